"""The rounding boxes of a merged checkpoint: between which bounds each element of the delta must have lain."""

from __future__ import annotations

import torch

from mfs_decompose.linalg.grid import GRIDS, Grid
from mfs_decompose.linalg.margins import Merge, box

_BLOCK = 1 << 20
_GRIDS: dict[torch.dtype, Grid] = {torch.bfloat16: GRIDS["BF16"], torch.float16: GRIDS["F16"]}


def has_boxes(dtype: torch.dtype) -> bool:
    """Whether numbers of the type are coarse enough for fp32 arithmetic to see their boxes."""
    return dtype in _GRIDS


def delta_boxes(own_OI: torch.Tensor, base_OI: torch.Tensor, merge: Merge) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and largest delta of each element, fp32 [O, I]; unbounded where a side is not finite."""
    grid = _GRIDS[own_OI.dtype]
    low, high = torch.empty(own_OI.shape), torch.empty(own_OI.shape)
    step = max(1, _BLOCK // max(own_OI.shape[1], 1))
    for start in range(0, own_OI.shape[0], step):
        rows = slice(start, start + step)
        own, base = own_OI[rows].to(torch.float64), base_OI[rows].to(torch.float64)
        loose = ~(torch.isfinite(own) & torch.isfinite(base))
        edges = box(own.masked_fill(loose, 0.0).numpy(), base.masked_fill(loose, 0.0).numpy(), grid, merge)
        low[rows] = torch.from_numpy(edges[0]).masked_fill(loose, -torch.inf)
        high[rows] = torch.from_numpy(edges[1]).masked_fill(loose, torch.inf)
    return low, high


def share_outside(low_OI: torch.Tensor, high_OI: torch.Tensor, left_OR: torch.Tensor, right_IR: torch.Tensor) -> float:
    """The share of elements of `left @ right.T` outside their box."""
    outside = 0
    step = max(1, _BLOCK // max(low_OI.shape[1], 1))
    for start in range(0, low_OI.shape[0], step):
        rows = slice(start, start + step)
        product = left_OR[rows] @ right_IR.mT
        outside += int(((product < low_OI[rows]) | (product > high_OI[rows])).sum())
    return outside / max(low_OI.numel(), 1)
