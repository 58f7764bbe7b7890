"""Families whose variants were made from a common intermediate checkpoint: base, what all learnt, what each did."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from checkpoints import EMBEDDING
from pipeline_runs import BASE, Tensors, toy

UP, DOWN, EMBED, NORM = "up.weight", "down.weight", EMBEDDING, "norm.weight"


def base_tensors(seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return (0.1 * torch.randn(shape, generator=generator)).to(torch.bfloat16)

    return {UP: draw(120, 72), DOWN: draw(72, 120), EMBED: draw(161, 72), NORM: draw(72)}


def learnt(tensors: Tensors, seed: int, size: float, rank: int) -> Tensors:
    """The same after a change of that many directions and a little noise in every matrix."""
    generator = torch.Generator().manual_seed(seed)
    found: Tensors = {}
    for name, weight in tensors.items():
        if weight.dim() != 2:
            found[name] = weight
            continue
        rows, columns = weight.shape
        left = torch.randn(rows, rank, generator=generator) * torch.linspace(1.0, 0.3, rank)
        change = left @ torch.randn(rank, columns, generator=generator)
        change += 0.05 * torch.randn(rows, columns, generator=generator)
        found[name] = (weight.float() + size * change).to(weight.dtype)
    return found


def common_family(
    root: Path, ids: str = "abcd", changed: Mapping[str, Mapping[str, torch.Tensor]] | None = None
) -> tuple[Path, dict[str, Path]]:
    """Base and variants of one intermediate checkpoint; `changed` replaces tensors of a variant."""
    base = base_tensors()
    between = learnt(base, 1, 0.02, 12)
    folders = {}
    for at, id in enumerate(ids):
        own = {**learnt(between, 10 + at, 0.006, 3), **(changed or {}).get(id, {})}
        folders[id] = toy(root / id, own)
    return toy(root / BASE, base), folders
