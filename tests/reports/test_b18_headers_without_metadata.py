"""B18: a safetensors file without `__metadata__`, or with an empty one, is saved again and cannot be loaded.

Such files are read. What we lay out says `format: pt`, what stands in a header besides comes back, and a file whose
tensors all have their original bits is the original, byte for byte.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import INDEX, fine_tune, make_llama, random_checkpoint, read_weights, shard_bytes
from report_program import succeeded

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("b18")
    base = make_llama(root / "base", seed=18)
    return {"base": base, "own": fine_tune(base, root / "own", seed=19)}


def header(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    found: dict[str, Any] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return found


def with_header(folder: Path, metadata: dict[str, str] | None) -> Path:
    """The same tensors below another header; `{}` stands there as it is, where the library would leave it out."""
    path = folder / WEIGHTS
    data, table = path.read_bytes(), header(path)
    del table["__metadata__"]
    start = 8 + int.from_bytes(data[:8], "little")
    path.write_bytes(shard_bytes({**({} if metadata is None else {"__metadata__": metadata}), **table}, data[start:]))
    return folder


METADATA: list[dict[str, str] | None] = [None, {}, {"source": "a trainer", "epoch": "3"}]


@pytest.mark.parametrize("metadata", METADATA, ids=["none", "empty", "others"])
def test_the_same_file_comes_back(pair: dict[str, Path], tmp_path: Path, metadata: dict[str, str] | None) -> None:
    sources = {id: with_header(shutil.copytree(folder, tmp_path / id), metadata) for id, folder in pair.items()}
    command = ["decompose", "--base", sources["base"], "--variants", sources["own"], "--codec", "lossless"]
    succeeded(*command, "--out", tmp_path / "art")
    for id in ("base", "own"):
        succeeded("restore", tmp_path / "art", "--variant", id, "--exact", "--out", tmp_path / "back" / id)
        assert (tmp_path / "back" / id / WEIGHTS).read_bytes() == (sources[id] / WEIGHTS).read_bytes()
    assert header(next((tmp_path / "art").glob("v0001-*")))["__metadata__"]["format"] == "pt"


@pytest.mark.parametrize("metadata", METADATA, ids=["none", "empty", "others"])
@pytest.mark.parametrize("more", [("--dtype", "float32"), ("--layout", "single")], ids=["float32", "single"])
def test_a_new_file_says_what_it_is_and_loads(
    pair: dict[str, Path], tmp_path: Path, metadata: dict[str, str] | None, more: tuple[str, str]
) -> None:
    from transformers import AutoModelForCausalLM

    sources = {id: with_header(shutil.copytree(folder, tmp_path / id), metadata) for id, folder in pair.items()}
    command = ["decompose", "--base", sources["base"], "--variants", sources["own"], "--budget", "30%"]
    succeeded(*command, "--out", tmp_path / "art")
    succeeded("restore", tmp_path / "art", "--variant", "own", *more, "--out", tmp_path / "back")
    assert header(tmp_path / "back" / WEIGHTS)["__metadata__"] == {"format": "pt", **(metadata or {})}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert model(torch.tensor([[5, 6]])).logits.isfinite().all()


def test_one_file_for_several_keeps_what_their_headers_say(pair: dict[str, Path], tmp_path: Path) -> None:
    """Of a word that two headers say differently, the first file's stays."""
    from safetensors.torch import save_file

    own = shutil.copytree(pair["own"], tmp_path / "own")
    weights = read_weights(own)
    (own / WEIGHTS).unlink()
    files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for at, words in enumerate(({"stage": "one", "first": "yes"}, {"stage": "two", "second": "yes"})):
        save_file(dict(list(weights.items())[at::2]), own / files[at], words)
    weight_map = {name: files[at % 2] for at, name in enumerate(weights)}
    (own / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    command = ["decompose", "--base", pair["base"], "--variants", own, "--codec", "lossless"]
    succeeded(*command, "--out", tmp_path / "art")
    succeeded("restore", tmp_path / "art", "--variant", "own", "--layout", "single", "--out", tmp_path / "back")
    words = header(tmp_path / "back" / WEIGHTS)["__metadata__"]
    assert words == {"format": "pt", "stage": "one", "first": "yes", "second": "yes"}


def test_the_base_of_an_artifact_that_is_a_mean_says_what_it_is(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(18)
    shared = torch.randn(24, 20, generator=generator)
    folders = [
        random_checkpoint(tmp_path / id, {"a.weight": shared + 0.01 * torch.randn(24, 20, generator=generator)})
        for id in ("one", "two")
    ]
    succeeded("decompose", "--variants", *folders, "--rank", "3", "--out", tmp_path / "art")
    succeeded("restore", tmp_path / "art", "--variant", "base", "--out", tmp_path / "back")
    assert header(tmp_path / "back" / WEIGHTS)["__metadata__"] == {"format": "pt"}
    assert header(next((tmp_path / "art").glob("base-*")))["__metadata__"]["format"] == "pt"
