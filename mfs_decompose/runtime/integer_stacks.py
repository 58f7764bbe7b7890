"""Low-rank deltas of several variants as one product of integers: the codes are multiplied as they are stored.

`h = x right^T` with x as digits (`integer_rights`), h = 0 where a column is another variant's, `y += h left` with h as
digits. Sums of integers are exact, so that a row's bits do not depend on its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from mfs_decompose.runtime.digits import LONGEST, has_exact_products, join_digits
from mfs_decompose.runtime.nibbles import NIBBLE, spread
from mfs_decompose.runtime.resident_forms import Factor, LowRank
from mfs_decompose.runtime.stack_layout import Layout, Member, columns

MOST_RANK = 1024
"""Of one stack of several members."""
PIECE = 1 << 21
"""Codes that are spread at a time."""
_SCALES = 2.0**60  # between this and its inverse no product of scales, codes and digits leaves fp32
_MOST_POWER = 100


class Hidden(NamedTuple):
    """h of one stack: digits int8 [DIGITS * T, R] in the order of its left factors, and what a row of them counts.

    halves [T, 1] is what the halves of the left codes come to, in units; None where codes have none.
    """

    codes: torch.Tensor
    halves: torch.Tensor | None
    unit: torch.Tensor


@dataclass(eq=False)
class IntegerStack(Layout):
    """Joined are codes and nibbles of the left factors, then those of the right ones.

    Columns of h lie as the right factors are spread; vectors along them are of fp32.
    """

    _vectors: Vectors | None = None
    _alone: dict[int, list[IntegerStack]] = field(default_factory=dict)

    @property
    def vectors(self) -> Vectors:
        assert self._vectors is not None, "it has members"
        return self._vectors

    def prepare(self) -> None:
        self._vectors = Vectors.of(self.members)
        self._alone = {}

    def of(self, variant: int) -> list[IntegerStack]:
        """A variant's own factors: less to read where all rows are its."""
        if variant not in self._alone:
            own = [member for member in self.members if member.variant == variant]
            variants = frozenset([variant])
            self._alone[variant] = [
                IntegerStack(self.start, self.stop, [one], variants, joined=one.tensors) for one in own
            ]
            for stack in self._alone[variant]:
                stack.prepare()
        return self._alone[variant]

    def expand(self, hidden: Hidden, y_TO: torch.Tensor) -> None:
        """`y += h left`, fp32, in place."""
        left, nibbles = self.joined[:2]
        length = left.shape[1]
        step = length if not nibbles.shape[0] else max(64, PIECE // hidden.codes.shape[1] // 64 * 64)
        for at in range(0, length, step):
            stop = min(at + step, length)
            whole = stop - at == length
            part = spread(left, nibbles) if whole else spread(left[:, at:stop], nibbles[:, at:stop])
            sums = join_digits(torch._int_mm(hidden.codes, part))
            if hidden.halves is not None:
                sums.add_(hidden.halves)
            columns(y_TO, self.start + at, self.start + stop).add_(sums.mul_(hidden.unit))


def integer_member(variant: int, form: LowRank) -> Member | None:
    """A form as a member of such a stack; None where it cannot be one.

    Its codes are int8 and its scales of whole directions, sums stay within int32, and nothing else lies in its memory.
    """
    sides = (form.left, form.right)
    if not has_exact_products() or form.left.rank > LONGEST or not all(map(_fits, sides)):
        return None
    tensors = []
    for side in sides:
        none = side.codes.new_empty(0, side.codes.shape[1])
        tensors += [side.codes, none if side.nibbles is None else side.nibbles]
    return Member(variant, form, tuple(tensors))


def _fits(factor: Factor) -> bool:
    codes, nibbles, scales = factor.codes, factor.nibbles, factor.scales
    if codes.dtype != torch.int8 or codes.device.type != "cpu" or not factor.by_direction:
        return False
    if not 0 < codes.shape[1] <= LONGEST or any(
        one.untyped_storage().nbytes() != one.nbytes for one in (codes, nibbles) if one is not None
    ):
        return False
    sizes = torch.ones(1) if scales is None else scales.abs()
    return bool(((sizes == 0) | ((sizes > 1 / _SCALES) & (sizes < _SCALES))).all())


@dataclass(frozen=True, eq=False)
class Vectors:
    """What goes with the columns of h.

    Attributes:
        owners: int16 [R], variants.
        scales: of both factors together, over 2^power of the column's variant.
        powers: by variant, such that its h is about 1 where x is: other stacks' h may share its unit then.
        right_halves: what each code of the right factors lacks, None where nothing.
        left_halves: the same of the left ones, as those are spread.
        order: the columns as the left factors are spread, None where that is as the right ones are.
    """

    owners: torch.Tensor
    scales: torch.Tensor
    powers: dict[int, int]
    right_halves: torch.Tensor | None
    left_halves: torch.Tensor | None
    order: torch.Tensor | None

    @classmethod
    def of(cls, members: Sequence[Member]) -> Vectors:
        starts, rows = [], 0
        for member in members:
            starts.append(rows)
            rows += member.rank
        # Per member first, then as each side is spread.
        sides = [[one.form.left for one in members], [one.form.right for one in members]]
        left, right = (_spread_order(side, starts) for side in sides)
        times = [torch.cat([_times(factor) for factor in side]) for side in sides]
        halves = [torch.cat([_halves(factor) for factor in side]) for side in sides]
        owners = torch.cat([torch.full((one.rank,), one.variant, dtype=torch.int16) for one in members])
        scales = [_scales(one.form) for one in members]
        sizes = [_size(one.form.right, own) for one, own in zip(members, scales, strict=True)]
        powers = {
            variant: _power(max(size for one, size in zip(members, sizes, strict=True) if one.variant == variant))
            for variant in {one.variant for one in members}
        }
        even = [own * math.ldexp(1.0, -powers[one.variant]) for one, own in zip(members, scales, strict=True)]
        place = torch.empty_like(right)
        place[right] = torch.arange(rows)
        return cls(
            owners[right],
            (torch.cat(even) / (times[0] * times[1]))[right],
            powers,
            halves[1][right] if bool(halves[1].any()) else None,
            halves[0][left] if bool(halves[0].any()) else None,
            None if torch.equal(left, right) else place[left],
        )


def _spread_order(factors: Sequence[Factor], starts: Sequence[int]) -> torch.Tensor:
    """Directions, counted member after member, as codes and nibbles of all are spread."""
    found: list[list[int]] = [[], [], []]
    for factor, start in zip(factors, starts, strict=True):
        whole, pairs = factor.codes.shape[0], 0 if factor.nibbles is None else factor.nibbles.shape[0]
        found[0] += range(start, start + whole)
        found[1] += range(start + whole, start + whole + pairs)
        found[2] += range(start + whole + pairs, start + whole + 2 * pairs)
    return torch.tensor([at for part in found for at in part])


def _times(factor: Factor) -> torch.Tensor:
    """How many times as large as stored codes are when they are spread."""
    times = torch.ones(factor.rank)
    times[factor.codes.shape[0] :] = NIBBLE
    return times


def _halves(factor: Factor) -> torch.Tensor:
    return _times(factor) * (0.5 if factor.half else 0.0)


def _scales(form: LowRank) -> torch.Tensor:
    scales = torch.ones(form.left.rank)
    for side in (form.left, form.right):
        if side.scales is not None:
            scales = scales * side.scales[:, 0]
    return scales


def _size(factor: Factor, scales: torch.Tensor) -> float:
    """The largest code, scaled."""
    return float((factor.whole_codes().to(torch.int16).abs().amax(dim=1) * scales.abs()).max())


def _power(size: float) -> int:
    return max(-_MOST_POWER, min(_MOST_POWER, math.frexp(size)[1]))
