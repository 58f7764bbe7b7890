"""Which row belongs to whom."""

from __future__ import annotations

import threading
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfs_decompose.errors import UsageError
from mfs_decompose.runtime.batch_plan import ANY_ROWS, BASE, BatchPlan, Group, PlanSlot

slots = st.lists(st.integers(BASE, 4), max_size=40)


@given(slots)
def test_every_row_is_in_one_group_of_its_variant(rows: list[int]) -> None:
    plan = BatchPlan.for_rows(rows)
    assert plan.row_variants == tuple(rows)
    assert plan.rows == len(rows)
    assert plan.variants == tuple(sorted(set(rows)))
    assert plan.uniform == (len(set(rows)) <= 1)
    assert [group.stop - group.start for group in plan.groups] == [len([*run]) for _, run in groupby(rows)]
    assert plan.over(len(rows)) == plan.groups


@given(slots)
def test_sorted_rows_have_one_group_a_variant(rows: list[int]) -> None:
    plan = BatchPlan.for_rows(sorted(rows))
    assert len(plan.groups) == len(plan.variants)


@given(slots, st.data())
def test_a_selection_is_the_plan_of_those_rows(rows: list[int], data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.sampled_from(range(len(rows))), max_size=20)) if rows else []
    assert BatchPlan.for_rows(rows).select(chosen) == BatchPlan.for_rows([rows[at] for at in chosen])


def test_one_variant_for_rows_of_any_shape() -> None:
    plan = BatchPlan.only(3)
    assert (plan.rows, plan.uniform, plan.select([1, 2])) == (ANY_ROWS, True, plan)
    assert plan.over(12) == (Group(3, 0, 12),)
    assert plan.over(0) == ()
    assert BatchPlan.only(BASE, 5) == BatchPlan.for_rows([BASE] * 5)


def test_other_rows_than_the_plan_has_are_a_bug() -> None:
    with pytest.raises(AssertionError, match="4 rows reached a module under a plan for 3"):
        BatchPlan.for_rows([0, 0, 1]).over(4)


def test_a_slot_gives_the_plan_in_use_and_the_one_before_afterwards() -> None:
    slot, outer, inner = PlanSlot(), BatchPlan.for_rows([0, 1]), BatchPlan.only(2)
    with pytest.raises(UsageError, match="none chosen"):
        _ = slot.plan
    with slot.use(outer, outer.select([1])):
        assert slot.logits_plan == BatchPlan.for_rows([1])
        with pytest.raises(ZeroDivisionError), slot.use(inner):
            assert slot.plan == slot.logits_plan == inner
            _ = 1 / 0
        assert slot.plan == outer
    with pytest.raises(UsageError):
        _ = slot.logits_plan


def test_another_thread_waits_for_its_turn() -> None:
    slot = PlanSlot()
    seen: list[int] = []

    def ask() -> None:
        with slot.use(BatchPlan.only(1)):
            seen.append(slot.plan.variants[0])

    thread = threading.Thread(target=ask)
    with slot.use(BatchPlan.only(0)):
        thread.start()
        thread.join(0.05)
        assert slot.plan.variants == (0,)
        assert seen == []
    thread.join()
    assert seen == [1]
