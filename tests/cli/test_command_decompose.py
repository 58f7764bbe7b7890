"""What the options of `mfs decompose` come to: in the plan, and in what is written."""

from __future__ import annotations

import re
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Family
from e2e_program import Ran, refused, run, succeeded, tree
from safetensors.torch import save_file

from mfs_decompose.recipe.presets import preset_names


def plan(family: Family, out: Path, *more: object) -> dict[str, Any]:
    words = ("decompose", "--base", family.base, "--variants", family.variants["math"], "--out", out, "--dry-run")
    return succeeded(*words, *more, "--json").document


def recipe(family: Family, out: Path, *more: object) -> dict[str, Any]:
    found = plan(family, out, *more)["recipe"]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(
    ("given", "keys", "value"),
    [
        ((), ("objective",), {"budget": 0.05}),
        (("--budget", "7%"), ("objective",), {"budget": 0.07}),
        (("--budget", "90kB"), ("objective",), {"budget": 90_000}),
        (("--rank", "6"), ("objective",), {"rank": 6}),
        (("--codec", "sparse", "--density", "2%"), ("objective",), {"density": 0.02}),
        (("--codec", "lossless"), ("deltas", "default"), {"codec": "lossless"}),
        (("--codec", "raw"), ("deltas", "default"), {"codec": "raw"}),
        (("--codec", "sparse"), ("deltas", "default"), {"codec": "sparse", "values": "bf16"}),
        (("--set", "deltas.default.factors=int8"), ("deltas", "default"), {"codec": "lowrank", "factors": "int8"}),
        (("--seed", "11"), ("seed",), 11),
        (("--shard-size", "64kB"), ("output", "shard_size"), 64_000),
        (("--base-mode", "known", "--base-store", "reference"), ("base",), {"mode": "known", "store": "reference"}),
        (("--recipe", "lowrank-r16"), ("objective",), {"rank": 16}),
        (("--recipe", "lowrank-r16", "--rank", "4"), ("objective",), {"rank": 4}),
        (("--recipe", "lowrank-r16", "--budget", "9%"), ("objective",), {"budget": 0.09}),
        (("--recipe", "sparse", "--set", "objective.density=0.1"), ("objective",), {"density": 0.1}),
    ],
)
def test_options_are_keys_of_the_recipe(
    family: Family, tmp_path: Path, given: tuple[str, ...], keys: tuple[str, ...], value: object
) -> None:
    found: Any = recipe(family, tmp_path / "art", *given)
    for key in keys:
        found = found[key]
    assert found == value


def test_limits_are_no_part_of_what_is_made(family: Family, tmp_path: Path) -> None:
    free = recipe(family, tmp_path / "art")
    assert recipe(family, tmp_path / "art", "--max-ram", "8GB", "--max-disk", "9GB", "--threads", "2") == free


@pytest.mark.parametrize("name", preset_names())
def test_every_shipped_recipe_makes_a_sound_artifact(family: Family, tmp_path: Path, name: str) -> None:
    words = ("--base", family.base, "--variants", family.variants["vocab"], "--out", tmp_path / "art")
    document = succeeded("decompose", *words, "--recipe", name, "--json").document
    (variant,) = document["variants"]
    assert 0 < variant["footprint"] < 1
    succeeded("verify", tmp_path / "art", "--level", "values", "--against", family.variants["vocab"])
    succeeded("restore", tmp_path / "art", "--variant", "vocab", "--out", tmp_path / "back")


def test_a_recipe_of_ones_own_with_rules(family: Family, tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        "schema: mfs.recipe/1\nabout: attention exactly, the rest by rank\nobjective: {rank: 5}\ndeltas:\n"
        '  default: {codec: lowrank, factors: int8}\n  rules:\n    - {match: "*.self_attn.*", codec: lossless}\n'
        '    - {match: ["*.up_proj.*", "*.down_proj.*"], codec: lowrank, rank: 2}\n'
    )
    words = ("--base", family.base, "--variants", family.variants["math"], "--out", tmp_path / "art")
    succeeded("decompose", *words, "--recipe", mine)
    tensors = run("inspect", tmp_path / "art", "--variant", "math", "--json").document["tensors"]
    codecs = {tensor["tensor"].removeprefix("model.layers.1."): tensor["codec"] for tensor in tensors}
    assert codecs["self_attn.q_proj.weight"].startswith("lossless")
    assert (
        codecs["mlp.up_proj.weight"] == codecs["mlp.down_proj.weight"] == "lowrank[2 int4]"
    )  # a rule has its own defaults
    assert codecs["mlp.gate_proj.weight"] == codecs["model.embed_tokens.weight"] == "lowrank[5 int8]"


def test_shards_are_cut_at_their_size(family: Family, tmp_path: Path) -> None:
    words = ("--base", family.base, "--variants", family.variants["math"], "--budget", "30%")
    whole = succeeded("decompose", *words, "--out", tmp_path / "whole", "--json").document
    cut = succeeded("decompose", *words, "--out", tmp_path / "cut", "--shard-size", "9kB", "--json").document
    shards = sorted((tmp_path / "cut").glob("v0001-*.safetensors"))
    assert len(shards) > 3
    assert cut["variants"][0]["bytes"] == sum(shard.stat().st_size for shard in shards)
    assert cut["variants"][0]["footprint"] <= 0.30
    assert whole["variants"][0]["footprint"] <= 0.30
    succeeded("verify", tmp_path / "cut", "--level", "values")
    succeeded("restore", tmp_path / "cut", "--variant", "math", "--out", tmp_path / "back")


def test_an_empty_folder_is_as_good_as_none(family: Family, tmp_path: Path) -> None:
    (tmp_path / "art").mkdir()
    words = ("--base", family.base, "--variants", family.variants["math"], "--budget", "30%", "--out")
    succeeded("decompose", *words, tmp_path / "art")
    succeeded("decompose", *words, tmp_path / "not" / "yet" / "there")
    assert tree(tmp_path / "art").keys() == tree(tmp_path / "not" / "yet" / "there").keys()
    (tmp_path / "back").mkdir()
    succeeded("restore", tmp_path / "art", "--variant", "math", "--out", tmp_path / "back")


def test_a_bare_folder_is_named_by_its_last_part(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(family.variants["math"])
    words = ("decompose", "--base", "../base", "--variants", ".", "../code/", "v=../vocab", "--dry-run", "--out")
    document = succeeded(*words, tmp_path / "art", "--json").document
    assert [variant["id"] for variant in document["variants"]] == ["code", "math", "v"]


def test_what_is_at_odds_with_the_base_is_said(family: Family, untied_family: Family, tmp_path: Path) -> None:
    """A head of its own beside a tied base, and a variant that leaves the base's head out."""
    words = ("decompose", "--dry-run", "--out", tmp_path / "art")
    ran = succeeded(*words, "--base", family.base, "--variants", f"apart={untied_family.variants['math']}")
    assert "note: apart: 1 tensor stored apart where the base ties it to its embeddings" in ran.out
    ran = succeeded(*words, "--base", untied_family.base, "--variants", f"tied={family.variants['math']}")
    assert "note: tied: 1 tensor of the base left out: lm_head.weight" in ran.out


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """What a full disk does, for this process alone."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def limited(nbytes: int, *words: object) -> Ran:
    with files_of_at_most(nbytes):
        return run(*words)


@pytest.mark.parametrize(
    ("nbytes", "store", "name"),
    [
        (1_000, "copy", "journal.jsonl"),
        (60_000, "copy", "base-00001-of-00001.safetensors"),
        (10_000, "reference", "p1-"),
        (30_000, "reference", "art.partial"),
    ],
)
def test_a_disk_that_fills_up_on_the_way(family: Family, tmp_path: Path, nbytes: int, store: str, name: str) -> None:
    out = tmp_path / "art"
    source = ("--base", family.base, "--variants", family.variants["math"])
    words = ("decompose", *source, "--budget", "30%", "--base-store", store, "--out", out)
    ran = limited(nbytes, *words, "-q")
    assert ran.code == 13
    error, hint = ran.talk
    assert error.startswith(f"Error: expected room for {tmp_path}/art.partial/")
    assert name in error
    assert "then run the same command again" in hint
    assert not out.exists()
    succeeded(*words)
    shutil.rmtree(out)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_while_restoring(family: Family, tmp_path: Path) -> None:
    art = tmp_path / "art"
    succeeded(
        "decompose", "--base", family.base, "--variants", family.variants["math"], "--budget", "30%", "--out", art
    )
    before = tree(tmp_path)
    ran = limited(20_000, "restore", art, "--variant", "math", "--out", tmp_path / "back", "-q")
    assert ran.code == 13
    assert ran.talk[0].startswith("Error: expected room for ")
    assert tree(tmp_path) == before


def test_help_says_what_the_options_take() -> None:
    ran = succeeded("decompose", "--help")
    for word in ("Inputs:", "Output:", "Plan:", "Machine:", "--budget 5%|80MB", "[ID=]REF...", "Examples:"):
        assert word in ran.out
    assert "mfs decompose --base ./base --variants math=./math code=./code --out art" in ran.out
    message, _ = refused(2, "decompose", "--base", "b", "--variants", "v")
    assert message.startswith("missing option '--out'")


def test_the_table_says_what_comes_back_exactly(family: Family, tmp_path: Path) -> None:
    words = ["decompose", "--base", family.base, "--variants", f"math={family.variants['math']}", "--rank", "2"]
    lossy = succeeded(*words, "--out", tmp_path / "lossy")
    assert re.search(r"math .* 5 of 20 exact", lossy.out)
    assert "mfs eval measures that" in lossy.err
    kept = succeeded(*words, "--keep-exact", "--out", tmp_path / "kept")
    assert re.search(r"math .* 0\.\d+ +exact", kept.out)
    shown = succeeded("inspect", tmp_path / "kept")
    assert re.search(r"math: [\d.]+ % of its checkpoint only corrects restored bits", shown.out)
    exact = succeeded(*words[:-2], "--codec", "lossless", "--out", tmp_path / "exact")
    assert re.search(r"math .* 0 +exact", exact.out)
    assert "note:" not in exact.err


def test_an_adapter_is_no_base(family: Family, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2}')
    save_file({"base_model.model.x.lora_A.weight": torch.ones(2, 3)}, adapter / "adapter_model.safetensors")
    ran = run("decompose", "--base", adapter, "--variants", family.variants["math"], "--out", tmp_path / "art")
    assert ran.code == 12
    assert "expected a whole checkpoint as the base, found an adapter" in ran.err
