"""Merged LoRAs made for tests."""

from __future__ import annotations

import torch


def merged_lora(
    shape: tuple[int, int],
    rank: int,
    rms: float,
    seed: int,
    dtype: torch.dtype = torch.bfloat16,
    rounded_first: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A base N(0, 0.02) [O, I], the base with a LoRA of this rms added, and the true delta in fp32.

    The LoRA's directions fall to a third of the first. With `rounded_first` it is rounded to `dtype` before the sum is,
    as a merge into a model of that dtype does it.
    """
    draw = torch.Generator().manual_seed(seed)
    base = (torch.randn(shape, generator=draw) * 0.02).to(dtype)
    up = torch.randn(shape[0], rank, generator=draw) * torch.linspace(1, 1 / 3, rank)
    delta = up @ torch.randn(rank, shape[1], generator=draw)
    delta *= rms / float(delta.square().mean().sqrt())
    if rounded_first:
        return base, base + delta.to(dtype), delta
    return base, (base.to(torch.float32) + delta).to(dtype), delta
