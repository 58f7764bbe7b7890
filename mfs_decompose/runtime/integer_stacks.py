"""Low-rank deltas of several variants as one product of integers: the codes are multiplied as they are stored.

`h = x right^T` with x as digits, h = 0 where a column is another variant's, `y += h left` with h as digits. Sums of
integers are exact, so that a row's bits do not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from mfs_decompose.runtime.batch_plan import BatchPlan
from mfs_decompose.runtime.digits import LONGEST, Inputs, has_exact_products, join_digits, to_digits
from mfs_decompose.runtime.nibbles import NIBBLE, spread
from mfs_decompose.runtime.resident_forms import Factor, LowRank
from mfs_decompose.runtime.stack_layout import Layout, Member, columns

MOST_RANK = 1024
"""Of one stack of several members."""
_PIECE = 1 << 21  # codes that are spread at a time
_SCALES = 2.0**60  # between this and its inverse no product of scales, codes and digits leaves fp32


@dataclass(eq=False)
class IntegerStack(Layout):
    """Joined are codes and nibbles of the left factors, then those of the right ones.

    Columns of h lie as the right factors are spread; vectors along them are of fp32.
    """

    _vectors: _Vectors | None = None
    _masked: tuple[BatchPlan | None, torch.Tensor] = (None, torch.empty(0))  # scales [T, R] of the last plan
    _alone: dict[int, list[IntegerStack]] = field(default_factory=dict)

    def prepare(self) -> None:
        self._vectors = _Vectors.of(self.members)
        self._masked, self._alone = (None, torch.empty(0)), {}

    def add(self, plan: BatchPlan, x_TI: torch.Tensor, x: Inputs, y_TO: torch.Tensor) -> None:
        """Add the deltas to `y`, fp32, in place; `x` is `x_TI` in digits."""
        assert self._vectors is not None
        if not plan.uniform:
            if self._masked[0] is not plan:
                self._masked = plan, self._vectors.of_rows(plan)
            self._add(x, self._masked[1], y_TO)
            return
        # Where all rows are one variant's, its own factors are less to read.
        for stack in self._of(plan.variants[0]):
            assert stack._vectors is not None
            stack._add(x, stack._vectors.scales, y_TO)

    def _of(self, variant: int) -> list[IntegerStack]:
        if variant not in self._alone:
            own = [member for member in self.members if member.variant == variant]
            self._alone[variant] = [IntegerStack(self.start, self.stop, [one], joined=one.tensors) for one in own]
            for stack in self._alone[variant]:
                stack.prepare()
        return self._alone[variant]

    def _add(self, x: Inputs, scales: torch.Tensor, y_TO: torch.Tensor) -> None:
        left, left_nibbles, right, right_nibbles = self.joined
        known = self._vectors
        assert known is not None
        hidden_TR = join_digits(_times_transpose(x.codes, right, right_nibbles))
        if known.right_halves is not None:
            hidden_TR.addr_(x.sums, known.right_halves)
        hidden_TR.mul_(scales)
        if known.order is not None:
            hidden_TR = hidden_TR.index_select(1, known.order)
        codes, unit = to_digits(hidden_TR)
        halves = None if known.left_halves is None else torch.mv(hidden_TR, known.left_halves).unsqueeze(1).div_(unit)
        unit.mul_(x.unit)
        length = left.shape[1]
        step = length if not left_nibbles.shape[0] else max(64, _PIECE // known.scales.numel() // 64 * 64)
        if length <= step:
            _add_sums(codes, spread(left, left_nibbles), halves, unit, columns(y_TO, self.start, self.stop))
            return
        for at in range(0, length, step):
            stop = min(at + step, length)
            part = spread(left[:, at:stop], left_nibbles[:, at:stop])
            _add_sums(codes, part, halves, unit, columns(y_TO, self.start + at, self.start + stop))


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


def _times_transpose(digits: torch.Tensor, codes: torch.Tensor, nibbles: torch.Tensor) -> torch.Tensor:
    """int32 [D T, R].

    The large matrix comes first, as it is then read where it lies; of the second one a copy is made.
    """
    length, rank = codes.shape[1], codes.shape[0] + 2 * nibbles.shape[0]
    if not nibbles.shape[0] or rank * length <= _PIECE:
        return torch._int_mm(spread(codes, nibbles), digits.mT).mT.contiguous()
    step, sums = max(64, _PIECE // rank // 64 * 64), None
    for at in range(0, length, step):
        part = spread(codes[:, at : at + step], nibbles[:, at : at + step])
        product = torch._int_mm(part, digits[:, at : at + step].contiguous().mT)
        sums = product if sums is None else sums.add_(product)
    assert sums is not None
    return sums.mT.contiguous()


def _add_sums(
    digits: torch.Tensor, codes: torch.Tensor, halves: torch.Tensor | None, unit: torch.Tensor, y_TO: torch.Tensor
) -> None:
    sums = join_digits(torch._int_mm(digits, codes))
    if halves is not None:
        sums.add_(halves)
    y_TO.add_(sums.mul_(unit))


@dataclass(frozen=True, eq=False)
class _Vectors:
    """What goes with the columns of h.

    Attributes:
        owners: int16 [R], variants.
        scales: of both factors together.
        right_halves: what each code of the right factors lacks, None where nothing.
        left_halves: the same of the left ones, as those are spread.
        order: the columns as the left factors are spread, None where that is as the right ones are.
    """

    owners: torch.Tensor
    scales: torch.Tensor
    right_halves: torch.Tensor | None
    left_halves: torch.Tensor | None
    order: torch.Tensor | None

    @classmethod
    def of(cls, members: Sequence[Member]) -> _Vectors:
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
        scales = torch.cat([_scales(one.form) for one in members]) / (times[0] * times[1])
        place = torch.empty_like(right)
        place[right] = torch.arange(rows)
        return cls(
            owners[right],
            scales[right],
            halves[1][right] if bool(halves[1].any()) else None,
            halves[0][left] if bool(halves[0].any()) else None,
            None if torch.equal(left, right) else place[left],
        )

    def of_rows(self, plan: BatchPlan) -> torch.Tensor:
        """Scales [T, R], zero where a column is not of the row's own variant."""
        rows = torch.tensor(plan.row_variants, dtype=torch.int16).unsqueeze(1)
        return (rows == self.owners) * self.scales


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
