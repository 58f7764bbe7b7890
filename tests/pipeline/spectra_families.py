"""A small family whose variants are each of another class, with what was planted at hand."""

from __future__ import annotations

from pathlib import Path

import torch
from pipeline_runs import Tensors, toy

Q, K, UP, EMBED, NORM = (
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.1.self_attn.q_proj.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.embed_tokens.weight",
    "model.norm.weight",
)
EXPERTS, STEP = "model.layers.1.mlp.experts.gate_up_proj", "model.step"
RANK = 3
SHAPES: dict[str, tuple[int, ...]] = {
    Q: (96, 80),
    K: (96, 80),
    UP: (70, 130),
    EMBED: (211, 80),
    NORM: (80,),
    EXPERTS: (3, 64, 72),
}


def drawn(name: str, seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * seed + len(name)), dtype=torch.float64)


def base_tensors() -> Tensors:
    """bf16 weights like a model's, and a counter."""
    made: Tensors = {name: (0.02 * drawn(name, 1, *shape)).to(torch.bfloat16) for name, shape in SHAPES.items()}
    return {**made, STEP: torch.tensor([7])}


def merged(base: Tensors, rms: float = 1e-3, rank: int = RANK) -> Tensors:
    """Every matrix moved by so many directions and rounded once; the norm stays."""
    made = dict(base)
    for name, shape in SHAPES.items():
        if len(shape) > 1:
            left, right = drawn(name, 2, *shape[:-1], rank), drawn(name, 3, *shape[:-2], rank, shape[-1])
            made[name] = (base[name].double() + rms / rank**0.5 * (left @ right)).to(torch.bfloat16)
    return made


def dense(base: Tensors, decay: float, rms: float = 2e-3) -> Tensors:
    """Every matrix moved along all directions; the larger `decay`, the more by the first of them."""
    made = dict(base)
    for name, shape in SHAPES.items():
        if len(shape) == 2:
            short = min(shape)
            left = torch.linalg.qr(drawn(name, 4, shape[0], short)).Q
            right = torch.linalg.qr(drawn(name, 5, shape[1], short)).Q
            sigma = torch.arange(1, short + 1, dtype=torch.float64) ** -decay
            change = (left * sigma) @ right.mT
            made[name] = (base[name].double() + rms * change / change.square().mean().sqrt()).to(torch.bfloat16)
    made[NORM] = (base[NORM].double() + rms * drawn(NORM, 6, *SHAPES[NORM])).to(torch.bfloat16)
    return made


def sparse(base: Tensors, share: float = 0.1) -> Tensors:
    """So many weights of each matrix pushed by a few units, the others left alone."""
    made = dict(base)
    for name, shape in SHAPES.items():
        if len(shape) > 1:
            chosen = torch.rand(shape, generator=torch.Generator().manual_seed(len(name))) < share
            pushed = (base[name].double() + 1e-3 * drawn(name, 7, *shape)).to(torch.bfloat16)
            made[name] = torch.where(chosen, pushed, base[name])
    return made


def make_classes(root: Path) -> tuple[Path, dict[str, Path]]:
    """Folders of the base and of one variant a class."""
    base = base_tensors()
    variants = {
        "same": dict(base),
        "lora": merged(base),
        "sparse": sparse(base),
        "peaked": dense(base, decay=0.9),
        "flat": dense(base, decay=0.0),
    }
    return toy(root / "base", base), {id: toy(root / id, tensors) for id, tensors in variants.items()}
