"""The right factors of all stacks that are given the same inputs, of one layer and its siblings, as one product.

q, k and v, or gate and up: what a step costs is calls, and one matrix is multiplied faster than its parts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch

from mfs_decompose.runtime.batch_plan import BatchPlan
from mfs_decompose.runtime.digits import Inputs, join_digits, to_digits
from mfs_decompose.runtime.integer_stacks import PIECE, Hidden, IntegerStack
from mfs_decompose.runtime.nibbles import spread


class Rights:
    """The right factors of some stacks: columns of h are those of the first stack, then those of the next."""

    def __init__(self, stacks: Sequence[IntegerStack]) -> None:
        self.stacks = tuple(stacks)
        vectors = [stack.vectors for stack in stacks]
        self._edges = list(pairwise(accumulate((one.scales.numel() for one in vectors), initial=0)))
        self._owners = torch.cat([one.owners for one in vectors])
        self._scales = torch.cat([one.scales for one in vectors])
        self._right_halves = _joined([one.right_halves for one in vectors], self._edges)
        orders = [
            torch.arange(start, stop) if one.order is None else one.order + start
            for one, (start, stop) in zip(vectors, self._edges, strict=True)
        ]
        self._order = None if all(one.order is None for one in vectors) else torch.cat(orders)
        halves = _joined([one.left_halves for one in vectors], self._edges)
        self._left_halves = None
        if halves is not None:
            # A column for each stack: one product gives the halves of all.
            self._left_halves = torch.zeros(halves.numel(), len(vectors))
            for at, (start, stop) in enumerate(self._edges):
                self._left_halves[start:stop, at] = halves[start:stop]
        self._last: tuple[BatchPlan, int, torch.Tensor, torch.Tensor] | None = None

    def shrink(self, plan: BatchPlan, x: Inputs) -> dict[IntegerStack, Hidden]:
        """`h = x right^T` of every stack, zero where a column is not of the row's own variant."""
        count = x.unit.shape[0]
        if self._last is None or self._last[0] is not plan or self._last[1] != count:
            self._last = plan, count, *self._of_rows(plan, count)
        _, _, scales, factors = self._last
        hidden_TR = join_digits(self._sums(x.codes))
        if self._right_halves is not None:
            hidden_TR.addr_(x.sums, self._right_halves)
        hidden_TR.mul_(scales)
        if self._order is not None:
            hidden_TR = hidden_TR.index_select(1, self._order)
        codes, unit = to_digits(hidden_TR)
        halves = None if self._left_halves is None else torch.mm(hidden_TR, self._left_halves).div_(unit)
        units = factors * unit.mul_(x.unit)
        return {
            stack: Hidden(codes[:, start:stop], None if halves is None else halves[:, at, None], units[:, at, None])
            for at, (stack, (start, stop)) in enumerate(zip(self.stacks, self._edges, strict=True))
        }

    def _of_rows(self, plan: BatchPlan, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales [T, R] of the rows, and what each stack's results are multiplied by [T, stacks]."""
        variants = plan.row_variants if len(plan.row_variants) == count else plan.variants * count
        rows = torch.tensor(variants, dtype=torch.int16).unsqueeze(1)
        powers = [[stack.vectors.powers.get(variant, 0) for stack in self.stacks] for variant in variants]
        factors = torch.tensor([[math.ldexp(1.0, power) for power in row] for row in powers], dtype=torch.float32)
        return (rows == self._owners) * self._scales, factors

    def _sums(self, digits: torch.Tensor) -> torch.Tensor:
        """int32 [D T, R].

        The large matrix comes first, as it is then read where it lies; of the second one a copy is made.
        """
        rank, length = self._scales.numel(), digits.shape[1]
        step = length if rank * length <= PIECE else max(64, PIECE // rank // 64 * 64)
        if len(self.stacks) == 1 and not self.stacks[0].joined[3].shape[0]:
            step = length
        sums = None
        for at in range(0, length, step):
            stop = min(at + step, length)
            part = digits if step >= length else digits[:, at:stop].contiguous()
            product = torch._int_mm(self._spread(at, stop), part.mT)
            sums = product if sums is None else sums.add_(product)
        assert sums is not None
        return sums.mT.contiguous()

    def _spread(self, start: int, stop: int) -> torch.Tensor:
        """Columns of all right factors, int8 [R, stop - start]; the codes themselves where nothing is to be joined."""
        codes, nibbles = self.stacks[0].joined[2:]
        if len(self.stacks) == 1 and not nibbles.shape[0]:
            return codes
        out = codes.new_empty(self._scales.numel(), stop - start)
        for stack, (first, last) in zip(self.stacks, self._edges, strict=True):
            codes, nibbles = stack.joined[2:]
            if nibbles.shape[0]:
                spread(codes[:, start:stop], nibbles[:, start:stop], out[first:last])
            else:
                out[first:last].copy_(codes[:, start:stop])
        return out


@dataclass(frozen=True, eq=False)
class Shrunk:
    """Inputs of a layer in digits, and h of stacks whose right factors they were multiplied by."""

    inputs: Inputs
    found: dict[IntegerStack, Hidden] = field(default_factory=dict)


def _joined(vectors: Sequence[torch.Tensor | None], edges: Sequence[tuple[int, int]]) -> torch.Tensor | None:
    """Vectors one after another, zeros for those that are not there; None where none is."""
    if all(one is None for one in vectors):
        return None
    return torch.cat(
        [torch.zeros(stop - start) if one is None else one for one, (start, stop) in zip(vectors, edges, strict=True)]
    )
