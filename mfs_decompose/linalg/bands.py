"""Directions of a low-rank delta in bands of 8, 6, 4, 3 and 2 bits: how many of each, and what they cost.

Reverse water-filling: a direction of energy `s^2` gets the width that minimises `s^2 * NOISE * ERROR[bits] + lam *
bytes`, or none, where it minimises `s^2`. With one lambda over all tensors this is also how the bytes of a variant are
shared out: rank and bits follow from it. The widths of sorted directions never rise, so a tensor's answer is five
counts. No tensor library needed.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from mfs_decompose.linalg.shapes import is_coded, scales_of, side_bits

WIDTHS = (8, 6, 4, 3, 2)
"""Bits of a factor value, widest first."""

ERROR = {8: 1.3e-4, 6: 2.1e-3, 4: 0.03, 3: 0.11, 2: 0.42}
"""The squared error of a direction at each width as part of its energy, measured on real and on Gaussian directions."""

ERROR_LONG = {8: 1e-4, 6: 1e-3, 4: 0.015, 3: 0.055, 2: 0.21}
"""The same across from a vocabulary, whose other side has 8 bits."""

RATE = {8: 458, 6: 328, 4: 208, 3: 153, 2: 102}
"""What codes of each width are given, in 64ths of a bit: what those of normal directions take, range coded."""

RATE_LONG = {8: 486, 6: 348, 4: 223, 3: 157, 2: 99}
"""The same where 64 values have a scale."""

NOISE = 0.5
"""What noise counts beside a direction left out, which is missed in one sense everywhere. KL of three fine-tunes, 4.4 %
of the checkpoint for their linears, at .3 / .4 / .5 / .65: 6.6 / 5.9 / 5.7 / 5.9e-5 (light, code), 8.0 / 7.1 / 7.2 /
7.9e-5 (light, mathematics), 2.6 / 2.6 / 2.8 / 3.2e-3 and 2.4 / 2.2 / 2.0 / 1.9e-3 (heavy; prose, code). Of a vocabulary
it counts in full: at 1.7 MB, codes packed, of .3 / .5 / .8 / 1.1 / 1.5 10.1 / 7.4 / 7.1 / 7.2 / 6.8e-5 (light) and
3.0 / 2.3 / 2.2 / 2.1 / 2.3e-3 (heavy)."""

MOST_MADE_UP = 1.15
"""Of a flat spectrum the directions kept are no likeness of those left out. KL of 2 % of a checkpoint with a limit of
1.05 / 1.1 / 1.15 / 1.3: 5.4 / 5.2 / 5.2 / 5.4e-4 (light, 6.8e-4 without), 3.5 / 3.3 / 3.2 / 3.2e-2 (heavy, 3.8e-2)."""

Bands = tuple[int, ...]
"""Directions at each of WIDTHS, strongest first."""

Spectrum = tuple[Sequence[float], tuple[int, int]]
"""Falling energies of a tensor, and its shape [O, I]."""


def loss(shape: tuple[int, int], bits: int) -> float:
    """What a direction of that width loses for each unit of its energy, in units of a direction left out."""
    return ERROR_LONG[bits] if _is_long(shape) else NOISE * ERROR[bits]


def errors(shape: tuple[int, int]) -> Mapping[int, float]:
    """ERROR or ERROR_LONG."""
    return ERROR_LONG if _is_long(shape) else ERROR


def _is_long(shape: tuple[int, int]) -> bool:
    return (scales_of(shape[0]) > 0) != (scales_of(shape[1]) > 0)


@lru_cache(maxsize=4096)
def direction_bytes(shape: tuple[int, int], bits: int) -> int:
    """Bytes that one direction of an [O, I] delta is given: codes, scales along a vocabulary, and a gain."""
    return 2 + sum(codes_bytes(*side, bits) + scales_of(side[0]) for side in (shape, shape[::-1]))


def codes_bytes(length: int, other: int, bits: int) -> int:
    """Bytes that the codes of a direction are given along a side; where they are coded, they are made to fit."""
    bits = side_bits(length, other, bits)
    if not is_coded(length):
        return -(-length * bits // 8)
    return -(-length * (RATE_LONG if scales_of(length) else RATE)[bits] // 512)


def bands_bytes(shape: tuple[int, int], bands: Bands) -> int:
    """Bytes that an [O, I] delta with that many directions at each width is given; coded sides may leave a few."""
    return sum(count * direction_bytes(shape, bits) for count, bits in zip(bands, WIDTHS, strict=True))


def choose_bands(energies: Sequence[float], shape: tuple[int, int], lam: float) -> Bands:
    """Directions at each width for squared singular values in falling order, at `lam` units of energy a byte."""
    assert lam > 0
    counts, taken = [], 0
    for threshold in _thresholds(shape):
        # Every energy from the threshold up is worth at least this width.
        below = bisect_left(energies, -threshold * lam, key=lambda energy: -energy)
        while below < len(energies) and energies[below] >= threshold * lam:
            below += 1
        counts.append(max(below - taken, 0))
        taken = max(below, taken)
    return tuple(counts)


def allocate_bands(tensors: Sequence[Spectrum], budget: int) -> list[Bands]:
    """Bands for tensors that together take at most `budget` bytes, see `BandLadder.spend`."""
    return BandLadder(tensors).spend(budget)


class BandLadder:
    """Every direction of some tensors at every width, best energy a byte first: what a budget buys is a beginning.

    Sorted once, for as many budgets as are asked for.
    """

    def __init__(self, tensors: Sequence[Spectrum]) -> None:
        import numpy as np

        self._tensors = tensors
        lams, costs, places = [np.empty((0,))], [np.empty((0,), np.int64)], [np.empty((0,), np.int32)]
        for at, (energies, shape) in enumerate(tensors):
            known = np.asarray(energies, dtype=np.float64)
            known = known[: np.count_nonzero((known > 0.0) & (known < math.inf))]
            prices = [direction_bytes(shape, bits) for bits in reversed(WIDTHS)]  # narrow first: that is bought first
            bounds = np.minimum.accumulate(_thresholds(shape))[::-1]
            lams.append((known[:, None] / bounds).reshape(-1))
            costs.append(np.tile(np.diff(prices, prepend=0), len(known)))
            places.append(np.tile(np.arange(len(WIDTHS), dtype=np.int32) + at * len(WIDTHS), len(known)))
        lam = np.concatenate(lams)
        order = np.argsort(-lam, kind="stable")  # of equals, what must be bought first
        self._costs, self._places = np.concatenate(costs)[order], np.concatenate(places)[order]
        self._falling = -lam[order]
        self._sums = np.cumsum(self._costs)

    def bytes_at(self, lam: float) -> int:
        """What `choose_bands` takes of all tensors together."""
        count = int(self._falling.searchsorted(-lam, side="right"))
        return int(self._sums[count - 1]) if count else 0

    def spend(self, budget: int, unused: Iterable[int] = ()) -> list[Bands]:
        """Bands of all tensors that take at most `budget` bytes; those of `unused` numbers get none.

        As at one lambda, then single directions widened or added, best energy a byte first, while bytes are left.
        """
        import numpy as np

        costs, places, sums = self._costs, self._places, self._sums
        left_out = set(unused)
        if left_out:
            kept = ~np.isin(places // len(WIDTHS), list(left_out))
            costs, places = costs[kept], places[kept]
            sums = np.cumsum(costs)
        count = int(sums.searchsorted(budget, side="right"))
        spent = int(sums[count - 1]) if count else 0
        reached = np.bincount(places[:count], minlength=len(self._tensors) * len(WIDTHS)).reshape(-1, len(WIDTHS))
        bands = np.diff(reached[:, ::-1], prepend=0, axis=1).tolist()
        tensors = [((), shape) if at in left_out else (own, shape) for at, (own, shape) in enumerate(self._tensors)]
        return _fill(tensors, bands, budget - spent)


def made_up(energies: Sequence[float], total: float, shape: tuple[int, int], rank: int) -> float:
    """By how much the first `rank` directions of a delta are enlarged to make up for those left out.

    These shift every layer's outputs back towards the base, and what layers miss adds up in one sense. The inputs of a
    layer are strong where its delta is, so outputs on them are left as they were in the mean where `<stored, delta>` is
    `<delta, delta>` in the metric delta^T delta: by the sums of s^4.

    Args:
        energies: squared singular values in falling order, as far as they were fitted; `total`: the sum of all.
    """
    kept = math.fsum(energy * energy for energy in energies[:rank])
    beyond = max(total - math.fsum(energies), 0.0)
    spread = beyond * beyond / max(min(shape) - len(energies), 1)
    left_out = math.fsum(energy * energy for energy in energies[rank:]) + spread
    return min(1.0 + left_out / kept, MOST_MADE_UP) if kept > 0.0 else 1.0


@lru_cache(maxsize=1024)
def _thresholds(shape: tuple[int, int]) -> list[float]:
    """For each width the least `energy / lam` at which it, or a wider one, is the best choice."""
    choices = {0: (0, 1.0), **{bits: (direction_bytes(shape, bits), loss(shape, bits)) for bits in WIDTHS}}
    return [
        max(
            (choices[bits][0] - cost) / (worse - choices[bits][1])
            for other, (cost, worse) in choices.items()
            if other < bits
        )
        for bits in WIDTHS
    ]


def _fill(tensors: Sequence[Spectrum], bands: list[list[int]], left: int) -> list[Bands]:
    queue: list[tuple[float, int, int, int]] = []  # (-energy a byte, tensor, index of the width to widen to, bytes)

    def offer(at: int, index: int) -> None:
        energies, shape = tensors[at]
        taken = sum(bands[at][: index + 1])
        narrow = next((n for n in range(index + 1, len(WIDTHS)) if bands[at][n]), None)
        if taken >= len(energies) or energies[taken] <= 0:
            return
        before = (0, 1.0) if narrow is None else (direction_bytes(shape, WIDTHS[narrow]), loss(shape, WIDTHS[narrow]))
        cost = direction_bytes(shape, WIDTHS[index]) - before[0]
        heapq.heappush(queue, (-energies[taken] * (before[1] - loss(shape, WIDTHS[index])) / cost, at, index, cost))

    for at in range(len(tensors)):
        for index in range(len(WIDTHS)):
            offer(at, index)
    while queue:
        _, at, index, cost = heapq.heappop(queue)
        if cost > left:
            continue
        narrow = next((n for n in range(index + 1, len(WIDTHS)) if bands[at][n]), None)
        now = direction_bytes(tensors[at][1], WIDTHS[index])
        now -= 0 if narrow is None else direction_bytes(tensors[at][1], WIDTHS[narrow])
        if now != cost or sum(bands[at][: index + 1]) >= len(tensors[at][0]):
            continue  # the tensor changed since this was offered
        bands[at][index] += 1
        if narrow is not None:
            bands[at][narrow] -= 1
        left -= cost
        for again in range(len(WIDTHS)):
            offer(at, again)
    return [tuple(counts) for counts in bands]
