"""Two factors of integers, so that their product is exact in fp64 whatever the order of its sums.

Direction k contributes `2^e_k * u_k * v_k`, with integers u and v. All terms are multiples of the least 2^e_k; when the
sum of the largest of them is below 2^53 of those, every partial sum is an integer below 2^53 and no order or fused
multiply-add can round. The codes are as coarse as the error that may be made, not as a number of bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

_EXACT = 1 << 53
_EXPONENTS = range(-500, 501)
LARGEST_CODE = (1 << 24) - 1
MAX_RANK = 1 << 9
"""Directions; codes of one value cost no bytes, so this bounds what a small file can make a reader hold."""


@dataclass(frozen=True)
class FixedFactors:
    """`sum_k 2^exponents[k] * left[k]^T right[k]`: int32 codes [R, O] and [R, I], R exponents."""

    left: torch.Tensor
    right: torch.Tensor
    exponents: tuple[int, ...]

    @property
    def rank(self) -> int:
        return len(self.exponents)

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Rows start..stop of the product, fp64 [stop - start, I], exact."""
        scale = torch.tensor([math.ldexp(1.0, e) for e in self.exponents], dtype=torch.float64)
        left = self.left[:, start:stop].to(torch.float64) * scale.unsqueeze(1)
        return left.mT @ self.right.to(torch.float64)


def is_exact(factors: FixedFactors) -> bool:
    """Whether every partial sum of the product is exact in fp64, and codes and exponents are in range."""
    if factors.rank == 0:
        return True
    if factors.rank > MAX_RANK or any(e not in _EXPONENTS for e in factors.exponents):
        return False
    peaks = [_peaks(side) for side in (factors.left, factors.right)]
    if max(max(side) for side in peaks) > LARGEST_CODE:
        return False
    least = min(factors.exponents)
    total = sum(u * v << (e - least) for u, v, e in zip(peaks[0], peaks[1], factors.exponents, strict=True))
    return total < _EXACT


def quantise_fixed(left_OR: torch.Tensor, right_IR: torch.Tensor, error: float) -> FixedFactors | None:
    """Round factors with orthogonal directions so that the product is off by about `error` (rms); None if it cannot be.

    Every direction of either side is given the same share of the error: codes are rounded in steps inverse to the size
    of the other side's direction, so strong directions have more bits (reverse water-filling).
    """
    left, right = left_OR.to(torch.float64), right_IR.to(torch.float64)
    sizes = [side.square().mean(dim=0).sqrt() for side in (left, right)]
    kept = (sizes[0] > 0) & (sizes[1] > 0)
    left, right, rms_left, rms_right = left[:, kept], right[:, kept], sizes[0][kept], sizes[1][kept]
    if not bool(torch.isfinite(left).all() and torch.isfinite(right).all()) or not error > 0:
        return None
    share = error * math.sqrt(12 / max(2 * left.shape[1], 1))
    steps = share / rms_right, share / rms_left
    exponents = torch.round(torch.log2(steps[0] * steps[1]))
    stretch = (torch.exp2(exponents) / (steps[0] * steps[1])).sqrt()
    codes = [(side / (step * stretch)).round().mT for side, step in zip((left, right), steps, strict=True)]
    if not all(bool((side.abs() <= LARGEST_CODE).all()) for side in codes):
        return None
    whole = [side.to(torch.int32).contiguous() for side in codes]
    factors = FixedFactors(whole[0], whole[1], tuple(int(e) for e in exponents.tolist()))
    return factors if is_exact(factors) else None


def _peaks(codes_RN: torch.Tensor) -> list[int]:
    if not codes_RN.shape[1]:
        return [0] * codes_RN.shape[0]
    return [int(peak) for peak in codes_RN.to(torch.int64).abs().amax(dim=1).tolist()]
