"""Factors of few significant bits, on one fixed-point grid, so that their products sum exactly in fp64.

A product computed in fp32 is not portable: another kernel set rounds it differently. When every value of both
factors is an integer multiple of a power of two, with B bits each, a product of rank R needs `2 B + log2 R` bits. At
no more than 53 every partial sum is exact in fp64, and every order of summation gives the same bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from mfs_decompose.linalg.shapes import GROUP

FactorFormat = Literal["int4", "int8", "bf16"]

_LEVELS = {"int4": 7, "int8": 127}
_SIGNIFICANT = {"int4": 3, "int8": 7}
_SCALE_BITS = 8  # bf16


@dataclass(frozen=True)
class Quantised:
    """R directions of length N: `codes` int8 [R, N] with bf16 `scales` [R, ceil(N / 64)], or bf16 `codes` alone."""

    codes: torch.Tensor
    scales: torch.Tensor | None

    def head(self, rank: int) -> Quantised:
        """The first `rank` directions."""
        return Quantised(self.codes[:rank], None if self.scales is None else self.scales[:rank])


def grid_bits(rank: int) -> int:
    """Bits a factor value may span so that a product of `rank` terms sums exactly in fp64."""
    return (53 - math.ceil(math.log2(max(rank, 1)))) // 2


def quantise(directions_RN: torch.Tensor, fmt: FactorFormat) -> Quantised:
    """Quantise fp32 directions [R, N], symmetric, one bf16 scale for 64 values.

    Scales (or bf16 values) far below the largest are raised (flushed) to the grid, see the module's docstring.
    """
    bits = grid_bits(directions_RN.shape[0])
    if fmt == "bf16":
        return Quantised(_flush_to_grid(directions_RN, bits), None)
    levels = _LEVELS[fmt]
    rank, length = directions_RN.shape
    groups = -(-length // GROUP)
    padded = torch.nn.functional.pad(directions_RN, (0, groups * GROUP - length)).view(rank, groups, GROUP)
    scales = _scale_grid(padded.abs().amax(dim=2) / levels, bits - _SIGNIFICANT[fmt] - _SCALE_BITS)
    step = scales.to(torch.float32).unsqueeze(2)
    codes = torch.where(step > 0, padded / step, 0.0).round_().clamp_(-levels, levels)
    return Quantised(codes.view(rank, groups * GROUP)[:, :length].to(torch.int8), scales)


def _scale_grid(scales: torch.Tensor, window: int) -> torch.Tensor:
    """Round scales up to bf16 and raise those below `largest * 2^-window` to that power of two; zero stays zero."""
    # Up, not to nearest: the largest value of a group must not be clipped.
    word = scales.to(torch.float32).view(torch.int32)
    up = ((word + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16).to(torch.float32)
    largest = float(up.max()) if up.numel() else 0.0
    if largest == 0.0:
        return up.to(torch.bfloat16)
    floor = math.ldexp(1.0, math.frexp(largest)[1] - 1 - window)
    return torch.where(up > 0, up.clamp(min=floor), up).to(torch.bfloat16)


def _flush_to_grid(values: torch.Tensor, bits: int) -> torch.Tensor:
    rounded = values.to(torch.bfloat16).to(torch.float64)
    largest = float(rounded.abs().max()) if rounded.numel() else 0.0
    if largest == 0.0:
        return rounded.to(torch.bfloat16)
    unit = math.ldexp(1.0, math.frexp(largest)[1] - bits)
    return ((rounded / unit).round() * unit).to(torch.bfloat16)


def dequantise(quantised: Quantised, start: int = 0, stop: int | None = None) -> torch.Tensor:
    """The exact fp64 values [R, stop - start] of the columns `start .. stop`."""
    codes, scales = quantised.codes, quantised.scales
    stop = codes.shape[1] if stop is None else stop
    values = codes[:, start:stop].to(torch.float64)
    if scales is None:
        return values
    first = start // GROUP
    wide = scales[:, first : -(-stop // GROUP)].to(torch.float64).repeat_interleave(GROUP, dim=1)
    return values * wide[:, start - first * GROUP :][:, : stop - start]
