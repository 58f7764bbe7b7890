"""Every codec through the whole main path: errors as recorded, caps kept, all bits back where that was asked for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Family, read_weights
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pipeline_runs import asked, back, codec_of, contents, measured_error, record, run

from mfs_decompose.artifact.verify import verify
from mfs_decompose.errors import MfsError
from mfs_decompose.events import NullSink
from mfs_decompose.linalg.bands import WIDTHS, allocate_bands, bands_bytes
from mfs_decompose.pipeline.against import compare_with_originals
from mfs_decompose.pipeline.inspect import inspect, inspect_tensors
from mfs_decompose.pipeline.prepare import prepare
from mfs_decompose.plan.allocate import Candidate
from mfs_decompose.plan.share import BandedCandidate, share_out, sum_of_steps

Recipe = Mapping[str, Any]

LOSSY: dict[str, Recipe] = {
    "banded": {"deltas.default.factors": "banded", "objective.budget": "20%"},
    "effect": {"deltas.default.codec": "sparse", "deltas.default.select": "effect", "objective.density": "5%"},
    "sign": {"deltas.default.codec": "sign"},
    "sign-tensor": {"deltas.default.codec": "sign", "deltas.default.scale": "tensor"},
    "ternary": {"deltas.default.codec": "ternary"},
    "kbit": {"deltas.default.codec": "kbit", "deltas.default.bits": 3},
    "deadzone": {"deltas.default.codec": "deadzone", "deltas.default.step": 1e-3},
    "rowsparse": {"deltas.default.codec": "rowsparse", "deltas.default.rows": 5},
    "residual": {"objective.rank": 4, "deltas.default.residual": {"codec": "kbit", "bits": 2}},
    "residual-budget": {"objective.budget": "40%", "deltas.default.residual": {"codec": "sign"}},
}
MIXED: Recipe = {
    "objective.budget": "25%",
    "deltas.default.factors": "banded",
    "deltas.rules": [
        {"match": "*mlp*", "codec": "sparse"},
        {"match": "*q_proj*", "codec": "sign"},
        {"match": "*k_proj*", "codec": "deadzone", "step": 1e-3},
        {"match": "*v_proj*", "codec": "lora-exact"},
    ],
}
NODES = {"effect": "sparse", "sign-tensor": "sign", "residual": "sum", "residual-budget": "sum"}


@pytest.fixture(scope="module")
def made(family: Family, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("codecs")
    for name, recipe in {**LOSSY, "mixed": MIXED}.items():
        run(root / name, family.base, family.variants, recipe)
    return {name: root / name for name in (*LOSSY, "mixed")}


@pytest.mark.parametrize("name", [*LOSSY, "mixed"])
def test_the_recorded_error_is_that_of_a_float32_restore(
    name: str, made: dict[str, Path], family: Family, tmp_path: Path
) -> None:
    base = read_weights(family.base)
    for id in ("math", "code"):
        _, served = back(made[name], id, tmp_path / id, dtype="float32")
        original = read_weights(family.variants[id])
        assert measured_error(original, base, served) == pytest.approx(_rel_error(made[name], id), rel=1e-5)
    assert verify(made[name], "values").ok


@pytest.mark.parametrize("name", LOSSY)
def test_matrices_are_stored_as_asked(name: str, made: dict[str, Path]) -> None:
    codec = NODES.get(name, name)
    assert codec_of(made[name], "math", "model.layers.0.self_attn.q_proj.weight").startswith(codec)
    assert codec_of(made[name], "math", "model.norm.weight") == "raw"
    assert codec_of(made[name], "vocab", "model.embed_tokens.weight").startswith(f"rows({codec}")


@pytest.mark.parametrize(("name", "cap"), [("banded", 0.2), ("mixed", 0.25), ("residual-budget", 0.4)])
def test_a_cap_is_kept_and_used(name: str, cap: float, made: dict[str, Path]) -> None:
    for id in ("code", "math", "vocab"):
        variant = record(made[name], id)
        assert cap * 0.93 < variant["bytes"] / variant["checkpoint_bytes"] <= cap


@pytest.mark.parametrize("name", [*LOSSY, "mixed"])
def test_the_dry_run_bounds_the_bytes(name: str, made: dict[str, Path], family: Family, tmp_path: Path) -> None:
    recipe = MIXED if name == "mixed" else LOSSY[name]
    prepared = prepare(asked(tmp_path / "x", family.base, family.variants, recipe))
    for estimated in prepared.estimate.variants:
        assert record(made[name], estimated.id)["bytes"] <= estimated.bytes


@pytest.mark.parametrize("name", ["banded", "mixed", "residual-budget"])
def test_threads_and_order_change_no_byte(name: str, made: dict[str, Path], family: Family, tmp_path: Path) -> None:
    recipe = MIXED if name == "mixed" else LOSSY[name]
    turned = dict(reversed(list(family.variants.items())))
    run(tmp_path / "art", family.base, turned, recipe, threads=2)
    assert contents(tmp_path / "art") == contents(made[name])


def test_bands_make_up_for_what_they_leave_out(made: dict[str, Path], family: Family, tmp_path: Path) -> None:
    """Unlike those with a coded rest, which is of the delta as it is."""
    base, original = read_weights(family.base), read_weights(family.variants["code"])
    _, banded = back(made["banded"], "code", tmp_path / "banded", dtype="float32")
    found = []
    for name in original:
        if codec_of(made["banded"], "code", name) == "banded":
            delta, stored = (one[name].double() - base[name].double() for one in (original, banded))
            metric = delta.mT @ delta
            found.append(float((stored @ metric * delta).sum() / (delta @ metric * delta).sum()))
    assert found and all(0.9 < one < 1.1 for one in found)
    assert sum(found) / len(found) == pytest.approx(1.0, abs=0.01)


def test_banded_beats_int4_at_the_same_bytes(made: dict[str, Path], family: Family, tmp_path: Path) -> None:
    recipe = {"deltas.default.codec": "lowrank", "objective.budget": "20%"}
    run(tmp_path / "int4", family.base, family.variants, recipe)
    assert _rel_error(made["banded"], "code") < _rel_error(tmp_path / "int4", "code")


@pytest.mark.parametrize("name", [*LOSSY, "mixed"])
def test_with_corrections_every_bit_comes_back(
    name: str, family: Family, made: dict[str, Path], tmp_path: Path
) -> None:
    recipe = MIXED if name == "mixed" else LOSSY[name]
    run(tmp_path / "art", family.base, family.variants, {**recipe, "deltas.keep_exact": True})
    assert verify(tmp_path / "art", "values").ok
    places = {id: str(folder) for id, folder in family.variants.items()}
    assert all(c.ok and c.exact == c.tensors for c in compare_with_originals(
        tmp_path / "art", places, base=None, progress=NullSink()
    ))  # fmt: skip
    lossy, exact = inspect(made[name])["variants"], inspect(tmp_path / "art")["variants"]
    for id, before, after in zip(sorted(family.variants), lossy, exact, strict=True):
        restored, weights = back(tmp_path / "art", id, tmp_path / id, exact=True)
        assert restored.exact
        assert contents(restored.folder) == contents(family.variants[id])
        assert all(torch.equal(weights[key], value) for key, value in read_weights(family.variants[id]).items())
        # What is served, its error and its bytes are those without corrections, which are counted apart.
        assert after["rel_error"] == before["rel_error"]
        assert before["correction_bytes"] == 0 < after["correction_bytes"]
        assert after["bytes"] - after["correction_bytes"] == pytest.approx(before["bytes"], abs=400)


def test_what_is_served_leaves_corrections_out_unless_all_bits_are_wanted(family: Family, tmp_path: Path) -> None:
    run(tmp_path / "art", family.base, family.variants, {"objective.rank": 4, "deltas.keep_exact": True})
    run(tmp_path / "plain", family.base, family.variants, {"objective.rank": 4})
    _, served = back(tmp_path / "art", "code", tmp_path / "a", dtype="float32")
    _, plain = back(tmp_path / "plain", "code", tmp_path / "b", dtype="float32")
    _, whole = back(tmp_path / "art", "code", tmp_path / "c", dtype="float32", exact=True)
    original = read_weights(family.variants["code"])
    assert all(torch.equal(served[name], plain[name]) for name in plain)
    assert all(torch.equal(whole[name], original[name].float()) for name in original)


def test_a_correction_of_nothing_but_rounding_is_small(family: Family, tmp_path: Path) -> None:
    run(
        tmp_path / "art",
        family.base,
        {"math": family.variants["math"]},
        {"objective.rank": 16, "deltas.keep_exact": True},
    )
    run(tmp_path / "all", family.base, {"math": family.variants["math"]}, {"deltas.default.codec": "lossless"})
    corrected, lossless = record(tmp_path / "art", "math"), record(tmp_path / "all", "math")
    assert corrected["bytes"] < lossless["bytes"]


def test_a_merged_lora_is_peeled_and_the_rest_lossless(family: Family, tmp_path: Path) -> None:
    recipe = {"deltas.default.codec": "lora-exact"}
    run(tmp_path / "art", family.base, family.variants, recipe)
    run(tmp_path / "lossless", family.base, family.variants, {"deltas.default.codec": "lossless"})
    for id in family.variants:
        mine, other = record(tmp_path / "art", id), record(tmp_path / "lossless", id)
        assert mine["bytes"] <= other["bytes"]
        assert all(tensor["exact"] for tensor in mine["tensors"].values())
    assert contents(back(tmp_path / "art", "math", tmp_path / "out")[0].folder) == contents(family.variants["math"])


def test_inspect_tells_sizes(made: dict[str, Path]) -> None:
    shown = {one["tensor"]: one["codec"] for one in inspect_tensors(made["banded"], "math")}
    q = shown["model.layers.0.self_attn.q_proj.weight"]
    assert q.startswith("banded[") and "x" in q
    shown = {one["tensor"]: one["codec"] for one in inspect_tensors(made["residual"], "math")}
    assert shown["model.layers.0.self_attn.q_proj.weight"] == "sum(lowrank[4 int4]+kbit[2])"


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ({"deltas.default.codec": "deadzone"}, "needs step"),
        ({"deltas.default.codec": "rowsparse"}, "needs rows"),
        ({"deltas.default.codec": "auto", "deltas.default.bits": 4}, "bits is an option of kbit"),
        ({"deltas.default.factors": "int8", "deltas.default.bits": 4}, "bits is an option of kbit"),
        ({"deltas.default.codec": "kbit", "deltas.default.bits": 9}, "expected at most 8, found 9"),
        ({"deltas.default.codec": "sign", "objective.budget": "5%"}, "takes no objective"),
        ({"deltas.default.factors": "banded", "objective.rank": 4}, "no one rank"),
        ({"deltas.default.codec": "sparse", "deltas.default.select": "effect"}, "needs the objective density"),
        ({"deltas.default.factors": "banded", "deltas.default.residual": {"codec": "sign"}}, "residual"),
        ({"deltas.default.residual": {"codec": "sign", "bits": 3}}, "bits is an option of kbit"),
    ],
)
def test_options_that_make_no_sense_are_refused(recipe: Recipe, said: str, family: Family, tmp_path: Path) -> None:
    with pytest.raises(MfsError, match=said) as caught:
        asked(tmp_path / "art", family.base, family.variants, recipe)
    assert caught.value.exit_code == 2


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.lists(st.floats(0, 10), min_size=1, max_size=12), min_size=0, max_size=4),
    st.lists(st.lists(st.floats(0, 10), min_size=1, max_size=12), min_size=1, max_size=4),
    st.integers(0, 20_000),
)
def test_both_kinds_share_one_budget(steps: list[list[float]], bands: list[list[float]], budget: int) -> None:
    fitted = [Candidate(("v", f"s{at}", 0), sorted(e, reverse=True), 150, 96) for at, e in enumerate(steps)]
    banded = {("v", f"b{at}"): BandedCandidate(sorted(e, reverse=True), (64, 96), 96) for at, e in enumerate(bands)}
    taken, given_bands = share_out(fitted, banded, budget)
    spent = sum_of_steps(fitted, taken)
    for key, counts in given_bands.items():
        assert len(counts) == len(WIDTHS)
        spent += bands_bytes(banded[key].shape, counts) + (96 if sum(counts) else 0)
    assert spent <= max(budget, 0)
    if not fitted:  # then it is the allocation of bands alone, less what headers take
        alone = allocate_bands([(one.energy, one.shape) for _, one in sorted(banded.items())], budget)
        assert sum(bands_bytes((64, 96), counts) for counts in alone) >= spent - 96 * len(banded)


def _rel_error(artifact: Path, id: str) -> float:
    found = {variant["id"]: variant["rel_error"] for variant in inspect(artifact)["variants"]}
    return float(found[id])
