"""Sparse by effect: in each row the entries that moved furthest beyond the rounding of their weight.

The largest magnitudes of a bf16 delta lie where the weights are large: one step of their last bit, which is noise.
Measured in such steps, those moves are small. What is written is the codec `sparse`; only the choice is another.
"""

from __future__ import annotations

import torch

from mfs_decompose.codec.arrays import head_parts
from mfs_decompose.codec.base import Delta, Emit, Fetch
from mfs_decompose.codec.direct import Context, DeltaRows, Params, row_blocks
from mfs_decompose.codec.direct_sizes import direct_bytes
from mfs_decompose.codec.sizes import SHORT_INDEX
from mfs_decompose.codec.sparse import Sparse
from mfs_decompose.codec.tree import CodecNode

_LEAST = 2.0**-126  # the smallest normal number of bf16 and fp32: below it all weights have the same step


class Significant:
    """The choice `significant`; parameter `steps`, entries a row. The node it writes is one of `sparse`, in bf16."""

    name = "significant"

    def nbytes(self, shape: tuple[int, int], params: Params) -> int | None:
        return direct_bytes("significant", shape, params)

    def encode(
        self, rows: DeltaRows, shape: tuple[int, int], params: Params, emit: Emit, *, context: Context | None = None
    ) -> CodecNode:
        steps = params["steps"]
        assert type(steps) is int and steps >= 0 and context is not None, f"{steps!r} steps, context {context}"
        steps = min(steps, shape[1])
        index: list[torch.Tensor] = [torch.zeros(steps, 0, dtype=torch.int32)]
        value: list[torch.Tensor] = [torch.zeros(steps, 0, dtype=torch.bfloat16)]
        for start, stop in row_blocks(shape):
            delta = rows(start, stop)
            effect = delta.abs() / rounding_steps(context.base_rows(start, stop))
            order = torch.sort(effect, dim=1, descending=True, stable=True)[1][:, :steps]
            index.append(order.mT.to(torch.int32))
            value.append(delta.gather(1, order).mT.to(torch.bfloat16))
        whole = torch.cat(index, dim=1)
        arrays = {
            "index": whole.to(torch.uint16) if shape[1] <= SHORT_INDEX else whole,
            "value": torch.cat(value, dim=1),
        }
        parts, data = head_parts(arrays, ("index", "value"), steps)
        emit(data)
        return CodecNode("sparse", params={"values": "bf16", "steps": steps}, parts=parts)

    def open(self, node: CodecNode, fetch: Fetch, shape: tuple[int, int]) -> Delta:
        return Sparse().open(node, fetch, shape)


def rounding_steps(weights: torch.Tensor) -> torch.Tensor:
    """The power of two at or below each weight's magnitude, as fp32: its last bit is a fixed part of that."""
    mantissa, exponent = torch.frexp(weights.to(torch.float32).abs().clamp(min=_LEAST))
    del mantissa
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent - 1)
