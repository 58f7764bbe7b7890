"""Identical: the base's own bits, at no bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mfs_decompose.codec.base import Emit, Fetch, Rows
from mfs_decompose.codec.tree import CodecNode
from mfs_decompose.errors import ArtifactInvalid
from mfs_decompose.source.header import TensorSpec

if TYPE_CHECKING:
    import torch


class Identical:
    """The codec `identical`; the caller has made sure of it by digest."""

    name = "identical"

    def encode(self, own: Rows, base: Rows | None, spec: TensorSpec, emit: Emit) -> CodecNode:
        return CodecNode("identical")

    def open(self, node: CodecNode, fetch: Fetch, spec: TensorSpec) -> Callable[[int, int, Rows | None], torch.Tensor]:
        def rows(start: int, stop: int, base: Rows | None) -> torch.Tensor:
            if base is None:
                raise ArtifactInvalid(
                    f"tensor {spec.name!r} is stored as identical to the base, which has no such tensor"
                )
            return base(start, stop)

        return rows
