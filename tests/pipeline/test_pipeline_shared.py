"""What variants have in common, stored once beside a base that is given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import HEAD
from interruptions import PASS_1, PASS_2, Interrupting, partial
from pipeline_runs import (
    Recording,
    back,
    codec_of,
    contents,
    doubles,
    manifest,
    measured_error,
    moved,
    record,
    run,
    toy,
)
from shared_families import BASE, DOWN, EMBED, NORM, UP, base_tensors, common_family, learnt

from mfs_decompose.artifact.reader import Family
from mfs_decompose.artifact.verify import verify
from mfs_decompose.errors import UsageError
from mfs_decompose.pipeline.inspect import inspect
from mfs_decompose.plan import shared_sizes
from mfs_decompose.source.checkpoint import open_checkpoint

SURVEY, ENCODE = "shared delta: survey", "shared delta: encode"
SHARED = {"base.mode": "shared", "objective.budget": "12%", "deltas.default.codec": "lowrank"}
BANDED = {**SHARED, "deltas.default.factors": "banded"}
SHARD = "shared-00001.safetensors"


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    from checkpoints import read_weights

    return read_weights(folder)


@pytest.fixture(scope="module")
def common(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path]]:
    return common_family(tmp_path_factory.mktemp("common"))


@pytest.fixture(scope="module")
def art(common: tuple[Path, dict[str, Path]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("shared") / "art"
    run(out, *common, BANDED)
    return out


def test_it_saves_a_third_of_the_bytes_at_equal_error(
    common: tuple[Path, dict[str, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes shared out by plain energy, which is what the error measures (test_pipeline_shared_own.py: by harm)."""
    monkeypatch.setattr(shared_sizes, "OWN", 0.0)
    known = run(tmp_path / "known", *common, {**BANDED, "base.mode": "known", "objective.budget": "30%"})
    shared = run(tmp_path / "shared", *common, {**BANDED, "objective.budget": "20%"})
    for one, other in zip(known.variants, shared.variants, strict=True):
        assert other.rel_error <= one.rel_error
    delta_bytes = [report.total_bytes - report.base_bytes for report in (known, shared)]
    assert delta_bytes[1] <= 0.7 * delta_bytes[0]


def test_bytes_add_up_and_stay_within_the_caps(art: Path) -> None:
    document = manifest(art)
    total = document["shared"]["bytes"]
    assert total == sum(document["files"][name]["size"] for name in document["shared"]["shards"]) > 0
    shown = inspect(art)
    assert shown["shared"]["bytes"] == sum(one["shared_bytes"] for one in shown["variants"]) == total
    assert (
        max(one["shared_bytes"] for one in shown["variants"]) - min(one["shared_bytes"] for one in shown["variants"])
        <= 1
    )
    for one in shown["variants"]:
        assert one["footprint"] == (one["bytes"] + one["shared_bytes"]) / one["checkpoint_bytes"] <= 0.12
    assert shown["total_bytes"] == document["base"]["bytes"] + total + sum(one["bytes"] for one in shown["variants"])
    assert document["base"]["mode"] == "shared" and document["base"]["source"] is not None
    card = (art / "README.md").read_text()
    assert "stored once, for 3 of its tensors" in card and "its part of what is stored for all" in card


def test_every_variant_is_served_as_base_plus_shared_plus_its_own(
    art: Path, common: tuple[Path, dict[str, Path]], tmp_path: Path
) -> None:
    base = tensors_of(common[0])
    assert verify(art, "values").ok
    for id, folder in common[1].items():
        own = tensors_of(folder)
        _, served = back(art, id, tmp_path / f"{id}-served", dtype="float32")
        assert record(art, id)["tensors"][NORM]["tree"]["codec"] == "identical"
        assert codec_of(art, id, UP) == "sum(shared+banded)"
        recorded = list(record(art, id)["tensors"].values())
        error = sum(tensor["error"] for tensor in recorded) / sum(tensor["energy"] for tensor in recorded)
        assert measured_error(own, base, served) == pytest.approx(error**0.5, rel=1e-3)
        restored, _ = back(art, id, tmp_path / f"{id}-restored")
        assert restored.folder.exists()


def test_the_shared_delta_is_what_was_learnt_in_common(art: Path, common: tuple[Path, dict[str, Path]]) -> None:
    base = tensors_of(common[0])
    between = learnt(base_tensors(), 1, 0.02, 12)
    with Family.open(art) as family:
        for name in (UP, DOWN, EMBED):
            found = family.shared(name)
            assert found is not None and found.shape == tuple(base[name].shape)
            stored = found.open().rows(0, found.shape[0]).numpy()
            learned = doubles(between[name]) - doubles(base[name])
            facts = manifest(art)["shared"]["tensors"][name]
            assert facts["energy"] == pytest.approx(float((learned**2).sum()), rel=0.02)
            assert 0 < facts["error"] < 0.02 * facts["energy"] and facts["variants"] == 4
            assert float(((stored - learned) ** 2).sum()) < 0.02 * float((learned**2).sum())
        assert family.shared(NORM) is None and family.shared(None) is None


@pytest.mark.parametrize("changes", [{"threads": 2}, {"resume": False}, {"max_ram": "500MB"}])
def test_the_same_bytes_again(
    art: Path, common: tuple[Path, dict[str, Path]], tmp_path: Path, changes: dict[str, Any]
) -> None:
    recipe = {**BANDED, **({"limits.max_ram": changes.pop("max_ram")} if "max_ram" in changes else {})}
    backwards = dict(reversed(common[1].items()))
    run(tmp_path / "art", common[0], backwards, recipe, **changes)
    assert contents(tmp_path / "art") == contents(art)


@pytest.mark.parametrize(
    ("stage", "advance"), [(SURVEY, 0), (SURVEY, 30), (ENCODE, 0), (ENCODE, 15), (PASS_1, 3), (PASS_2, 1)]
)
def test_a_killed_run_goes_on(
    art: Path, common: tuple[Path, dict[str, Path]], tmp_path: Path, stage: str, advance: int
) -> None:
    out = tmp_path / "art"
    with pytest.raises(KeyboardInterrupt):
        run(out, *common, BANDED, Interrupting(stage, advance))
    report = run(out, *common, BANDED)
    assert report.resumed_units > 0
    assert contents(out) == contents(art)


@pytest.mark.parametrize("damage", ["scratch", "shard"])
def test_what_was_lost_is_made_again(
    art: Path, common: tuple[Path, dict[str, Path]], tmp_path: Path, damage: str
) -> None:
    out = tmp_path / "art"
    with pytest.raises(KeyboardInterrupt):
        run(out, *common, BANDED, Interrupting(*((ENCODE, 30) if damage == "scratch" else (PASS_1, 1))))
    if damage == "scratch":
        lost = sorted((partial(out) / "scratch").glob("shared-encode-*.bin"))
        assert lost
        lost[0].write_bytes(b"other")
    else:
        (partial(out) / "artifact" / SHARD).write_bytes(b"cut")
    run(out, *common, BANDED)
    assert contents(out) == contents(art)


def test_a_tampered_shard_is_found(art: Path, tmp_path: Path) -> None:
    import shutil

    bad = tmp_path / "bad"
    shutil.copytree(art, bad)
    data = bytearray((bad / SHARD).read_bytes())
    data[-5] ^= 1
    (bad / SHARD).write_bytes(data)
    assert verify(bad, "quick").ok
    found = verify(bad, "checksums")
    assert [problem.file for problem in found.problems] == [SHARD]
    whats = {problem.what for problem in verify(bad, "values").problems}
    assert any("the shared delta of" in what and "is damaged" in what for what in whats)


def test_the_same_command_on_a_finished_artifact(art: Path, common: tuple[Path, dict[str, Path]]) -> None:
    before = contents(art)
    assert not run(art, *common, BANDED).written
    assert contents(art) == before


@pytest.mark.parametrize(
    ("ids", "recipe", "message"),
    [
        ("a", {}, "needs at least two variants, found 1"),
        ("ab", {"deltas.default.codec": "sign"}, "with the codec lowrank, found none"),
        ("ab", {"deltas.default.codec": "lossless"}, "with the codec lowrank, found none"),
    ],
)
def test_what_cannot_share_is_refused_in_words(
    common: tuple[Path, dict[str, Path]], tmp_path: Path, ids: str, recipe: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        run(tmp_path / "art", common[0], {id: common[1][id] for id in ids}, {"base.mode": "shared", **recipe})
    assert not list(tmp_path.iterdir())


def test_without_a_base_it_is_refused(common: tuple[Path, dict[str, Path]], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the base mode 'shared' needs a base"):
        run(tmp_path / "art", None, common[1], SHARED)


def strangers(root: Path) -> tuple[Path, dict[str, Path]]:
    """Variants that learnt nothing in common."""
    base = base_tensors()
    return toy(root / BASE, base), {
        id: toy(root / id, learnt(base, seed, 0.02, 4)) for seed, id in ((1, "a"), (2, "b"))
    }


def test_nothing_in_common_is_no_shared_delta(tmp_path: Path) -> None:
    base, variants = strangers(tmp_path)
    sink = Recording()
    run(tmp_path / "art", base, variants, BANDED, sink)
    assert "shared" not in manifest(tmp_path / "art") and not list((tmp_path / "art").glob("shared-*"))
    assert any("none is worth its bytes" in note for note, _ in sink.notes)
    assert verify(tmp_path / "art", "values").ok


def test_variants_that_have_nothing_in_common_with_the_others(tmp_path: Path) -> None:
    """One is the base itself in a tensor, one has learnt something else: they do not name the shared delta."""
    base = base_tensors()
    other = learnt(base, 77, 0.02, 5)
    changed = {"c": {UP: base[UP]}, "d": other}
    folder, variants = common_family(tmp_path, changed=changed)
    run(tmp_path / "art", folder, variants, BANDED)
    assert codec_of(tmp_path / "art", "c", UP) == "identical"
    assert codec_of(tmp_path / "art", "a", UP) == "sum(shared+banded)"
    assert codec_of(tmp_path / "art", "d", UP) == "banded"
    facts = manifest(tmp_path / "art")["shared"]["tensors"]
    assert (facts[UP]["variants"], facts[DOWN]["variants"]) == (2, 3)
    shares = {one["id"]: one.get("shared_bytes", 0) for one in manifest(tmp_path / "art")["variants"]}
    assert shares["d"] == 0 and sum(shares.values()) == manifest(tmp_path / "art")["shared"]["bytes"]
    assert verify(tmp_path / "art", "values").ok


def test_grown_and_tied_embeddings(tmp_path: Path) -> None:
    folder, variants = common_family(tmp_path)
    own = tensors_of(variants["b"])
    grown = torch.cat([own[EMBED], torch.ones(6, own[EMBED].shape[1], dtype=torch.bfloat16)])
    config = json.dumps({"model_type": "toy", "tie_word_embeddings": True})
    (folder / "config.json").write_text(config)
    variants["b"] = toy(tmp_path / "grown", {**own, EMBED: grown, HEAD: grown.clone()}, config_json=config)
    run(tmp_path / "art", folder, variants, {**BANDED, "objective.budget": "25%"})
    assert {codec_of(tmp_path / "art", "b", name) for name in (EMBED, HEAD)} == {"rows(sum+raw)", "alias"}
    _, weights = back(tmp_path / "art", "b", tmp_path / "b-restored")
    assert torch.equal(weights[EMBED][-6:], grown[-6:]) and torch.equal(weights[EMBED], weights[HEAD])
    assert verify(tmp_path / "art", "values").ok


def test_all_bits_with_corrections(common: tuple[Path, dict[str, Path]], tmp_path: Path) -> None:
    run(tmp_path / "art", *common, {**BANDED, "deltas.keep_exact": True})
    assert codec_of(tmp_path / "art", "a", UP) == "corrected(sum)"
    restored, weights = back(tmp_path / "art", "a", tmp_path / "a", exact=True)
    assert all(torch.equal(weights[name], own) for name, own in tensors_of(common[1]["a"]).items())
    assert restored.folder.exists()


def test_exact_tensors_do_without(common: tuple[Path, dict[str, Path]], tmp_path: Path) -> None:
    rules = [{"match": "down*", "codec": "lossless"}, {"match": "*embed*", "codec": "sign"}]
    run(tmp_path / "art", *common, {**BANDED, "objective.budget": "42%", "deltas.rules": rules})
    assert codec_of(tmp_path / "art", "a", DOWN) in ("lossless", "raw")
    assert codec_of(tmp_path / "art", "a", EMBED) == "sign"
    assert manifest(tmp_path / "art")["shared"]["tensors"].keys() == {UP}
    assert verify(tmp_path / "art", "values").ok


@pytest.mark.parametrize("factors", ["int4", "int8", "bf16"])
def test_a_fixed_rank(common: tuple[Path, dict[str, Path]], tmp_path: Path, factors: str) -> None:
    recipe = {"objective.rank": 6, "deltas.default.factors": factors}
    known = run(tmp_path / "known", *common, recipe)
    shared = run(tmp_path / "shared", *common, {**recipe, "base.mode": "shared"})
    assert codec_of(tmp_path / "shared", "a", UP) == "sum(shared+lowrank)"
    assert all(b.rel_error < 0.7 * a.rel_error for a, b in zip(known.variants, shared.variants, strict=True))


def test_residuals_and_other_codecs_beside_it(common: tuple[Path, dict[str, Path]], tmp_path: Path) -> None:
    residual = {"codec": "kbit", "bits": 2}
    rules = [{"match": "up*", "codec": "lowrank", "rank": 2, "residual": residual}]
    run(tmp_path / "art", *common, {**SHARED, "objective.budget": "60%", "deltas.rules": rules})
    assert codec_of(tmp_path / "art", "a", UP) == "sum(shared+lowrank+kbit)"
    assert verify(tmp_path / "art", "values").ok


def test_an_adapter_among_the_variants(tmp_path: Path) -> None:
    from adapters import write_adapter

    folder, variants = common_family(tmp_path, "ab")
    (folder / "config.json").write_text(json.dumps({"model_type": "toy"}))
    generator = torch.Generator().manual_seed(5)
    stem = f"base_model.model.{UP.removesuffix('.weight')}"
    factors = {
        f"{stem}.lora_A.weight": torch.randn(3, 72, generator=generator),
        f"{stem}.lora_B.weight": torch.randn(120, 3, generator=generator),
    }
    write_adapter(tmp_path / "lora", factors, {"peft_type": "LORA", "r": 3, "lora_alpha": 7, "target_modules": ["up"]})
    run(tmp_path / "art", folder, {**variants, "lora": tmp_path / "lora"}, BANDED)
    shares = {one["id"]: one.get("shared_bytes", 0) for one in manifest(tmp_path / "art")["variants"]}
    assert shares["lora"] == 0 and shares["a"] > 0
    assert verify(tmp_path / "art", "values").ok
    with pytest.raises(UsageError, match="beside adapters"):
        run(tmp_path / "two", folder, {"a": variants["a"], "lora": tmp_path / "lora"}, BANDED)


def test_nan_keeps_a_variant_out(tmp_path: Path) -> None:
    folder, variants = common_family(tmp_path)
    own = tensors_of(variants["c"])
    own[UP][3, 5] = float("nan")
    variants["c"] = toy(tmp_path / "nan", own)
    run(tmp_path / "art", folder, variants, {**BANDED, "objective.budget": "45%"})
    assert codec_of(tmp_path / "art", "c", UP) in ("lossless", "raw")
    assert manifest(tmp_path / "art")["shared"]["tensors"].get(UP, {"variants": 3})["variants"] == 3
    assert verify(tmp_path / "art", "values").ok


def test_small_shards(art: Path, common: tuple[Path, dict[str, Path]], tmp_path: Path) -> None:
    run(tmp_path / "art", *common, {**BANDED, "output.shard_size": 6000})
    assert len(manifest(tmp_path / "art")["shared"]["shards"]) > 1
    assert verify(tmp_path / "art", "values").ok


def test_the_base_by_reference(common: tuple[Path, dict[str, Path]], tmp_path: Path) -> None:
    run(tmp_path / "art", *common, {**BANDED, "base.store": "reference"})
    assert manifest(tmp_path / "art")["base"]["bytes"] == 0
    assert verify(tmp_path / "art", "values", base=common[0]).ok


def test_a_large_matrix_in_row_blocks(
    common: tuple[Path, dict[str, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Limits of one piece, made small: the same matrices, read in blocks, have a shared delta as good."""
    from mfs_decompose.pipeline import reading, shared_survey
    from mfs_decompose.plan import shared_groups, units

    for module in (shared_groups, units):
        monkeypatch.setattr(module, "BLOCK_ELEMENTS", 5000)
    for module in (reading, shared_survey):
        monkeypatch.setattr(module, "ROW_BLOCK_ELEMENTS", 3000)
    report = run(tmp_path / "art", *common, BANDED)
    assert codec_of(tmp_path / "art", "a", EMBED) == "sum(shared+banded)"
    assert verify(tmp_path / "art", "values").ok
    assert all(variant.rel_error < 0.05 for variant in report.variants)


AUTO = {**BANDED, "base.mode": "auto"}


class TestAuto:
    def test_it_takes_what_is_smaller_and_says_so(
        self, art: Path, common: tuple[Path, dict[str, Path]], tmp_path: Path
    ) -> None:
        sink = Recording()
        run(tmp_path / "art", *common, AUTO, sink)
        assert manifest(tmp_path / "art")["base"]["mode"] == "shared"
        (said,) = [note for note, _ in sink.notes if note.startswith("base mode auto: shared; for the same")]
        assert "kB under shared and" in said and said.endswith("kB under known")
        assert contents(tmp_path / "art").keys() == contents(art).keys()
        assert contents(tmp_path / "art")[SHARD] == contents(art)[SHARD]
        assert not run(tmp_path / "art", *common, AUTO).written

    def test_nothing_in_common_is_the_known_base(self, tmp_path: Path) -> None:
        base, variants = strangers(tmp_path)
        sink = Recording()
        run(tmp_path / "art", base, variants, AUTO, sink)
        assert manifest(tmp_path / "art")["base"]["mode"] == "known"
        assert any(note.startswith("base mode auto: known") for note, _ in sink.notes)
        assert not run(tmp_path / "art", base, variants, AUTO).written

    @pytest.mark.parametrize("stage", [SURVEY, ENCODE, PASS_1])
    def test_a_killed_run_decides_the_same(
        self, common: tuple[Path, dict[str, Path]], tmp_path: Path, stage: str
    ) -> None:
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "art", *common, AUTO, Interrupting(stage, 1))
        run(tmp_path / "art", *common, AUTO)
        run(tmp_path / "whole", *common, AUTO)
        assert contents(tmp_path / "art") == contents(tmp_path / "whole")

    def test_one_variant_or_nothing_to_share_is_known(
        self, common: tuple[Path, dict[str, Path]], tmp_path: Path
    ) -> None:
        run(tmp_path / "one", common[0], {"a": common[1]["a"]}, AUTO)
        run(tmp_path / "exact", *common, {"base.mode": "auto", "deltas.default.codec": "lossless"})
        assert {manifest(tmp_path / name)["base"]["mode"] for name in ("one", "exact")} == {"known"}

    @pytest.mark.parametrize("rank", [4, 7])
    def test_at_a_fixed_rank(self, common: tuple[Path, dict[str, Path]], tmp_path: Path, rank: int) -> None:
        run(tmp_path / "art", *common, {"base.mode": "auto", "objective.rank": rank})
        assert manifest(tmp_path / "art")["base"]["mode"] == "shared"


def test_variants_keep_their_own_names(tmp_path: Path) -> None:
    """A tensor that a variant calls otherwise shares the delta of its base tensor."""
    folder, variants = common_family(tmp_path, "ab")
    for id in "ab":
        own = {f"model.{name}": weight for name, weight in tensors_of(variants[id]).items()}
        variants[id] = toy(tmp_path / f"{id}-renamed", own)
    run(tmp_path / "art", folder, variants, BANDED)
    assert codec_of(tmp_path / "art", "a", f"model.{UP}") == "sum(shared+banded)"
    assert open_checkpoint(variants["a"], "a").tensors.keys() == record(tmp_path / "art", "a")["tensors"].keys()
    assert verify(tmp_path / "art", "values").ok


def test_a_mean_of_two_is_moved_as_a_fine_tune_is(tmp_path: Path) -> None:
    """Real shapes of the toy family: stacks and convolutions beside plain matrices."""
    from pipeline_runs import toy_tensors

    base = toy_tensors()
    common = moved(base, 1)
    variants = {id: toy(tmp_path / id, moved(common, seed, 0.01)) for seed, id in ((2, "a"), (3, "b"))}
    run(tmp_path / "art", toy(tmp_path / BASE, base), variants, {**SHARED, "objective.budget": "60%"})
    assert codec_of(tmp_path / "art", "a", "experts.weight") == "lowrank"
    assert verify(tmp_path / "art", "values").ok
