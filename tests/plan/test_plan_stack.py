"""Tensors [E, O, I]: each slice a matrix of its own, in one unit, counted E times."""

from __future__ import annotations

import pytest
from plan_cases import Specs, checkpoint, plan_of

from mfs_decompose.codec.sizes import max_steps, step_bytes
from mfs_decompose.linalg.shapes import POWER_ITERATIONS
from mfs_decompose.plan import units
from mfs_decompose.plan.cap import ENTRY_BYTES
from mfs_decompose.plan.duration import count_work
from mfs_decompose.plan.estimate import estimate
from mfs_decompose.plan.model import Item, Plan
from mfs_decompose.plan.units import cut_units, slice_groups, slice_steps
from mfs_decompose.source.header import TensorSpec

UP, DOWN, NORM = "layers.0.experts.gate_up_proj", "layers.0.experts.down_proj", "norm.weight"
MOE: Specs = {UP: ("BF16", (6, 40, 72)), DOWN: ("BF16", (6, 36, 40)), NORM: ("BF16", (40,))}


def found(plan: Plan, name: str, variant: str = "a") -> Item:
    return next(item for item in plan.items() if item.key == (variant, name))


def stack(shape: tuple[int, int, int], steps: int, *, fixed: bool = False, codec: str = "lowrank") -> Item:
    spec = TensorSpec("t", "BF16", shape)
    params = {"factors": "int4"} if codec == "lowrank" else {"values": "bf16"}
    return Item("v", "same", spec, spec, shape[0], codec, params, shape[1:], steps, fixed, stacked=True)


def test_each_slice_is_a_matrix() -> None:
    plan = plan_of(checkpoint("a", MOE), recipe={"objective.rank": 3}, base=MOE)
    item = found(plan, UP)
    assert (item.stacked, item.matrix, item.matrices, item.steps, item.fixed) == (True, (40, 72), 6, 3, True)
    assert item.step_bytes == step_bytes("lowrank", (40, 72), {"factors": "int4"})
    norm = found(plan, NORM)
    assert (norm.stacked, norm.matrices, norm.step_bytes) == (False, 0, 0)


def test_only_shared_experts_are_matrices() -> None:
    grown = {**MOE, UP: ("BF16", (8, 40, 72))}
    item = found(plan_of(checkpoint("a", grown), recipe={"objective.rank": 3}, base=MOE), UP)
    assert (item.kind, item.matrices, item.tail_bytes) == ("resized", 6, 2 * 40 * 72 * 2)


@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_exact_codecs_see_no_slices(codec: str) -> None:
    rules = [{"match": "*experts*", "codec": codec}]
    item = found(plan_of(checkpoint("a", MOE), recipe={"deltas.rules": rules}, base=MOE), UP)
    assert (item.stacked, item.matrix, item.matrices) == (False, None, 0)


def test_a_budget_is_split_over_slices() -> None:
    plan = plan_of(checkpoint("a", MOE), recipe={"objective.budget": "4%"}, base=MOE)
    cap = plan.variants[0].cap
    assert cap is not None
    each = 6 * (found(plan, UP).step_bytes + found(plan, DOWN).step_bytes)
    assert 0 < 2 * cap / each < 8
    assert found(plan, UP).steps == 8
    ample = plan_of(checkpoint("a", MOE), recipe={"objective.budget": "11%"}, base=MOE)
    cap = ample.variants[0].cap
    assert cap is not None
    assert found(ample, UP).steps == int(2 * cap / each) + 1 > 8


def test_no_slice_takes_more_than_itself() -> None:
    recipe = {"objective.budget": "100%", "deltas.default.factors": "bf16"}
    item = found(plan_of(checkpoint("a", MOE), recipe=recipe, base=MOE), UP)
    assert item.steps == item.worthwhile_steps == 40 * 72 * 2 // (2 * (40 + 72))
    assert item.worthwhile_steps <= max_steps("lowrank", (40, 72))


def test_a_stack_is_a_unit_of_its_own() -> None:
    plan = plan_of(checkpoint("a", MOE), checkpoint("b", MOE), recipe={"objective.rank": 3}, base=MOE)
    stacks = [unit for unit in plan.units if unit.kind == "stack"]
    assert sorted(unit.items[0].key for unit in stacks) == sorted((v, name) for v in "ab" for name in (UP, DOWN))
    assert all(len(unit.items) == 1 for unit in stacks)
    assert stacks[0].read_bytes == 2 * 6 * 40 * 72 * 2
    assert plan == plan_of(checkpoint("b", MOE), checkpoint("a", MOE), recipe={"objective.rank": 3}, base=MOE)


def test_experts_in_files_of_their_own_are_batches_of_equal_shapes() -> None:
    """Mixtral's: layers.0.block_sparse_moe.experts.3.w1.weight is a matrix like any other."""
    shapes = {"w1": (56, 40), "w2": (40, 56), "w3": (56, 40)}
    specs: Specs = {
        f"layers.{layer}.block_sparse_moe.experts.{at}.{w}.weight": ("BF16", shape)
        for layer in (0, 1)
        for at in range(5)
        for w, shape in shapes.items()
    }
    plan = plan_of(checkpoint("a", specs), checkpoint("b", specs), recipe={"objective.rank": 3}, base=specs)
    assert sorted((unit.kind, unit.items[0].matrix, len(unit.items)) for unit in plan.units) == [
        ("batch", (40, 56), 2 * 2 * 5),
        ("batch", (56, 40), 2 * 2 * 10),
    ]


def test_groups_hold_a_block_of_slices_or_one_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "BLOCK_ELEMENTS", 1000)
    assert slice_groups(stack((7, 16, 20), 3)) == [(0, 3), (3, 6), (6, 7)]
    assert slice_groups(stack((3, 50, 21), 3)) == [(0, 1), (1, 2), (2, 3)]
    monkeypatch.setattr(units, "BLOCK_ELEMENTS", 1 << 24)
    assert [stop - start for start, stop in slice_groups(stack((600, 8, 8), 3))] == [256, 256, 88]


@pytest.mark.parametrize("changed", [1, 2, 3, 5, 8])
def test_what_unchanged_slices_do_not_need_the_others_may_have(changed: int) -> None:
    item = stack((8, 96, 40), 5)
    steps = slice_steps(item, 8, changed)
    assert steps == min(item.worthwhile_steps, 8 * 5 // changed) >= 5
    assert steps * changed <= 8 * 5
    assert slice_steps(stack((8, 96, 40), 5, fixed=True), 8, changed) == 5


def test_peak_memory_is_that_of_a_group() -> None:
    few, many = (cut_units([stack((count, 1 << 11, 1 << 10), 8)])[0] for count in (8, 256))
    assert few.peak_bytes == many.peak_bytes > 4 * units.BLOCK_ELEMENTS
    deep = cut_units([stack((256, 1 << 11, 1 << 10), 200)])[0]
    assert deep.peak_bytes > many.peak_bytes
    giant = cut_units([stack((4, 1 << 13, 1 << 13), 8)])[0]
    assert giant.peak_bytes > 8 * 5 * (1 << 26)  # a slice is decoded whole


def test_estimates_count_every_slice() -> None:
    plan = plan_of(checkpoint("a", MOE), recipe={"objective.rank": 3}, base=MOE)
    found_estimate = estimate(plan, checkpoint("base", MOE), (checkpoint("a", MOE),), 1)
    factors = 3 * 6 * (found(plan, UP).step_bytes + found(plan, DOWN).step_bytes)
    assert found_estimate.variants[0].bytes >= factors + 40 * 2 + 3 * ENTRY_BYTES
    one = plan_of(checkpoint("a", {"w": ("BF16", (800, 300))}), recipe={"objective.rank": 8},
                  base={"w": ("BF16", (800, 300))})  # fmt: skip
    many = plan_of(checkpoint("a", {"w": ("BF16", (6, 800, 300))}), recipe={"objective.rank": 8},
                   base={"w": ("BF16", (6, 800, 300))})  # fmt: skip
    work = count_work(many, 0)
    assert work["fp32"] == (2 * POWER_ITERATIONS + 1) * 6 * 800 * 300 * 32
    for kind, amount in count_work(one, 0).items():
        assert work[kind] == pytest.approx(6 * amount)
