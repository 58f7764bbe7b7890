"""Sum: a delta as the sum of others, such as low rank and a coded residual.

Each child gives exact fp64 values, the same everywhere; they are added one after another in the order of the tree, one
IEEE addition an element. That rounds, at 2^-53, but has no order to choose, so its bits too are the same everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mfs_decompose.codec.base import Delta, Emit
from mfs_decompose.codec.direct import Context, DeltaRows, DirectCodec, Params
from mfs_decompose.codec.tree import CodecNode


class Summed:
    """The sum of opened deltas, at least one."""

    def __init__(self, children: Sequence[Delta]) -> None:
        assert children, "a sum of nothing has no shape"
        self._children = children

    def rows(self, start: int, stop: int) -> torch.Tensor:
        total = self._children[0].rows(start, stop)
        for child in self._children[1:]:
            total = total + child.rows(start, stop)
        return total


def encode_residual(
    rows: DeltaRows,
    shape: tuple[int, int],
    first: Delta,
    codec: DirectCodec,
    params: Params,
    emit: Emit,
    *,
    context: Context | None = None,
) -> CodecNode:
    """Write what `first`, a delta as it is stored, leaves of `rows`."""

    def remainder(start: int, stop: int) -> torch.Tensor:
        return (rows(start, stop).to(torch.float64) - first.rows(start, stop)).to(torch.float32)

    return codec.encode(remainder, shape, params, emit, context=context)


def sum_node(children: Sequence[CodecNode]) -> CodecNode:
    """The tree of children whose bytes follow one another; the arrays of each count from its own first byte."""
    placed, offset = [], 0
    for child in children:
        placed.append(child.shifted(offset))
        offset += child.nbytes
    return CodecNode("sum", children=tuple(placed))
