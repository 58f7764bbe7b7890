"""Rounding restored weights to the dtype of the original.

Rounding `W* + delta` to the nearest bf16 snaps changes below half an ulp back to the base and multiplies the
drift by five; rounding up or down with the right probability keeps them in the mean. The generator is
counter-based (key: tensor name, counter: flat index), so the same artifact restores to the same bytes every time.
"""

from __future__ import annotations

from typing import Literal

import torch

from mfs_decompose.linalg.seeds import random_bits16, stream_key

Rounding = Literal["stochastic", "nearest"]


def rounding_key(tensor_name: str) -> int:
    """The key of the rounding stream of one tensor; independent of any seed, so restoring needs none."""
    return stream_key(0, "round", tensor_name)


def round_to(values: torch.Tensor, dtype: torch.dtype, rounding: Rounding, key: int, start: int) -> torch.Tensor:
    """Round fp64 `values` (any shape, flat indices from `start`) to `dtype`.

    Stochastic rounding applies to bf16 and fp16; a dtype with 24 or more significant bits rounds to nearest,
    since its ulp lies far below any delta that was stored. Finite values stay finite: what would overflow becomes
    the largest finite number. A value that `dtype` holds exactly is returned unchanged; NaN becomes the quiet NaN.
    """
    if rounding == "nearest" or dtype not in (torch.bfloat16, torch.float16):
        return _repair(values.to(dtype), values)
    bits = random_bits16(key, start, values.numel()).reshape(values.shape).to(values.device)
    rounded = _round_bf16(values, bits) if dtype == torch.bfloat16 else _round_fp16(values, bits)
    return _repair(rounded, values)


def _round_bf16(values: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    # bf16 is the upper half of fp32: adding 16 random bits below the cut carries with exactly the right probability.
    word = values.to(torch.float32).view(torch.int32)
    return ((word + bits) >> 16).to(torch.int16).view(torch.bfloat16)


def _round_fp16(values: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    nearest = values.to(torch.float16)
    error = values - nearest.to(torch.float64)
    towards = torch.where(error > 0, torch.inf, -torch.inf).to(torch.float16)
    other = torch.nextafter(nearest, towards)
    gap = (other.to(torch.float64) - nearest.to(torch.float64)).abs()
    chance = error.abs() / gap
    draw = (bits.to(torch.float64) + 0.5) / 65536.0
    return torch.where((error != 0) & torch.isfinite(gap) & (draw < chance), other, nearest)


def _repair(rounded: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    if not values.numel():
        return rounded
    low, high = torch.aminmax(values)  # NaN if any value is
    if max(-float(low), float(high)) <= torch.finfo(rounded.dtype).max / 2:
        return rounded
    overflow = torch.isinf(rounded) & torch.isfinite(values)
    if bool(overflow.any()):
        largest = torch.full_like(rounded, torch.finfo(rounded.dtype).max)
        rounded = torch.where(overflow, torch.copysign(largest, rounded), rounded)
    # Random bits carry a NaN into an Inf or a zero, and kernels differ in the payload that they round it to.
    nan = torch.isnan(values)
    return rounded.masked_fill(nan, torch.nan) if bool(nan.any()) else rounded
