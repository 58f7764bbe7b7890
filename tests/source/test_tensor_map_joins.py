"""Joins that the tested architectures do not use: cut projections, rows in another order, operations that break."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, build, save
from checkpoints import random_checkpoint, read_weights

from mfs_decompose.errors import SourceIncompatible
from mfs_decompose.source.checkpoint import open_checkpoint
from mfs_decompose.source.tensor_map import TensorMap, assemble, load_tensor_map

QKV = "model.layers.{}.self_attn.qkv_proj.weight"
Q, K, V = (f"model.layers.{{}}.self_attn.{letter}_proj.weight" for letter in "qkv")


@pytest.fixture(scope="module")
def square(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with as many key-value heads as heads: its projections are equally high."""
    config = ARCHITECTURES["llama"]()
    config.num_key_value_heads = 4
    return save(build(config, seed=9), tmp_path_factory.mktemp("joins") / "square", "square")


def fused_folder(source: Path, folder: Path) -> Path:
    """The same checkpoint with the projections of each layer in one tensor."""
    weights = read_weights(source)
    for layer in range(2):
        weights[QKV.format(layer)] = torch.cat([weights.pop(name.format(layer)) for name in (Q, K, V)])
    random_checkpoint(folder, weights, {"format": "pt"})
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    return folder


def mapped_with(monkeypatch: pytest.MonkeyPatch, folder: Path, operations: list[Any]) -> tuple[TensorMap, Any]:
    """The map, and a real load, under one more entry in transformers' own table."""
    from transformers import AutoModelForCausalLM, conversion_mapping
    from transformers.core_model_loading import WeightConverter

    real: Any = conversion_mapping.get_checkpoint_conversion_mapping

    def table(kind: str) -> Any:
        if kind != "llama":
            return real(kind)
        targets = [f"self_attn.{letter}_proj.weight" for letter in "qkv"]
        return [WeightConverter(r"self_attn.qkv_proj.weight", targets, operations=list(operations))]

    monkeypatch.setattr(conversion_mapping, "get_checkpoint_conversion_mapping", table)
    loader: Any = AutoModelForCausalLM
    found = load_tensor_map(open_checkpoint(folder, "one"))
    return found, None if found.failed else loader.from_pretrained(folder, dtype=torch.bfloat16)


def test_a_cut_projection_is_rows_of_a_checkpoint_tensor(
    square: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.core_model_loading import Chunk

    folder = fused_folder(square, tmp_path / "fused")
    found, model = mapped_with(monkeypatch, folder, [Chunk(dim=0)])
    assert (found.unused, found.unfilled, found.shadowed) == ((), (), {})
    weights = read_weights(folder)
    for name, value in model.state_dict().items():
        assert torch.equal(assemble(found.parameters[name], weights.__getitem__), value)
    (piece,) = found.parameters[K.format(1)].pieces
    assert (piece.tensor, piece.origin, piece.place) == (QKV.format(1), ((48, 96), (0, 40)), ((0, 48), (0, 40)))
    assert [name for name, _ in found.places[QKV.format(1)]] == [Q.format(1), K.format(1), V.format(1)]
    with pytest.raises(SourceIncompatible, match=r"parts of model\.layers\.1\.self_attn\.qkv_proj\.weight"):
        found.parameters[K.format(1)].parts()


def test_rows_in_another_order_are_computed_and_say_from_what(
    square: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.core_model_loading import Chunk, PermuteForRope

    folder = fused_folder(square, tmp_path / "fused")
    permuted = [Chunk(dim=0), PermuteForRope(permute_layer_names=["q_proj", "k_proj"])]
    found, model = mapped_with(monkeypatch, folder, permuted)
    weights = read_weights(folder)
    key = found.parameters[K.format(0)]
    assert (key.pieces, key.computed_from, key.tensors) == ((), (QKV.format(0),), (QKV.format(0),))
    assert not torch.equal(model.state_dict()[K.format(0)], weights[QKV.format(0)][48:96])
    with pytest.raises(SourceIncompatible, match=r"found it computed from model\.layers\.0\.self_attn\.qkv"):
        assemble(key, weights.__getitem__)
    value = found.parameters[V.format(0)]
    assert torch.equal(assemble(value, weights.__getitem__), model.state_dict()[V.format(0)])
    assert (found.unused, found.unfilled, found.shadowed) == ((), (), {})


def test_an_operation_that_breaks_is_named_with_its_tensors(
    square: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.core_model_loading import Transpose

    folder = fused_folder(square, tmp_path / "fused")
    found, _ = mapped_with(monkeypatch, folder, [Transpose(0, 5)])
    assert [(one.parameter, one.tensors) for one in found.failed] == [
        (Q.format(layer), (QKV.format(layer),)) for layer in range(2)
    ]
    assert "Dimension out of range" in found.failed[0].reason
    assert "\n" not in found.failed[0].reason
    assert {K.format(0), V.format(1)} <= set(found.unfilled)
