"""How much of a delta must be rounding noise, predicted from the weights' own grid.

A fine-tuned weight is `round(w + l)`, where `w` lies on the grid and `l` is what training wanted. Where `l` is much
larger than the unit in the last place u, the stored difference is l plus independent noise of u^2 / 12. Where it is
not, most weights snap back to the base, and the noise is neither u^2 / 12 nor independent of l. With l ~ N(0, s^2) the
difference d = u round(l / u) is a part proportional to l and a rest without correlation to it (Bussgang 1952):

    d = a l + n,    a = sum_k u p((k + 1/2) u),    E n^2 = E d^2 - a^2 s^2

with p the density of l. The rest is what fills the spectrum beyond the directions of l. s is found from the share of
weights that did not change, P(|l| < u / 2), summed over the units that occur. Measured on real merges of rank 16, the
energy outside their 16 directions is 0.8 to 1.0 times this prediction, where sum u^2 / 12 is up to four times too much.

A delta that was itself rounded before it was added (an adapter merged in the checkpoint's own precision) adds the
noise of that second rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_STEPS = 60  # of a bisection
_DENSE = 3.0  # s / u from which on E n^2 = u^2 / 12, to 1e-12


@dataclass(frozen=True)
class Grid:
    """A float format: stored bits of the mantissa, exponent of the least normal number."""

    mantissa: int
    least: int


GRIDS = {"BF16": Grid(7, -126), "F16": Grid(10, -14), "F32": Grid(23, -126), "F64": Grid(52, -126)}
"""By the names of safetensors; exponents are read off fp32, so those of F64 end where fp32's do."""


def count_units(values: torch.Tensor) -> torch.Tensor:
    """How many finite values there are of each fp32 exponent: int64 [256] by biased exponent, zeros at 0."""
    import torch

    bits = values.detach().reshape(-1).to(torch.float32).view(torch.int32)
    counts = torch.bincount((bits >> 23) & 0xFF, minlength=256)
    counts[255] = 0  # NaN and infinities
    return counts


def predict_noise(unit_counts: torch.Tensor, dtype: str, unchanged: int, energy: float, *, on_grid: bool) -> float:
    """The squared Frobenius norm of the rounding noise in a delta.

    Args:
        unit_counts: of the variant's weights, from `count_units`.
        dtype: the format they were rounded to.
        unchanged: how many of them equal the base's.
        energy: the delta's own squared norm.
        on_grid: whether the base's weights are numbers of that format; if not, u^2 / 12 holds for all.
    """
    grid = GRIDS[dtype]
    units = [
        (int(count), 2.0 ** (max(exponent - 127, grid.least) - grid.mantissa))
        for exponent, count in enumerate(unit_counts.tolist())
        if count
    ]
    total = sum(count for count, _ in units)
    # For x spread evenly in the logarithm, the mean of ulp(x)^2 is 2 ln 2 / 3 of 4^-mantissa times the mean of x^2.
    second = energy * 4.0**-grid.mantissa * 2 * math.log(2) / 3 / 12
    dense = math.fsum(count * unit * unit for count, unit in units) / 12
    if not on_grid or unchanged <= 0 or unchanged >= total:
        return second + (dense if unchanged < total else 0.0)
    spread = _find_spread(units, unchanged)
    moments = [(count, unit, *_moments(spread / unit)) for count, unit in units]
    square = math.fsum(count * unit * unit * second_moment for count, unit, second_moment, _ in moments)
    slope = math.fsum(count * slope for count, _, _, slope in moments) / total
    return second + max(0.0, square - slope * slope * spread * spread * total)


def _find_spread(units: list[tuple[int, float]], unchanged: int) -> float:
    """s at which that many weights are expected not to change."""
    low, high = math.log(min(unit for _, unit in units)) - 8, math.log(max(unit for _, unit in units)) + 40
    for _ in range(_STEPS):
        middle = (low + high) / 2
        spread = math.exp(middle)
        expected = math.fsum(count * math.erf(unit / spread / math.sqrt(8)) for count, unit in units)
        low, high = (middle, high) if expected > unchanged else (low, middle)
    return math.exp((low + high) / 2)


def _moments(ratio: float) -> tuple[float, float]:
    """E d^2 / u^2 and the slope a of a weight whose l has the spread s = ratio * u."""
    if ratio > _DENSE:
        return ratio * ratio + 1 / 12, 1.0
    square = slope = 0.0
    for k in range(1, 2 + math.ceil(8 * ratio)):
        low, high = (k - 0.5) / ratio, (k + 0.5) / ratio
        square += k * k * (math.erfc(low / math.sqrt(2)) - math.erfc(high / math.sqrt(2)))
        slope += 2 * math.exp(-low * low / 2) / math.sqrt(2 * math.pi) / ratio
    return square, slope
