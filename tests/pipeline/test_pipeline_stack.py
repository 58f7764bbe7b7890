"""Fused experts [E, O, I] from end to end: each slice its own matrix, and rank where the change is."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from interruptions import PASS_1, PASS_2, Interrupting, partial
from pipeline_runs import (
    Recording,
    Tensors,
    back,
    contents,
    doubles,
    manifest,
    measured_error,
    moved,
    record,
    run,
    same_bits,
    toy,
)

from mfs_decompose.artifact.verify import verify
from mfs_decompose.errors import ArtifactInvalid
from mfs_decompose.pipeline import encode, reading, stack, survey
from mfs_decompose.pipeline.surveyed import Slice, Surveyed, slice_runs
from mfs_decompose.plan import units
from mfs_decompose.recipe.values import read_budget

UP, DOWN, EXTRA = "mlp.experts.gate_up_proj", "mlp.experts.down_proj", "attn.weight"
COUNT = 5


def experts(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return {UP: draw(COUNT, 30, 44), DOWN: draw(COUNT, 44, 15), EXTRA: draw(26, 44), "norm": draw(44)}


def only(base: Tensors, changes: dict[str, list[int]], seed: int = 7, rank: int = 3, scale: float = 0.05) -> Tensors:
    """The base with some slices of some tensors moved by a low rank and a little noise."""
    generator = torch.Generator().manual_seed(seed)
    own = {name: weight.clone() for name, weight in base.items()}
    for name, slices in changes.items():
        for at in slices:
            rows, columns = own[name][at].shape
            change = torch.randn(rows, rank, generator=generator) @ torch.randn(rank, columns, generator=generator)
            change += 0.05 * torch.randn(rows, columns, generator=generator)
            own[name][at] = (own[name][at].float() + scale * change).to(own[name].dtype)
    return own


def tree(art: Path, name: str, id: str = "own") -> Any:
    return record(art, id)["tensors"][name]["tree"]


def pair(root: Path, base: Tensors, own: Tensors) -> tuple[Path, dict[str, Path]]:
    return toy(root / "base", base), {"own": toy(root / "own", own)}


def test_a_slice_is_stored_as_if_it_were_a_tensor(tmp_path: Path) -> None:
    """The oracle: the same slices in tensors of their own, at one rank, lose exactly as much."""
    base = {UP: experts()[UP]}
    own = moved(base, 1)
    recipe = {"objective.rank": 4}
    run(tmp_path / "art", *pair(tmp_path / "stacked", base, own), recipe)
    apart = [{f"{UP}.{at}": one.clone() for at, one in enumerate(part[UP])} for part in (base, own)]
    run(tmp_path / "apart", *pair(tmp_path / "apart-in", *apart), recipe)
    stacked, single = record(tmp_path / "art", "own")["tensors"][UP], record(tmp_path / "apart", "own")["tensors"]
    assert stacked["tree"]["codec"] == "lowrank" and stacked["tree"]["params"]["slices"] == [4] * COUNT
    assert stacked["energy"] == pytest.approx(sum(one["energy"] for one in single.values()), rel=1e-12)
    assert stacked["error"] == pytest.approx(sum(one["error"] for one in single.values()), rel=0.01)  # other sketches
    assert stacked["blob"]["nbytes"] == sum(one["blob"]["nbytes"] for one in single.values())


@pytest.mark.parametrize("factors", ["int4", "int8", "bf16"])
def test_each_slice_is_as_good_as_its_own_svd(tmp_path: Path, factors: str) -> None:
    base, own = experts(), moved(experts(), 3)
    recipe = {"objective.rank": 6, "deltas.default.factors": factors}
    run(tmp_path / "art", *pair(tmp_path, base, own), recipe)
    _, served = back(tmp_path / "art", "own", tmp_path / "out", dtype="float32")
    for name in (UP, DOWN):
        for at in range(COUNT):
            delta = doubles(own[name][at]) - doubles(base[name][at])
            sigma = np.linalg.svd(delta, compute_uv=False)
            least = math.sqrt(float(np.square(sigma[6:]).sum()))
            found = float(np.linalg.norm(doubles(served[name][at]) - doubles(own[name][at])))
            step = {"int4": 0.2, "int8": 0.02, "bf16": 0.02}[factors]
            assert least * 0.999 <= found <= math.hypot(least * 1.02, step * float(np.linalg.norm(delta)))


@pytest.mark.parametrize("recipe", [{}, {"deltas.default.codec": "sparse"}, {"objective.budget": "2%"}])
def test_the_budget_goes_to_the_expert_that_changed(tmp_path: Path, recipe: dict[str, object]) -> None:
    base = experts()
    own = only(base, {UP: [3]})
    report = run(tmp_path / "art", *pair(tmp_path, base, own), recipe)
    found = tree(tmp_path / "art", UP)
    assert [child["codec"] for child in found["children"]] == [
        "identical", recipe.get("deltas.default.codec", "lowrank"), "identical",
    ]  # fmt: skip
    assert found["params"]["splits"] == [0, 3, 4, 5]
    assert {tree(tmp_path / "art", name)["codec"] for name in (DOWN, EXTRA, "norm")} == {"identical"}
    cap = int((0.02 if "objective.budget" in recipe else 0.05) * report.variants[0].checkpoint_bytes)
    assert cap - 250 < report.variants[0].bytes <= cap
    _, weights = back(tmp_path / "art", "own", tmp_path / "out")
    for at in (0, 1, 2, 4):
        assert same_bits(weights[UP][at], own[UP][at])


def test_rank_goes_where_the_energy_is(tmp_path: Path) -> None:
    base = experts()
    own = only(base, {UP: [1, 2, 4], DOWN: [0]}, scale=0.004)
    own[UP][2] = only(base, {UP: [2]}, rank=9, scale=0.3)[UP][2]
    run(tmp_path / "art", *pair(tmp_path, base, own), {"objective.budget": "4%"})
    steps = {}
    for start, child in zip(tree(tmp_path / "art", UP)["params"]["splits"], tree(tmp_path / "art", UP)["children"],
                            strict=False):  # fmt: skip
        for at, count in enumerate(child.get("params", {}).get("slices", [])):
            steps[start + at] = count
    assert sorted(steps) == [1, 2, 4]
    assert steps[2] > 2 * max(steps[1], steps[4])


def test_a_slice_that_gets_nothing_decodes_to_the_base(tmp_path: Path) -> None:
    base = experts()
    own = only(base, {UP: [0, 1, 2, 3, 4]}, scale=1e-2)
    own[UP][2] = only(base, {UP: [2]}, scale=2.0)[UP][2]
    report = run(tmp_path / "art", *pair(tmp_path, base, own), {"objective.budget": "700B"})
    found = tree(tmp_path / "art", UP)
    assert found["codec"] == "lowrank"
    slices = found["params"]["slices"]
    assert slices[2] > 0 and slices[0] == 0
    assert report.variants[0].bytes <= 700
    _, weights = back(tmp_path / "art", "own", tmp_path / "out")
    for at, steps in enumerate(slices):
        assert torch.equal(weights[UP][at], base[UP][at]) == (steps == 0)
    tensor = record(tmp_path / "art", "own")["tensors"][UP]
    assert not tensor["exact"] and tensor["error"] > 0


@pytest.mark.parametrize("budget", ["3%", "20%", "100%", "900B"])
def test_the_cap_holds(tmp_path: Path, budget: str) -> None:
    base, own = experts(), moved(experts(), 5)
    del base["norm"], own["norm"]  # which must be raw, and the smallest cap would not hold it
    report = run(tmp_path / "art", *pair(tmp_path, base, own), {"objective.budget": budget})
    variant = report.variants[0]
    cap = read_budget(budget).cap(variant.checkpoint_bytes)
    assert min(cap - 450, 9000) < variant.bytes <= cap  # at 9 kB nothing is left to store
    _, served = back(tmp_path / "art", "own", tmp_path / "out", dtype="float32")
    assert measured_error(own, base, served) == pytest.approx(variant.rel_error, rel=1e-6)


def test_a_rank_beside_a_budget(tmp_path: Path) -> None:
    base, own = experts(), moved(experts(), 5)
    rules = [{"match": "*gate_up*", "codec": "lowrank", "rank": 3}]
    recipe = {"deltas.rules": rules, "objective.budget": "10%"}
    report = run(tmp_path / "art", *pair(tmp_path, base, own), recipe)
    assert tree(tmp_path / "art", UP)["params"]["slices"] == [3] * COUNT
    assert len(set(tree(tmp_path / "art", DOWN)["params"]["slices"])) > 0
    assert report.variants[0].footprint <= 0.1


@pytest.mark.parametrize("recipe", [{"objective.rank": 4}, {"objective.budget": "30%"}])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_slice_that_is_not_finite_is_stored_exactly_and_alone(
    tmp_path: Path, recipe: dict[str, object], bad: float
) -> None:
    base = experts()
    own = only(base, {UP: [0, 1, 3, 4]})
    own[UP][3, 7, 2] = bad
    sink = Recording()
    report = run(tmp_path / "art", *pair(tmp_path, base, own), recipe, sink)
    found = tree(tmp_path / "art", UP)
    assert [child["codec"] for child in found["children"]] == ["lowrank", "identical", "lossless", "lowrank"]
    assert found["params"]["splits"] == [0, 2, 3, 4, 5]
    tensor = record(tmp_path / "art", "own")["tensors"][UP]
    assert tensor["nonfinite"] == 1 and not tensor["exact"] and math.isfinite(tensor["error"])
    assert any(UP in message and "1 value that is NaN or infinite" in message for message, _ in sink.notes)
    _, weights = back(tmp_path / "art", "own", tmp_path / "out")
    assert same_bits(weights[UP][2:4].contiguous(), own[UP][2:4].contiguous())
    assert bool(torch.isfinite(weights[UP][[0, 1, 4]]).all())
    assert verify(tmp_path / "art", "values").ok
    if "objective.budget" in recipe:
        assert report.variants[0].footprint <= 0.3


def test_a_stack_of_nothing_but_such_slices_is_one_lossless_tensor(tmp_path: Path) -> None:
    base = experts()
    own = only(base, {UP: [1, 3]})
    own[UP][[1, 3], 0, 0] = math.nan
    run(tmp_path / "art", *pair(tmp_path, base, own), {"objective.budget": "40%"})
    assert tree(tmp_path / "art", UP)["codec"] == "lossless"
    _, weights = back(tmp_path / "art", "own", tmp_path / "out", exact=True)
    assert same_bits(weights[UP], own[UP])


def test_more_experts_behind_unchanged_and_changed_ones(tmp_path: Path) -> None:
    base = experts()
    own = only(base, {UP: [1]})
    own = {name: torch.cat([one, one[:2] * 2]) if name in (UP, DOWN) else one for name, one in own.items()}
    run(tmp_path / "art", *pair(tmp_path, base, own), {"objective.budget": "60%"})
    up, down = (tree(tmp_path / "art", name) for name in (UP, DOWN))
    assert [child["codec"] for child in up["children"]] == ["identical", "lowrank", "identical", "raw"]
    assert up["params"]["splits"] == [0, 1, 2, 5, 7]
    assert [child["codec"] for child in down["children"]] == ["identical", "raw"]
    _, weights = back(tmp_path / "art", "own", tmp_path / "out")
    assert same_bits(weights[UP][2:].contiguous(), own[UP][2:].contiguous())
    assert same_bits(weights[DOWN], own[DOWN])
    assert verify(tmp_path / "art", "values").ok


@pytest.mark.parametrize("own_type", [torch.float32, torch.float16, torch.float64])
def test_types_of_their_own(tmp_path: Path, own_type: torch.dtype) -> None:
    """Slices of another type are never the base's bits, and one that is equal in value costs no steps."""
    base = experts()
    own = {name: one.to(own_type) for name, one in only(base, {UP: [2]}).items()}
    report = run(tmp_path / "art", *pair(tmp_path, base, own), {"objective.rank": 3})
    assert tree(tmp_path / "art", UP)["params"]["slices"] == [0, 0, 3, 0, 0]
    _, served = back(tmp_path / "art", "own", tmp_path / "out", dtype="float32")
    assert measured_error(own, base, served) == pytest.approx(report.variants[0].rel_error, rel=1e-6)


def test_equal_stacks_are_stored_once(tmp_path: Path) -> None:
    base = {UP: experts()[UP], "other": experts()[UP].clone()}
    own = only({UP: base[UP]}, {UP: [1]})
    own["other"] = own[UP].clone()
    run(tmp_path / "art", *pair(tmp_path, base, own), {"objective.rank": 2})
    assert tree(tmp_path / "art", "other")["params"] == {"of": UP}
    _, weights = back(tmp_path / "art", "own", tmp_path / "out")
    assert same_bits(weights["other"], weights[UP])


def families(root: Path) -> tuple[Path, dict[str, Path]]:
    base = experts()
    one, two = only(base, {UP: [0, 1, 4], DOWN: [2]}, seed=3), moved(base, 4)
    one[DOWN][0, 3, 3] = math.inf
    return toy(root / "base", base), {"one": toy(root / "one", one), "two": toy(root / "two", two)}


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two slices of UP in a group, four of DOWN; decoded one at a time; and the matrix in row blocks."""
    monkeypatch.setattr(units, "BLOCK_ELEMENTS", 2 * 30 * 44)
    for module in (units, encode, survey, stack):
        monkeypatch.setattr(module, "DECODE_ELEMENTS", 700)
    monkeypatch.setattr(reading, "ROW_BLOCK_ELEMENTS", 500)


@pytest.mark.usefixtures("small_groups")
def test_threads_and_order_change_no_byte(tmp_path: Path) -> None:
    base, variants = families(tmp_path)
    for threads, ids in ((1, ("one", "two")), (3, ("two", "one"))):
        run(tmp_path / f"art{threads}", base, {id: variants[id] for id in ids}, threads=threads)
    assert contents(tmp_path / "art1") == contents(tmp_path / "art3")
    assert verify(tmp_path / "art1", "values").ok
    for id, folder in variants.items():
        _, weights = back(tmp_path / "art1", id, tmp_path / f"{id}-out")
        assert weights.keys() == experts().keys()
        assert folder.exists()


@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize(("stage", "advance"), [(PASS_1, 4), (PASS_1, 15), (PASS_2, 3), (PASS_2, 9)])
def test_stopped_and_gone_on_with(tmp_path: Path, stage: str, advance: int) -> None:
    base, variants = families(tmp_path)
    run(tmp_path / "art", base, variants)
    out = tmp_path / "again"
    with pytest.raises(KeyboardInterrupt):
        run(out, base, variants, sink=Interrupting(stage, advance))
    run(out, base, variants)
    assert contents(out) == contents(tmp_path / "art")


def test_fits_that_scratch_has_lost_are_made_again(tmp_path: Path) -> None:
    base, variants = families(tmp_path)
    run(tmp_path / "art", base, variants)
    out = tmp_path / "again"
    with pytest.raises(KeyboardInterrupt):
        run(out, base, variants, sink=Interrupting(PASS_2, 0))
    for file in (partial(out) / "scratch").glob("p1-*.bin"):
        file.unlink()
    run(out, base, variants)
    assert contents(out) == contents(tmp_path / "art")


class PassOne(Recording):
    """What pass 1 was said to read, and what it read."""

    def __init__(self) -> None:
        super().__init__()
        self.planned = self.read = 0

    def start(self, stage: str, total_bytes: int | None) -> None:
        super().start(stage, total_bytes)
        if stage == PASS_1:
            self.planned = total_bytes or 0

    def advance(self, nbytes: int) -> None:
        super().advance(nbytes)
        self.read += nbytes if self.stages[-1] == PASS_1 else 0


def test_what_pass_1_reads_is_what_was_planned(tmp_path: Path) -> None:
    base, variants = families(tmp_path)
    sink = PassOne()
    run(tmp_path / "art", base, variants, {"objective.rank": 2}, sink)
    assert sink.read == sink.planned > 0


@pytest.mark.parametrize("own_type", [torch.bfloat16, torch.float32])
def test_a_slice_that_does_not_compress_is_raw(tmp_path: Path, own_type: torch.dtype) -> None:
    base = experts()
    own = {name: one.to(own_type) for name, one in only(base, {UP: [0, 1]}).items()}
    noise = torch.randint(0, 256, (own[UP][3].nbytes,), generator=torch.Generator().manual_seed(2), dtype=torch.uint8)
    own[UP][3] = noise.view(own_type).reshape(30, 44)
    own[UP][3, 0, 0] = math.nan
    run(tmp_path / "art", *pair(tmp_path, base, own), {"objective.budget": "90%"})
    children = tree(tmp_path / "art", UP)["children"]
    same = "identical" if own_type == torch.bfloat16 else "lowrank"
    expected = ["lowrank", same, "raw", same] if same == "identical" else ["lowrank", "raw", "lowrank"]
    assert [child["codec"] for child in children] == expected
    _, weights = back(tmp_path / "art", "own", tmp_path / "out")
    assert same_bits(weights[UP][3].contiguous(), own[UP][3].contiguous())
    assert verify(tmp_path / "art", "values").ok


def test_the_journal_gives_back_what_was_found() -> None:
    slices: tuple[Slice, ...] = ("identical", (3.5, 0.25), "exact", "exact", (), (1e-300,))
    found = Surveyed("ab" * 32, False, 2, 4.5, exact_bytes=7, fit={"codec": "lowrank"}, slices=slices)
    assert Surveyed.from_json(json.loads(json.dumps(found.to_json()))) == found
    assert found.curves == ((), (3.5, 0.25), (), (), (), (1e-300,))
    assert slice_runs(slices) == [
        ("identical", 0, 1), ("fitted", 1, 2), ("exact", 2, 4), ("fitted", 4, 6),
    ]  # fmt: skip
    plain = Surveyed("cd" * 32, False, 0, 1.0, explained=(0.5, 0.25))
    assert "slices" not in plain.to_json() and plain.curves == ((0.5, 0.25),)
    assert Surveyed.from_json(plain.to_json()) == plain


def test_a_mean_of_experts(tmp_path: Path) -> None:
    _, variants = families(tmp_path)
    third = toy(tmp_path / "three", moved(experts(), 8))
    report = run(tmp_path / "art", None, {"two": variants["two"], "three": third}, {"objective.rank": 2})
    assert tree(tmp_path / "art", UP, "two")["params"]["slices"] == [2] * COUNT
    assert 0 < report.variants[0].rel_error < 1
    assert verify(tmp_path / "art", "values").ok


def test_a_damaged_tree_of_a_stack_is_refused(tmp_path: Path) -> None:
    base, own = experts(), moved(experts(), 2)
    run(tmp_path / "art", *pair(tmp_path, base, own), {"objective.rank": 2})
    from mfs_decompose.codec.opened import OpenedTensor
    from mfs_decompose.codec.tree import CodecNode
    from mfs_decompose.source.header import TensorSpec

    found = tree(tmp_path / "art", UP)
    found["params"]["slices"][0] += 1
    with pytest.raises(ArtifactInvalid, match="steps of its slices"):
        OpenedTensor(CodecNode.from_json(found), lambda offset, count: b"", TensorSpec(UP, "BF16", (COUNT, 30, 44)))


def test_a_manifest_of_many_experts_stays_small(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    base = {f"layers.{layer}.experts": torch.randn(128, 9, 8, generator=generator) for layer in range(3)}
    own = {name: one + 1e-2 * torch.randn(one.shape, generator=generator) for name, one in base.items()}
    run(tmp_path / "art", *pair(tmp_path, base, own), {"objective.rank": 2})
    records = manifest(tmp_path / "art")["variants"][0]["tensors"]
    assert all(len(json.dumps(one)) < 1500 for one in records.values())
