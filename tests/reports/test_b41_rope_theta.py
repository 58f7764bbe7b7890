"""B41: a merge of models with another RoPE base gives junk: weights look compatible, rope_theta is 5e5 against 2e7.

The config is the variant's own: `mfs inspect` and `mfs diff` show what differs, each variant is stored with its own and
restored with its own, and the logits of the restored models differ as those of the originals do.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import make_llama
from report_program import succeeded

THETA = {"base": 500000.0, "near": 500000.0, "far": 20000000.0}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three checkpoints of the same weights; one has another rope_theta, in the old spelling."""
    root = tmp_path_factory.mktemp("b41")
    found = {"base": make_llama(root / "base", seed=41)}
    for id in ("near", "far"):
        found[id] = shutil.copytree(found["base"], root / id)
    for id, folder in found.items():
        config = json.loads((folder / "config.json").read_text())
        del config["rope_parameters"]
        spelled = {"rope_theta": THETA[id], "rope_scaling": None}
        new = {"rope_parameters": {"rope_theta": THETA[id], "rope_type": "default"}}
        config |= new if id == "base" else spelled
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return found


@pytest.fixture(scope="module")
def art(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("b41-art") / "art"
    refs = [f"{id}={folders[id]}" for id in ("near", "far")]
    succeeded("decompose", "--base", folders["base"], "--variants", *refs, "--out", out)
    return out


def test_inspect_shows_the_one_key_that_differs(art: Path) -> None:
    variants = {one["id"]: one for one in succeeded("inspect", art, "--json").document["variants"]}
    assert variants["near"]["config_changes"] == []  # another spelling is no change
    assert variants["far"]["config_changes"] == [
        {
            "file": "config.json",
            "key": "rope_parameters.rope_theta",
            "kind": "changed",
            "base": 500000.0,
            "variant": 20000000.0,
        }
    ]
    rows = [line.split() for line in succeeded("inspect", art).out.splitlines()]
    assert ["far", "config.json", "rope_parameters.rope_theta", "500000.0", "20000000.0"] in rows


def test_diff_shows_it_though_every_weight_is_equal(folders: dict[str, Path], art: Path) -> None:
    for other in (folders["far"], f"{art}::far"):
        document = succeeded("diff", folders["base"], other, "--json").document
        assert (document["equal"], document["tensors"]["equal"], document["tensors"]["changes"]) == (False, 20, [])
        assert [one["key"] for one in document["config"]["changes"]] == ["rope_parameters.rope_theta"]
    assert succeeded("diff", folders["base"], folders["near"], "--json").document["equal"] is True


def test_each_variant_is_restored_with_its_own(folders: dict[str, Path], art: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    text = torch.arange(3, 80).reshape(1, -1)
    logits = {}
    for id in ("near", "far"):
        succeeded("restore", art, "--variant", id, "--out", tmp_path / id)
        assert (tmp_path / id / "config.json").read_bytes() == (folders[id] / "config.json").read_bytes()
        for folder in (folders[id], tmp_path / id):
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            with torch.no_grad():
                logits[folder] = model(text).logits
        assert torch.equal(logits[folders[id]], logits[tmp_path / id])
    assert not torch.allclose(logits[tmp_path / "near"], logits[tmp_path / "far"], atol=1e-4)
