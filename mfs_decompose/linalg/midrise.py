"""Directions as odd integers times a byte a group of 64: the quantiser of banded factors.

Two choices follow from what drift does, not from the least squared error. Clipping and shrinking change the strong
directions of a delta in one sense everywhere, and cost far more than independent noise of the same energy (measured:
at 3 bits and rank 64, KL 1.6e-3 with scales of least error and 3.8e-4 with these, at 2 % more error). So the search
for a scale weighs errors by the square of the value, and gains are set so that `<q, x> = <x, x>`: no shrinkage.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mfs_decompose.linalg.shapes import GROUP

_FULL = 255  # the largest scale
_CLIPS = tuple(0.35 + 0.05 * turn for turn in range(15))  # of the scale at which the largest value is a level


@dataclass(frozen=True)
class Levels:
    """Directions [R, N] as `gains[r] * scales[r, n // 64] * (2 * codes[r, n] + 1 - 2^bits)`.

    codes uint8 [R, N], scales uint8 [R, ceil(N / 64)], gains fp64 [R].
    """

    codes: torch.Tensor
    scales: torch.Tensor
    gains: torch.Tensor
    bits: int


def quantise_levels(directions_RN: torch.Tensor, bits: int) -> Levels:
    """Quantise finite fp32 directions to `bits` in 2..8, each on its own."""
    rank, length = directions_RN.shape
    groups = -(-length // GROUP)
    values = torch.nn.functional.pad(directions_RN, (0, groups * GROUP - length)).view(rank, groups, GROUP)
    peaks = values.abs().amax(dim=2)
    largest = peaks.amax(dim=1, keepdim=True) if groups else peaks.new_zeros(rank, 1)
    unit = torch.where(largest > 0, largest * _CLIPS[-1] / ((1 << bits) - 1) / _FULL, 1.0)
    relative = values / unit.unsqueeze(2)
    weight = values / torch.where(largest > 0, largest, 1.0).unsqueeze(2)
    best = torch.zeros(rank, groups, dtype=torch.uint8, device=values.device)
    least = (weight.square() * relative.square()).sum(dim=2)  # of scale 0
    for clip in _CLIPS:
        scales = (peaks / unit * (clip / ((1 << bits) - 1))).round().clamp(1, _FULL)
        error = (weight * (relative - _level(relative, scales, bits))).square().sum(dim=2)
        better = error < least
        least, best = torch.where(better, error, least), torch.where(better, scales.to(torch.uint8), best)
    codes = _codes(relative, best.to(torch.float32), bits).view(rank, groups * GROUP)[:, :length]
    whole = Levels(codes.to(torch.uint8).contiguous(), best, unit[:, 0].to(torch.float64), bits)
    return Levels(whole.codes, whole.scales, whole.gains * _unshrunk(directions_RN, whole), bits)


def integers(codes_RN: torch.Tensor, scales: torch.Tensor, bits: int, start: int = 0) -> torch.Tensor:
    """`scales * (2 * codes + 1 - 2^bits)` in fp64 for codes of the columns from `start`, exact."""
    odd = codes_RN.to(torch.float64).mul_(2.0).sub_(float((1 << bits) - 1))
    first, stop = start // GROUP, start + codes_RN.shape[1]
    wide = scales[:, first : -(-stop // GROUP)].to(torch.float64).repeat_interleave(GROUP, dim=1)
    return odd.mul_(wide[:, start - first * GROUP :][:, : codes_RN.shape[1]])


def dequantise_levels(levels: Levels) -> torch.Tensor:
    """The directions [R, N] in fp64."""
    return integers(levels.codes, levels.scales, levels.bits) * levels.gains.unsqueeze(1)


def _codes(relative: torch.Tensor, scales: torch.Tensor, bits: int) -> torch.Tensor:
    steps = scales.unsqueeze(2) * 2
    nearest = torch.where(steps > 0, relative / steps, 0.0).floor() + (1 << (bits - 1))
    return nearest.clamp(0, (1 << bits) - 1)


def _level(relative: torch.Tensor, scales: torch.Tensor, bits: int) -> torch.Tensor:
    return (_codes(relative, scales, bits) * 2 - ((1 << bits) - 1)) * scales.unsqueeze(2)


def _unshrunk(directions_RN: torch.Tensor, levels: Levels) -> torch.Tensor:
    """For each direction the factor that brings `<q, x>` to `<x, x>`; 1 where there is nothing to bring there."""
    wide = directions_RN.to(torch.float64)
    along = (dequantise_levels(levels) * wide).sum(dim=1)
    return torch.where(along > 0, wide.square().sum(dim=1) / along, 1.0)
