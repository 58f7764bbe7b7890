"""Sign: one bit a weight, and a scale for the tensor, for a row or for 64 values of a row (BitDelta, Liu et al. 2024).

The scale of least squared error is the mean magnitude.
"""

from __future__ import annotations

import math

import torch

from mfs_decompose.codec.base import Delta, Emit, Fetch
from mfs_decompose.codec.direct import Context, DeltaRows, Params, params_of, row_blocks
from mfs_decompose.codec.direct_sizes import direct_bytes
from mfs_decompose.codec.packed_rows import PackedRows, as_scale, grouped, write_packed
from mfs_decompose.codec.tree import CodecNode
from mfs_decompose.linalg.packing import pack_bits, packed_bytes, unpack_bits
from mfs_decompose.linalg.shapes import GROUP


class Sign:
    """The codec `sign`; parameter `scale` is tensor, row or group."""

    name = "sign"

    def nbytes(self, shape: tuple[int, int], params: Params) -> int | None:
        return direct_bytes("sign", shape, params)

    def encode(
        self, rows: DeltaRows, shape: tuple[int, int], params: Params, emit: Emit, *, context: Context | None = None
    ) -> CodecNode:
        per = params["scale"]
        whole = _mean_of_all(rows, shape) if per == "tensor" else None

        def block(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            packed = pack_bits((values >= 0).to(torch.uint8), 1)
            if whole is not None:
                return packed, torch.zeros(0, dtype=torch.bfloat16)
            return packed, as_scale(_row_means(values) if per == "row" else _group_means(values))

        return write_packed("sign", {"scale": per}, rows, shape, packed_bytes(shape[1], 1), block, emit, whole)

    def open(self, node: CodecNode, fetch: Fetch, shape: tuple[int, int]) -> Delta:
        (per,) = params_of(node, scale=("tensor", "row", "group"))
        scales = {"tensor": (1,), "row": (shape[0],), "group": (shape[0], -(-shape[1] // GROUP))}[str(per)]

        def unpack(packed: torch.Tensor) -> torch.Tensor:
            return unpack_bits(packed, 1, shape[1]).to(torch.float64).mul_(2).sub_(1)

        return PackedRows(node, fetch, packed_bytes(shape[1], 1), shape, scales, unpack)


def _mean_of_all(rows: DeltaRows, shape: tuple[int, int]) -> torch.Tensor:
    sums = [_row_means(rows(*block)).tolist() for block in row_blocks(shape)]
    mean = math.fsum(value for block in sums for value in block) / max(shape[0], 1)
    return as_scale(torch.tensor([mean], dtype=torch.float64))


def _row_means(values_NI: torch.Tensor) -> torch.Tensor:
    return values_NI.to(torch.float64).abs().sum(dim=1) / max(values_NI.shape[1], 1)


def _group_means(values_NI: torch.Tensor) -> torch.Tensor:
    ones = grouped(torch.ones_like(values_NI, dtype=torch.float64))
    return grouped(values_NI.to(torch.float64).abs()).sum(dim=2) / ones.sum(dim=2)
