"""What is stored with all its bits, what costs nothing, and tensors of every odd kind."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from checkpoints import EMBEDDING, HEAD, random_checkpoint
from pipeline_runs import (
    LARGE,
    NORM,
    THIN,
    WIDE,
    Recording,
    Tensors,
    back,
    check_restores,
    codec_of,
    manifest,
    measured_error,
    moved,
    planted,
    record,
    run,
    same_bits,
    toy,
    toy_tensors,
    toys,
)

from mfs_decompose.artifact.verify import verify
from mfs_decompose.pipeline.restore import RestoreOptions, restore

RANK = {"objective.rank": 3}
LOSSLESS = {"deltas.default.codec": "lossless"}
NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("recipe", [RANK, LOSSLESS, {"deltas.default.codec": "raw"}, {"objective.budget": "40%"}])
def test_tensors_of_every_kind(tmp_path: Path, recipe: dict[str, object]) -> None:
    base, variants = toys(tmp_path, "one", "two")
    report = run(tmp_path / "art", base, variants, recipe)
    assert verify(tmp_path / "art", "values").ok
    for seed, variant in enumerate(report.variants, start=1):
        original = moved(toy_tensors(), seed)
        check_restores(tmp_path / "art", variant.id, original, tmp_path / f"{variant.id}-out")
        _, served = back(tmp_path / "art", variant.id, tmp_path / f"{variant.id}-32", dtype="float32")
        floats = {name: weight for name, weight in original.items() if weight.is_floating_point()}
        found = measured_error(floats, toy_tensors(), served)
        assert found == pytest.approx(variant.rel_error, rel=1e-6, abs=1e-9)
        for name in ("position", "mask"):
            assert same_bits(served[name], original[name])
    for name in ("position", "mask", "empty", "also.empty"):
        assert codec_of(tmp_path / "art", "one", name) == "identical"


def test_equal_tensors_cost_nothing(tmp_path: Path) -> None:
    base, _ = toys(tmp_path)
    twin = toy(tmp_path / "twin", toy_tensors())
    sibling = toy(tmp_path / "sibling", {**toy_tensors(), LARGE: moved(toy_tensors(), 4)[LARGE]})
    report = run(tmp_path / "art", base, {"twin": twin, "sibling": sibling}, {"objective.budget": "500B"})
    one, two = report.variants
    assert (two.id, two.bytes, two.footprint, two.rel_error) == ("twin", 0, 0.0, 0.0)
    assert two.codecs == {"identical": len(toy_tensors())}
    assert (record(tmp_path / "art", "twin")["shards"], list((tmp_path / "art").glob("v0002-*"))) == ([], [])
    (stored,) = one.codecs.keys() - {"identical"}
    assert one.codecs == {"identical": len(toy_tensors()) - 1, stored: 1}
    assert stored in ("banded", "deadzone", "sum(banded+deadzone)")
    assert 0 < one.bytes <= 500
    assert verify(tmp_path / "art", "values").ok
    restored, weights = back(tmp_path / "art", "twin", tmp_path / "out", exact=True)
    assert restored.exact
    assert all(same_bits(weights[name], tensor) for name, tensor in toy_tensors().items())


def test_a_budget_that_buys_nothing_leaves_the_base(tmp_path: Path) -> None:
    base, _ = toys(tmp_path)
    changed = toy(tmp_path / "changed", {**toy_tensors(), LARGE: moved(toy_tensors(), 4)[LARGE]})
    report = run(tmp_path / "art", base, {"changed": changed}, {"objective.budget": "360B"})
    tensor = record(tmp_path / "art", "changed")["tensors"][LARGE]
    assert (report.variants[0].bytes, tensor["blob"], tensor["tree"]["codec"]) == (0, None, "banded")
    assert not any(tensor["tree"]["params"]["bands"])
    assert tensor["error"] == tensor["energy"] > 0
    assert not tensor["exact"]
    assert report.variants[0].rel_error == 1.0
    _, weights = back(tmp_path / "art", "changed", tmp_path / "out")
    assert same_bits(weights[LARGE], toy_tensors()[LARGE])


@pytest.mark.parametrize("recipe", [RANK, {"objective.budget": "40%"}])
def test_weights_that_are_not_finite_are_kept_and_said_aloud(tmp_path: Path, recipe: dict[str, object]) -> None:
    one = moved(toy_tensors(), 1)
    broken = {
        LARGE: planted(one[LARGE], 7, NAN, INF, -INF),
        NORM: one[NORM].index_fill(0, torch.tensor([3]), INF),
        THIN: torch.cat([one[THIN], torch.full((2, 24), NAN, dtype=torch.bfloat16)]),
    }
    base, variants = toys(tmp_path, broken=broken)
    sink = Recording()
    run(tmp_path / "art", base, variants, recipe, sink)
    aloud = [message for message, level in sink.notes if "NaN" in message and level == "warning"]
    assert aloud == [
        f"{THIN} of variant 'broken' holds 48 values that are NaN or infinite; stored exactly",
        f"{LARGE} of variant 'broken' holds 3 values that are NaN or infinite; stored exactly",
        f"{NORM} of variant 'broken' holds 1 value that is NaN or infinite; stored exactly",
    ]
    tensors = record(tmp_path / "art", "broken")["tensors"]
    assert {name: t["nonfinite"] for name, t in tensors.items() if t["nonfinite"]} == {LARGE: 3, NORM: 1, THIN: 48}
    assert codec_of(tmp_path / "art", "broken", LARGE) in ("lossless", "raw")
    coded = ("lowrank",) if recipe == RANK else ("sum", "banded")
    assert codec_of(tmp_path / "art", "broken", THIN) in [f"rows({codec}+raw)" for codec in coded]
    original = {**one, **broken}
    check_restores(tmp_path / "art", "broken", original, tmp_path / "out")
    _, weights = back(tmp_path / "art", "broken", tmp_path / "again")
    assert same_bits(weights[LARGE], original[LARGE])
    assert same_bits(weights[THIN][33:], original[THIN][33:])
    assert verify(tmp_path / "art", "values").ok
    assert math.isfinite(manifest(tmp_path / "art")["variants"][0]["tensors"][LARGE]["energy"])


def test_a_base_that_is_not_finite(tmp_path: Path) -> None:
    poisoned = {**toy_tensors(), LARGE: planted(toy_tensors()[LARGE], 2, NAN, 1.0, INF)}
    base = toy(tmp_path / "base", poisoned)
    sound, same = moved(toy_tensors(), 1), {**moved(toy_tensors(), 2), LARGE: poisoned[LARGE]}
    variants = {"sound": toy(tmp_path / "sound", sound), "same": toy(tmp_path / "same", same)}
    sink = Recording()
    run(tmp_path / "art", base, variants, RANK, sink)
    assert codec_of(tmp_path / "art", "sound", LARGE) in ("lossless", "raw")
    assert codec_of(tmp_path / "art", "same", LARGE) == "identical"
    assert [message for message, _ in sink.notes] == [
        f"{LARGE} of variant 'same' holds 2 values that are NaN or infinite; stored exactly"
    ]
    for id, original in (("sound", sound), ("same", same)):
        check_restores(tmp_path / "art", id, original, tmp_path / f"{id}-out")


def test_a_delta_too_large_for_its_type(tmp_path: Path) -> None:
    """3e38 - -3e38 is no fp32 number, though both weights are."""
    far = torch.full((20, 16), 3e38, dtype=torch.float32)
    calm = torch.randn(90, 90, generator=torch.Generator().manual_seed(1))
    more = {"calm.weight": calm, "calmer.weight": calm / 2}  # most of it is kin, so the far one is no stranger
    base = toy(tmp_path / "base", {"far.weight": far, **more})
    own = {"far.weight": -far, **more}
    sink = Recording()
    run(tmp_path / "art", base, {"own": toy(tmp_path / "own", own)}, RANK, sink)
    assert record(tmp_path / "art", "own")["tensors"]["far.weight"]["exact"]
    assert sink.notes == []
    check_restores(tmp_path / "art", "own", own, tmp_path / "out")


@pytest.mark.parametrize("recipe", [RANK, LOSSLESS, {"objective.budget": "30%"}])
def test_a_variant_that_stores_its_embedding_twice(tmp_path: Path, recipe: dict[str, object]) -> None:
    base_tensors = {**toy_tensors(), EMBEDDING: toy_tensors(8)[LARGE]}
    embedding = moved(base_tensors, 5)[EMBEDDING]
    own = {**moved(base_tensors, 5), EMBEDDING: embedding, HEAD: embedding.clone()}
    once = {name: weight for name, weight in own.items() if name != HEAD}
    base = toy(tmp_path / "base", base_tensors)
    variants = {"twice": toy(tmp_path / "twice", own), "once": toy(tmp_path / "once", once)}
    report = run(tmp_path / "art", base, variants, recipe)
    tensors = record(tmp_path / "art", "twice")["tensors"]
    assert tensors[EMBEDDING]["tree"] == {"codec": "alias", "version": 1, "params": {"of": HEAD}}
    assert tensors[EMBEDDING]["blob"] is None
    assert tensors[EMBEDDING]["restored_sha256"] == tensors[HEAD]["restored_sha256"]
    assert tensors[EMBEDDING]["exact"] == tensors[HEAD]["exact"] == (recipe == LOSSLESS)
    sizes = {variant.id: variant.bytes for variant in report.variants}
    if "objective.budget" not in recipe:
        assert abs(sizes["twice"] - sizes["once"]) <= 8  # the other name of an entry, and padding
    check_restores(tmp_path / "art", "twice", own, tmp_path / "out")
    _, weights = back(tmp_path / "art", "twice", tmp_path / "again")
    assert same_bits(weights[EMBEDDING], weights[HEAD])
    assert verify(tmp_path / "art", "values").ok


def test_equal_tensors_under_unlike_rules_are_no_aliases(tmp_path: Path) -> None:
    base = toy(tmp_path / "base", {"a.weight": toy_tensors()[LARGE], "b.weight": toy_tensors()[LARGE]})
    changed = moved(toy_tensors(), 5)[LARGE]
    own = toy(tmp_path / "own", {"a.weight": changed, "b.weight": changed.clone()})
    run(tmp_path / "art", base, {"own": own}, {**RANK, "deltas.rules": [{"match": "b.*", "codec": "lossless"}]})
    assert codec_of(tmp_path / "art", "own", "a.weight") == "lowrank"
    assert record(tmp_path / "art", "own")["tensors"]["b.weight"]["exact"]


@pytest.mark.parametrize("recipe", [RANK, LOSSLESS])
def test_missing_and_extra_tensors(tmp_path: Path, recipe: dict[str, object]) -> None:
    tower = torch.randn(11, 13, generator=torch.Generator().manual_seed(3))
    base, variants = toys(
        tmp_path,
        other={"tower.weight": tower, WIDE: None, "position": None},
        plain={},
    )
    sink = Recording()
    run(tmp_path / "art", base, variants, recipe, sink)
    other = record(tmp_path / "art", "other")
    assert other["missing"] == ["position", WIDE]
    assert record(tmp_path / "art", "plain")["missing"] == []
    assert (other["tensors"]["tower.weight"]["kind"], other["tensors"]["tower.weight"]["exact"]) == (
        "only_in_variant",
        True,
    )
    original = {**moved(toy_tensors(), 1), "tower.weight": tower}
    del original[WIDE], original["position"]
    check_restores(tmp_path / "art", "other", original, tmp_path / "out")
    assert [message for message, _ in sink.notes] == [
        "other: 1 tensor not in the base, stored whole: tower.weight",
        f"other: 2 tensors of the base left out: position, {WIDE}",
    ]
    coverage = manifest(tmp_path / "art")["coverage"]
    assert coverage == {"tensors": 10 + 9 + 10, "groups": 11}
    assert verify(tmp_path / "art", "values").ok


@pytest.mark.parametrize("recipe", [RANK, LOSSLESS])
@pytest.mark.parametrize(("own", "base"), [("float32", "bfloat16"), ("float16", "bfloat16"), ("float64", "float32")])
def test_a_variant_in_another_type_than_the_base(
    tmp_path: Path, own: str, base: str, recipe: dict[str, object]
) -> None:
    shared = {name: weight.to(getattr(torch, base)) for name, weight in toy_tensors().items() if name != "mask"}
    changed = {
        name: weight.to(getattr(torch, own)) if weight.is_floating_point() else weight
        for name, weight in moved({name: weight.float() for name, weight in shared.items()}, 3).items()
    }
    folders = toy(tmp_path / "base", shared), toy(tmp_path / "own", changed)
    report = run(tmp_path / "art", folders[0], {"own": folders[1]}, recipe)
    check_restores(tmp_path / "art", "own", changed, tmp_path / "out")
    assert verify(tmp_path / "art", "values").ok
    assert (report.variants[0].rel_error == 0) == (recipe == LOSSLESS)


@pytest.mark.parametrize("recipe", [RANK, LOSSLESS])
def test_a_cut_vocabulary(tmp_path: Path, recipe: dict[str, object]) -> None:
    cut = moved(toy_tensors(), 1)[THIN][:29].contiguous()
    base, variants = toys(tmp_path, cut={THIN: cut})
    run(tmp_path / "art", base, variants, recipe)
    tensor = record(tmp_path / "art", "cut")["tensors"][THIN]
    assert (tensor["kind"], tensor["common_rows"], tensor["shape"]) == ("resized", 29, [29, 24])
    check_restores(tmp_path / "art", "cut", {**moved(toy_tensors(), 1), THIN: cut}, tmp_path / "out")
    assert verify(tmp_path / "art", "values").ok


def odd_types(seed: int) -> Tensors:
    """Types and shapes that no lossy codec takes, with other values for another seed."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(-100, 100, (4, 9), generator=generator)
    return {
        "bytes": numbers.to(torch.int8),
        "words": numbers.abs().to(torch.uint16),
        "eighth": (numbers / 50).to(torch.float8_e4m3fn),
        "turns": torch.complex(numbers.float(), -numbers.float()),
        "flags": numbers > 0,
        "step": numbers[0, 0],
        "scale": (numbers[0, 1] / 7).to(torch.bfloat16),
        "thin.weight": (numbers / 3).to(torch.float16),
    }


@pytest.mark.parametrize("recipe", [RANK, LOSSLESS, {"deltas.default.codec": "raw"}])
def test_types_that_no_lossy_codec_takes(tmp_path: Path, recipe: dict[str, object]) -> None:
    sources = {id: {**moved(toy_tensors(), seed), **odd_types(seed)} for seed, id in enumerate(("one", "two"), start=1)}
    base = toy(tmp_path / "base", {**toy_tensors(), **odd_types(0)})
    variants = {id: toy(tmp_path / id, tensors) for id, tensors in sources.items()}
    run(tmp_path / "art", base, variants, recipe)
    for id, original in sources.items():
        _, weights = back(tmp_path / "art", id, tmp_path / f"{id}-out")
        for name in odd_types(0):
            assert same_bits(weights[name], original[name])
            assert codec_of(tmp_path / "art", id, name) in ("raw", "lossless")
        _, served = back(tmp_path / "art", id, tmp_path / f"{id}-32", dtype="float32")
        changed = {name for name in served if served[name].dtype != original[name].dtype}
        assert changed & odd_types(0).keys() == {"scale", "thin.weight"}
    assert verify(tmp_path / "art", "values").ok


@pytest.mark.parametrize("recipe", [RANK, LOSSLESS])
@pytest.mark.parametrize("name", ["experts.weight", "conv.weight"])
def test_more_experts_or_channels(tmp_path: Path, recipe: dict[str, object], name: str) -> None:
    base_tensors = {
        **toy_tensors(),
        "conv.weight": torch.randn(12, 4, 3, 2, generator=torch.Generator().manual_seed(1)),
    }
    one = moved(base_tensors, 1)
    own = {**one, name: torch.cat([one[name], torch.ones(2, *one[name].shape[1:], dtype=one[name].dtype)])}
    base, variant = toy(tmp_path / "base", base_tensors), toy(tmp_path / "own", own)
    report = run(tmp_path / "art", base, {"own": variant}, recipe)
    rows = base_tensors[name].shape[0]
    tensor = record(tmp_path / "art", "own")["tensors"][name]
    assert (tensor["kind"], tensor["common_rows"]) == ("resized", rows)
    restored, weights = back(tmp_path / "art", "own", tmp_path / "out")
    assert same_bits(weights[name][rows:], own[name][rows:])
    assert restored.exact == (recipe == LOSSLESS)
    _, served = back(tmp_path / "art", "own", tmp_path / "32", dtype="float32")
    floats = {key: weight for key, weight in own.items() if weight.is_floating_point()}
    assert measured_error(floats, base_tensors, served) == pytest.approx(report.variants[0].rel_error, rel=1e-6)


def test_side_files_are_stored_once(tmp_path: Path) -> None:
    base, variants = toys(tmp_path, "one", "two")
    for folder in (base, *variants.values()):
        (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (variants["two"] / "chat_template.jinja").write_text("{{ messages }}")
    (variants["two"] / "notes.bin").write_bytes(b"left out")
    run(tmp_path / "art", base, variants, RANK)
    two = record(tmp_path / "art", "two")["source"]
    assert sorted(two["files"]) == ["chat_template.jinja", "config.json", "tokenizer.json"]
    assert two["left_out"] == ["notes.bin"]
    assert two["files"]["tokenizer.json"] == record(tmp_path / "art", "one")["source"]["files"]["tokenizer.json"]
    (restored,) = restore(tmp_path / "art", ["two"], tmp_path / "out", RestoreOptions())
    assert (restored.folder / "chat_template.jinja").read_text() == "{{ messages }}"
    assert not (restored.folder / "notes.bin").exists()


def test_a_leftover_in_the_metadata_comes_back(tmp_path: Path) -> None:
    base, _ = toys(tmp_path)
    own = random_checkpoint(tmp_path / "own", moved(toy_tensors(), 1), {"leftover": "yes"})
    run(tmp_path / "art", base, {"own": own}, LOSSLESS)
    back(tmp_path / "art", "own", tmp_path / "out")
    weights = "model.safetensors"
    assert (tmp_path / "out" / weights).read_bytes() == (own / weights).read_bytes()


def test_a_grown_vocabulary_over_untouched_rows_stores_the_new_rows_alone(tmp_path: Path) -> None:
    base = toy_tensors()
    name = next(name for name, tensor in base.items() if tensor.dim() == 2)
    more = torch.randn(3, base[name].shape[1]).to(base[name].dtype)
    own = {**base, name: torch.cat([base[name], more])}
    out = tmp_path / "art"
    run(out, toy(tmp_path / "base", base), {"grown": toy(tmp_path / "grown", own)}, {"objective.rank": 3})
    stored = record(out, "grown")["tensors"][name]
    assert codec_of(out, "grown", name) == "rows(identical+raw)"
    assert stored["exact"] and stored["blob"]["nbytes"] == more.numel() * more.element_size()
    _, weights = back(out, "grown", tmp_path / "back", exact=True)
    assert same_bits(weights[name], own[name])
