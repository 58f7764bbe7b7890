"""How many directions the shared delta gets against the variants: one lambda for all.

With M the mean of K deltas `D_k` and `D_k = M + E_k`, a direction of M that is stored once explains K times its energy.
What is not stored of M is in no variant; each stores directions of its E_k, a unit of whose energy does more harm
(`gain`). At lambda units of drift a byte every matrix takes what is worth it (linalg/bands.py), M with K-fold energies.
A tensor has a shared delta where that costs less than coding every `D_k` alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from mfs_decompose.linalg.bands import WIDTHS, Bands, bands_bytes, choose_bands, loss

_TURNS = 50
_NONE: Bands = (0,) * len(WIDTHS)
MOST_SHARED = 2
"""Directions of a shared delta at a fixed rank, at most, in units of that."""

OWN = 0.8
"""The power of M's energy over that of E_k by which a unit of the latter counts more: at 1 relative errors of both
would count alike, at 0.5 drift would grow with norms. KL of two variants of SmolLM2-135M with ratios of about 100 where
.6 / .75 / .88 / .94 of 14 MB are shared: 5.9 / 4.8 / 6.9 / 15e-4 and 2.0 / 1.7 / 2.5 / 3.7e-4; of 8 MB, .6 / .75 / .88:
11 / 11 / 18e-4 and 3.7 / 2.5 / 2.9e-4. This power shares .72 to .75 of either, a power of 0 all that it may."""

_BESIDE = 512  # bytes of headers around a shared delta, at most
_WORTH = 0.98  # of the cost without it: curves of two factorisations of the same delta differ by as much


@dataclass(frozen=True)
class Curve:
    """What each direction of a matrix explains, falling, and all there is."""

    energy: Sequence[float]
    total: float


@dataclass(frozen=True)
class SharedCurves:
    """A base tensor [O, I]: the curve of the mean delta, and of every variant that would use it with and without it.

    Where `rank` is set, variants store that many directions whatever they are worth, and the mean has directions of
    `bits` bits.
    """

    name: str
    shape: tuple[int, int]
    mean: Curve
    rests: Mapping[str, Curve]
    alone: Mapping[str, Curve]
    rank: int | None = None
    bits: int = 8

    @property
    def users(self) -> int:
        return len(self.rests)


def predicted_drift(energy_left: float) -> float:
    """What energy that is not stored stands for: the drift that it would cause."""
    return energy_left


@dataclass(frozen=True)
class SharedBudget:
    """Bytes that all variants may spend on the tensors together, and those that the shared delta may take at most."""

    total: int
    most: int


def share_shared(curves: Sequence[SharedCurves], budget: SharedBudget | None) -> dict[str, Bands]:
    """Directions of the shared delta of each tensor, by name; none where it is not worth its bytes.

    `budget` is None where ranks are fixed.
    """
    found = {one.name: _at_rank(one) for one in curves if one.rank is not None}
    free = [one for one in curves if one.rank is None]
    if free and budget is not None:
        lam = price_within(free, budget)
        found |= {one.name: (best_offer(one, lam).shared if lam is not None else _NONE) for one in free}
    return {name: bands for name, bands in found.items() if sum(bands)}


def gain(mean: Curve, rest: Curve) -> float:
    """How much a unit of a rest's energy counts against one of the mean: 1 where the rest is as large, or larger.

    What makes a variant itself is small, and its directions are strong for what it learnt: without them it is another.
    """
    return (mean.total / rest.total) ** OWN if 0.0 < rest.total < mean.total else 1.0


def bytes_at_drift(curves: Sequence[Curve], shape: tuple[int, int], lam: float) -> tuple[int, float]:
    """Bytes that matrices of one shape take at a price, and the drift that is left."""
    nbytes, left = 0, 0.0
    for curve in curves:
        taken = choose_bands(curve.energy, shape, lam)
        nbytes += bands_bytes(shape, taken)
        left += predicted_drift(_left(curve, shape, taken))
    return nbytes, left


@dataclass(frozen=True)
class Offer:
    """A way to store a tensor of all variants: bands of the shared delta, bytes of all, and the drift left."""

    shared: Bands
    nbytes: int
    left: float


def best_offer(one: SharedCurves, lam: float, *, gains: bool = True) -> Offer:
    """With a shared delta or without, whichever costs less at a price of `lam` units of drift a byte.

    Costs are compared in plain energy, which means the same with and without; `gain` then says what rests get, with
    `gains`.
    """
    alone = Offer(_NONE, *bytes_at_drift(list(one.alone.values()), one.shape, lam))
    bands = choose_bands([one.users * value for value in one.mean.energy], one.shape, lam)
    if not sum(bands):
        return alone
    plain = _beside(one, bands, [(rest, lam) for rest in one.rests.values()])
    if _cost(plain, lam) >= _WORTH * _cost(alone, lam):
        return alone
    if not gains:
        return plain
    return _beside(one, bands, [(rest, lam / gain(one.mean, rest)) for rest in one.rests.values()])


def _beside(one: SharedCurves, bands: Bands, rests: Sequence[tuple[Curve, float]]) -> Offer:
    """A shared delta, and rests at a price each; what bands leave of the mean no variant has."""
    nbytes, left = bands_bytes(one.shape, bands), one.users * predicted_drift(_left(one.mean, one.shape, bands))
    for rest, lam in rests:
        taken, missed = bytes_at_drift([rest], one.shape, lam)
        nbytes, left = nbytes + taken, left + missed
    return Offer(bands, nbytes, left)


def _cost(offer: Offer, lam: float) -> float:
    return offer.left + predicted_drift(lam * offer.nbytes)


def _at_rank(one: SharedCurves) -> Bands:
    """Directions of the mean that explain more than the next of a variant would, if that beats as many more for all."""
    assert one.rank is not None
    following = [curve.energy[one.rank] for curve in one.alone.values() if len(curve.energy) > one.rank]
    price = math.fsum(following) / one.users
    rank = sum(one.users * value > price for value in one.mean.energy[: MOST_SHARED * one.rank])
    more = one.rank + -(-rank // one.users)
    bands = tuple(rank if bits == one.bits else 0 for bits in WIDTHS)
    with_it = sum(tail(curve, one.rank) for curve in one.rests.values()) + one.users * tail(one.mean, rank)
    return bands if rank and with_it < _WORTH * sum(tail(curve, more) for curve in one.alone.values()) else _NONE


def tail(curve: Curve, rank: int) -> float:
    """Energy beyond the first directions."""
    return max(0.0, curve.total - math.fsum(curve.energy[:rank]))


def _left(curve: Curve, shape: tuple[int, int], bands: Bands) -> float:
    """Energy of directions left out, and the noise of those that are stored."""
    edges = list(accumulate(bands, initial=0))
    noise = sum(
        loss(shape, bits) * math.fsum(curve.energy[a:b]) for bits, a, b in zip(WIDTHS, edges, edges[1:], strict=False)
    )
    return tail(curve, edges[-1]) + noise


def price_within(curves: Sequence[SharedCurves], budget: SharedBudget, *, gains: bool = True) -> float | None:
    """Lambda at which all tensors together just stay within the budget; None where there is nothing to spend on."""
    peak = max((max(curve.energy, default=0.0) for one in curves for curve in one.alone.values()), default=0.0)
    if not 0 < peak < math.inf or budget.total <= 0:
        return None
    # K-fold energies of a mean may be worth more than any of one variant.
    low, high = math.log2(peak) - 100.0, math.log2(peak) + 20.0
    for _ in range(_TURNS):
        middle = (low + high) / 2
        offers = [(one, best_offer(one, 2.0**middle, gains=gains)) for one in curves]
        shared = sum(bands_bytes(one.shape, offer.shared) + _BESIDE for one, offer in offers if sum(offer.shared))
        dear = sum(offer.nbytes for _, offer in offers) > budget.total or shared > budget.most
        low, high = (middle, high) if dear else (low, middle)
    return float(2.0**high)
