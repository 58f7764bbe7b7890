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


def packed_bytes(length: int, bits: int) -> int:
    """Bytes of a row of `length` codes of `bits` bits."""
    return -(-length * bits // 8)


def pack_bits(codes_RN: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack uint8 values below 2^bits, [R, N], into uint8 [R, ceil(N * bits / 8)], lowest bits first; bits in 1..8."""
    rows, length = codes_RN.shape
    eights = -(-length // 8)
    padded = torch.nn.functional.pad(codes_RN, (0, -length % 8)).view(rows, eights, 8)
    words = torch.zeros(rows, eights, 1, dtype=torch.int64, device=codes_RN.device)
    for at in range(8):  # eight codes are `bits` bytes
        words[:, :, 0] |= padded[:, :, at].to(torch.int64) << (bits * at)
    packed = words.view(torch.uint8)[:, :, :bits]
    return packed.reshape(rows, eights * bits)[:, : packed_bytes(length, bits)].contiguous()


def unpack_bits(packed: torch.Tensor, bits: int, length: int) -> torch.Tensor:
    """The uint8 values [R, length] of `pack_bits`."""
    rows, width = packed.shape
    eights = -(-length // 8)
    padded = torch.nn.functional.pad(packed, (0, eights * bits - width)).view(rows, eights, bits)
    words = torch.nn.functional.pad(padded, (0, 8 - bits)).contiguous().view(torch.int64)
    codes = torch.empty(rows, eights, 8, dtype=torch.uint8, device=packed.device)
    for at in range(8):
        codes[:, :, at] = ((words[:, :, 0] >> (bits * at)) & ((1 << bits) - 1)).to(torch.uint8)
    return codes.view(rows, eights * 8)[:, :length].contiguous()
