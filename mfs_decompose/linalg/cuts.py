"""How to code differences given the exponent of the base, chosen on a sample."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mfs_decompose.linalg.classes import CLASSES, Cuts
from mfs_decompose.linalg.digits import WIDTHS, most
from mfs_decompose.linalg.words import Words, zigzag_difference

_SAMPLE = 2048
_EXPONENTS = 24  # binades that are told apart, from nearly the largest weight down
_ESCAPES = {1: 0.004, 2: 0.004, 4: 0.006, 8: 0.08}  # share of numbers that may escape, by width of digit; measured

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Scheme:
    """Exponents cut into classes; how many of the lowest bytes of all differences stand aside, being noise; and the
    width of the digits, class by class, that what is above them is written in."""

    cuts: Cuts
    aside: int
    widths: tuple[int, ...]


def choose_scheme(own: Words, base: Words, shift: int, mask: int) -> Scheme:
    """Cut the exponents in bits `shift` and up where the lengths of the differences have the least entropy given the
    class, and take the narrowest digits that few differences escape from."""
    stride = max(1, base.size // _SAMPLE) | 1  # odd, to meet every column of a matrix
    known = base[::stride]
    numbers = zigzag_difference(own[::stride], known)
    exponents = ((known >> shift) & known.dtype.type(mask)).astype(np.int64)
    cuts = Cuts(shift, mask, _cut(numbers, exponents))
    aside = next(
        low
        for low in range(base.itemsize)
        if _few_escape(np.right_shift(numbers, 8 * low), 8) or low + 1 == base.itemsize
    )
    high = np.right_shift(numbers, 8 * aside)
    classes = np.searchsorted(np.array(cuts.above, np.int64), exponents)
    return Scheme(cuts, aside, tuple(_width(high[classes == at]) for at in range(cuts.classes)))


def _width(numbers: Words) -> int:
    return next(width for width in WIDTHS if width == 8 or _few_escape(numbers, width))


def _few_escape(numbers: Words, width: int) -> bool:
    return bool(np.count_nonzero(numbers >= most(width)) <= _ESCAPES[width] * numbers.size)


def _cut(numbers: Words, exponents: Integers) -> tuple[int, ...]:
    """The last exponent of every class but the highest: the cheapest of all partitions into at most four classes."""
    lengths = np.frexp(numbers.astype(np.float64))[1]
    top = int(np.partition(exponents, -1 - exponents.size // 256)[-1 - exponents.size // 256])
    low = max(0, top - _EXPONENTS + 1)
    kinds, rows = int(lengths.max()) + 1, top - low + 1
    cells = (np.clip(exponents, low, top) - low) * kinds + lengths
    counts = np.bincount(cells, minlength=rows * kinds).reshape(rows, kinds)
    used = np.flatnonzero(counts.any(axis=1))
    return tuple(low + int(used[end - 1]) for end in _partition(_costs(counts[used])))


def _costs(counts: Integers) -> Floats:
    """Entry [p, q]: bits to code the lengths of rows p..q-1 with one table; infinite where that is no row."""
    rows, kinds = counts.shape
    sums = np.zeros((rows + 1, kinds))
    np.cumsum(counts, axis=0, out=sums[1:])
    within = np.maximum(sums[None] - sums[:, None], 0)
    costs: Floats = _weighted_log(within.sum(axis=2)) - _weighted_log(within).sum(axis=2)
    costs[np.tril_indices(rows + 1)] = np.inf
    return costs


def _weighted_log(counts: Floats) -> Floats:
    weighted: Floats = counts * np.log2(np.maximum(counts, 1))
    return weighted


def _partition(costs: Floats) -> list[int]:
    """Ends of all parts but the last of the cheapest partition; among equals the one of fewest parts."""
    rows = costs.shape[0] - 1
    best, back = costs[0], [np.zeros(rows + 1, np.int64)]
    finals = [float(best[rows])]
    for _ in range(min(CLASSES, rows) - 1):
        longer = best[:, None] + costs
        back.append(longer.argmin(axis=0))
        best = longer.min(axis=0)
        finals.append(float(best[rows]))
    ends, end = [], rows
    for step in range(finals.index(min(finals)), 0, -1):
        end = int(back[step][end])
        ends.append(end)
    return ends[::-1]
