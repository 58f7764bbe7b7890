"""Shared: the leaf of a codec tree that stands for what the variants' deltas have in common.

The delta `S` of a base tensor is stored once for the family (docs/format.md), under a tree of its own. A variant's tree
names it by a node of 0 bytes: `sum(shared+banded)` is `S` and what the variant has beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mfs_decompose.codec.base import Delta
from mfs_decompose.codec.tree import CodecNode
from mfs_decompose.errors import ArtifactInvalid


@dataclass(frozen=True)
class Shared:
    """The shared delta of one base tensor: the matrix [O, I] it is, and how to open it."""

    shape: tuple[int, int]
    open: Callable[[], Delta]


def open_shared(shared: Shared | None, shape: tuple[int, int]) -> Delta:
    """The shared delta as the delta of a tensor whose common rows are the matrix `shape`, the first of its rows.

    Raises:
        ArtifactInvalid: there is none, or it is of another shape.
    """
    if shared is None:
        raise ArtifactInvalid("codec 'shared' stands where the family has no shared delta")
    if shared.shape[1] != shape[1] or shared.shape[0] < shape[0]:
        raise ArtifactInvalid(f"codec 'shared': expected a delta {list(shape)}, found {list(shared.shape)}")
    return shared.open()


def with_shared(node: CodecNode) -> CodecNode:
    """The tree of the shared delta plus what `node` stores: no byte moves."""
    rest = node.children if node.codec == "sum" else (node,)
    return CodecNode("sum", children=(CodecNode("shared"), *rest))


def uses_shared(node: CodecNode) -> bool:
    """Whether the leaf stands anywhere in the tree."""
    return node.codec == "shared" or any(map(uses_shared, node.children))
