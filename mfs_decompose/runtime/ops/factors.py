"""Products with one factor, which is widened a piece at a time: a piece stays in the cache.

A pass over the codes costs as much as a product. So only scales of groups go into every code: what scales a whole
direction, what spreading nibbles multiplies by and the halves of codes go to the few numbers per direction instead.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from mfs_decompose.linalg.shapes import GROUP
from mfs_decompose.runtime.nibbles import NIBBLE, spread
from mfs_decompose.runtime.resident_forms import Factor

_PIECE = 1 << 19  # elements of a factor widened at a time: 2 MiB


def shrink(factor: Factor, x_TN: torch.Tensor) -> torch.Tensor:
    """`x values^T`, fp32 [T, R]."""
    found_TR = None
    for start, stop, wide in _widened(factor):
        x = x_TN if stop - start == x_TN.shape[1] else x_TN[:, start:stop]
        product = functional.linear(x, wide)
        found_TR = product if found_TR is None else found_TR.add_(product)
    assert found_TR is not None
    _unspread(factor, found_TR)
    if factor.half and factor.by_direction:
        found_TR.add_(x_TN.sum(dim=1, keepdim=True), alpha=0.5)
    elif factor.half:
        assert factor.scales is not None
        before, length = factor.first, factor.first + x_TN.shape[1]
        sums = functional.pad(x_TN, (before, -length % GROUP)).view(x_TN.shape[0], -1, GROUP).sum(dim=2)
        found_TR.addmm_(sums, factor.scales.mT, alpha=0.5)
    if factor.scales is not None and factor.by_direction:
        found_TR.mul_(factor.scales.mT)
    return found_TR


def expand(factor: Factor, h_TR: torch.Tensor, y_TN: torch.Tensor) -> None:
    """`y += h values`, in place; what h holds afterwards means nothing."""
    if factor.scales is not None and factor.by_direction:
        h_TR.mul_(factor.scales.mT)
    if factor.half and factor.by_direction:
        y_TN.add_(h_TR.sum(dim=1, keepdim=True), alpha=0.5)
    elif factor.half:
        assert factor.scales is not None
        halves = (h_TR @ factor.scales).repeat_interleave(GROUP, dim=1)
        y_TN.add_(halves[:, factor.first : factor.first + y_TN.shape[1]], alpha=0.5)
    _unspread(factor, h_TR)
    for start, stop, wide in _widened(factor):
        y = y_TN if stop - start == y_TN.shape[1] else y_TN[:, start:stop]
        y.addmm_(h_TR, wide)


def pick(factor: Factor, at_N: torch.Tensor) -> torch.Tensor:
    """Some values of every direction, fp32 [N, R]."""
    nibbles, scales = factor.nibbles, factor.scales
    codes = Factor(factor.codes[:, at_N], nibbles=None if nibbles is None else nibbles[:, at_N]).whole_codes()
    values = codes.to(torch.float32, copy=True).add_(0.5 if factor.half else 0.0)
    if scales is not None:
        values.mul_(scales if factor.by_direction else scales[:, (at_N + factor.first) // GROUP])
    return values.mT


def _widened(factor: Factor) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Columns start..stop and what they are, fp32 [R, stop - start], until the next are asked for.

    Scales of groups are in them; those of whole directions and halves are not, and nibbles are NIBBLE times as large.
    """
    rank, length = factor.rank, factor.codes.shape[1]
    if factor.by_direction and factor.codes.dtype == torch.float32:
        yield 0, length, factor.codes
        return
    step = length if rank * length <= _PIECE else max(GROUP, _PIECE // max(rank, 1) // GROUP * GROUP)
    wide = factor.codes.new_empty(rank * step, dtype=torch.float32)
    narrow = None if factor.nibbles is None else factor.codes.new_empty(rank * step)
    for start in range(0, length, step):
        part = factor if step >= length else factor.columns(start, min(start + step, length))
        width = part.codes.shape[1]
        values = wide[: rank * width].view(rank, width)
        if narrow is None or part.nibbles is None:
            values.copy_(part.codes)
        else:
            values.copy_(spread(part.codes, part.nibbles, narrow[: rank * width].view(rank, width)))
        if not factor.by_direction:  # of a part of one group this is not seen
            _scale(values, part)
        yield start, start + width, values


def _scale(values: torch.Tensor, part: Factor) -> None:
    scales, length = part.scales, values.shape[1]
    assert scales is not None
    if part.first or length % GROUP:
        values.mul_(scales.repeat_interleave(GROUP, dim=1)[:, part.first : part.first + length])
    else:
        values.view(values.shape[0], -1, GROUP).mul_(scales.unsqueeze(2))


def _unspread(factor: Factor, h_TR: torch.Tensor) -> None:
    """Make up for what spreading multiplies the last directions by."""
    if factor.nibbles is not None:
        h_TR[:, factor.codes.shape[0] :].mul_(1 / NIBBLE)
