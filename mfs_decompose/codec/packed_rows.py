"""What sign, ternary and k-bit deltas have in common: rows of small integers, packed, and scales.

Codes are written as rows come; scales, two bytes each, are kept until then and written last. A reader fetches the rows
that it is asked for. One product of a small integer and a bf16 value is exact in fp64, and nothing is summed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from mfs_decompose.codec.arrays import read_array, tensor_bytes
from mfs_decompose.codec.base import Emit, Fetch
from mfs_decompose.codec.direct import DeltaRows, Params, row_blocks
from mfs_decompose.codec.tree import CodecNode, Part
from mfs_decompose.errors import ArtifactInvalid
from mfs_decompose.linalg.shapes import GROUP

Encode = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""fp32 rows [N, I] to packed bytes [N, W] and bf16 scales."""

Unpack = Callable[[torch.Tensor], torch.Tensor]
"""Packed bytes [N, W] to fp64 integers [N, I]."""


def write_packed(
    codec: str,
    params: Params,
    rows: DeltaRows,
    shape: tuple[int, int],
    width: int,
    encode: Encode,
    emit: Emit,
    scale: torch.Tensor | None = None,
) -> CodecNode:
    """Write every row of `width` packed bytes, then the scales: those of the rows, or the one given."""
    scales: list[torch.Tensor] = []
    for start, stop in row_blocks(shape):
        packed, own = encode(rows(start, stop))
        assert packed.shape == (stop - start, width), f"{list(packed.shape)} for {stop - start} rows of {width} bytes"
        emit(tensor_bytes(packed))
        scales.append(own)
    if scale is not None:
        scales = [scale]
    whole = torch.cat(scales)
    emit(tensor_bytes(whole))
    nbytes = shape[0] * width
    parts = (
        Part("code", "U8", (shape[0], width), 0, nbytes),
        Part("scale", "BF16", tuple(whole.shape), nbytes, 2 * whole.numel()),
    )
    return CodecNode(codec, params=dict(params), parts=parts)


class PackedRows:
    """A delta of packed rows; scales are [1], [O] or [O, groups]."""

    def __init__(
        self, node: CodecNode, fetch: Fetch, width: int, shape: tuple[int, int], scales: tuple[int, ...], unpack: Unpack
    ) -> None:
        """Open a node that `write_packed` wrote.

        Raises:
            ArtifactInvalid: arrays are not of the size that the shape asks for, or a scale is not finite.
        """
        part = node.part("code")
        if (part.dtype, part.shape, part.nbytes) != ("U8", (shape[0], width), shape[0] * width):
            expected = f"U8 {[shape[0], width]}"
            raise ArtifactInvalid(
                f"array 'code' of codec {node.codec!r}: expected {expected}, found {part.dtype} {list(part.shape)}"
            )
        self._scale = read_array(node, "scale", fetch, "BF16", scales).to(torch.float64)
        if not bool(torch.isfinite(self._scale).all()):
            raise ArtifactInvalid(f"codec {node.codec!r}: a scale is not finite")
        self._node, self._fetch, self._width, self._columns = node, fetch, width, shape[1]
        self._offset, self._unpack = part.offset, unpack

    def rows(self, start: int, stop: int) -> torch.Tensor:
        if start == stop or not self._columns:
            return torch.zeros(stop - start, self._columns, dtype=torch.float64)
        count = (stop - start) * self._width
        data = bytearray(self._fetch(self._offset + start * self._width, count))
        if len(data) != count:
            raise ArtifactInvalid(f"codec {self._node.codec!r}: expected {count} bytes of codes, found {len(data)}")
        values = self._unpack(torch.frombuffer(data, dtype=torch.uint8).view(-1, self._width))
        if self._scale.dim() == 2:
            wide = self._scale[start:stop].repeat_interleave(GROUP, dim=1)
            return values * wide[:, : self._columns]
        return values * (self._scale if self._scale.numel() == 1 else self._scale[start:stop].unsqueeze(1))


def grouped(values_NI: torch.Tensor) -> torch.Tensor:
    """Rows in groups of 64, [N, groups, 64], filled up with zeros."""
    rows, columns = values_NI.shape
    groups = -(-columns // GROUP)
    return torch.nn.functional.pad(values_NI, (0, groups * GROUP - columns)).view(rows, groups, GROUP)


def as_scale(values: torch.Tensor) -> torch.Tensor:
    """Magnitudes as bf16, the largest of them finite."""
    return values.clamp(max=torch.finfo(torch.bfloat16).max).to(torch.bfloat16)
