"""Loading for measurement, with the tensors checked against the architecture before a weight is read."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, VOCABULARY, build, save
from checkpoints import random_checkpoint, read_weights

from mfs_decompose.errors import ArtifactInvalid, SourceIncompatible
from mfs_decompose.fidelity.model import load_model, predict_windows
from mfs_decompose.fidelity.settings import EvalSettings
from mfs_decompose.fidelity.windows import Window

SETTINGS = EvalSettings()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("saved")

    def folder(name: str) -> Path:
        if not (root / name).exists():
            save(build(CONFIGS[name](), seed=8), root / name, name)
        return root / name

    return folder


def _llava() -> Any:
    """A wrapper that AutoModelForCausalLM does not know."""
    from transformers import CLIPVisionConfig, LlavaConfig

    vision = CLIPVisionConfig(
        hidden_size=48, intermediate_size=68, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=7
    )
    return LlavaConfig(text_config=ARCHITECTURES["llama"](), vision_config=vision)


CONFIGS = {**ARCHITECTURES, "llava": _llava}


def changed(source: Path, to: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    shutil.copytree(source, to)
    weights = read_weights(source)
    change(weights)
    random_checkpoint(to, weights, {"format": "pt"})
    return to


@pytest.fixture
def no_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    def refuse(*_: object, **__: object) -> None:
        pytest.fail("the weights were loaded")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", refuse)


@pytest.mark.parametrize("name", ["mixtral", "gemma3_vision", "gpt_neox", "llava"])
def test_what_transformers_renames_and_fuses_is_whole(name: str, saved: Callable[[str], Path]) -> None:
    model = load_model(saved(name), "original", SETTINGS)
    assert model.vocabulary == VOCABULARY
    (logits,) = predict_windows(model, [Window(0, tuple(range(20, 33)), tuple(range(21, 34)), 0)])
    assert logits.shape == (13, VOCABULARY)
    assert logits.isfinite().all()


@pytest.mark.usefixtures("no_loading")
def test_a_hole_among_the_experts_is_named_by_its_parameter(saved: Callable[[str], Path], tmp_path: Path) -> None:
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    folder = changed(saved("mixtral"), tmp_path / "one", lambda weights: weights.pop(name))
    with pytest.raises(ArtifactInvalid, match=r"not to be joined model\.layers\.1\.mlp\.experts\.gate_up_proj \(Sizes"):
        load_model(folder, "restored", SETTINGS)


@pytest.mark.usefixtures("no_loading")
def test_leftover_tensors_are_named_as_the_checkpoint_names_them(saved: Callable[[str], Path], tmp_path: Path) -> None:
    """transformers would name model.layers.0.mlp.experts.1.w4.weight, which stands in no file."""
    name = "model.layers.0.block_sparse_moe.experts.1.w4.weight"
    folder = changed(saved("mixtral"), tmp_path / "one", lambda weights: weights.update({name: torch.ones(2, 3)}))
    with pytest.raises(SourceIncompatible, match=f"found unexpected {name}$"):
        load_model(folder, "base", SETTINGS)


@pytest.mark.usefixtures("no_loading")
def test_a_tensor_that_transformers_drops_without_a_word_is_refused(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    twice = {"norm.weight": torch.ones(40, dtype=torch.bfloat16)}
    folder = changed(saved("llama"), tmp_path / "one", lambda weights: weights.update(twice))
    with pytest.raises(SourceIncompatible, match=r"found dropped for another of the same place norm\.weight"):
        load_model(folder, "original", SETTINGS)
