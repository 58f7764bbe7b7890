"""Linear layers that serve every variant: the base's product once, then what each variant's rows get.

Few rows of several variants go through stacks, where their factors lie side by side; all else goes group by group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from mfs_decompose.errors import UsageError
from mfs_decompose.runtime.batch_plan import BatchPlan, Group, PlanSlot
from mfs_decompose.runtime.changes import Change, Delta
from mfs_decompose.runtime.digits import input_digits
from mfs_decompose.runtime.integer_rights import Rights, Shrunk
from mfs_decompose.runtime.integer_stacks import IntegerStack
from mfs_decompose.runtime.ops.dispatch import Ops
from mfs_decompose.runtime.resident_forms import Rows
from mfs_decompose.runtime.stack_layout import columns
from mfs_decompose.runtime.stacks import MOST_ROWS, Chosen, Stacks

_RIGHTS = 4  # sets of variants whose joined right factors are kept


class _Way(NamedTuple):
    """The groups whose variants change a layer, the stacks that serve all of them together, None for none, and the
    groups of which some changes lie in no stack."""

    changed: list[Group]
    chosen: Chosen | None
    apart: list[Group]


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
        self._rest: dict[int, Delta] = {}  # what does not lie in the stacks
        self._stacks = Stacks() if ops.stacks else None
        self._biases: dict[int, torch.Tensor] = {}
        self._served: set[int] = set()
        self._last: tuple[BatchPlan, int, _Way] | None = None
        self._siblings: Sequence[FamilyLinear] = (self,)
        self._rights: dict[tuple[IntegerStack, ...], Rights] = {}
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
            if self._stacks is not None:
                self._rest[variant] = self._stacks.put(variant, change.matrix, self._in_out)
        if change.bias is not None:
            self._biases[variant] = change.bias
        self._note()

    def detach(self, variant: int) -> None:
        self._deltas.pop(variant, None)
        self._rest.pop(variant, None)
        self._biases.pop(variant, None)
        if self._stacks is not None:
            self._stacks.drop(variant)
        self._note()

    def _note(self) -> None:
        self._served = self._deltas.keys() | self._biases.keys()
        self._last = None
        for one in self._siblings:
            one._rights.clear()

    def join(self, siblings: Sequence[FamilyLinear]) -> None:
        """Right factors are multiplied together with those of layers, this one among them, that are given the same
        tensor one after another."""
        self._siblings = siblings

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
        if way.chosen is None or x_TI.shape[0] > MOST_ROWS:
            self._add(way.changed, self._deltas, x_TI, y_TO)
            return y
        wide = x_TI if x.dtype == torch.float32 else x_TI.to(torch.float32)
        shrunk = self._shrink(plan, x, wide) if way.chosen.integers else None
        endless = None if shrunk is None or shrunk.inputs.endless is None else y_TO.clone()
        whole = y_TO if y.dtype == torch.float32 else y_TO.to(torch.float32)
        way.chosen.add(plan, wide, {} if shrunk is None else shrunk.found, whole)
        self._add(way.apart, self._rest, x_TI, whole)
        if whole is not y_TO:
            y_TO.copy_(whole)
        if endless is not None:
            assert shrunk is not None and shrunk.inputs.endless is not None
            self._add(way.changed, self._deltas, x_TI, endless)
            y_TO[shrunk.inputs.endless] = endless[shrunk.inputs.endless]
        return y

    def _shrink(self, plan: BatchPlan, x: torch.Tensor, wide_TI: torch.Tensor) -> Shrunk:
        """What integer factors make of inputs, of the siblings too: they come with the same inputs next."""
        shrunk = self._slot.once(x, lambda: Shrunk(input_digits(wide_TI)))
        own = self._way(plan, wide_TI.shape[0]).chosen
        if own is not None and own.integers[0] not in shrunk.found:
            ways = [one._way(plan, wide_TI.shape[0]).chosen for one in self._siblings]
            stacks = tuple(stack for chosen in ways if chosen is not None for stack in chosen.integers)
            if stacks not in self._rights:
                if len(self._rights) >= _RIGHTS:
                    self._rights.clear()
                self._rights[stacks] = Rights(stacks)
            shrunk.found.update(self._rights[stacks].shrink(plan, shrunk.inputs))
        return shrunk

    def _way(self, plan: BatchPlan, rows: int) -> _Way:
        """How rows under a plan are answered; that of the last plan is kept, as steps of decoding are alike."""
        if self._last is None or self._last[0] is not plan or self._last[1] != rows:
            changed = [group for group in plan.over(rows) if group.variant in self._served]
            chosen = None if self._stacks is None else self._stacks.choose(plan)
            apart = [
                group
                for group in changed
                if group.variant in self._biases or (group.variant in self._rest and self._rest[group.variant].placed)
            ]
            self._last = plan, rows, _Way(changed, chosen, apart)
        return self._last[2]

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
        target = columns(y_TO, start, stop)
        ops.add(form, x_TI, target)
        if isinstance(form, Rows) and form.own and bias is not None:
            own = bias[start:stop].to(torch.float32)
            if form.index is None:
                target += own
            else:
                index = form.index.to(torch.int64)
                target[:, index] += own[index]
