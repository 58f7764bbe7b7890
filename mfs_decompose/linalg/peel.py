"""How many directions a merged delta has, and what they are: found by whether the rounding boxes can be met.

Small merges show no gap in their spectrum, rounding noise fills it. But a fit with as many directions as the merge had
leaves few elements outside their boxes, and one with more shows the gap: the noise has become slack of the boxes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from mfs_decompose.linalg.boxes import delta_boxes, share_outside
from mfs_decompose.linalg.deround import Pair, deround
from mfs_decompose.linalg.margins import Merge
from mfs_decompose.linalg.svd import truncated_svd

_MET = 0.04  # of the elements outside: the boxes count as met; one direction short of rank 16 leaves 5 % and more
_NEARLY_MET = 0.2  # a dense delta leaves 25 % and more at any rank that a search can afford
_CHEAP = 20  # ranks up to which the search goes on all the same: in small merges noise hides half of the directions
_CODE_BITS = 7.0  # of a factor's value, about
_SAMPLE = 384
_SPECTRUM = 512
_SEARCH_STEPS = 8
_COOLING = 0.72  # tau from one step to the next


@dataclass(frozen=True)
class Problem:
    """A variant's matrix, its base's and the boxes of their difference, fp32 [O, I]."""

    delta: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    key: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.delta.shape[0], self.delta.shape[1]

    def sample(self, side: int) -> Problem:
        """At most `side` rows and columns, evenly spaced."""
        rows, columns = ((torch.arange(min(size, side)) * size) // min(size, side) for size in self.shape)
        parts = [values[rows][:, columns] for values in (self.delta, self.low, self.high)]
        return Problem(parts[0], parts[1], parts[2], self.key)

    def start(self, rank: int) -> Pair | None:
        """The rank's truncated SVD of the rounded delta."""
        found = truncated_svd(self.delta[None], rank, [self.key])[0]
        if found is None or found.rank == 0:
            return None
        return found.left.mT.contiguous(), found.right.mT.contiguous()


def make_problem(own_OI: torch.Tensor, base_OI: torch.Tensor, merge: Merge, key: int) -> Problem:
    """Of two matrices of one 16-bit float type; what is not finite bounds nothing."""
    low, high = delta_boxes(own_OI, base_OI, merge)
    delta = torch.nan_to_num(own_OI.to(torch.float32) - base_OI.to(torch.float32), 0.0, 0.0, 0.0)
    return Problem(delta, low, high, key)


def first_tau(problem: Problem) -> float:
    """A quarter of a common box: how far rounding moves an element."""
    width = (problem.high - problem.low).reshape(-1)
    sample = width[:: max(1, width.numel() // 65_536)]
    return max(float(sample[torch.isfinite(sample)].median()) / 4, 1e-36)


def least_error(problem: Problem, rank: int) -> float:
    """The rms error of the product at which coarser factors would cost as many bits as they save.

    A factor's value saves one bit when the error doubles. Bits to correct weights grow in proportion to it, by about
    3.3 a weight for an error as large as the box (measured). With p values a weight they balance at
    `1.44 p = 3.3 error / width`; half or twice that costs 2 % more.
    """
    rows, columns = problem.shape
    values = rank * (rows + columns) / (rows * columns)
    width = (problem.high - problem.low).reshape(-1)
    width = width[:: max(1, width.numel() // 65_536)].to(torch.float64)
    width = width.clamp(min=first_tau(problem) / 16)  # the boxes of a few zeros must not rule
    error = first_tau(problem)
    for _ in range(16):  # where the error exceeds the box, bits grow with its logarithm only
        error = 0.44 * values / float((1 / (width + 0.8 * error)).mean())
    return error


def cooling(first: float, last: float) -> list[float]:
    """Taus from `first` down to `last`."""
    steps = max(2, 1 + math.ceil(math.log(last / first) / math.log(_COOLING))) if last < first else 2
    return [first * (min(last, first) / first) ** (at / (steps - 1)) for at in range(steps)]


def find_rank(problem: Problem, most: int, hint: int | None = None) -> int | None:
    """The rank at which the boxes are met; None where none up to `most` does, or the search is not worth its cost.

    Fits samples of the matrix: at as many directions as stand out of the rounding noise, then at twice as many, and
    looks below for the least rank that is as good. `hint` is tried first: the tensors of one merge mostly share theirs.
    """
    rows, columns = problem.shape
    price = _CODE_BITS * (rows + columns) / (rows * columns)  # bits a weight of one direction
    limit = min(most, min(rows, columns) // 4)
    rank = hint or max(1, standing_out(problem.sample(_SPECTRUM)))
    while 1 <= rank <= limit:
        trial = _Trial(problem.sample(max(_SAMPLE, 8 * rank)), price)
        outside = trial.outside(rank)
        if outside <= _MET:
            return trial.least(rank)
        if hint is not None:
            return find_rank(problem, most)
        if rank == limit or (rank > _CHEAP and outside > _NEARLY_MET):
            return None
        rank = min(2 * rank, limit)
    return None


def standing_out(problem: Problem) -> int:
    """How many singular values lie above those of rounding noise: seldom more than a merge has directions."""
    width = torch.nan_to_num(problem.high - problem.low, 0.0, 0.0, 0.0).to(torch.float64)
    noise = width.square() / 12  # uniform within the box
    edge = noise.sum(dim=1).mean().sqrt() + noise.sum(dim=0).mean().sqrt()
    wide = problem.delta.to(torch.float64)
    short = wide if wide.shape[0] <= wide.shape[1] else wide.mT
    return int((torch.linalg.eigvalsh(short @ short.mT) > edge.square()).sum())


class _Trial:
    """Quick fits of one sample, at several ranks."""

    def __init__(self, sample: Problem, price: float) -> None:
        self._sample, self._price = sample, price
        self._found: dict[int, tuple[float, Pair | None]] = {}

    def outside(self, rank: int) -> float:
        """The share of elements outside their box."""
        return self._fit(rank)[0]

    def least(self, rank: int) -> int:
        """The rank that costs least, from a fit of `rank` downwards in strides that double, then halve."""
        pair = self._fit(rank)[1]
        assert pair is not None
        best, stride = self._cut(*pair), 1
        while best > stride and self._cost(best - stride) <= self._cost(best):
            best, stride = best - stride, 2 * stride
        while (stride := stride // 2) > 0:
            if best > stride and self._cost(best - stride) <= self._cost(best):
                best -= stride
        return best

    def _cut(self, left_OR: torch.Tensor, right_IR: torch.Tensor) -> int:
        """How many of the fit's directions cost least when the others are left out: too many rather than too few."""
        product = torch.zeros_like(self._sample.low)
        costs = []
        for at in range(left_OR.shape[1]):
            product.addr_(left_OR[:, at], right_IR[:, at])
            outside = float(((product < self._sample.low) | (product > self._sample.high)).to(torch.float64).mean())
            costs.append(self._price * (at + 1) + _residual_bits(outside))
        return 1 + min(range(len(costs)), key=costs.__getitem__)

    def _cost(self, rank: int) -> float:
        return self._price * rank + _residual_bits(self.outside(rank))

    def _fit(self, rank: int) -> tuple[float, Pair | None]:
        if rank not in self._found:
            self._found[rank] = _quick_fit(self._sample, rank)
        return self._found[rank]


def _quick_fit(problem: Problem, rank: int) -> tuple[float, Pair | None]:
    """What few steps leave outside, and the fit."""
    start = problem.start(rank)
    if start is None:
        return 1.0, None
    first = first_tau(problem)
    taus = [first * (1 / 12) ** (at / (_SEARCH_STEPS - 1)) for at in range(_SEARCH_STEPS)]
    pair = deround(problem.low, problem.high, start, taus)
    return share_outside(problem.low, problem.high, *pair), pair


def _residual_bits(outside: float) -> float:
    """About how many bits a weight it takes to correct them when so many lie outside; fitted on encoded tensors."""
    outside = min(outside, 0.999)
    if outside <= 0.0:
        return 0.0
    entropy = -outside * math.log2(outside) - (1 - outside) * math.log2(1 - outside)
    return 0.6 * entropy - 1.5 * math.log2(1 - outside)
