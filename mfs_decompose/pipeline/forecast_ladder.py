"""One variant's ladders: what budgets would leave of its delta, and what targets of drift would take.

Everything follows from what pass 1 found and from the allocation that the run itself would make; nothing is encoded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mfs_decompose.errors import UsageError
from mfs_decompose.linalg.bands import WIDTHS
from mfs_decompose.pipeline.allocation import Allocator
from mfs_decompose.pipeline.encode import Choice
from mfs_decompose.plan.allocate import Key
from mfs_decompose.plan.cap import SHARD_BYTES
from mfs_decompose.plan.forecast import DriftCurve
from mfs_decompose.plan.model import Item, VariantPlan
from mfs_decompose.recipe.schema import Objective
from mfs_decompose.recipe.values import Budget

BUDGETS = (0.01, 0.02, 0.03, 0.05, 0.07, 0.10, 0.15, 0.20, 0.30)
"""Shares of a variant's checkpoint."""

TARGETS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
"""Drift, KL in nats a token."""

_TRIES = 4  # allocations for each target, between two rungs
_CLOSE = 0.03  # of a target, below which its bytes are settled
_CUT = ("banded", "lowrank", "sparse")


@dataclass(frozen=True)
class Rung:
    """A budget, and what it would come to.

    `cap` are bytes of the variant's shards and of its part of a shared delta, as all bytes here. `nbytes` is None where
    the cap does not hold what must be exact. `left` is the share of the delta's weighted energy that would be missing:
    1 with nothing stored, 0 with every bit; it orders sizes of one variant, and is no measure of behaviour. `kl` is in
    nats a token, None without a measured curve. Beyond the budget that pass 1 fitted for (`fitted` is false) a run
    under that budget has more to choose from, and can only do better.
    """

    budget: float
    cap: int
    nbytes: int | None
    left: float | None
    kl: float | None
    fitted: bool


@dataclass(frozen=True)
class TargetRung:
    """The smallest size foreseen to keep a drift; `nbytes` is None where even the largest would not."""

    kl: float
    nbytes: int | None
    left: float | None
    fitted: bool


@dataclass(frozen=True)
class VariantForecast:
    """What to expect of one variant.

    `planned` is what the recipe itself asks for; None where only a target does. `budgets` and `targets` are empty for
    an adapter and where the recipe fixes every size. `unforeseen` tensors have an error that is in no figure: codecs
    whose size is fixed, and residuals.
    """

    id: str
    checkpoint_bytes: int
    shared_bytes: int
    adapter: bool
    planned: Rung | None
    budgets: tuple[Rung, ...]
    targets: tuple[TargetRung, ...]
    measured: bool
    unforeseen: int


def foresee_variant(
    allocator: Allocator, id: str, shared_bytes: int = 0, curve: DriftCurve | None = None
) -> VariantForecast:
    """The ladders of one variant; `curve` says what its scores come to in drift."""
    alone = allocator.of(id)
    (variant,) = alone.plan.variants
    if variant.adapter:
        kept = variant.unavoidable_bytes + SHARD_BYTES
        planned = Rung(_share(kept, variant), kept, kept, 0.0, 0.0, True)
        return VariantForecast(id, variant.checkpoint_bytes, 0, True, planned, (), (), False, 0)
    ladder = _Ladder(alone, variant, shared_bytes, curve)
    items = alone.plan.items()
    free = any(item.fitted and not item.fixed for item in items)
    planned_rung = ladder.planned(free)
    return VariantForecast(
        id=id,
        checkpoint_bytes=variant.checkpoint_bytes,
        shared_bytes=shared_bytes,
        adapter=False,
        planned=planned_rung,
        budgets=tuple(ladder.rung(share) for share in BUDGETS) if free else (),
        targets=ladder.targets(TARGETS) if free and curve is not None else (),
        measured=curve is not None,
        unforeseen=sum(item.direct or item.residual is not None for item in items),
    )


@dataclass(frozen=True)
class _Seen:
    """An allocation that was tried: its bytes, the shared part included, and its score."""

    nbytes: int
    score: float


class _Ladder:
    """Allocations of one variant, each made once."""

    def __init__(self, allocator: Allocator, variant: VariantPlan, shared: int, curve: DriftCurve | None) -> None:
        self._allocator, self._variant, self._shared, self._curve = allocator, variant, shared, curve
        self._seen: dict[int, _Seen | None] = {}
        self._nothing = 0.0

    def planned(self, free: bool) -> Rung | None:
        """What the recipe asks of the variant by itself."""
        cap = self._variant.cap
        if cap is not None:
            return self._rung(cap + self._shared)
        if free:
            return None
        seen = self._look(self._allocator.foretell({}))
        return Rung(_share(seen.nbytes, self._variant), seen.nbytes, *self._figures(seen), True)

    def rung(self, share: float) -> Rung:
        """A budget of the ladder."""
        return self._rung(Budget(share=share).cap(self._variant.checkpoint_bytes))

    def targets(self, kls: Sequence[float]) -> tuple[TargetRung, ...]:
        """The smallest sizes that keep these drifts, of all that were tried on the way."""
        for kl in kls:
            self._search(kl)
        return tuple(self._target(kl) for kl in kls)

    def _target(self, kl: float) -> TargetRung:
        best = self._keeping(kl)
        found = None if best is None else self._seen[best]
        if best is None or found is None:
            return TargetRung(kl, None, None, False)
        return TargetRung(kl, found.nbytes, self._left(found), self._fitted(best))

    def _search(self, kl: float) -> None:
        """Try sizes between the largest that fails and the smallest that keeps a drift."""
        whole = max(self._variant.checkpoint_bytes, *self._seen, 1)
        best = self._keeping(kl) or self._keeping(kl, whole)
        for _ in range(_TRIES if best is not None else 0):
            assert best is not None
            below = self._below(best, kl)
            cap = self._between(below, best, kl)
            if self._kl(self._seen[best]) >= (1 - _CLOSE) * kl or not (below < cap < best):
                return
            seen = self._at(cap)
            best = cap if seen is not None and self._kl(seen) <= kl else best

    def _keeping(self, kl: float, cap: int | None = None) -> int | None:
        """The smallest cap tried, or this one, that keeps a drift."""
        caps = sorted(self._seen) if cap is None else [cap]
        return next((one for one in caps if (seen := self._at(one)) is not None and self._kl(seen) <= kl), None)

    def _below(self, best: int, kl: float) -> int:
        """The largest cap tried below `best` that does not keep the drift."""
        return max((cap for cap, seen in self._seen.items() if cap < best and self._kl(seen) > kl), default=0)

    def _between(self, below: int, best: int, kl: float) -> int:
        """Where a straight line through the logarithms of both drifts meets the target, kept off both ends."""
        near, far = self._kl(self._seen.get(below)), self._kl(self._seen[best])
        part = math.log(near / kl) / math.log(near / far) if 0.0 < far < kl < near < math.inf else 0.5
        return below + int((best - below) * min(max(part * 1.02, 0.05), 0.95))

    def _rung(self, cap: int) -> Rung:
        seen, share = self._at(cap), _share(cap, self._variant)
        if seen is None:
            return Rung(share, cap, None, None, None, self._fitted(cap))
        return Rung(share, cap, *self._figures(seen), self._fitted(cap))

    def _figures(self, seen: _Seen) -> tuple[int, float, float | None]:
        return seen.nbytes, self._left(seen), None if self._curve is None else self._kl(seen)

    def _fitted(self, cap: int) -> bool:
        return self._variant.cap is None or cap <= self._variant.cap + self._shared

    def _at(self, cap: int) -> _Seen | None:
        """What a cap comes to; None where it does not hold what must be exact."""
        if cap not in self._seen:
            whole = [one for at, one in self._seen.items() if at <= cap and one is not None and one.score == 0.0]
            self._seen[cap] = whole[0] if whole else self._try(cap)
        return self._seen[cap]

    def _try(self, cap: int) -> _Seen | None:
        own = cap - self._shared
        if own <= 0:
            return None
        plan = self._allocator.plan
        recipe = plan.recipe.model_copy(update={"objective": Objective(budget=Budget(nbytes=own))})
        allocator = replace(self._allocator, plan=replace(plan, recipe=recipe, total_cap=None))
        try:
            return self._look(allocator.foretell({self._variant.id: own}))
        except UsageError:
            return None

    def _look(self, choices: Mapping[Key, Choice]) -> _Seen:
        if not self._nothing:
            self._nothing = self._without(choices)
        outlook = self._allocator.outlook(self._variant.id, choices)
        return _Seen(outlook.nbytes + self._shared, outlook.score)

    def _without(self, choices: Mapping[Key, Choice]) -> float:
        """The score of storing nothing of what allocation decides upon."""
        return math.fsum(
            self._allocator.score(item, _empty(item))
            for item in self._allocator.plan.items()
            if self._allocator.surveyed[item.key].fit is not None and _decided(item, choices[item.key])
        )

    def _left(self, seen: _Seen) -> float:
        return min(seen.score / self._nothing, 1.0) if self._nothing > 0.0 else 0.0

    def _kl(self, seen: _Seen | None) -> float:
        if seen is None:
            return math.inf
        assert self._curve is not None
        return self._curve.kl(seen.score)


def _decided(item: Item, choice: Choice) -> bool:
    return choice.codec in _CUT or (item.auto and choice.codec in ("lossless", "lora-exact"))


def _empty(item: Item) -> Choice:
    if item.codec == "banded":
        return Choice("banded", 0, bands=(0,) * len(WIDTHS))
    return Choice(item.codec, 0, slices=(0,) * item.matrices if item.stacked else ())


def _share(nbytes: int, variant: VariantPlan) -> float:
    return nbytes / variant.checkpoint_bytes if variant.checkpoint_bytes else 0.0
