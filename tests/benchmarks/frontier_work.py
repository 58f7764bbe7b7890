"""A base and a variant of odd shapes, whose delta is of few directions and some noise."""

from __future__ import annotations

import torch

from benchmarks.frontier.work import Work

SHAPES = {
    "model.embed_tokens.weight": (257, 72),
    "model.layers.0.self_attn.q_proj.weight": (72, 72),
    "model.layers.0.self_attn.k_proj.weight": (24, 72),
    "model.layers.0.mlp.up_proj.weight": (200, 72),
    "model.layers.0.mlp.down_proj.weight": (72, 200),
}


def make_work(seed: int = 3, *, grams: bool = False) -> Work:
    """Five matrices and a norm, in bf16."""
    generator = torch.Generator().manual_seed(seed)
    base: dict[str, torch.Tensor] = {"model.norm.weight": torch.ones(72, dtype=torch.bfloat16)}
    variant = {"model.norm.weight": torch.linspace(0.9, 1.1, 72).to(torch.bfloat16)}
    inputs: dict[str, torch.Tensor] = {}
    for name, (rows, columns) in SHAPES.items():
        own = 0.1 * torch.randn(rows, columns, generator=generator)
        strength = 0.02 * 0.5 ** torch.arange(12)
        low = (torch.randn(rows, 12, generator=generator) * strength) @ torch.randn(12, columns, generator=generator)
        base[name] = own.to(torch.bfloat16)
        variant[name] = (base[name].float() + low + 1e-3 * torch.randn(rows, columns, generator=generator)).bfloat16()
        x = torch.randn(300, columns, generator=generator) * torch.linspace(0.2, 3.0, columns)
        inputs[name] = x.mT @ x
    work = Work(base, variant)
    if grams:
        work.grams.update({name: inputs[name] for name in work.linears})
    return work


def error(work: Work, name: str, delta: torch.Tensor) -> float:
    """Relative Frobenius error of a stored delta."""
    own = work.delta(name).double()
    return float((delta.double() - own).norm() / own.norm())
