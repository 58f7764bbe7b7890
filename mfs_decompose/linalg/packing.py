"""Two 4-bit integers in a byte."""

from __future__ import annotations

import torch


def pack_int4(codes_RN: torch.Tensor) -> torch.Tensor:
    """Pack int8 values in -8..7, [R, N], into uint8 [R, ceil(N / 2)]; the even column lies in the low half."""
    rank, length = codes_RN.shape
    even = torch.nn.functional.pad(codes_RN, (0, length % 2)).reshape(rank, -(-length // 2), 2).to(torch.int16) & 0xF
    return (even[:, :, 0] | (even[:, :, 1] << 4)).to(torch.uint8)


def unpack_int4(packed: torch.Tensor, length: int) -> torch.Tensor:
    """The int8 values [R, length] of `pack_int4`."""
    low = (packed << 4).view(torch.int8) >> 4
    high = packed.view(torch.int8) >> 4
    return torch.stack((low, high), dim=2).view(packed.shape[0], 2 * packed.shape[1])[:, :length].contiguous()
