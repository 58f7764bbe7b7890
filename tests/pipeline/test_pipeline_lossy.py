"""Decompose real families with loss: what it may cost is kept to the byte, and what it says it lost is what is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import EMBEDDING, HEAD, Family, fine_tune, make_llama, read_weights
from pipeline_runs import (
    Recording,
    back,
    codec_of,
    doubles,
    manifest,
    measured_error,
    record,
    run,
)
from safetensors.torch import load_file

from mfs_decompose.artifact.verify import verify
from mfs_decompose.errors import UsageError
from mfs_decompose.recipe.values import read_budget

UP = "model.layers.0.mlp.up_proj.weight"


def test_the_report_is_what_lies_on_disk(art: Path, family: Family, tmp_path: Path) -> None:
    sink = Recording()
    report = run(tmp_path / "art", family.base, family.variants, sink=sink)
    assert (report.written, report.resumed_units) == (True, 0)
    assert [variant.id for variant in report.variants] == ["code", "math", "vocab"]
    for number, variant in enumerate(report.variants, start=1):
        files = sorted((tmp_path / "art").glob(f"v{number:04}-*.safetensors"))
        assert variant.bytes == sum(file.stat().st_size for file in files)
        assert variant.checkpoint_bytes == sum(w.nbytes for w in read_weights(family.variants[variant.id]).values())
        assert variant.footprint == variant.bytes / variant.checkpoint_bytes
    base = tmp_path / "art" / "base-00001-of-00001.safetensors"
    assert base.read_bytes() == (family.base / "model.safetensors").read_bytes()
    assert report.base_bytes == base.stat().st_size
    assert report.total_bytes == report.base_bytes + sum(variant.bytes for variant in report.variants)
    assert report.bytes_read > report.checkpoint_bytes
    assert not (tmp_path / "art.partial").exists()
    assert not (tmp_path / "art.lock").exists()
    assert sink.stages[-1] == "publishing"
    notes = [message for message, _ in sink.notes if "a merged LoRA" not in message]
    assert notes == ["vocab: 1 tensor with 259 rows where the base has 257, the new rows stored whole: " + EMBEDDING]


@pytest.mark.parametrize("budget", ["2%", "5%", "13.7%", "40%", "9000B"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_footprint_is_within_the_budget(
    tmp_path: Path, family: Family, untied_family: Family, tied: bool, budget: str
) -> None:
    chosen = family if tied else untied_family
    report = run(tmp_path / "art", chosen.base, chosen.variants, {"objective.budget": budget})
    for variant in report.variants:
        cap = read_budget(budget).cap(variant.checkpoint_bytes)
        assert cap * 0.7 - 2000 < variant.bytes <= cap
    assert verify(tmp_path / "art", "values").ok


@pytest.mark.parametrize("recipe", [{}, {"objective.budget": "23%"}, {"objective.rank": 3}])
@pytest.mark.parametrize("tied", [True, False])
def test_the_recorded_error_is_that_of_a_restore(
    tmp_path: Path, family: Family, untied_family: Family, tied: bool, recipe: dict[str, object]
) -> None:
    chosen = family if tied else untied_family
    report = run(tmp_path / "art", chosen.base, chosen.variants, recipe)
    base = read_weights(chosen.base)
    for variant in report.variants:
        _, served = back(tmp_path / "art", variant.id, tmp_path / variant.id, dtype="float32")
        found = measured_error(read_weights(chosen.variants[variant.id]), base, served)
        assert found == pytest.approx(variant.rel_error, rel=1e-6)
        assert 0 < found < 1


def test_more_budget_loses_less(tmp_path: Path, family: Family) -> None:
    errors = {}
    for budget in ("2%", "6%", "20%"):
        report = run(tmp_path / budget, family.base, family.variants, {"objective.budget": budget})
        errors[budget] = {variant.id: variant.rel_error for variant in report.variants}
    for id in family.variants:
        assert errors["2%"][id] > errors["6%"][id] > errors["20%"][id]


def test_a_low_rank_fine_tune_is_caught_by_its_rank(tmp_path: Path, family: Family) -> None:
    """Rank 3 of noise 50 times weaker: three directions take nearly all of it, two do not."""
    errors = {}
    for rank in (2, 3):
        recipe = {"objective.rank": rank, "deltas.default.factors": "bf16"}
        run(tmp_path / str(rank), family.base, {"math": family.variants["math"]}, recipe)
        tensor = record(tmp_path / str(rank), "math")["tensors"][UP]
        errors[rank] = (tensor["error"] / tensor["energy"]) ** 0.5
    assert errors[3] < 0.05 < 0.2 < errors[2]


def test_the_factors_read_by_hand(tmp_path: Path, family: Family) -> None:
    """int4 codes, low half first, bf16 scales for 64 values: read with numpy from the shard's bytes alone."""
    art = tmp_path / "art"
    run(art, family.base, family.variants, {"deltas.default.codec": "lowrank"})
    shard = (art / "v0002-00001.safetensors").read_bytes()
    tensor = record(art, "math")["tensors"][UP]
    header = int.from_bytes(shard[:8], "little")
    start = 8 + header + json.loads(shard[8 : 8 + header])[tensor["blob"]["entry"]]["data_offsets"][0]
    parts = {part["name"]: part for part in tensor["tree"]["parts"]}
    steps = tensor["tree"]["params"]["steps"]

    def side(codes: str, scales: str, length: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        def raw(name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
            first = start + parts[name]["offset"]
            return np.frombuffer(shard[first : first + parts[name]["nbytes"]], np.uint8)

        packed = raw(codes).reshape(steps, -1)
        nibbles = np.stack([packed & 15, packed >> 4], axis=2).reshape(steps, -1)[:, :length].astype(np.int64)
        signed = np.where(nibbles > 7, nibbles - 16, nibbles)
        scale = (raw(scales).view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(steps, -1)
        return signed * np.repeat(scale.astype(np.float64), 64, axis=1)[:, :length]

    delta = side("u", "us", 96).T @ side("v", "vs", 64)
    original, base = (doubles(read_weights(folder)[UP]) for folder in (family.variants["math"], family.base))
    assert steps > 0
    assert np.square(delta - (original - base)).sum() == pytest.approx(tensor["error"], rel=1e-9)
    assert np.square(original - base).sum() == pytest.approx(tensor["energy"], rel=1e-9)


@pytest.mark.parametrize(("factors", "least"), [("int4", 0.02), ("int8", 0.0005), ("bf16", 0.0001)])
def test_factor_formats(tmp_path: Path, family: Family, factors: str, least: float) -> None:
    recipe = {"objective.rank": 5, "deltas.default.factors": factors}
    report = run(tmp_path / "art", family.base, {"math": family.variants["math"]}, recipe)
    assert verify(tmp_path / "art", "values").ok
    tree = record(tmp_path / "art", "math")["tensors"][UP]["tree"]
    assert tree["params"] == {"factors": factors, "group": 64, "steps": 5}
    _, served = back(tmp_path / "art", "math", tmp_path / "math", dtype="float32")
    found = measured_error(read_weights(family.variants["math"]), read_weights(family.base), served)
    assert found == pytest.approx(report.variants[0].rel_error, rel=1e-6)
    assert found >= least


@pytest.mark.parametrize("values", ["bf16", "int8"])
def test_the_largest_entries_of_every_row(tmp_path: Path, family: Family, values: str) -> None:
    recipe = {"deltas.default.codec": "sparse", "deltas.default.values": values, "objective.density": "10%"}
    report = run(tmp_path / "art", family.base, family.variants, recipe)
    assert verify(tmp_path / "art", "values").ok
    original, base = read_weights(family.variants["code"]), read_weights(family.base)
    _, served = back(tmp_path / "art", "code", tmp_path / "code", dtype="float32")
    by_id = {variant.id: variant for variant in report.variants}
    assert measured_error(original, base, served) == pytest.approx(by_id["code"].rel_error, rel=1e-6)
    delta, kept = doubles(original[UP]) - doubles(base[UP]), doubles(served[UP]) - doubles(base[UP])
    assert (np.count_nonzero(kept, axis=1) <= 6).all()  # 10 % of 64
    order = np.argsort(-np.abs(delta), axis=1, kind="stable")[:, :6]
    largest = np.zeros_like(delta)
    np.put_along_axis(largest, order, np.take_along_axis(delta, order, axis=1), axis=1)
    assert np.abs(kept - largest).max() <= np.abs(delta).max() / (250 if values == "bf16" else 120)


def test_sparse_under_a_budget(tmp_path: Path, family: Family) -> None:
    recipe = {"deltas.default.codec": "sparse", "objective.budget": "12%"}
    report = run(tmp_path / "art", family.base, family.variants, recipe)
    assert all(0.09 < variant.footprint <= 0.12 for variant in report.variants)
    steps = {t["tree"]["params"]["steps"] for t in record(tmp_path / "art", "code")["tensors"].values() if t["error"]}
    assert len(steps) > 1


def test_rules_for_some_tensors(tmp_path: Path, family: Family) -> None:
    rules = [
        {"match": ["*q_proj*", "*k_proj*"], "codec": "lowrank", "rank": 4, "factors": "int8"},
        {"match": "*down_proj*", "codec": "sparse"},
        {"match": "*embed*", "codec": "raw"},
        {"match": "*v_proj*", "codec": "lossless"},
    ]
    out = tmp_path / "art"
    report = run(out, family.base, family.variants, {"deltas.rules": rules, "objective.budget": "50%"})
    assert all(variant.footprint <= 0.5 for variant in report.variants)
    assert codec_of(out, "vocab", EMBEDDING) == "raw"
    assert codec_of(out, "math", "model.layers.1.mlp.down_proj.weight") == "sparse"
    assert codec_of(out, "math", "model.layers.1.self_attn.v_proj.weight") in ("lossless", "raw")
    params = record(out, "math")["tensors"]["model.layers.1.self_attn.q_proj.weight"]["tree"]["params"]
    assert params == {"factors": "int8", "group": 64, "steps": 4}
    assert verify(out, "values").ok


def test_a_lossless_rule_is_charged_what_it_costs(tmp_path: Path, family: Family) -> None:
    """A small change of the embedding costs little without loss; its raw bytes would not fit into the budget."""
    gently = fine_tune(family.base, tmp_path / "gently", seed=9, kind="dense", scale=0.0004)
    rules = [{"match": "*embed*", "codec": "lossless"}]
    recipe = {"deltas.default.codec": "lowrank", "deltas.rules": rules, "objective.budget": "17%"}
    report = run(tmp_path / "art", family.base, {"gently": gently}, recipe)
    tensor = record(tmp_path / "art", "gently")["tensors"][EMBEDDING]
    raw = 257 * 64 * 2
    assert tensor["tree"]["codec"] == "lossless"
    assert raw > 0.17 * report.variants[0].checkpoint_bytes > tensor["blob"]["nbytes"]
    assert 0.12 < report.variants[0].footprint <= 0.17


@pytest.mark.parametrize("recipe", [{}, {"output.shard_size": 700}])
@pytest.mark.parametrize("budget", ["1100B", "0.4%"])
def test_a_budget_too_small_is_refused_and_the_one_that_is_named_holds(
    tmp_path: Path, untied_family: Family, budget: str, recipe: dict[str, object]
) -> None:
    out = tmp_path / "art"
    with pytest.raises(UsageError, match="does not hold what must be stored exactly") as caught:
        run(out, untied_family.base, untied_family.variants, {**recipe, "objective.budget": budget})
    assert list(tmp_path.iterdir()) == []
    assert caught.value.hint is not None
    named = caught.value.hint.rpartition(" ")[2]
    report = run(out, untied_family.base, untied_family.variants, {**recipe, "objective.budget": named})
    assert all(v.bytes <= read_budget(named).cap(v.checkpoint_bytes) for v in report.variants)


def test_a_budget_that_pass_1_finds_too_small(tmp_path: Path, family: Family) -> None:
    """Norms that moved must be raw, and no header can tell that they moved."""
    out, variants = tmp_path / "art", {"code": family.variants["code"], "math": family.variants["math"]}
    with pytest.raises(UsageError, match=r"the budget of 1 kB for variant '\w+' does not hold") as caught:
        run(out, family.base, variants, {"objective.budget": "1000B"})
    assert list(tmp_path.iterdir()) == []
    assert caught.value.hint is not None
    named = caught.value.hint.rpartition(" ")[2]
    report = run(out, family.base, variants, {"objective.budget": named})
    assert all(variant.bytes <= int(named[:-1]) for variant in report.variants)


def test_many_shards(tmp_path: Path, family: Family) -> None:
    recipe = {"output.shard_size": 1500, "objective.budget": "20%"}
    report = run(tmp_path / "art", family.base, family.variants, recipe)
    shards = record(tmp_path / "art", "code")["shards"]
    assert len(shards) > 8
    for name in shards:
        entries = load_file(tmp_path / "art" / name)
        assert len(entries) == 1 or sum(entry.nbytes for entry in entries.values()) <= 1500
    assert all(variant.footprint <= 0.2 for variant in report.variants)
    assert verify(tmp_path / "art", "values").ok
    restored, _ = back(tmp_path / "art", "code", tmp_path / "code")
    assert restored.checked


def test_a_head_of_its_own_over_a_tied_base(tmp_path: Path, family: Family) -> None:
    own = fine_tune(family.base, tmp_path / "headed", seed=7, tie=False)
    report = run(tmp_path / "art", family.base, {"headed": own})
    head = record(tmp_path / "art", "headed")["tensors"][HEAD]
    assert (head["kind"], head["base_name"]) == ("tied", EMBEDDING)
    assert head["tree"]["codec"] in ("banded", "sum")
    _, served = back(tmp_path / "art", "headed", tmp_path / "out", dtype="float32")
    found = measured_error(read_weights(own), read_weights(family.base), served)
    assert found == pytest.approx(report.variants[0].rel_error, rel=1e-6)


def test_a_variant_that_ties_what_the_base_does_not(tmp_path: Path, untied_family: Family) -> None:
    own = fine_tune(untied_family.base, tmp_path / "tied", seed=8, tie=True)
    run(tmp_path / "art", untied_family.base, {"tied": own})
    assert record(tmp_path / "art", "tied")["missing"] == [HEAD]
    restored, weights = back(tmp_path / "art", "tied", tmp_path / "out")
    assert HEAD not in weights
    assert restored.tensors == len(read_weights(own))


def test_a_base_in_shards_and_in_another_type(tmp_path: Path) -> None:
    base = make_llama(
        tmp_path / "base", seed=5, hidden=48, inter=72, layers=1, vocab=131, dtype=torch.float32, shards=3
    )
    math = fine_tune(base, tmp_path / "math", seed=6, shards=2)
    report = run(tmp_path / "art", base, {"math": math}, {"objective.budget": "12%"})
    assert len(manifest(tmp_path / "art")["base"]["shards"]) == 3
    assert report.variants[0].footprint <= 0.12
    _, served = back(tmp_path / "art", "math", tmp_path / "out", dtype="float32")
    found = measured_error(read_weights(math), read_weights(base), served)
    assert found == pytest.approx(report.variants[0].rel_error, rel=1e-6)
    assert verify(tmp_path / "art", "values").ok
