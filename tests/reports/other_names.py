"""Checkpoints under other names: the same weights in a wrapper, or in a tree that was renamed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from checkpoints import random_checkpoint, read_weights

Tensors = dict[str, torch.Tensor]


def called(folder: Path, new: Path, name_of: Callable[[str], str], config: Mapping[str, Any] | None = None) -> Path:
    """A copy of a checkpoint with other names, in one file; `config` is laid over its config.json."""
    shutil.copytree(folder, new, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    random_checkpoint(new, {name_of(name): weight for name, weight in read_weights(folder).items()}, {"format": "pt"})
    path = new / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **(config or {})}, indent=2) + "\n")
    return new


def wrapped(name: str) -> str:
    return f"language_model.{name}"


def drawn(shapes: Mapping[str, tuple[int, ...]], seed: int) -> Tensors:
    """Normal matrices in bf16, vectors about one."""
    generator = torch.Generator().manual_seed(seed)
    noise = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {name: (value if value.dim() > 1 else 1 + 0.1 * value).bfloat16() for name, value in noise.items()}


def tuned(weights: Mapping[str, torch.Tensor], seed: int, scale: float = 0.03) -> Tensors:
    """A fine-tune: every tensor moved a little, matrices by rank 2."""
    generator = torch.Generator().manual_seed(seed)
    found: Tensors = {}
    for name, weight in weights.items():
        if weight.dim() != 2:
            change = torch.randn(weight.shape, generator=generator)
        else:
            rows, columns = weight.shape
            change = torch.randn(rows, 2, generator=generator) @ torch.randn(2, columns, generator=generator)
        found[name] = (weight.float() + scale * change).to(weight.dtype)
    return found
