"""Low-rank deltas of several variants as one product: factors lie side by side, and a row sees those of its own.

`h = x right^T`, h = 0 where a column is another variant's, `y += h left`: three calls for any number of variants, where
what a step costs is calls and not arithmetic. Zeros add nothing, and the shapes are those of the step and of the stack
alone: which variants the other rows belong to changes no bit of a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.nn import functional

from mfs_decompose.runtime.batch_plan import BatchPlan
from mfs_decompose.runtime.changes import Delta
from mfs_decompose.runtime.resident_forms import Factor, LowRank

MOST_ROWS = 64
"""Of a step whose deltas are added together: every row is multiplied by the factors of all, which many rows feel."""
MOST_RANK = 64
"""Of one stack; a variant of more than half of it stays alone, where one has nothing to share calls with."""


@dataclass(frozen=True, eq=False)
class _Member:
    """Factors left [R, O] and right [R, I]: the very tensors that the variant's form holds."""

    variant: int
    left: torch.Tensor
    right: torch.Tensor

    @property
    def rank(self) -> int:
        return self.left.shape[0]

    def own(self) -> None:
        """Take the factors out of a memory that others lie in."""
        with torch.inference_mode():
            for factor in (self.left, self.right):
                if factor.untyped_storage().nbytes() > factor.nbytes:
                    _hold(factor, factor.clone())


@dataclass(eq=False)
class _Stack:
    """Members whose deltas are of outputs start..stop; left [N, O] and right [N, I] hold all their factors.

    Attributes:
        owners: variant and rank of each, which says whose column is whose.
    """

    start: int
    stop: int
    members: list[_Member] = field(default_factory=list)
    owners: tuple[tuple[int, int], ...] = ()
    variants: frozenset[int] = frozenset()
    left: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    right: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def rank(self) -> int:
        return sum(member.rank for member in self.members)

    def lay_out(self) -> None:
        """Join the factors of the members, whose tensors become views: nothing is held twice."""
        self.owners = tuple((member.variant, member.rank) for member in self.members)
        self.variants = frozenset(member.variant for member in self.members)
        if not self.members:
            return
        # Inside, tensors made under inference mode and others may be written to alike.
        with torch.inference_mode():
            self.left, self.right = (
                tensors[0] if len(tensors) == 1 else torch.cat(tensors)
                for tensors in zip(*((member.left, member.right) for member in self.members), strict=True)
            )
            if len(self.members) == 1:
                return
            at = 0
            for member in self.members:
                stop = at + member.rank
                _hold(member.left, self.left[at:stop])
                _hold(member.right, self.right[at:stop])
                at = stop


class Stacks:
    """The stacks of one linear layer."""

    def __init__(self) -> None:
        self._stacks: list[_Stack] = []

    def put(self, variant: int, delta: Delta, in_out: bool) -> Delta:
        """Take in what can lie beside others; what cannot is given back, as a delta of fewer forms."""
        rest = []
        for placed in delta.placed:
            found = _fitting(placed.form)
            start, stop = placed.start, placed.stop
            if found is not None and in_out != delta.transposed:
                # Places are inputs here: those of all of them are a product like any other.
                found = found.transposed if (start, stop) == (0, delta.rows) else None
                start, stop = 0, 0 if found is None else found.left.codes.shape[1]
            if found is None:
                rest.append(placed)
                continue
            member = _Member(variant, found.left.codes, found.right.codes)
            stack = self._stack_for(start, stop, member.rank)
            stack.members.append(member)
            stack.lay_out()
        return Delta(tuple(rest), delta.rows, delta.transposed)

    def drop(self, variant: int) -> None:
        """Give a variant's factors memory of their own again, and that of the others no longer hold them."""
        for stack in self._stacks:
            if variant not in stack.variants:
                continue
            left = [member for member in stack.members if member.variant != variant]
            alone = left if len(left) == 1 else []
            for member in (*alone, *(member for member in stack.members if member.variant == variant)):
                member.own()
            stack.members = left
            stack.lay_out()
        self._stacks = [stack for stack in self._stacks if stack.members]

    def add(self, plan: BatchPlan, x_TI: torch.Tensor, y_TO: torch.Tensor) -> None:
        """Add the deltas to `y`, fp32, in place, of all rows of the plan."""
        for stack in self._stacks:
            if stack.variants.isdisjoint(plan.variants):
                continue
            hidden_TR = functional.linear(x_TI, stack.right)
            hidden_TR.masked_fill_(plan.foreign(stack.owners, x_TI.device), 0.0)
            whole = stack.stop - stack.start == y_TO.shape[1]
            (y_TO if whole else y_TO[:, stack.start : stack.stop]).addmm_(hidden_TR, stack.left)

    def _stack_for(self, start: int, stop: int, rank: int) -> _Stack:
        for stack in self._stacks:
            if (stack.start, stack.stop) == (start, stop) and stack.rank + rank <= MOST_RANK:
                return stack
        self._stacks.append(_Stack(start, stop))
        return self._stacks[-1]


def _hold(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Let a tensor be what another is, for all who have it, and let go of the memory that it had."""
    tensor.set_(other.untyped_storage(), other.storage_offset(), other.size(), other.stride())


def _fitting(form: object) -> LowRank | None:
    """A low-rank form whose factors a product takes as they are, and that nothing else lies in the memory of."""
    if not isinstance(form, LowRank) or form.left.codes.shape[0] > MOST_RANK // 2:
        return None
    return form if _fits(form.left) and _fits(form.right) else None


def _fits(factor: Factor) -> bool:
    codes = factor.codes
    if factor.scales is not None or factor.half or codes.dtype != torch.float32:
        return False
    # Zero times infinity would be a neighbour's.
    return codes.untyped_storage().nbytes() == codes.nbytes and bool(torch.isfinite(codes).all())
