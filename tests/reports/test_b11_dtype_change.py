"""B11: a delta or merge is twice the base's size: the base is in bf16, the variant was saved in fp32.

`mfs diff` reports the change of dtype, and tells an upcast of the same values from fp32 weights that bf16 cannot hold.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import make_llama, read_weights
from report_program import run, succeeded
from safetensors.torch import save_file


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A bf16 base, its upcast to fp32, and one with noise below what bf16 holds."""
    root = tmp_path_factory.mktemp("b11")
    base = make_llama(root / "base", seed=11)
    generator = torch.Generator().manual_seed(11)
    found = {"base": base}
    for id in ("upcast", "noise"):
        folder = found[id] = shutil.copytree(base, root / id)
        weights = {name: weight.float() for name, weight in read_weights(base).items()}
        if id == "noise":
            weights = {n: w * (1 + 2**-12 * torch.rand(w.shape, generator=generator)) for n, w in weights.items()}
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    return found


def test_an_upcast_is_told_from_other_values(folders: dict[str, Path]) -> None:
    upcast = succeeded("diff", folders["base"], folders["upcast"], "--json").document
    assert (upcast["a"]["dtypes"], upcast["b"]["dtypes"]) == ({"BF16": 20}, {"F32": 20})
    assert upcast["b"]["bytes"] == 2 * upcast["a"]["bytes"]
    assert {(one["verdict"], one["changed"]) for one in upcast["tensors"]["changes"]} == {("retyped", 0)}
    assert [(one["key"], one["a"], one["b"]) for one in upcast["config"]["changes"]] == [
        ("dtype", "bfloat16", "float32")
    ]
    noise = succeeded("diff", folders["base"], folders["noise"], "--json").document
    assert all(one["changed"] > 0.9 * one["compared"] for one in noise["tensors"]["changes"])
    assert 0 < noise["tensors"]["rel"] < 2**-12


def test_people_are_told_in_a_sentence(folders: dict[str, Path]) -> None:
    lines = run("diff", folders["base"], folders["upcast"], "--exit-code").out.splitlines()
    assert "dtypes differ: BF16 in A and F32 in B; 20 of these 20 hold the same values" in lines
    assert lines[-1] == "different"
    lines = run("diff", folders["base"], folders["noise"]).out.splitlines()
    assert "dtypes differ: BF16 in A and F32 in B; 0 of these 20 hold the same values" in lines
    assert any("BF16 -> F32" in line for line in lines)


def test_it_is_told_of_a_stored_variant_too(folders: dict[str, Path], tmp_path: Path) -> None:
    refs = [f"{id}={folders[id]}" for id in ("upcast", "noise")]
    succeeded("decompose", "--base", folders["base"], "--variants", *refs, "--budget", "60%", "--out", tmp_path / "art")
    document = succeeded("diff", folders["base"], f"{tmp_path / 'art'}::upcast", "--json").document
    assert {(one["verdict"], one["changed"]) for one in document["tensors"]["changes"]} == {("retyped", 0)}
    changes = {
        one["id"]: one["config_changes"]
        for one in succeeded("inspect", tmp_path / "art", "--json").document["variants"]
    }
    for id in ("upcast", "noise"):
        assert [(one["key"], one["base"], one["variant"]) for one in changes[id]] == [("dtype", "bfloat16", "float32")]
