"""What drift to expect of an allocation: its own score, and a curve from scores to what was measured.

The score of a variant is what allocation minimises: energy left out, by weight, noise counted for what it does. It
orders the allocations of one variant; what a score comes to in nats depends on the fine-tune and on the text, so a
curve is measured, at a few sizes, and read between them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any


@dataclass(frozen=True)
class DriftCurve:
    """Measured points (score, KL in nats a token) by rising score, each above 0."""

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        assert self.points and all(score > 0 and kl > 0 for score, kl in self.points)
        assert all(one[0] < two[0] for one, two in pairwise(self.points))

    def kl(self, score: float) -> float:
        """The KL to expect at a score: a power law between two points, and beyond the first and last of them."""
        if score <= 0.0:
            return 0.0
        if len(self.points) == 1:
            return self.points[0][1] * score / self.points[0][0]
        (low, near), (high, far) = self._around([point[0] for point in self.points], score)
        power = max(math.log(far / near) / math.log(high / low), 0.0)
        return near * math.exp(power * math.log(score / low))

    def _around(self, scores: Sequence[float], score: float) -> tuple[tuple[float, float], tuple[float, float]]:
        at = min(max(bisect_right(scores, score), 1), len(scores) - 1)
        return self.points[at - 1], self.points[at]

    def to_json(self) -> list[Any]:
        return [[*point] for point in self.points]

    @classmethod
    def from_json(cls, document: Sequence[Sequence[float]]) -> DriftCurve:
        return cls(tuple((float(score), float(kl)) for score, kl in document))


def fit_curve(measured: Sequence[tuple[float, float]]) -> DriftCurve | None:
    """The curve through measured points; of equal scores the mean, and what measured nothing is left out.

    Where a higher score measured less, both get their geometric mean: noise is no reason for a curve to fall.
    """
    by_score: dict[float, list[float]] = {}
    for score, kl in measured:
        if score > 0.0 and kl > 0.0 and math.isfinite(score) and math.isfinite(kl):
            by_score.setdefault(score, []).append(kl)
    pools: list[tuple[list[float], float]] = []  # scores, and the mean ln KL that they share
    for score, kls in sorted(by_score.items()):
        scores, level = [score], math.log(math.fsum(kls) / len(kls))
        while pools and pools[-1][1] > level:
            before, higher = pools.pop()
            level = (higher * len(before) + level * len(scores)) / (len(before) + len(scores))
            scores = [*before, *scores]
        pools.append((scores, level))
    points = tuple((score, math.exp(level)) for scores, level in pools for score in scores)
    return DriftCurve(points) if points else None
