"""Rotary embeddings of variants that trained with others than the base: each group's angles by its own module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from mfs_decompose.runtime.batch_plan import BASE, PlanSlot


class FamilyRotary(nn.Module):
    """A rotary embedding (x, position_ids [1, T], ...) -> (cos, sin), both [1, T, D]."""

    def __init__(self, original: nn.Module, slot: PlanSlot, own: Mapping[int, nn.Module]) -> None:
        super().__init__()
        self.original = original
        self._slot = slot
        self._own = dict(own)  # not children: they have nothing of the base's

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, *rest: Any, **named: Any) -> Any:
        plan = self._slot.plan
        if plan.uniform:
            return self._of(plan.variants[0] if plan.variants else BASE)(x, position_ids, *rest, **named)
        assert tuple(position_ids.shape) == (1, plan.rows), f"positions {list(position_ids.shape)} of {plan.rows} rows"
        parts = [
            self._of(group.variant)(x, position_ids[:, group.start : group.stop], *rest, **named)
            for group in plan.groups
        ]
        return tuple(torch.cat(pieces, dim=-2) for pieces in zip(*parts, strict=True))

    def _of(self, variant: int) -> nn.Module:
        return self._own.get(variant, self.original)
