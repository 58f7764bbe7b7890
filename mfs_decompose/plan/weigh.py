"""`--base-mode auto`: which of two bases takes fewer bytes for the same predicted drift.

With a base that is given, `shared` is weighed against `known`, else `refined` against `mean`: in either pair the base
itself takes the same bytes, and the drift of the richer mode is what the plain one has to reach.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mfs_decompose.linalg.bands import bands_bytes, direction_bytes
from mfs_decompose.plan.model import BaseMode
from mfs_decompose.plan.shared_sizes import (
    Curve,
    SharedBudget,
    SharedCurves,
    best_offer,
    bytes_at_drift,
    price_within,
    share_shared,
    tail,
)
from mfs_decompose.units import format_bytes

PLAIN: Mapping[BaseMode, BaseMode] = {"shared": "known", "refined": "mean", "known": "known", "mean": "mean"}
"""What each mode is weighed against."""

Tensor = tuple[Sequence[Curve], tuple[int, int]]
"""What the variants have of one base tensor: their curves, and its shape as a matrix."""

_TURNS = 60
_WORTH = 0.99  # of the plain mode's bytes: less than that is within the errors of the estimate


@dataclass(frozen=True)
class Weighed:
    """Bytes of the deltas under either mode, at the drift of the richer one."""

    plain: int
    rich: int

    @property
    def better(self) -> bool:
        """Whether the richer mode is worth it."""
        return self.rich < _WORTH * self.plain

    def settle(self, mode: BaseMode) -> BaseMode:
        """The mode, or the plain one it was weighed against."""
        return mode if self.better else PLAIN[mode]

    def said(self, mode: BaseMode, where: str) -> str:
        """What was chosen and why, in words; `where` says of what the bytes are."""
        chosen = self.settle(mode)
        rich, plain = format_bytes(self.rich), format_bytes(self.plain)
        return (
            f"base mode auto: {chosen}; for the same predicted drift {where} take {rich} under {mode} "
            f"and {plain} under {PLAIN[mode]}"
        )


def weigh_shared(curves: Sequence[SharedCurves], budget: SharedBudget | None) -> Weighed:
    """Deltas beside a base that was given, with a shared delta (its bytes included) and without.

    In plain energy: that of a delta as a whole does not tell how much of it makes the variant itself.
    """
    plain = rich = 0
    for one in curves:
        if one.rank is not None:
            with_it, alone = _at_rank(one)
            rich, plain = rich + with_it, plain + alone
    free = [one for one in curves if one.rank is None]
    lam = price_within(free, budget, gains=False) if free and budget is not None else None
    if lam is not None:
        offers = [best_offer(one, lam, gains=False) for one in free]
        rich += sum(offer.nbytes for offer in offers)
        tensors = [(tuple(one.alone.values()), one.shape) for one in free]
        plain += bytes_for_drift(tensors, math.fsum(offer.left for offer in offers))
    return Weighed(plain, rich)


def weigh_refined(refined: Sequence[Tensor], mean: Sequence[Tensor], nbytes: int) -> Weighed:
    """Deltas against a refined base that take `nbytes`, and against the mean at the same drift."""
    low, high = _range(refined)
    for _ in range(_TURNS):
        middle = (low + high) / 2
        spent = sum(bytes_at_drift(curves, shape, 2.0**middle)[0] for curves, shape in refined)
        low, high = (middle, high) if spent > nbytes else (low, middle)
    found = [bytes_at_drift(curves, shape, 2.0**high) for curves, shape in refined]
    left = math.fsum(one[1] for one in found)
    return Weighed(bytes_for_drift(mean, left), sum(one[0] for one in found))


def bytes_for_drift(tensors: Sequence[Tensor], drift: float) -> int:
    """Bytes at one price for all, so that no more than that drift is left; at least, where curves end before that."""
    low, high = _range(tensors)
    for _ in range(_TURNS):
        middle = (low + high) / 2
        left = math.fsum(bytes_at_drift(curves, shape, 2.0**middle)[1] for curves, shape in tensors)
        low, high = (middle, high) if left <= drift else (low, middle)
    return sum(bytes_at_drift(curves, shape, 2.0**low)[0] for curves, shape in tensors)


def _range(tensors: Sequence[Tensor]) -> tuple[float, float]:
    peak = max((max(curve.energy, default=0.0) for curves, _ in tensors for curve in curves), default=0.0)
    top = math.log2(peak) if 0 < peak < math.inf else 0.0
    return top - 100.0, top + 1.0


def _at_rank(one: SharedCurves) -> tuple[int, int]:
    """Bytes of one tensor at a fixed rank: with what `share_shared` decides, and alone with as little left."""
    assert one.rank is not None
    step = direction_bytes(one.shape, one.bits)
    bands = share_shared([one], None).get(one.name)
    own = one.users * one.rank * step
    if bands is None:
        return own, own
    left = sum(tail(curve, one.rank) for curve in one.rests.values()) + one.users * tail(one.mean, sum(bands))
    rank = next((r for r in range(one.rank, _most(one)) if _left_alone(one, r) <= left), _most(one))
    return own + bands_bytes(one.shape, bands), one.users * rank * step


def _left_alone(one: SharedCurves, rank: int) -> float:
    return sum(tail(curve, rank) for curve in one.alone.values())


def _most(one: SharedCurves) -> int:
    return max((len(curve.energy) for curve in one.alone.values()), default=0)
