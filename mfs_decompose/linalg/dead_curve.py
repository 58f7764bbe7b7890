"""What a dead-zone quantiser would cost and lose, from a sample: bits an element and error for a ladder of steps."""

from __future__ import annotations

import math
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
    """At each of RATIOS: bits an element, and the squared error as part of the energy."""

    bits: tuple[float, ...]
    error: tuple[float, ...]

    def at(self, ratio: float) -> tuple[float, float]:
        """Bits and error at any step: geometric between those of the ladder, and clamped."""
        place = min(max(place_of(math.log2(ratio)), 0.0), len(RATIOS) - 1.0)
        low = min(int(place), len(RATIOS) - 2)
        part = place - low
        return _between(self.bits, low, part), _between(self.error, low, part)


def _between(ladder: tuple[float, ...], low: int, part: float) -> float:
    one, two = max(ladder[low], LEAST), max(ladder[low + 1], LEAST)
    found = float(one * (two / one) ** part)
    return found if found > LEAST else 0.0


def measure_dead_curve(values_RI: torch.Tensor, dead: float) -> DeadCurve | None:
    """The curve of sampled finite values, with a zero widened by `dead` steps; None where all are zero.

    Bits are the entropy of the codes in the sample, which a static model comes within a percent of; codes of size 1,
    and larger ones, are put at the mean of what they stand for, as the codec does.
    """
    import numpy as np

    sizes = np.sort(np.abs(values_RI.reshape(-1).double().numpy()))
    # Sorted, the values of one code are neighbours: sums over them are differences of running sums.
    running = np.concatenate(([0.0], np.cumsum(sizes)))
    squares = np.concatenate(([0.0], np.cumsum(np.square(sizes))))
    square, count = float(squares[-1]), sizes.size
    if square <= 0.0:
        return None
    rms = math.sqrt(square / count)
    bits, errors = [], []
    for ratio in RATIOS:
        step = ratio * rms
        most = math.floor(sizes[-1] / step + (0.5 - dead))
        ends = np.append(sizes.searchsorted((np.arange(1, most + 1) - (0.5 - dead)) * step), count)
        members = np.diff(ends, prepend=0)
        shares = members[members > 0] / count
        signs = 1.0 - members[0] / count
        bits.append(float(signs - (shares * np.log2(shares)).sum()))
        lost = float(squares[ends[0]])
        # Over codes c = 1, and over all larger ones: the variance of |x| - c * step, times their number.
        for codes in (slice(1, 2), slice(2, None)):
            size, counts = np.arange(most + 1)[codes] * step, members[codes]
            total = int(counts.sum())
            if total:
                first, last = ends[codes.start - 1], ends[codes.start - 1] + total
                sums = np.diff(running[ends])[codes.start - 1 :][: counts.size]
                over = float(sums.sum() - (counts * size).sum())
                energy = float(squares[last] - squares[first] - 2 * (sums * size).sum() + (counts * size * size).sum())
                lost += max(energy - over**2 / total, 0.0)
        errors.append(max(lost / square, _LITTLE))
    return DeadCurve(tuple(bits), tuple(errors))
