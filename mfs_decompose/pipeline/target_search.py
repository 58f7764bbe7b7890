"""The smallest size at which a drift stays within its limit, found by few measurements along a cheap outlook.

A measurement takes minutes and tells the truth; the outlook takes none and knows the shape of the curve: score against
bytes. So log KL is taken for a straight line over the log of what the outlook expects, between what was measured
(a secant with a bracket). Perplexity drift is not monotone in size and often negative, so its limit is turned into a KL
(an interval of a mean is about as wide as the root of the KL), the search moves along that, and only the verdict is the
perplexity's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mfs_decompose.pipeline.gauge import Drift
from mfs_decompose.recipe.values import Target, TargetKind

MOST = 5
"""Measurements of a variant, at most."""

CLOSE = 0.7
"""A drift within (0.7 X, X] is what a search is for."""

_WORTH = 0.05  # of log bytes: what another measurement must promise to save
_BELIEVED = 0.8  # of the slope that was measured, as it may be less steep from there on
_FALLS = (0.4, 8.0)  # of log drift over log bytes, as far as two measurements are believed beyond them
_BESIDE = 1.0  # of log KL: nearer to each other, what holds and what fails are a better guide than the nearest two
_SPARE = math.log(1.1)  # of log bytes: no answer shall be further above the smallest size that holds
_TIGHT = 0.98  # bytes of what fails over bytes of what holds, where nothing is left to find between
LOST = 1e6
"""Stands for a drift that is no number."""

_NOTHING = 1e-14  # the KL of rounding alone
_SLOPES = (0.4, 2.5)  # of log KL over log outlook, as far as two measurements are believed beyond them
_LOOKS = 16
_STRAIGHT = 12.0  # of log outlook: further apart, which the exact end is, nothing is near a straight line
_NEAR = 0.01  # how near to the wanted log outlook a size must lie


@dataclass(frozen=True)
class Size:
    """An allocation at a cap, as it is foretold: bytes, and the score of allocation (lost energy, weighted)."""

    cap: int
    nbytes: int
    score: float


@dataclass(frozen=True)
class Trial:
    """A size, and the drift that was measured there."""

    size: Size
    drift: Drift

    def value(self, kind: TargetKind) -> float:
        """What a target of this kind limits."""
        if kind == "kl":
            return self.drift.kl
        return LOST if self.drift.ln_ppl is None else self.drift.ln_ppl


@dataclass(frozen=True)
class Road:
    """All sizes of a variant, from what must be exact alone to all that its codecs can keep.

    `look` foretells the allocation at a cap; `prior` is the KL to expect of a score. `exact`: the upper end keeps
    every bit, which needs no measurement.
    """

    lowest: Size
    highest: Size
    exact: bool
    look: Callable[[int], Size]
    prior: Callable[[float], float]

    def depth(self, size: Size) -> float:
        """The log of the KL to expect at a size: what a search moves along."""
        score = max(size.score, 1e-12 * self.lowest.score)
        return math.log(max(self.prior(score), 1e-300)) if score > 0.0 else -700.0


def search(
    target: Target, road: Road, tokens: int, measure: Callable[[Size], Drift], known: Sequence[Trial] = ()
) -> list[Trial]:
    """Measure up to `MOST` sizes, one where the last ones point to; `tokens` of text are scored each time.

    Returns:
        The trials in order. `smallest_held` is the answer; without one it is the upper end where that is exact, and
        else the target is out of reach: the last trial is then the upper end.
    """
    trials = [*known]
    while (size := _next_size(target, road, tokens, trials)) is not None:
        trials.append(Trial(size, measure(size)))
    return trials


def smallest_held(target: Target, trials: Sequence[Trial]) -> Trial | None:
    """Of what was measured and holds, the smallest."""
    held = [trial for trial in trials if trial.value(target.kind) <= target.limit]
    return min(held, key=lambda trial: trial.size.nbytes, default=None)


def _next_size(target: Target, road: Road, tokens: int, trials: Sequence[Trial]) -> Size | None:
    best = smallest_held(target, trials)
    failed = _largest_failed(target, trials, best)
    left = MOST - len(trials)
    if left == 0 or (best is not None and _is_enough(target, road, trials, best, failed)):
        return None
    measured = {trial.size.nbytes for trial in trials}
    if best is None and not road.exact and left == 1:
        return None if road.highest.nbytes in measured else road.highest
    depth = _wanted_depth(target, road, tokens, trials, best, failed, left)
    low = road.lowest if failed is None else failed.size
    high = road.highest if best is None else best.size
    if best is not None and failed is not None:
        low, high = _between(road, failed.size, best.size)
    for _ in range(4):
        below, above = _find(road, depth, low, high)
        if road.exact and above == road.highest:  # which is known; what lies before it is not, whatever was expected
            return None if below.nbytes in measured else below
        if above.nbytes not in measured:
            return above
        if best is not None:
            return below if below.nbytes not in measured else None  # as near as sizes lie
        depth -= 0.7
    return None if road.exact or road.highest.nbytes in measured else road.highest


def _largest_failed(target: Target, trials: Sequence[Trial], best: Trial | None) -> Trial | None:
    """Of what does not hold, the largest below the best: above it, perplexity may fail again."""
    failed = [trial for trial in trials if trial.value(target.kind) > target.limit]
    below = [trial for trial in failed if best is None or trial.size.nbytes < best.size.nbytes]
    return max(below, key=lambda trial: trial.size.nbytes, default=None)


def _is_enough(target: Target, road: Road, trials: Sequence[Trial], best: Trial, failed: Trial | None) -> bool:
    if best.size == road.lowest or (failed is not None and failed.size.nbytes >= _TIGHT * best.size.nbytes):
        return True
    if best.value(target.kind) <= CLOSE * target.limit:
        return False
    return _to_save(target, trials, best, failed) < _WORTH


def _to_save(target: Target, trials: Sequence[Trial], best: Trial, failed: Trial | None) -> float:
    """Of log bytes, what a smaller size than the best could save: never all that lies above what fails.

    By the slope of log drift over log bytes, from the best to the next that was measured: a drift near its limit
    is no answer where the curve is flat.
    """
    value = math.log(max(best.value(target.kind), _NOTHING))
    others = [trial for trial in trials if trial is not best]
    if not others:
        return (math.log(target.limit) - value) / _BELIEVED
    beside = min(others, key=lambda trial: abs(math.log(trial.size.nbytes / best.size.nbytes)))
    fall = (value - math.log(max(beside.value(target.kind), _NOTHING))) / math.log(
        beside.size.nbytes / best.size.nbytes
    )
    to_save = (math.log(target.limit) - value) / (_BELIEVED * min(max(fall, _FALLS[0]), _FALLS[1]))
    return to_save if failed is None else min(to_save, math.log(best.size.nbytes / failed.size.nbytes))


def _between(road: Road, failed: Size, best: Size) -> tuple[Size, Size]:
    """The sizes to look between: where both ends are near, those that leave an answer near enough, hold or fail."""
    low, high = best.nbytes * math.exp(-_SPARE), failed.nbytes * math.exp(_SPARE)
    if low > high:
        return failed, best
    return (
        road.look(round(low)) if low > failed.nbytes else failed,
        road.look(round(high)) if high < best.nbytes else best,
    )


def _wanted_depth(
    target: Target,
    road: Road,
    tokens: int,
    trials: Sequence[Trial],
    best: Trial | None,
    failed: Trial | None,
    left: int,
) -> float:
    """Where the KL is expected to be as large as it may be, less some room for being wrong."""
    wanted = _wanted_kl(target, tokens, trials, best, left)
    points = [(road.depth(trial.size), math.log(max(trial.drift.kl, _NOTHING))) for trial in trials]
    if not points:
        return wanted
    if best is not None and failed is not None:
        (near, low), (far, high) = points[trials.index(best)], points[trials.index(failed)]
        if 0.0 < high - low < _BESIDE:
            return near + min(max((wanted - low) / (high - low), 0.1), 0.9) * (far - near)
    at, value = min(points, key=lambda point: abs(point[1] - wanted))
    others = [point for point in points if abs(point[0] - at) > _NEAR]
    slope = 1.0
    if others:
        second = min(others, key=lambda point: abs(point[1] - wanted))
        slope = min(max((value - second[1]) / (at - second[0]), _SLOPES[0]), _SLOPES[1])
    depth = at + (wanted - value) / slope
    room = 0.1
    if best is not None and failed is not None:
        room = min(room, 0.1 * (road.depth(failed.size) - road.depth(best.size)))
    if failed is not None:
        depth = min(depth, road.depth(failed.size) - room)
    return depth if best is None else max(depth, road.depth(best.size) + room)


def _wanted_kl(target: Target, tokens: int, trials: Sequence[Trial], best: Trial | None, left: int) -> float:
    """The log of the KL to aim at: the nearer what was measured, the nearer to the limit."""
    nearest = min(trials, key=lambda trial: _distance(target, trial), default=None)
    room = 0.02 + 0.1 * min(1.0 if nearest is None else _distance(target, nearest), 1.0)
    if best is None and left <= 2:
        room += 0.35 if left == 2 else 1.0
    limit = target.limit * math.exp(-room)
    if target.kind == "kl":
        return math.log(limit)
    # Of T tokens the interval of a mean is about 2 sqrt(2 KL / T) wide to either side, and |mean| is some KL.
    width = math.sqrt(8 / tokens)
    if nearest is not None and nearest.drift.kl > _NOTHING:
        expected = width * math.sqrt(nearest.drift.kl) + nearest.drift.kl
        limit *= min(max(expected / max(nearest.value("ppl"), _NOTHING), 1e-2), 1e2)
    return 2 * math.log((math.sqrt(width * width + 4 * limit) - width) / 2)


def _distance(target: Target, trial: Trial) -> float:
    return abs(math.log(max(trial.value(target.kind), _NOTHING) / target.limit))


def _find(road: Road, depth: float, low: Size, high: Size) -> tuple[Size, Size]:
    """The size of that depth between two others, twice; where sizes leap over it, both sides of the leap."""
    if depth >= road.depth(low) - _NEAR:
        return low, low
    if depth <= road.depth(high) + _NEAR and not (high == road.highest and road.exact):
        return high, high
    for turn in range(_LOOKS):
        part = 0.5
        span = road.depth(low) - road.depth(high)
        if turn % 2 and 0.0 < span < _STRAIGHT:  # along the line between the two, else in the middle: no curve is slow
            part = min(max((road.depth(low) - depth) / span, 0.1), 0.9)
        cap = round(max(low.cap, 1) * (max(high.cap, 1) / max(low.cap, 1)) ** part)
        if not low.cap < cap < high.cap:
            break
        middle = road.look(cap)
        if abs(road.depth(middle) - depth) <= _NEAR:
            return middle, middle
        low, high = (middle, high) if road.depth(middle) > depth else (low, middle)
    return low, high
