"""The base that leaves least to the variants' low-rank deltas, by alternating minimisation.

For K weights `W_k` of one matrix and ranks `r_k`, minimise over W

    f(W) = sum_k tail_k(W_k - W),    tail_k(M) = ||M - T_k(M)||^2,

with T_k the truncation to r_k directions. Given the truncations, the best W moves by the mean of the residuals; given
W, the truncations are SVDs. Either step never raises f. Since that mean is a gradient step, moves are over-relaxed, and
fall back to the plain one where f would rise. K = 2 has a closed form: of `W_1 - W_2` the base takes half of what no
two truncations can hold, and the strongest directions are shared out between the two.

Against the grid that the base is stored on, the start it came from may be the better one; the best as stored is kept,
so that f is never above that of the rounded mean, or of a base that was given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from mfs_decompose.base_extraction.deltas import delta_rows, mean_rows
from mfs_decompose.linalg.svd import Truncation, truncated_svd
from mfs_decompose.linalg.warm import warm_svd

_RELAXED = 1.8
_ENOUGH = 1e-4  # relative decrease of f
_TURNS = 60


@dataclass(frozen=True)
class Refined:
    """The base as stored, what it leaves beyond the ranks, where it came from, and after how many turns."""

    base: torch.Tensor
    left: float
    start: str
    turns: int


def refine(
    weights: Sequence[torch.Tensor],
    ranks: Sequence[int],
    dtype: torch.dtype,
    key: int,
    known: torch.Tensor | None = None,
) -> Refined | None:
    """The base of K finite matrices [O, I], rounded to `dtype`; None where a factorisation failed.

    `key` is that of the random sketches. Memory: K weights, K truncations, and four matrices of fp64.
    """
    assert len(weights) == len(ranks) and len(weights) > 0
    problem = _Problem(weights, ranks, key)
    if len(weights) == 1:
        return problem.stored(weights[0].to(dtype), "variant 1", 0)
    given = {} if known is None else {"known": known.to(dtype)}
    plain = {"mean": mean_rows(weights, dtype), **given}
    found = [problem.stored(base, name, 0) for name, base in plain.items()]
    if len(weights) == 2:
        found.append(problem.stored(_between(problem).to(dtype), "closed form", 0))
    elif any(ranks):
        for name, point in problem.starts(plain):
            moved, turns = _alternate(problem, point)
            found.append(problem.stored(moved.base.to(dtype), name, turns))
            found.append(problem.stored(_settle(problem, moved, dtype), name, turns))
    sound = [one for one in found if one is not None]
    return min(sound, key=lambda one: one.left) if sound else None


@dataclass(frozen=True)
class _Point:
    """A base in fp64 with the truncations of what it leaves of each variant."""

    base: torch.Tensor
    deltas: tuple[Truncation, ...]
    left: float


@dataclass(frozen=True)
class _Problem:
    weights: Sequence[torch.Tensor]
    ranks: Sequence[int]
    key: int

    def at(self, base: torch.Tensor, near: _Point | None = None, above: float = float("inf")) -> _Point | None:
        """f and its truncations at a base, from warm subspaces where there are; None once f exceeds `above`."""
        found: list[Truncation] = []
        left = 0.0
        for index, (own, rank) in enumerate(zip(self.weights, self.ranks, strict=True)):
            delta = delta_rows(own, base)
            if near is None or not near.deltas[index].rank:
                one = truncated_svd(delta[None], rank, [self.key])[0]
            else:
                one = warm_svd(delta[None], rank, [self.key], [near.deltas[index]])[0]
            if one is None:
                return None
            found.append(one)
            left += one.residual()
            if left > above:
                return None
        return _Point(base, tuple(found), left)

    def stored(self, base: torch.Tensor, start: str, turns: int) -> Refined | None:
        point = self.at(base.to(torch.float64))
        return None if point is None else Refined(base, point.left, start, turns)

    def starts(self, plain: dict[str, torch.Tensor]) -> list[tuple[str, _Point]]:
        """The best of the mean, a base that was given and each variant; and the mean, which often leads further."""
        mean = self.at(plain["mean"].to(torch.float64))
        best: tuple[str, _Point] | None = None
        for name, base in (*plain.items(), *((f"variant {at + 1}", own) for at, own in enumerate(self.weights))):
            point = self.at(base.to(torch.float64), above=best[1].left if best else float("inf"))
            best = (name, point) if point is not None else best
        found = [] if best is None else [best]
        return [*found, ("mean", mean)] if mean is not None and best is not None and best[0] != "mean" else found

    def residuals(self, point: _Point) -> Iterator[torch.Tensor]:
        """What the truncations leave of each variant, fp64."""
        for own, low in zip(self.weights, point.deltas, strict=True):
            yield own.to(torch.float64) - point.base - (low.left.mT @ low.right).to(torch.float64)


def _alternate(problem: _Problem, point: _Point) -> tuple[_Point, int]:
    for turn in range(_TURNS):
        if point.left == 0.0:
            return point, turn
        step = sum(problem.residuals(point), torch.zeros_like(point.base)) / len(problem.weights)
        moved = problem.at(point.base + _RELAXED * step, point, point.left)
        if moved is None:
            moved = problem.at(point.base + step, point, point.left)
        if moved is None:
            return point, turn
        enough = point.left - moved.left <= _ENOUGH * point.left
        point = moved
        if enough:
            return point, turn + 1
    return point, _TURNS


def _settle(problem: _Problem, point: _Point, dtype: torch.dtype) -> torch.Tensor:
    """Round to the grid that the base is stored on, and move on from there, until it stays where it is.

    On the grid the noise of one element no longer hides in the base, and truncations agree better.
    """
    base = point.base.to(dtype)
    for _ in range(10):
        on_grid = problem.at(base.to(torch.float64), point)
        if on_grid is None:
            break
        step = sum(problem.residuals(on_grid), torch.zeros_like(point.base)) / len(problem.weights)
        moved = (on_grid.base + step).to(dtype)
        if torch.equal(moved, base):
            break
        base = moved
    return base


def _between(problem: _Problem) -> torch.Tensor:
    """The closed form for two: the directions that can be held go to one and the other in turn."""
    one, other = (weight.to(torch.float64) for weight in problem.weights)
    total = sum(problem.ranks)
    found = truncated_svd(delta_rows(*problem.weights)[None], total, [problem.key])[0]
    mean = (one + other) / 2
    if found is None:
        return mean
    # W = W_1 - L_1 - N / 2 and W_1 - W_2 = L_1 - L_2 + N, so W = mean - (L_1 + L_2) / 2.
    order = _turns(min(problem.ranks[0], found.rank), min(problem.ranks[1], found.rank), found.rank)
    signs = torch.tensor(order, dtype=torch.float64).unsqueeze(1)
    return mean - (signs * found.left.to(torch.float64)).mT @ found.right.to(torch.float64) / 2


def _turns(first: int, second: int, total: int) -> list[float]:
    """+1 for a direction of the first variant's delta and -1 for one of the second's, strongest first."""
    signs: list[float] = []
    taken = [0, 0]
    for _ in range(total):
        goes = 0 if taken[0] < first and (taken[0] <= taken[1] or taken[1] >= second) else 1
        taken[goes] += 1
        signs.append(1.0 if goes == 0 else -1.0)
    return signs
