"""What a dead-zone quantiser would cost and lose, from a sample: bits an element and error for a ladder of steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

RATIOS = tuple(2.0 ** (at / 2) for at in range(-5, 7))
"""Steps of the ladder, over the root mean square of the values: from near lossless to almost nothing coded."""

_LEAST = 1e-9


@dataclass(frozen=True, slots=True)
class DeadCurve:
    """At each of RATIOS: bits an element, and the squared error as part of the energy, both falling or equal."""

    bits: tuple[float, ...]
    error: tuple[float, ...]

    def at(self, ratio: float) -> tuple[float, float]:
        """Bits and error at any step: geometric between those of the ladder, and clamped."""
        place = min(max(2.0 * math.log2(ratio) + 5.0, 0.0), len(RATIOS) - 1.0)
        low = min(int(place), len(RATIOS) - 2)
        part = place - low
        return _between(self.bits, low, part), _between(self.error, low, part)


def _between(ladder: tuple[float, ...], low: int, part: float) -> float:
    one, two = max(ladder[low], _LEAST), max(ladder[low + 1], _LEAST)
    return float(one * (two / one) ** part) if part else ladder[low]


def measure_dead_curve(values: torch.Tensor, dead: float) -> DeadCurve | None:
    """The curve of a sample of finite values, with a zero widened by `dead` steps; None where all are zero.

    Bits are the entropy of the codes in the sample, which a static model comes within a percent of; codes of size 1,
    and larger ones, are put at the mean of what they stand for, as the codec does.
    """
    import numpy as np

    sizes = values.reshape(-1).double().abs().numpy()
    square = float(np.square(sizes).sum())
    if square <= 0.0:
        return None
    rms = math.sqrt(square / sizes.size)
    bits, errors = [], []
    for ratio in RATIOS:
        step = ratio * rms
        codes = np.floor(sizes / step + (0.5 - dead)).astype(np.int64)
        counts = np.bincount(np.minimum(codes, 4095))
        shares = counts[counts > 0] / sizes.size
        signs = 1.0 - counts[0] / sizes.size
        bits.append(float(-(shares * np.log2(shares)).sum()) + signs)
        over = sizes - codes * step
        lost = float(np.square(sizes[codes == 0]).sum())
        for chosen in (codes == 1, codes > 1):
            part = over[chosen]
            lost += float(np.square(part).sum() - part.sum() ** 2 / part.size) if part.size else 0.0
        errors.append(max(lost / square, 1e-12))
    return DeadCurve(tuple(bits), tuple(errors))
