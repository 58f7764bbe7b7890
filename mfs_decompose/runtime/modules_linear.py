"""Linear layers that serve every variant: the base's product once, then what each variant's rows get.

Few rows go through a program of the ops, in which the deltas of all groups are one call; many go group by group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from mfs_decompose.errors import UsageError
from mfs_decompose.runtime.batch_plan import FEW_ROWS, BatchPlan, Group, PlanSlot
from mfs_decompose.runtime.changes import Change, Delta
from mfs_decompose.runtime.ops.dispatch import Ops, Part, Program, Taken
from mfs_decompose.runtime.resident_forms import LowRank, Placed, Rows


class _Way(NamedTuple):
    """The groups whose variants change a layer; the program that adds most of that, None for none; and the groups of
    which something is left, with the deltas of that."""

    changed: list[Group]
    program: Program | None
    apart: list[Group]
    rest: Mapping[int, Delta]


class FamilyLinear(nn.Module):
    """nn.Linear, or transformers' Conv1D, of which each variant has its own weight and bias."""

    def __init__(
        self,
        original: nn.Module,
        slot: PlanSlot,
        ops: Ops,
        *,
        stored_in_out: bool = False,
        head: bool = False,
        outputs: int = 0,
    ) -> None:
        """
        Args:
            stored_in_out: the weight is [I, O].
            head: its rows are those whose logits are asked for, its outputs the tokens.
            outputs: of a head, the tokens of the largest vocabulary, where that is not the base's.
        """
        super().__init__()
        self.original = original
        self._slot, self._ops = slot, ops
        self._deltas: dict[int, Delta] = {}
        self._biases: dict[int, torch.Tensor] = {}
        self._served: set[int] = set()
        self._last: tuple[BatchPlan, int, _Way] | None = None
        self._in_out, self._head = stored_in_out, head
        assert isinstance(original.weight, torch.Tensor)
        bias = original.bias
        assert bias is None or isinstance(bias, torch.Tensor)
        self._bias = (bias,)  # in a tuple: as an attribute it would be a parameter of this module too
        own = original.weight.shape[1 if stored_in_out else 0]
        self._outputs = max(own, outputs) if head else own

    def attach(self, variant: int, change: Change) -> None:
        if change.matrix is not None:
            self._deltas[variant] = change.matrix
        if change.bias is not None:
            self._biases[variant] = change.bias
        self._note()

    def detach(self, variant: int) -> None:
        self._deltas.pop(variant, None)
        self._biases.pop(variant, None)
        self._note()

    def _note(self) -> None:
        self._served = self._deltas.keys() | self._biases.keys()
        self._last = None

    @property
    def weight(self) -> torch.Tensor:
        """The base's weight, which code of the model may ask for."""
        weight = self.original.weight
        assert isinstance(weight, torch.Tensor)
        return weight

    @property
    def bias(self) -> torch.Tensor | None:
        return self._bias[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.original(x)
        plan = self._slot.logits_plan if self._head else self._slot.plan
        if self._outputs > y.shape[-1]:
            y = functional.pad(y, (0, self._outputs - y.shape[-1]))
        way = self._way(plan, x.numel() // x.shape[-1])
        if not way.changed:
            return y
        if y.requires_grad:
            raise UsageError(
                "expected the runtime to answer without gradients, found them switched on",
                hint="call the model inside `with torch.inference_mode():`",
            )
        x_TI, y_TO = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        if way.program is None:
            self._add(way.changed, self._deltas, x_TI, y_TO)
            return y
        whole = y_TO if y.dtype == torch.float32 else y_TO.to(torch.float32)
        way.program.add(x_TI.to(torch.float32).contiguous(), whole)
        self._add(way.apart, way.rest, x_TI, whole)
        if whole is not y_TO:
            y_TO.copy_(whole)
        return y

    def _way(self, plan: BatchPlan, rows: int) -> _Way:
        """How rows under a plan are answered; that of the last plan is kept, as steps of decoding are alike."""
        if self._last is None or self._last[0] is not plan or self._last[1] != rows:
            changed = [group for group in plan.over(rows) if group.variant in self._served]
            way = _Way(changed, None, changed, self._deltas)
            self._last = plan, rows, self._few(changed) if rows <= FEW_ROWS else way
        return self._last[2]

    def _few(self, changed: list[Group]) -> _Way:
        """How few rows are answered: what a program takes of each delta, and what is left."""
        parts: list[Part] = []
        rest: dict[int, Delta] = {}
        for variant, first, last in changed:
            if (delta := self._deltas.get(variant)) is None:
                continue
            left = []
            for placed in delta.placed:
                if (form := self._for_program(delta, placed)) is not None:
                    place = (placed.start, placed.stop) if delta.transposed == self._in_out else (0, self._outputs)
                    parts.append(Part(form, first, last, *place))
                else:
                    left.append(placed)
            if left:
                rest[variant] = Delta(tuple(left), delta.rows, delta.transposed)
        apart = [group for group in changed if group.variant in self._biases or group.variant in rest]
        return _Way(changed, self._ops.program(parts) if parts else None, apart, rest)

    def _for_program(self, delta: Delta, placed: Placed) -> Taken | None:
        """A form [O, I] of the layer's own orientation, None where no program takes it."""
        form = placed.form
        if not isinstance(form, Taken) or not self._ops.takes(form):
            return None
        if delta.transposed == self._in_out:
            return form
        # Places are inputs there: a part of them takes a part of x.
        whole = (placed.start, placed.stop) == (0, delta.rows)
        return form.transposed if whole and isinstance(form, LowRank) else None

    def _add(self, groups: list[Group], deltas: Mapping[int, Delta], x_TI: torch.Tensor, y_TO: torch.Tensor) -> None:
        for variant, start, stop in groups:
            delta, bias = deltas.get(variant), self._biases.get(variant)
            rows = y_TO[start:stop]
            whole = rows if rows.dtype == torch.float32 else rows.to(torch.float32)
            if delta is not None:
                x = x_TI[start:stop]
                x = x if x.dtype == torch.float32 else x.to(torch.float32)
                add_delta(self._ops, delta, x, whole, self._in_out, *self._bias)
            if bias is not None:
                whole[:, : bias.numel()] += bias
            if whole is not rows:
                rows.copy_(whole)


def add_delta(
    ops: Ops, delta: Delta, x_TI: torch.Tensor, y_TO: torch.Tensor, in_out: bool, bias: torch.Tensor | None
) -> None:
    """Add a delta to `y`, fp32, in place; `bias` is what own rows, which replace theirs, need again."""
    for placed in delta.placed:
        form, start, stop = placed.form, placed.start, placed.stop
        if in_out != delta.transposed:
            ops.add_transposed(form, x_TI[:, start:stop], y_TO)
            continue
        target = y_TO if stop - start == y_TO.shape[1] else y_TO[:, start:stop]
        ops.add(form, x_TI, target)
        if isinstance(form, Rows) and form.own and bias is not None:
            own = bias[start:stop].to(torch.float32)
            if form.index is None:
                target += own
            else:
                index = form.index.to(torch.int64)
                target[:, index] += own[index]
