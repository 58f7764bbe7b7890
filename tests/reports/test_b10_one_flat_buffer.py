"""B10: a trainer that keeps every weight as a view of one flat buffer saves a .bin that cannot be saved again.

Pickles are refused by name, with what to type; the advice is followed here: once its views are safetensors they come
back as tensors of their own size, and true duplicates are stored once.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import EMBEDDING, HEAD, fine_tune, make_llama, read_weights
from report_program import run, succeeded
from report_runs import same_bits
from safetensors.torch import save_file


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An untied base, and a variant whose weights are views of one buffer in a pickle; its head is its embedding."""
    root = tmp_path_factory.mktemp("b10")
    base = make_llama(root / "base", seed=10, tie=False)
    whole = fine_tune(base, root / "whole", seed=11)
    weights = {**read_weights(whole), HEAD: read_weights(whole)[EMBEDDING]}
    save_file(weights, whole / "model.safetensors", {"format": "pt"})
    flat = torch.cat([weight.reshape(-1) for name, weight in weights.items() if name != HEAD])
    views, start = {}, 0
    for name, weight in weights.items():
        if name != HEAD:
            views[name] = flat[start : start + weight.numel()].view(weight.shape)
            start += weight.numel()
    views[HEAD] = views[EMBEDDING]
    pickled = shutil.copytree(whole, root / "pickled")
    (pickled / "model.safetensors").unlink()
    torch.save(views, pickled / "pytorch_model.bin")
    return {"base": base, "pickled": pickled, "whole": whole}


def test_the_library_refuses_such_views(folders: dict[str, Path], tmp_path: Path) -> None:
    """The report itself: the situation is the one that people met."""
    views = torch.load(folders["pickled"] / "pytorch_model.bin", weights_only=True)
    assert len({view.untyped_storage().data_ptr() for view in views.values()}) == 1
    with pytest.raises(RuntimeError, match="share memory"):
        save_file(views, tmp_path / "model.safetensors")


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
@pytest.mark.parametrize("as_base", [False, True])
def test_a_pickle_is_refused_with_what_to_do(
    folders: dict[str, Path], tmp_path: Path, more: tuple[str, ...], as_base: bool
) -> None:
    base, variant = ("pickled", "whole") if as_base else ("base", "pickled")
    ran = run("decompose", "--base", folders[base], "--variants", folders[variant], "--out", tmp_path / "art", *more)
    assert ran.code == 11
    assert "found only pytorch_model.bin, which this version does not read" in ran.err
    assert "write it with save_pretrained, which writes safetensors" in ran.err
    assert list(tmp_path.iterdir()) == []


def test_the_advice_works_and_no_buffer_is_stored_twice(folders: dict[str, Path], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(folders["pickled"]).save_pretrained(tmp_path / "own")
    original = read_weights(tmp_path / "own")
    command = ["decompose", "--base", folders["base"], "--variants", f"own={tmp_path / 'own'}"]
    succeeded(*command, "--codec", "lossless", "--out", tmp_path / "art")
    (variant,) = json.loads((tmp_path / "art" / "manifest.json").read_bytes())["variants"]
    assert variant["checkpoint_bytes"] == sum(weight.nbytes for weight in original.values())
    assert variant["bytes"] < variant["checkpoint_bytes"]
    succeeded("restore", tmp_path / "art", "--variant", "own", "--exact", "--out", tmp_path / "back")
    restored = read_weights(tmp_path / "back")
    assert restored.keys() == original.keys()
    assert all(same_bits(restored[name], weight) for name, weight in original.items())


def test_a_true_duplicate_is_stored_once(folders: dict[str, Path], tmp_path: Path) -> None:
    command = ["decompose", "--base", folders["base"], "--variants", folders["whole"], "--codec", "lossless"]
    succeeded(*command, "--out", tmp_path / "art")
    (variant,) = json.loads((tmp_path / "art" / "manifest.json").read_bytes())["variants"]
    pair = {name: variant["tensors"][name] for name in (EMBEDDING, HEAD)}
    (holder,) = [name for name, tensor in pair.items() if tensor["blob"] is not None]
    kept, alias = pair.pop(holder), next(iter(pair.values()))
    assert (alias["tree"]["codec"], alias["tree"]["params"]) == ("alias", {"of": holder})
    assert kept["energy"] <= alias["energy"]  # of the two it is the one that lies nearer to its base
    assert alias["original_sha256"] == kept["original_sha256"] == kept["restored_sha256"] == alias["restored_sha256"]
    succeeded("restore", tmp_path / "art", "--variant", "whole", "--exact", "--out", tmp_path / "back")
    restored = read_weights(tmp_path / "back")
    assert same_bits(restored[HEAD], restored[EMBEDDING])
    assert all(same_bits(restored[name], weight) for name, weight in read_weights(folders["whole"]).items())
