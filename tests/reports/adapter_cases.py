"""A toy model and adapters on it, as small as a report allows: what they merge to, or how they are refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import merged_weights, write_adapter
from checkpoints import random_checkpoint

from mfs_decompose.errors import SourceIncompatible

Tensors = dict[str, torch.Tensor]
Q = "model.layers.0.self_attn.q_proj"


def draw(name: str, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(map(ord, name))))


def toy_base(*, tokens: int = 512, tied: bool = False, biases: bool = False) -> Tensors:
    """A layer of attention and one of a gated MLP, hidden size 8, all projections of other sizes."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (tokens, 8),
        f"{Q}.weight": (12, 8),
        "model.layers.0.self_attn.v_proj.weight": (6, 8),
        "model.layers.0.mlp.gate_proj.weight": (14, 8),
        "model.layers.0.mlp.up_proj.weight": (14, 8),
    }
    if not tied:
        shapes["lm_head.weight"] = (tokens, 8)
    if biases:
        shapes |= {f"{Q}.bias": (12,), "model.layers.0.self_attn.v_proj.bias": (6,)}
    return {name: draw(name, *shape) for name, shape in shapes.items()}


def factors(module: str, outs: int, ins: int, rank: int) -> Tensors:
    stem = f"base_model.model.{module}"
    return {f"{stem}.lora_A.weight": draw(stem, rank, ins), f"{stem}.lora_B.weight": draw(stem + "b", outs, rank)}


def delta(tensors: Tensors, module: str, scale: float) -> torch.Tensor:
    a, b = (tensors[f"base_model.model.{module}.lora_{side}.weight"].double() for side in "AB")
    return scale * b @ a


def write(root: Path, base: Tensors, tensors: Tensors, config: Mapping[str, Any], **base_config: Any) -> None:
    random_checkpoint(root / "base", base)
    (root / "base" / "config.json").write_text(json.dumps({"model_type": "llama", **base_config}))
    write_adapter(root / "adapter", tensors, {"peft_type": "LORA", "r": 4, "lora_alpha": 10, **config})


def merge(
    root: Path, base: Tensors, tensors: Tensors, config: Mapping[str, Any] | None = None, **base_config: Any
) -> tuple[Tensors, Any]:
    """Merged weights in fp64, and the Merge."""
    write(root, base, tensors, config or {}, **base_config)
    return merged_weights(root / "adapter", root / "base")


def refuse(
    root: Path, base: Tensors, tensors: Tensors, config: Mapping[str, Any] | None = None, **base_config: Any
) -> SourceIncompatible:
    """The refusal, which is of exit code 12, one line, and says what to do."""
    write(root, base, tensors, config or {}, **base_config)
    with pytest.raises(SourceIncompatible) as caught:
        merged_weights(root / "adapter", root / "base")
    assert caught.value.exit_code == 12
    assert caught.value.hint
    assert "\n" not in caught.value.message
    return caught.value
