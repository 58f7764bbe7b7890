"""Experts of a mixture, fused into stacks [E, O, I]: each group's rows through the class's own code.

For a variant the stack is no tensor but stands for one: the code of the class takes matrix `e` of it and multiplies,
and gets the base's product and the delta of that matrix. No class is copied, and no matrix of weights is made.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from mfs_decompose.runtime.batch_plan import PlanSlot
from mfs_decompose.runtime.changes import Change, Delta
from mfs_decompose.runtime.modules import FamilyRows, RowAxes, shallow_copy
from mfs_decompose.runtime.modules_linear import add_delta
from mfs_decompose.runtime.ops.dispatch import Ops


class FamilyExperts(FamilyRows):
    """A module of fused experts: (hidden [T, H], expert ids [T, K], weights [T, K]) -> [T, H]."""

    def __init__(self, original: nn.Module, slot: PlanSlot, ops: Ops, axes: RowAxes) -> None:
        super().__init__(original, slot, axes)
        self._ops = ops

    def attach(self, variant: int, change: Change) -> None:
        own: dict[str, Any] = dict(change.whole)
        for name, deltas in change.stacks.items():
            own[name] = ServedStack(getattr(self.original, name), deltas, self._ops)
        self._copies[variant] = _in_eager_code(shallow_copy(self.original, own))


class ServedStack:
    """Stands for a stack [E, O, I] (or [E, I, O]) of a variant; all that can be done with it is to take a matrix."""

    def __init__(self, base: torch.Tensor, deltas: Mapping[int, Delta], ops: Ops) -> None:
        self._base, self._deltas, self._ops = base, dict(deltas), ops
        self.shape, self.dtype, self.device = base.shape, base.dtype, base.device

    def __getitem__(self, expert: int | torch.Tensor) -> ServedMatrix:
        at = int(expert)
        return ServedMatrix(self._base[at], self._deltas.get(at), self._ops)


class ServedMatrix:
    """Stands for one matrix; `linear(x, m)` and `x @ m` give the base's product and the delta's."""

    def __init__(self, base: torch.Tensor, delta: Delta | None, ops: Ops) -> None:
        self._base, self._delta, self._ops = base, delta, ops
        self.shape, self.dtype, self.device = base.shape, base.dtype, base.device

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        known = function is functional.linear or function in _PRODUCTS
        if not known or len(args) < 2 or not isinstance(args[1], ServedMatrix):
            return NotImplemented
        bias = args[2] if len(args) > 2 else (kwargs or {}).get("bias")
        return args[1]._times(args[0], bias, in_out=function is not functional.linear)

    def _times(self, x: torch.Tensor, bias: torch.Tensor | None, *, in_out: bool) -> torch.Tensor:
        y = x @ self._base if in_out else functional.linear(x, self._base)
        if self._delta is not None:
            whole = y.to(torch.float32)
            add_delta(self._ops, self._delta, x.to(torch.float32), whole, in_out, None)
            y = whole.to(y.dtype)
        return y if bias is None else y + bias


_PRODUCTS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.__rmatmul__, torch.mm)


def _in_eager_code(module: Any) -> nn.Module:
    """The same module, its forward that of its class, where transformers could put another in its place."""
    config = getattr(module, "config", None)
    if config is not None:
        module.config = copy.copy(config)
        module.config._experts_implementation = "eager"
    assert isinstance(module, nn.Module)
    return module
