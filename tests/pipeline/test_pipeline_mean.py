"""A base that is the mean of the variants."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from pipeline_runs import (
    LARGE,
    THIN,
    WIDE,
    Tensors,
    back,
    check_restores,
    codec_of,
    manifest,
    measured_error,
    moved,
    planted,
    run,
    same_bits,
    toy,
    toy_tensors,
    toys,
)

from mfs_decompose.artifact.verify import verify

RANK = {"objective.rank": 3}
LOSSLESS = {"deltas.default.codec": "lossless"}
NAN = math.nan


def mean_of(*sources: Tensors) -> Tensors:
    """The oracle of a mean base: fp64 sums, rounded once, common rows."""
    found: Tensors = {}
    for name, weight in sources[0].items():
        if weight.is_floating_point():
            rows = min(source[name].shape[0] for source in sources)
            total = sum((source[name][:rows].double() for source in sources[1:]), sources[0][name][:rows].double())
            found[name] = (total / len(sources)).to(weight.dtype)
    return found


@pytest.mark.parametrize("grown", [0, 3])
def test_a_mean_base(tmp_path: Path, grown: int) -> None:
    one, two, three = (moved(toy_tensors(), seed) for seed in (1, 2, 3))
    new = torch.randn(grown, 24, generator=torch.Generator().manual_seed(9)).to(torch.bfloat16)
    two[THIN] = torch.cat([two[THIN], new])
    sources = {"one": one, "two": two, "three": three}
    variants = {id: toy(tmp_path / id, tensors, tokenizer_json="{}") for id, tensors in sources.items()}
    (variants["two"] / "config.json").write_text('{"model_type": "other"}')
    report = run(tmp_path / "art", None, variants, {"objective.rank": 2, "output.shard_size": 3000})
    record_of_base = manifest(tmp_path / "art")["base"]
    assert (record_of_base["mode"], record_of_base["store"], record_of_base["source"]) == ("mean", "copy", None)
    assert len(record_of_base["shards"]) > 1
    restored, weights = back(tmp_path / "art", "base", tmp_path / "base")
    expected = mean_of(one, two, three)
    assert weights.keys() == expected.keys()
    assert all(same_bits(weights[name], expected[name]) for name in expected)
    assert restored.exact
    # What all variants agree on goes with it.
    assert sorted(path.name for path in (tmp_path / "base").iterdir()) == ["model.safetensors", "tokenizer.json"]
    assert codec_of(tmp_path / "art", "two", THIN) == ("rows(lowrank+raw)" if grown else "lowrank")
    for variant in report.variants:
        original = sources[variant.id]
        check_restores(tmp_path / "art", variant.id, original, tmp_path / f"{variant.id}-out")
        _, served = back(tmp_path / "art", variant.id, tmp_path / f"{variant.id}-32", dtype="float32")
        floats = {name: weight for name, weight in original.items() if weight.is_floating_point()}
        assert measured_error(floats, expected, served) == pytest.approx(variant.rel_error, rel=1e-6)
    assert verify(tmp_path / "art", "values").ok


def test_a_mean_of_what_all_have_in_the_type_that_holds_all(tmp_path: Path) -> None:
    one, two, three = (moved(toy_tensors(), seed) for seed in (1, 2, 3))
    del one[WIDE]
    two[LARGE] = two[LARGE].float()
    three["more.weight"] = torch.randn(9, 11, generator=torch.Generator().manual_seed(4))
    sources = {"one": one, "two": two, "three": three}
    variants = {id: toy(tmp_path / id, tensors) for id, tensors in sources.items()}
    run(tmp_path / "art", None, variants, {"objective.rank": 2})
    tensors = manifest(tmp_path / "art")["base"]["tensors"]
    assert WIDE not in tensors and "more.weight" not in tensors
    assert (tensors[LARGE]["dtype"], tensors[THIN]["dtype"]) == ("F32", "BF16")
    assert codec_of(tmp_path / "art", "two", WIDE) == "raw"
    for id, original in sources.items():
        check_restores(tmp_path / "art", id, original, tmp_path / f"{id}-out")
    assert verify(tmp_path / "art", "values").ok


def test_a_given_base_may_still_be_averaged_away(tmp_path: Path) -> None:
    base, variants = toys(tmp_path, "one", "two")
    run(tmp_path / "with", base, variants, {**RANK, "base.mode": "mean"})
    run(tmp_path / "without", None, variants, RANK)
    assert manifest(tmp_path / "with")["base"] == manifest(tmp_path / "without")["base"]


def test_a_nan_in_one_variant_does_not_reach_the_others_by_the_mean(tmp_path: Path) -> None:
    one, two = moved(toy_tensors(), 1), moved(toy_tensors(), 2)
    one[LARGE] = planted(one[LARGE], 4, NAN)
    variants = {"one": toy(tmp_path / "one", one), "two": toy(tmp_path / "two", two)}
    run(tmp_path / "art", None, variants, LOSSLESS)
    for id, original in (("one", one), ("two", two)):
        check_restores(tmp_path / "art", id, original, tmp_path / f"{id}-out")
        assert back(tmp_path / "art", id, tmp_path / f"{id}-again", exact=True)[0].exact
