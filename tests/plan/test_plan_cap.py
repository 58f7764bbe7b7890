"""A budget that does not hold is refused, and the one that is named holds."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import LLAMA, Specs, checkpoint, grown, plan_of

from mfs_decompose.artifact.shard import Entry, ShardPlan, split_into_shards
from mfs_decompose.artifact.shard_reader import shard_metadata
from mfs_decompose.errors import UsageError
from mfs_decompose.plan.cap import ENTRY_BYTES, SHARD_BYTES, Need, check_caps, shard_overhead, smallest_cap
from mfs_decompose.recipe.values import Budget, read_budget


def named_budget(error: UsageError) -> str:
    assert error.hint is not None
    match = re.fullmatch(r"The smallest budget that holds is --budget (\S+)", error.hint)
    assert match is not None, error.hint
    return match[1]


@given(st.integers(0, 10**12))
def test_an_entry_is_never_larger_than_it_is_counted(nbytes: int) -> None:
    entries = (Entry.of_bytes("t0", 1), Entry.of_bytes("t1234567", nbytes))
    metadata = shard_metadata("v" * 64, 99_999)
    one, two = (len(ShardPlan(entries[:count], metadata).header()) for count in (1, 2))
    assert two - one <= ENTRY_BYTES
    assert one <= SHARD_BYTES + ENTRY_BYTES


@given(st.lists(st.integers(1, 900), max_size=30), st.integers(1, 1000))
def test_shards_are_never_larger_than_they_are_counted(sizes: list[int], shard_size: int) -> None:
    entries = [Entry.of_bytes(f"t{at}", size) for at, size in enumerate(sizes)]
    shards = split_into_shards(entries, shard_size)
    written = sum(ShardPlan(shard, shard_metadata("math", at)).size for at, shard in enumerate(shards, 1))
    exact = sum(size + ENTRY_BYTES for size in sizes)
    assert written <= exact + shard_overhead(len(sizes), sum(sizes), shard_size)
    cap = smallest_cap(exact, len(sizes), shard_size)
    assert written <= cap
    assert exact + shard_overhead(len(sizes), cap, shard_size) == cap


def test_nothing_to_store_needs_no_shard() -> None:
    assert shard_overhead(0, 10**9, 100) == 0
    assert smallest_cap(0, 0, 100) == 0


def test_caps_that_hold_pass() -> None:
    check_caps([], Budget(share=0.05))
    check_caps([Need("a", 1000, 50, 50, 50), Need("b", 0, 0, 0, 0)], Budget(share=0.05))


def test_the_variant_in_the_greatest_need_is_named_and_the_budget_holds_all() -> None:
    needs = [Need("a", 1000, 50, 80, 90), Need("b", 2000, 100, 300, 310), Need("c", 9000, 450, 400, 9000)]
    with pytest.raises(UsageError) as caught:
        check_caps(needs, Budget(share=0.05))
    assert caught.value.message == (
        "the budget of 100 B for variant 'b' does not hold what must be stored exactly, 300 B or 15 % of its checkpoint"
    )
    budget = read_budget(named_budget(caught.value))
    assert all(budget.cap(need.checkpoint_bytes) >= (need.least if need.held else need.most) for need in needs)
    assert budget.share == pytest.approx(0.1555, abs=1e-3)


def test_bytes_are_answered_with_bytes() -> None:
    needs = [Need("a", 1000, 1500, 1600, 1700), Need("b", 9000, 1500, 1550, 1600)]
    with pytest.raises(UsageError) as caught:
        check_caps(needs, Budget(nbytes=1500))
    assert named_budget(caught.value) == "1700B"


@given(st.lists(st.tuples(st.integers(1, 10**10), st.integers(1, 10**10)), min_size=1, max_size=4))
def test_a_share_that_is_named_holds_after_rounding(pairs: list[tuple[int, int]]) -> None:
    needs = [Need(f"v{at}", max(pair), 0, min(pair), min(pair)) for at, pair in enumerate(pairs)]
    if any(need.most / need.checkpoint_bytes > 0.99 for need in needs):
        return
    with pytest.raises(UsageError) as caught:
        check_caps(needs, Budget(share=1e-12))
    budget = read_budget(named_budget(caught.value))
    assert all(budget.cap(need.checkpoint_bytes) >= need.most for need in needs)


@pytest.mark.parametrize("budget", ["1000B", "0.5%"])
@pytest.mark.parametrize("shard_size", ["2GB", "400B"])
def test_a_plan_stops_at_a_budget_below_the_new_rows(budget: str, shard_size: str) -> None:
    variants = (checkpoint("chat", grown(LLAMA, 12)), checkpoint("code", grown(LLAMA, 31)), checkpoint("math", LLAMA))
    recipe = {"objective.budget": budget, "output.shard_size": shard_size}
    with pytest.raises(UsageError, match="for variant 'code'") as caught:
        plan_of(*variants, recipe=recipe)
    plan = plan_of(*variants, recipe={**recipe, "objective.budget": named_budget(caught.value)})
    assert [variant.unavoidable_bytes for variant in plan.variants] == [12 * 80 + 96, 31 * 80 + 96, 0]


def test_a_tensor_that_may_be_the_bases_own_does_not_stop_a_plan() -> None:
    rules = [{"match": "*embed_tokens*", "codec": "raw"}]
    recipe = {"objective.budget": "5%", "deltas.rules": rules}
    assert plan_of(checkpoint("a", LLAMA), recipe=recipe).variants[0].unavoidable_bytes == 0
    # One row more: the others may still be the base's own.
    row = 40 * 2
    assert plan_of(checkpoint("a", grown(LLAMA, 1)), recipe=recipe).variants[0].unavoidable_bytes == row + 96


def test_a_whole_new_tensor_counts_where_it_is_raw_and_not_where_it_may_shrink() -> None:
    extra: Specs = {**LLAMA, "tower.weight": ("BF16", (60, 40))}
    with pytest.raises(UsageError, match=r"exactly, 5\.15 kB or 7\.44 % of its checkpoint"):
        plan_of(checkpoint("a", extra))
    lossless = [{"match": "tower.*", "codec": "lossless"}]
    assert plan_of(checkpoint("a", extra), recipe={"deltas.rules": lossless}).variants[0].unavoidable_bytes == 0
