"""Sources that cannot be decomposed: an exit code, one sentence, and nothing written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import INDEX, Family, make_llama, random_checkpoint, read_weights
from e2e_program import refused, run, succeeded, tree

SHARD = "model-00002-of-00002.safetensors"
HTML = b"<!DOCTYPE html>\n<html><body>Please log in</body></html>\n"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 269060552\n"


def gone(folder: Path) -> Path:
    shutil.rmtree(folder)
    return folder


def a_file(folder: Path) -> Path:
    return folder / "config.json"


def a_weights_file(folder: Path) -> Path:
    return folder / SHARD


def empty(folder: Path) -> Path:
    shutil.rmtree(folder)
    folder.mkdir()
    return folder


def without_weights(folder: Path) -> Path:
    for path in (*folder.glob("*.safetensors"), folder / INDEX):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    return folder


def missing_shard(folder: Path) -> Path:
    (folder / SHARD).unlink()
    return folder


def truncated_shard(folder: Path) -> Path:
    data = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes(data[:-7])
    return folder


def empty_shard(folder: Path) -> Path:
    (folder / SHARD).write_bytes(b"")
    return folder


def lying_index(folder: Path) -> Path:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.layers.7.mlp.up_proj.weight"] = SHARD
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def silent_index(folder: Path) -> Path:
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"]["model.norm.weight"]
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def web_page(folder: Path) -> Path:
    (folder / SHARD).write_bytes(HTML)
    return folder


def pointer(folder: Path) -> Path:
    (folder / SHARD).write_bytes(POINTER)
    return folder


def adapter(folder: Path) -> Path:
    for path in (*folder.glob("*.safetensors"), folder / INDEX):
        path.unlink()
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 7}')
    random_checkpoint(folder / "in", {"a.lora_A.weight": torch.ones(4, 9)})
    (folder / "in" / "model.safetensors").rename(folder / "adapter_model.safetensors")
    (folder / "in").rmdir()
    return folder


def other_widths(folder: Path) -> Path:
    shutil.rmtree(folder)
    weights = {f"model.layers.{n}.mlp.up_proj.weight": torch.randn(33, 21) for n in range(2)}
    return random_checkpoint(folder, weights)


BROKEN: list[tuple[Callable[[Path], Path], int, list[str], str]] = [
    (gone, 11, ["no such folder: ", "math"], "Check the path."),
    (a_file, 11, ["expected a checkpoint's folder, found a file", "config.json"], "Give the folder of a checkpoint."),
    (a_weights_file, 11, ["expected a checkpoint's folder, found a file", SHARD], "Give the folder that holds it: "),
    (empty, 11, ["the folder is empty"], "Give the folder of a checkpoint."),
    (without_weights, 11, ["expected weights in *.safetensors", "found only pytorch_model.bin"], "save_pretrained"),
    (missing_shard, 11, ["expected 2 shards", f"found 1: {SHARD} missing"], "Download or copy the checkpoint again."),
    (truncated_shard, 11, [SHARD, "is cut off", "expected", "found"], "Fetch the file again"),
    (empty_shard, 11, [SHARD, "is cut off", "0 bytes"], "Fetch the file again"),
    (lying_index, 11, ["'model.layers.7.mlp.up_proj.weight'", SHARD, "no shard has it"], "Download or copy"),
    (silent_index, 11, ["does not list model.norm.weight", "found in model-"], "Download or copy"),
    (web_page, 12, ["expected a safetensors file, found an HTML page", SHARD], "Download the file again, logged in"),
    (pointer, 12, ["expected a safetensors file, found a Git LFS pointer", SHARD], "`git lfs pull`"),
    (adapter, 12, ["expected lora_A and lora_B for a in", "found lora_A only"], "The adapter is incomplete"),
    (other_widths, 12, ["another architecture than the base", "0 of 2 tensors align", "up_proj"], "Give the base that"),
]


@pytest.mark.parametrize(("break_it", "code", "words", "hint"), BROKEN, ids=[case[0].__name__ for case in BROKEN])
def test_a_broken_variant_is_refused_and_nothing_is_written(
    family: Family,
    tmp_path: Path,
    break_it: Callable[[Path], Path],
    code: int,
    words: list[str],
    hint: str,
) -> None:
    place = break_it(shutil.copytree(family.variants["math"], tmp_path / "math"))
    before = tree(tmp_path), tree(family.base)
    arguments = ("--base", family.base, "--variants", f"math={place}", family.variants["code"])
    for more in ((), ("--dry-run",)):
        message, said = refused(code, "decompose", *arguments, "--out", tmp_path / "art", *more)
        for word in words:
            assert word in message
        assert hint in said
    assert (tree(tmp_path), tree(family.base)) == before


@pytest.mark.parametrize(
    ("break_it", "code"),
    [(case[0], case[1]) for case in BROKEN if case[0] not in (silent_index, adapter, other_widths)],
    ids=lambda case: getattr(case, "__name__", ""),
)
def test_a_broken_base_is_refused_and_nothing_is_written(
    family: Family, tmp_path: Path, break_it: Callable[[Path], Path], code: int
) -> None:
    place = break_it(shutil.copytree(family.variants["math"], tmp_path / "base"))
    before = tree(tmp_path)
    message, _ = refused(
        code, "decompose", "--base", place, "--variants", family.variants["code"], "--out", place / "a"
    )
    assert "base" in message
    assert tree(tmp_path) == before


# Strangers: the shapes fit, the weights do not.


def test_a_stranger_is_refused_by_name(family: Family, tmp_path: Path) -> None:
    stranger = make_llama(tmp_path / "stranger", seed=99)
    before = tree(tmp_path)
    arguments = ("--base", family.base, "--variants", family.variants["math"], f"odd={stranger}")
    message, hint = refused(12, "decompose", *arguments, "--out", tmp_path / "art")
    assert "expected fine-tunes of this base" in message
    assert "'odd' (cosine to its weights " in message
    assert "'math'" not in message
    assert "leave them out of --variants" in hint
    assert tree(tmp_path) == before


def test_a_stranger_is_refused_before_anything_is_averaged(family: Family, tmp_path: Path) -> None:
    stranger = make_llama(tmp_path / "stranger", seed=99)
    before = tree(tmp_path)
    variants = (family.variants["math"], f"odd={stranger}", family.variants["code"])
    message, _ = refused(12, "decompose", "--variants", *variants, "--base-mode", "mean", "--out", tmp_path / "art")
    assert "expected fine-tunes of one base" in message
    assert "'odd'" in message
    assert "'math'" not in message
    assert "'code'" not in message
    assert tree(tmp_path) == before


def test_two_that_are_no_kin_are_both_named(family: Family, tmp_path: Path) -> None:
    stranger = make_llama(tmp_path / "stranger", seed=99)
    message, _ = refused(12, "decompose", "--variants", stranger, family.variants["math"], "--out", tmp_path / "art")
    assert "'math'" in message
    assert "'stranger'" in message


def test_a_dry_run_reads_no_weights_and_says_so(family: Family, tmp_path: Path) -> None:
    """The stranger passes: from headers alone nobody can know, and the plan says that."""
    stranger = make_llama(tmp_path / "stranger", seed=99)
    words = ("decompose", "--base", family.base, "--variants", stranger, "--out", tmp_path / "art", "--dry-run")
    ran = run(*words)
    assert ran.code == 0, ran.err
    assert "lineage: not checked" in ran.out
    assert run(*words, "--json").document["lineage"] is None


def test_another_architecture_has_no_mean(family: Family, tmp_path: Path) -> None:
    other = make_llama(tmp_path / "wide", seed=5, hidden=48, inter=80, vocab=263)
    variants = (family.variants["math"], other, family.variants["code"])
    message, hint = refused(12, "decompose", "--variants", *variants, "--out", tmp_path / "art")
    assert "'wide'" in message
    assert "'math'" not in message
    assert "Leave it out" in hint


# NaN and infinity are stored, and said.


def test_weights_that_are_no_numbers_are_stored_exactly_and_named(family: Family, tmp_path: Path) -> None:
    odd = shutil.copytree(family.variants["code"], tmp_path / "odd")
    weights = read_weights(odd)
    norm, matrix = "model.layers.1.input_layernorm.weight", "model.layers.0.mlp.down_proj.weight"
    weights[norm][5] = torch.inf
    weights[matrix][3, 11] = torch.nan
    weights[matrix][0, 0] = -torch.inf
    random_checkpoint(odd, weights, {"format": "pt"})
    before = tree(odd)
    ran = succeeded("decompose", "--base", family.base, "--variants", odd, "--budget", "40%", "--out", tmp_path / "art")
    warnings = [line for line in ran.talk if line.startswith("Warning: ")]
    for warning, name, count in zip(warnings, (matrix, norm), ("2 values", "1 value"), strict=True):
        assert f"{name} of variant 'odd' holds {count} that " in warning
        assert warning.endswith("NaN or infinite; stored exactly")
    succeeded("verify", tmp_path / "art", "--level", "values", "--against", f"odd={odd}")
    tensors = {
        t["tensor"]: t for t in run("inspect", tmp_path / "art", "--variant", "odd", "--json").document["tensors"]
    }
    assert {name: t["nonfinite"] for name, t in tensors.items() if t["nonfinite"]} == {norm: 1, matrix: 2}
    succeeded("restore", tmp_path / "art", "--variant", "odd", "--out", tmp_path / "back")
    restored = read_weights(tmp_path / "back")
    for name in (norm, matrix):
        assert tensors[name]["exact"]
        assert torch.equal(restored[name].view(torch.int16), weights[name].view(torch.int16))
    assert all(restored[name].isfinite().all() for name in weights.keys() - {norm, matrix})
    assert tree(odd) == before
