"""What a dead-zone quantiser would cost and lose, from a sample: bits an element and error for a ladder of steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_OCTAVE = 4  # steps of the ladder
_FINEST = -10  # of them below a ratio of 1
RATIOS = tuple(2.0 ** (at / _OCTAVE) for at in range(_FINEST, 13))
"""Steps of the ladder, over the root mean square of the values: from near lossless to almost nothing coded."""

_LITTLE = 1e-12
LEAST = 1e-9
"""Stands for no bits, and for no error, where curves are geometric."""


def place_of(log: Any) -> Any:
    """Where a step lies on the ladder, of the logarithm to base 2 of its ratio: a number, or an array of them."""
    return _OCTAVE * log - _FINEST


@dataclass(frozen=True, slots=True)
class DeadCurve:
    """At each of RATIOS: bits an element, the squared error as part of the energy, and what of the strong directions'
    energy coding misses in one sense: zeroing small values may shrink them by more than the error says.
    """

    bits: tuple[float, ...]
    error: tuple[float, ...]
    missed: tuple[float, ...]

    def at(self, ratio: float) -> tuple[float, float, float]:
        """Bits, error and what is missed at any step: geometric between those of the ladder, and clamped."""
        place = min(max(place_of(math.log2(ratio)), 0.0), len(RATIOS) - 1.0)
        low = min(int(place), len(RATIOS) - 2)
        part = place - low
        bits, error, missed = (_between(ladder, low, part) for ladder in (self.bits, self.error, self.missed))
        return bits, error, missed


def _between(ladder: tuple[float, ...], low: int, part: float) -> float:
    one, two = max(ladder[low], LEAST), max(ladder[low + 1], LEAST)
    found = float(one * (two / one) ** part)
    return found if found > LEAST else 0.0


@dataclass(frozen=True)
class Directions:
    """Strong directions of a matrix, of any length: left [K, R] in the sampled rows, right [K, I], and weights [K].

    Their own outer products add up to a part of the matrix, and they are orthogonal.
    """

    left: torch.Tensor
    right: torch.Tensor
    weight: torch.Tensor


def measure_dead_curve(values_RI: torch.Tensor, dead: float, strong: Directions | None = None) -> DeadCurve | None:
    """The curve of sampled rows of finite values, with a zero widened by `dead` steps; None where all are zero.

    Bits are the entropy of the codes in the sample, which a static model comes within a percent of; codes of size 1,
    and larger ones, are put at the mean of what they stand for, as the codec does. Without strong directions, or where
    the sample does not have them, every direction is taken to shrink by the error.
    """
    import numpy as np

    flat = values_RI.reshape(-1).double().numpy()
    sizes = np.abs(flat)
    square = float(np.square(sizes).sum())
    if square <= 0.0:
        return None
    rms = math.sqrt(square / sizes.size)
    kept = None if strong is None else _kept(strong, values_RI)
    bits, errors, missed = [], [], []
    for ratio in RATIOS:
        step = ratio * rms
        codes = np.floor(sizes / step + (0.5 - dead)).astype(np.int64)
        counts = np.bincount(np.minimum(codes, 4095))
        shares = counts[counts > 0] / sizes.size
        signs = 1.0 - counts[0] / sizes.size
        bits.append(float(signs - (shares * np.log2(shares)).sum()))
        over = sizes - codes * step
        lost, stored = float(np.square(sizes[codes == 0]).sum()), codes * step
        for chosen in (codes == 1, codes > 1):
            part = over[chosen]
            if part.size:
                lost += float(np.square(part).sum() - part.sum() ** 2 / part.size)
                stored[chosen] += part.mean()
        error = max(lost / square, _LITTLE)
        errors.append(error)
        missed.append(error**2 if kept is None else kept(np.copysign(stored, flat)))
    return DeadCurve(tuple(bits), tuple(errors), tuple(missed))


def _kept(strong: Directions, values_RI: torch.Tensor) -> Callable[[Any], float] | None:
    """Of stored values, what part of the strong directions' energy they miss along them; None where none is seen."""
    import torch

    left, right = strong.left.double(), strong.right.double()

    def along(matrix_RI: torch.Tensor) -> torch.Tensor:
        return ((left @ matrix_RI) * right).sum(dim=1)

    own = along(values_RI.double())
    seen = own > 0
    weight = torch.where(seen, strong.weight.double(), 0.0)
    total = float(weight.sum())
    if total <= 0.0:
        return None

    def missed(stored: Any) -> float:
        share = along(torch.from_numpy(stored).view(values_RI.shape)) / torch.where(seen, own, 1.0)
        return max(float((weight * (1.0 - share).square()).sum()) / total, _LITTLE)

    return missed
