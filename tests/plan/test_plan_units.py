"""Units are cut by shapes and names, and by nothing else."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import LLAMA, checkpoint, grown, plan_of

from mfs_decompose.linalg.shapes import passes
from mfs_decompose.plan import units
from mfs_decompose.plan.model import Item, Plan, Unit
from mfs_decompose.plan.units import cut_units
from mfs_decompose.source.header import TensorSpec


def item(name: str, shape: tuple[int, ...], *, variant: str = "v", lossy: bool = True, steps: int = 3) -> Item:
    spec = TensorSpec(name, "BF16", shape)
    matrix = (shape[0], shape[1]) if lossy else None
    params = {"factors": "int4"} if lossy else {}
    codec = "lowrank" if lossy else "raw"
    return Item(variant, "same", spec, spec, shape[0], codec, params, matrix, steps, False)


def described(cut: tuple[Unit, ...]) -> list[tuple[int, str, list[tuple[str, str]]]]:
    return [(unit.number, unit.kind, [member.key for member in unit.items]) for unit in cut]


def test_every_item_is_in_exactly_one_unit_and_units_are_numbered_in_order() -> None:
    variants = [checkpoint(id, grown(LLAMA, rows)) for id, rows in (("b", 0), ("a", 3), ("c", 0))]
    plan = plan_of(*variants)
    keys = [member.key for member in plan.items()]
    assert sorted(keys) == sorted((v.id, name) for v in variants for name in v.tensors)
    assert [unit.number for unit in plan.units] == list(range(len(plan.units)))
    for unit in plan.units:
        assert len({(m.codec, m.matrix, tuple(m.params.items())) for m in unit.items}) == 1 or unit.kind == "exact"


def test_the_order_of_the_variants_changes_nothing() -> None:
    variants = [checkpoint(id, grown(LLAMA, rows)) for id, rows in (("b", 0), ("a", 3), ("c", 1))]
    plans = [plan_of(*order) for order in itertools.permutations(variants)]
    assert all(plan == plans[0] for plan in plans)


def test_memory_and_threads_change_nothing() -> None:
    variants = (checkpoint("a", LLAMA), checkpoint("b", LLAMA))
    small = plan_of(*variants, recipe={"limits.max_ram": "1GB", "limits.max_disk": "1GB"})
    large = plan_of(*variants, recipe={"limits.max_ram": "64GB"})
    assert small.units == large.units


@given(st.lists(st.sampled_from([(24, 40), (40, 24), (9, 8), (57, 8), (3,)]), min_size=1, max_size=12), st.randoms())
def test_cutting_does_not_depend_on_the_order_of_the_items(shapes: list[tuple[int, ...]], dice: random.Random) -> None:
    items = [item(f"t{at}", shape, variant=v, lossy=len(shape) > 1) for at, shape in enumerate(shapes) for v in "xy"]
    shuffled = list(items)
    dice.shuffle(shuffled)
    assert cut_units(items) == cut_units(shuffled)


def test_equal_matrices_of_all_layers_and_variants_are_one_batch() -> None:
    plan = plan_of(checkpoint("a", LLAMA), checkpoint("b", LLAMA))
    batches = {unit.items[0].matrix: unit for unit in plan.units if unit.kind == "batch"}
    assert [member.key for member in batches[96, 40].items] == [
        (variant, f"model.layers.{layer}.mlp.up_proj.weight") for layer in (0, 1) for variant in "ab"
    ]
    assert len(batches) == len([unit for unit in plan.units if unit.kind == "batch"]) == 5


def test_a_rank_of_its_own_is_a_batch_of_its_own() -> None:
    rules = [{"match": "*layers.1.mlp.up_proj*", "codec": "lowrank", "rank": 2}]
    plan = plan_of(checkpoint("a", LLAMA), recipe={"deltas.rules": rules})
    found = [unit.items for unit in plan.units if unit.items[0].matrix == (96, 40)]
    assert sorted((len(items), items[0].fixed) for items in found) == [(1, False), (1, True)]


def test_a_batch_ends_before_it_grows_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "BLOCK_ELEMENTS", 1000)
    cut = cut_units([item(f"t{at}", (40, 10)) for at in range(7)])
    assert [unit.kind for unit in cut] == ["batch"] * 4
    assert [len(unit.items) for unit in cut] == [2, 2, 2, 1]
    names = [member.name for unit in cut for member in unit.items]
    assert names == sorted(names)


def test_a_batch_holds_no_more_than_256_matrices() -> None:
    cut = cut_units([item(f"t{at:03}", (9, 8)) for at in range(300)])
    assert sorted(len(unit.items) for unit in cut) == [44, 256]


def test_a_matrix_above_the_block_is_alone_and_one_at_the_block_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "BLOCK_ELEMENTS", 1000)
    cut = cut_units([item("a", (100, 10)), item("b", (91, 11)), item("c", (91, 11))])
    assert described(cut) == [(0, "blocks", [("v", "b")]), (1, "blocks", [("v", "c")]), (2, "batch", [("v", "a")])]


def test_exact_tensors_are_cut_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "_EXACT_BYTES", 100)
    cut = cut_units([item(f"t{at}", (30,), lossy=False) for at in range(3)])
    assert [(unit.kind, len(unit.items)) for unit in cut] == [("exact", 1)] * 3
    assert len(cut_units([item(f"t{at}", (20,), lossy=False) for at in range(4)])) == 2


def test_the_costliest_unit_comes_first() -> None:
    cut = cut_units([item("small", (9, 8)), item("large", (90, 80)), item("norm", (8,), lossy=False)])
    assert [unit.items[0].name for unit in cut] == ["large", "small", "norm"]


def read_by(plan: Plan, shape: tuple[int, int]) -> int:
    return next(unit.read_bytes for unit in plan.units if unit.items[0].matrix == shape)


def test_bytes_of_pass_1_count_the_base_once_in_a_batch_and_each_time_beside_it() -> None:
    plan = plan_of(checkpoint("a", LLAMA), checkpoint("b", LLAMA))
    assert read_by(plan, (96, 40)) == (4 + 2) * 96 * 40 * 2
    exact = next(unit for unit in plan.units if unit.kind == "exact")
    assert exact.read_bytes == (6 + 6) * 40 * 2


@pytest.mark.parametrize("shape", [(259, 40), (40, 96)])
def test_bytes_of_pass_1_count_every_pass_over_a_large_tensor(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]
) -> None:
    monkeypatch.setattr(units, "BLOCK_ELEMENTS", 3000)
    large = item("t", shape, steps=4)
    (unit,) = cut_units([large])
    assert unit.kind == "blocks"
    assert unit.read_bytes == (1 + passes(shape, 4)) * 2 * shape[0] * shape[1] * 2


def test_peak_memory_grows_with_rank_but_not_with_a_blocked_tensor() -> None:
    wide, long = (item("t", (1 << 13, 1 << 12), steps=8), item("t", (3 << 14, 1 << 12), steps=8))
    (small,), (tall,) = cut_units([wide]), cut_units([long])
    assert small.kind == tall.kind == "blocks"
    work = 4 * units.BLOCK_ELEMENTS
    # Images of the sketch grow; the tensor itself grows by ten times as much.
    assert 0 < tall.peak_bytes - small.peak_bytes < work / 2
    (deep,) = cut_units([item("t", (1 << 13, 1 << 12), steps=64)])
    assert deep.peak_bytes > small.peak_bytes
    assert tall.peak_bytes > 4 * units.BLOCK_ELEMENTS
