"""Low-rank deltas of several variants as one product: factors lie side by side, and a row sees those of its own.

`h = x right^T`, h = 0 where a column is another variant's, `y += h left`: three calls for any number of variants, where
what a step costs is calls and not arithmetic. Zeros add nothing, and the shapes are those of the step and of the stack
alone: which variants the other rows belong to changes no bit of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch.nn import functional

from mfs_decompose.runtime.batch_plan import BatchPlan
from mfs_decompose.runtime.changes import Delta
from mfs_decompose.runtime.integer_stacks import MOST_RANK as MOST_INTEGER_RANK
from mfs_decompose.runtime.integer_stacks import Hidden, IntegerStack, integer_member
from mfs_decompose.runtime.resident_forms import Factor, LowRank
from mfs_decompose.runtime.stack_layout import Layout, Member, columns

S = TypeVar("S", bound=Layout)

MOST_ROWS = 64
"""Of a step whose deltas are added together: every row is multiplied by the factors of all, which many rows feel."""
MOST_RANK = 64
"""Of one stack; a variant of more than half of it stays alone, where one has nothing to share calls with."""


@dataclass(eq=False)
class _Stack(Layout):
    """Joined are the left factors [N, O] and the right ones [N, I].

    Attributes:
        owners: variant and rank of each, which says whose column is whose.
    """

    owners: tuple[tuple[int, int], ...] = ()
    _foreign: tuple[BatchPlan, torch.Tensor] | None = None  # of the last plan

    def prepare(self) -> None:
        self.owners = tuple((member.variant, member.rank) for member in self.members)
        self._foreign = None

    def add(self, plan: BatchPlan, x_TI: torch.Tensor, y_TO: torch.Tensor) -> None:
        """Add the deltas to `y`, fp32, in place."""
        left, right = self.joined
        hidden_TR = functional.linear(x_TI, right)
        if self._foreign is None or self._foreign[0] is not plan:
            self._foreign = plan, plan.foreign(self.owners, x_TI.device)
        hidden_TR.masked_fill_(self._foreign[1], 0.0)
        columns(y_TO, self.start, self.stop).addmm_(hidden_TR, left)


class Stacks:
    """The stacks of one linear layer."""

    def __init__(self) -> None:
        self._stacks: list[_Stack] = []
        self._integers: list[IntegerStack] = []

    def put(self, variant: int, delta: Delta, in_out: bool) -> Delta:
        """Take in what can lie beside others; what cannot is given back, as a delta of fewer forms."""
        rest = []
        for placed in delta.placed:
            form, start, stop = placed.form, placed.start, placed.stop
            if isinstance(form, LowRank) and in_out != delta.transposed and (start, stop) == (0, delta.rows):
                form, stop = form.transposed, form.right.codes.shape[1]
            elif not isinstance(form, LowRank) or in_out != delta.transposed:
                # Places are inputs there: those of all of them are a product like any other.
                rest.append(placed)
                continue
            if (member := _member(variant, form)) is not None:
                _stack_for(self._stacks, _Stack, start, stop, member.rank, MOST_RANK).take(member)
            elif (member := integer_member(variant, form)) is not None:
                _stack_for(self._integers, IntegerStack, start, stop, member.rank, MOST_INTEGER_RANK).take(member)
            else:
                rest.append(placed)
        return Delta(tuple(rest), delta.rows, delta.transposed)

    def drop(self, variant: int) -> None:
        """Give a variant's factors memory of their own again, and that of the others no longer hold them."""
        for stack in (*self._stacks, *self._integers):
            if variant in stack.variants:
                stack.drop(variant)
        self._stacks = [stack for stack in self._stacks if stack.members]
        self._integers = [stack for stack in self._integers if stack.members]

    def choose(self, plan: BatchPlan) -> Chosen | None:
        """The stacks of a plan's variants; None where all rows are one's whose own fp32 factors are less to read."""
        if plan.uniform and any(plan.variants[0] in stack.variants for stack in self._stacks):
            return None
        floats = [stack for stack in self._stacks if not stack.variants.isdisjoint(plan.variants)]
        integers = [stack for stack in self._integers if not stack.variants.isdisjoint(plan.variants)]
        if plan.uniform:
            integers = [own for stack in integers for own in stack.of(plan.variants[0])]
        return Chosen(floats, integers)


class Chosen(NamedTuple):
    """The stacks that add to the rows of a plan."""

    floats: list[_Stack]
    integers: list[IntegerStack]

    def add(
        self, plan: BatchPlan, x_TI: torch.Tensor, hidden: Mapping[IntegerStack, Hidden], y_TO: torch.Tensor
    ) -> None:
        """Add the deltas to `y`, fp32, in place, of all rows of the plan; `hidden` is of all `integers`."""
        for stack in self.floats:
            stack.add(plan, x_TI, y_TO)
        for integers in self.integers:
            integers.expand(hidden[integers], y_TO)


def _stack_for(stacks: list[S], kind: type[S], start: int, stop: int, rank: int, most: int) -> S:
    for stack in stacks:
        if (stack.start, stack.stop) == (start, stop) and stack.rank + rank <= most:
            return stack
    stacks.append(kind(start, stop))
    return stacks[-1]


def _member(variant: int, form: LowRank) -> Member | None:
    """A form whose factors a product takes as they are, and that nothing else lies in the memory of."""
    if form.left.rank > MOST_RANK // 2 or not (_fits(form.left) and _fits(form.right)):
        return None
    return Member(variant, form, (form.left.codes, form.right.codes))


def _fits(factor: Factor) -> bool:
    codes = factor.codes
    if factor.scales is not None or factor.half or codes.dtype != torch.float32:
        return False
    # Zero times infinity would be a neighbour's.
    return codes.untyped_storage().nbytes() == codes.nbytes and bool(torch.isfinite(codes).all())
