"""Modules of a transformers model that serve every variant: the base's product once, plus each group's delta.

Each holds the module it stands for, unchanged, and the deltas by variant slot; which row belongs to whom is read from
the plan of the step. Names of shapes: T rows of the step, I inputs, O outputs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from mfs_decompose.errors import UsageError
from mfs_decompose.runtime.batch_plan import BASE, FEW_ROWS, BatchPlan, Group, PlanSlot
from mfs_decompose.runtime.changes import Change, Delta
from mfs_decompose.runtime.ops.dispatch import Ops


class FamilyEmbedding(nn.Module):
    """nn.Embedding, or a class of it that scales its rows, with changed and new rows of each variant."""

    def __init__(self, original: nn.Embedding, slot: PlanSlot, ops: Ops) -> None:
        super().__init__()
        self.original = original
        self._slot, self._ops = slot, ops
        self._deltas: dict[int, Delta] = {}
        self._plain = type(original).forward is nn.Embedding.forward
        self._shell = shallow_copy(original)  # the class's own arithmetic, over rows that were looked up
        self._shell.padding_idx = None

    def attach(self, variant: int, change: Change) -> None:
        if change.matrix is not None:
            self._deltas[variant] = change.matrix

    def detach(self, variant: int) -> None:
        self._deltas.pop(variant, None)

    @property
    def weight(self) -> torch.Tensor:
        """The base's rows, which code of the model may ask for."""
        return self.original.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Raises UsageError for a token that the row's own variant does not have, where ids lie on a CPU."""
        known = self.original.weight.shape[0]
        flat = ids.reshape(-1)
        groups = self._slot.plan.over(flat.numel())
        if ids.device.type == "cpu":
            self._check(flat, groups)
        if not any(group.variant in self._deltas for group in groups):
            found: torch.Tensor = self.original(ids)
            return found
        values = functional.embedding(flat.clamp(max=known - 1), self.original.weight)
        for variant, start, stop in groups:
            delta = self._deltas.get(variant)
            if delta is None:
                continue
            rows = values[start:stop]
            whole = rows if rows.dtype == torch.float32 else rows.to(torch.float32)
            _look_up(self._ops, delta, flat[start:stop], whole)
            if whole is not rows:
                rows.copy_(whole)
        if self._plain:
            return values.view(*ids.shape, -1)
        self._shell._parameters["weight"] = values
        try:
            scaled: torch.Tensor = self._shell(torch.arange(flat.numel(), device=ids.device).view(ids.shape))
        finally:
            self._shell._parameters["weight"] = None
        return scaled

    def _check(self, flat: torch.Tensor, groups: tuple[Group, ...]) -> None:
        for variant, start, stop in groups:
            delta = self._deltas.get(variant)
            limit = self.original.weight.shape[0] if delta is None else delta.rows
            peak = int(flat[start:stop].max())
            if peak >= limit:
                whose = "the base" if variant == BASE else f"variant slot {variant}"
                raise UsageError(f"expected token ids below {limit} for {whose}, found {peak}")


def _look_up(ops: Ops, delta: Delta, ids: torch.Tensor, values: torch.Tensor) -> None:
    assert not delta.transposed, "an embedding has a row for each token"
    for one in delta.placed:
        if one.start == 0 and one.stop >= delta.rows:
            ops.look_up(one.form, ids, one.stop, values)
            continue
        inside = (ids >= one.start) & (ids < one.stop)
        at = inside.nonzero().flatten()
        if at.numel():
            part = values[at]
            ops.look_up(one.form, ids[at] - one.start, one.stop - one.start, part)
            values[at] = part


class FamilyRows(nn.Module):
    """Norms, routers, or anything else that treats its rows one by one, with parameters of each variant's own.

    The module's own code runs once for each group, over parameters as they are served; or once for a few rows, where it
    was seen at load that each row may bring its own. Which axis of its inputs and outputs runs along the rows was seen
    in a trial run.
    """

    def __init__(self, original: nn.Module, slot: PlanSlot, axes: RowAxes, *, by_row: bool = False) -> None:
        """
        Args:
            by_row: parameters of one axis may have one more before it, which runs along the rows.
        """
        super().__init__()
        self.original = original
        self._slot, self._axes = slot, axes
        self._copies: dict[int, nn.Module] = {}  # not children: they share the original's
        self._by_row = by_row
        self._together: tuple[BatchPlan, int, nn.Module] | None = None

    def attach(self, variant: int, change: Change) -> None:
        self._copies[variant] = shallow_copy(self.original, change.whole)
        self._together = None

    def detach(self, variant: int) -> None:
        self._copies.pop(variant, None)
        self._together = None

    @property
    def weight(self) -> Any:
        """The base's weight, which code of the model may ask for."""
        return self.original.weight

    def forward(self, *inputs: Any) -> Any:
        plan = self._slot.plan
        if plan.uniform:
            return self._of(plan.variants[0] if plan.variants else BASE)(*inputs)
        if not any(variant in self._copies for variant in plan.variants):
            return self.original(*inputs)
        if self._by_row and plan.rows <= FEW_ROWS:
            return self._with_rows(plan, inputs[0].dim())(*inputs)
        return run_groups(plan, inputs, self._axes, self._of)

    def _with_rows(self, plan: BatchPlan, axes: int) -> nn.Module:
        """The module with a row of parameters for each row of the plan; the last such is kept."""
        if self._together is None or self._together[0] is not plan or self._together[1] != axes:
            along = self._axes.inputs[0]
            assert along is not None
            between = [1] * (axes - along - 2)
            parts = [(self._of(group.variant), group.stop - group.start) for group in plan.groups]
            own = {
                leaf: torch.cat([getattr(module, leaf).expand(count, -1) for module, count in parts]).view(
                    plan.rows, *between, -1
                )
                for leaf, value in self.original._parameters.items()
                if value is not None
            }
            self._together = plan, axes, shallow_copy(self.original, own)
        return self._together[2]

    def _of(self, variant: int) -> nn.Module:
        found: nn.Module = self._copies.get(variant, self.original)
        return found


@dataclass(frozen=True)
class RowAxes:
    """Along which axis rows run in each tensor that a module takes, and in each that it gives; None for no tensor."""

    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]


def run_groups(plan: BatchPlan, inputs: tuple[Any, ...], axes: RowAxes, choose: Callable[[int], Any]) -> Any:
    """Run `choose(variant)` on the rows of each group, and put what comes back together again."""
    assert len(inputs) == len(axes.inputs), f"{len(inputs)} inputs of a module that was seen with {len(axes.inputs)}"
    results = [choose(group.variant)(*_cut(inputs, axes, plan, group)) for group in plan.groups]
    if isinstance(results[0], torch.Tensor):
        axis = axes.outputs[0]
        assert axis is not None
        return torch.cat(results, dim=axis)
    return tuple(
        torch.cat(parts, dim=axis) if axis is not None else parts[0]
        for parts, axis in zip(zip(*results, strict=True), axes.outputs, strict=True)
    )


def _cut(inputs: tuple[Any, ...], axes: RowAxes, plan: BatchPlan, group: Group) -> list[Any]:
    cut = []
    for value, axis in zip(inputs, axes.inputs, strict=True):
        if axis is None:
            cut.append(value)
            continue
        assert value.shape[axis] == plan.rows, f"{value.shape[axis]} rows under a plan for {plan.rows}"
        cut.append(value.narrow(axis, group.start, group.stop - group.start))
    return cut


def shallow_copy(module: nn.Module, parameters: Mapping[str, Any] | None = None) -> Any:
    """A module of the same class and settings whose own parameters can be other tensors; submodules are shared."""
    twin = copy.copy(module)
    twin._parameters = dict(module._parameters)
    twin._buffers = dict(module._buffers)
    twin.__dict__.pop("forward", None)  # hooks leave one behind that is bound to the original
    for name, value in (parameters or {}).items():
        if name in twin._buffers:
            twin._buffers[name] = value
        else:
            twin._parameters.pop(name, None)
            twin.__dict__[name] = value
    return twin
