"""Raw: the tensor's own bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mfs_decompose.codec.base import Emit, Fetch, Rows, block_rows
from mfs_decompose.codec.tree import CodecNode, Part
from mfs_decompose.errors import ArtifactInvalid
from mfs_decompose.source.dtypes import torch_dtype
from mfs_decompose.source.header import TensorSpec

if TYPE_CHECKING:
    import torch

_BLOCK = 1 << 22  # elements copied at a time


class Raw:
    """The codec `raw`."""

    name = "raw"

    def encode(self, own: Rows, base: Rows | None, spec: TensorSpec, emit: Emit) -> CodecNode:
        from mfs_decompose.codec.arrays import tensor_bytes

        step = block_rows(spec, _BLOCK)
        for start in range(0, spec.rows, step):
            emit(tensor_bytes(own(start, min(start + step, spec.rows))))
        return CodecNode("raw", parts=(Part("data", spec.dtype, spec.shape, 0, spec.nbytes),))

    def open(self, node: CodecNode, fetch: Fetch, spec: TensorSpec) -> Callable[[int, int, Rows | None], torch.Tensor]:
        part = node.part("data")
        if part.dtype != spec.dtype or part.shape != spec.shape or part.nbytes != spec.nbytes:
            raise ArtifactInvalid(
                f"raw bytes of {spec.name!r}: expected {spec.dtype} {list(spec.shape)}, "
                f"found {part.dtype} {list(part.shape)} in {part.nbytes} bytes"
            )

        def rows(start: int, stop: int, base: Rows | None) -> torch.Tensor:
            data = fetch(part.offset + start * spec.row_bytes, (stop - start) * spec.row_bytes)
            return from_bytes(data, spec, stop - start)

        return rows


def from_bytes(data: bytes, spec: TensorSpec, rows: int) -> torch.Tensor:
    """`rows` rows of a tensor from their bytes; a tensor without dimensions stays without.

    Raises:
        ArtifactInvalid: there are more or fewer bytes.
    """
    import torch

    if len(data) != rows * spec.row_bytes:
        raise ArtifactInvalid(f"tensor {spec.name!r}: expected {rows * spec.row_bytes} bytes, found {len(data)}")
    shape = (rows, *spec.shape[1:]) if spec.shape else ()
    if not data:
        return torch.empty(shape, dtype=torch_dtype(spec.dtype))
    return torch.frombuffer(bytearray(data), dtype=torch_dtype(spec.dtype)).reshape(shape)
