"""A base that is made from the variants, and leaves less to their deltas than the mean does."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_llama, read_weights
from interruptions import PASS_1, Interrupting
from pipeline_runs import (
    LARGE,
    NORM,
    THIN,
    WIDE,
    Recording,
    back,
    check_restores,
    contents,
    manifest,
    moved,
    planted,
    run,
    same_bits,
    toy,
    toy_tensors,
    toys,
)
from shared_families import common_family

from mfs_decompose.artifact.verify import verify
from mfs_decompose.errors import MfsError, UsageError
from mfs_decompose.source.lineage import check_lineage

STAGE = "base: refined"
RANK = {"base.mode": "refined", "objective.rank": 3, "deltas.default.factors": "bf16"}


def lost(artifact: Path) -> float:
    """What deltas miss, over all tensors of all variants."""
    return math.fsum(t["error"] for v in manifest(artifact)["variants"] for t in v["tensors"].values())


@pytest.mark.parametrize("family", ["independent", "common"])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_it_leaves_less_than_the_mean_and_the_known_base(tmp_path: Path, family: str, count: int) -> None:
    ids = "abcd"[:count]
    base, variants = toys(tmp_path, *ids) if family == "independent" else common_family(tmp_path, ids)
    for mode, below in (("mean", None), ("refined", None), ("known", base)):
        run(tmp_path / mode, below, variants, {**RANK, "base.mode": mode})
    run(tmp_path / "started", base, variants, RANK)
    for name in ("refined", "started"):
        found = manifest(tmp_path / name)["base"]
        assert (found["mode"], found["store"], found["source"]) == ("refined", "copy", None)
        assert lost(tmp_path / name) <= 1.001 * min(lost(tmp_path / "mean"), lost(tmp_path / "known"))
        assert verify(tmp_path / name, "values").ok
    assert lost(tmp_path / "refined") < 0.8 * lost(tmp_path / "mean")
    for id, folder in variants.items():
        check_restores(tmp_path / "refined", id, read_weights(folder), tmp_path / f"{id}-back")


def test_two_variants_have_the_closed_form(tmp_path: Path) -> None:
    _, variants = toys(tmp_path, "a", "b")
    run(tmp_path / "art", None, variants, RANK)
    _, base = back(tmp_path / "art", "base", tmp_path / "base-back")
    one, other = (read_weights(folder) for folder in variants.values())
    for name in (LARGE, WIDE, THIN):
        found = sum(
            float(torch.linalg.svdvals(own[name].double() - base[name].double())[3:].square().sum())
            for own in (one, other)
        )
        expected = float(torch.linalg.svdvals(one[name].double() - other[name].double())[6:].square().sum()) / 2
        noise = base[name].numel() * 2 * (2.0**-8) ** 2 / 3  # rounding the base to bf16, of weights of size 1
        assert expected <= found <= 1.01 * expected + noise


def test_the_same_bytes_with_any_threads_and_order(tmp_path: Path) -> None:
    _, variants = toys(tmp_path, "a", "b", "c")
    run(tmp_path / "one", None, variants, RANK)
    run(tmp_path / "two", None, dict(reversed(variants.items())), RANK, threads=2)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert not run(tmp_path / "one", None, variants, RANK).written


@pytest.mark.parametrize("advance", [0, 1, 5])
def test_a_killed_run_goes_on(tmp_path: Path, advance: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from mfs_decompose.pipeline import base_stage

    monkeypatch.setattr(base_stage, "_UNIT_BYTES", 2000)
    _, variants = toys(tmp_path, "a", "b", "c")
    run(tmp_path / "whole", None, variants, RANK)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "art", None, variants, RANK, Interrupting(STAGE, advance))
    run(tmp_path / "art", None, variants, RANK)
    assert contents(tmp_path / "art") == contents(tmp_path / "whole")


def test_what_cannot_be_refined_is_the_mean(tmp_path: Path) -> None:
    tensors = toy_tensors()
    one, two, three = (moved(tensors, seed) for seed in (1, 2, 3))
    two[LARGE] = planted(two[LARGE], 3, math.nan, math.inf)
    two[THIN] = torch.cat([two[THIN], two[THIN][:4]])
    variants = {id: toy(tmp_path / id, own) for id, own in (("one", one), ("two", two), ("three", three))}
    for mode in ("mean", "refined"):
        run(tmp_path / mode, None, variants, {**RANK, "base.mode": mode})
    bases = [back(tmp_path / mode, "base", tmp_path / f"{mode}-back")[1] for mode in ("mean", "refined")]
    for name in (LARGE, NORM):
        assert same_bits(bases[0][name], bases[1][name])
    for name in (WIDE, THIN, "experts.weight"):
        assert not same_bits(bases[0][name], bases[1][name])
    assert bases[1][THIN].shape == tensors[THIN].shape
    assert verify(tmp_path / "refined", "values").ok
    for id, own in (("one", one), ("two", two), ("three", three)):
        check_restores(tmp_path / "refined", id, own, tmp_path / f"{id}-back")


@pytest.mark.parametrize("codec", ["sign", "lossless"])
def test_codecs_without_directions_take_the_mean(tmp_path: Path, codec: str) -> None:
    _, variants = toys(tmp_path, "a", "b", "c")
    for mode in ("mean", "refined"):
        run(tmp_path / mode, None, variants, {"base.mode": mode, "deltas.default.codec": codec})
    bases = [back(tmp_path / mode, "base", tmp_path / f"{mode}-back")[1] for mode in ("mean", "refined")]
    assert all(same_bits(bases[0][name], bases[1][name]) for name in bases[0])


def test_a_budget_gives_the_rank(tmp_path: Path) -> None:
    _, variants = common_family(tmp_path)
    sink = Recording()
    recipe = {"objective.budget": "4%", "deltas.default.factors": "banded"}
    run(tmp_path / "mean", None, variants, recipe)
    run(tmp_path / "refined", None, variants, {**recipe, "base.mode": "refined"}, sink)
    assert lost(tmp_path / "refined") < lost(tmp_path / "mean")
    assert any(note.startswith("refined base: matrices by where they started:") for note, _ in sink.notes)


def test_large_matrices_are_the_mean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mfs_decompose.pipeline import refined_base

    monkeypatch.setattr(refined_base, "LARGEST", 100)
    _, variants = toys(tmp_path, "a", "b", "c")
    for mode in ("mean", "refined"):
        run(tmp_path / mode, None, variants, {**RANK, "base.mode": mode})
    bases = [back(tmp_path / mode, "base", tmp_path / f"{mode}-back")[1] for mode in ("mean", "refined")]
    assert all(same_bits(bases[0][name], bases[1][name]) for name in bases[0])


def test_it_cannot_lie_elsewhere(tmp_path: Path) -> None:
    _, variants = toys(tmp_path, "a", "b")
    with pytest.raises(UsageError, match="a refined base exists nowhere else"):
        run(tmp_path / "art", None, variants, {**RANK, "base.store": "reference"})


def test_strangers_are_refused_first(tmp_path: Path) -> None:
    """The lineage check stands before any averaging."""
    _base, variants = toys(tmp_path, "a", "b")
    variants["z"] = toy(tmp_path / "z", toy_tensors(99))
    sink = Recording()
    with pytest.raises(MfsError, match="'z'"):
        run(tmp_path / "art", None, variants, RANK, sink)
    assert STAGE not in sink.stages and check_lineage is not None


def test_a_base_to_start_from_is_part_of_what_a_run_resumes(tmp_path: Path) -> None:
    base, variants = toys(tmp_path, "a", "b", "c")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "art", base, variants, RANK, Interrupting(PASS_1))
    with pytest.raises(MfsError, match="the base to start from"):
        run(tmp_path / "art", None, variants, RANK)


def merge_loras(base: Path, root: Path, ids: str, ranks: dict[str, int]) -> dict[str, Path]:
    """Real adapters of PEFT with random factors, merged by PEFT into bf16."""
    import peft
    import transformers

    folders = {}
    for seed, id in enumerate(ids):
        torch.manual_seed(100 + seed)
        model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
        config = peft.LoraConfig(
            r=ranks[id], lora_alpha=2 * ranks[id] + 1, target_modules=["q_proj", "down_proj"], init_lora_weights=True
        )
        tuned = peft.get_peft_model(model, config)
        for name, weight in tuned.named_parameters():
            if "lora_" in name:
                weight.data = 0.02 * torch.randn_like(weight)
        tuned.merge_and_unload().save_pretrained(root / id)  # type: ignore[operator]
        folders[id] = root / id
    return folders


def test_the_base_of_three_merged_loras_comes_back(tmp_path: Path) -> None:
    """Made by PEFT, merged by PEFT, and the base thrown away: nine weights in ten to the bit, all to rounding."""
    base = make_llama(tmp_path / "base", seed=3, hidden=96, inter=160)
    weights = {n: (w.float() * (0.05 / w.float().std()) if w.dim() == 2 else w).to(torch.bfloat16)
               for n, w in read_weights(base).items()}  # fmt: skip
    from safetensors.torch import save_file

    save_file(weights, next(base.glob("*.safetensors")), {"format": "pt"})
    variants = merge_loras(base, tmp_path, "abc", {"a": 2, "b": 3, "c": 4})
    run(tmp_path / "art", None, variants, {"base.mode": "refined", "deltas.default.codec": "lora-exact"})
    _, found = back(tmp_path / "art", "base", tmp_path / "base-back")
    touched = [name for name in weights if name.endswith(("q_proj.weight", "down_proj.weight"))]
    assert touched
    for name, own in weights.items():
        if name not in found:
            continue
        if name not in touched:
            assert same_bits(found[name], own), name
            continue
        assert float((found[name] == own).double().mean()) > 0.85, name
        off = (found[name].double() - own.double()).abs()
        units = torch.exp2(own.double().abs().clamp(min=0.05).log2().floor() - 7)
        assert bool((off <= units).all()), name
    assert verify(tmp_path / "art", "values").ok


class TestAuto:
    def test_it_refines_where_that_saves_bytes(self, tmp_path: Path) -> None:
        _, variants = toys(tmp_path, "a", "b", "c")
        sink = Recording()
        recipe: dict[str, Any] = {**RANK, "base.mode": "auto"}
        run(tmp_path / "art", None, variants, recipe, sink)
        assert manifest(tmp_path / "art")["base"]["mode"] == "refined"
        (said,) = [note for note, _ in sink.notes if note.startswith("base mode auto: refined; for the same")]
        assert "matrices that were looked at take" in said
        assert not run(tmp_path / "art", None, variants, recipe).written
        run(tmp_path / "refined", None, variants, RANK)
        assert (
            contents(tmp_path / "art")["v0001-00001.safetensors"]
            == contents(tmp_path / "refined")["v0001-00001.safetensors"]
        )

    def test_it_takes_the_mean_where_there_is_nothing_to_gain(self, tmp_path: Path) -> None:
        _, variants = toys(tmp_path, "a", "b")
        run(tmp_path / "art", None, variants, {"base.mode": "auto", "deltas.default.codec": "lossless"})
        assert manifest(tmp_path / "art")["base"]["mode"] == "mean"
