"""Codes of 1 to 8 bits in bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from linalg_matrices import generator

from mfs_decompose.linalg.packing import pack_bits, packed_bytes, unpack_bits


def codes(rows: int, length: int, bits: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 1 << bits, (rows, length), generator=generator(seed)).to(torch.uint8)


def by_hand(row: list[int], bits: int) -> bytes:
    number = sum(code << (bits * at) for at, code in enumerate(row))
    return number.to_bytes(-(-len(row) * bits // 8), "little")


@given(st.integers(1, 8), st.integers(0, 3), st.integers(0, 41), st.integers(0, 9))
def test_packing_is_one_long_number_a_row(bits: int, rows: int, length: int, seed: int) -> None:
    values = codes(rows, length, bits, seed)
    packed = pack_bits(values, bits)
    assert packed.shape == (rows, packed_bytes(length, bits))
    assert [bytes(row) for row in packed.tolist()] == [by_hand(row, bits) for row in values.tolist()]
    assert torch.equal(unpack_bits(packed, bits, length), values)


@pytest.mark.parametrize("bits", range(1, 9))
def test_the_largest_codes_survive(bits: int) -> None:
    values = torch.full((2, 19), (1 << bits) - 1, dtype=torch.uint8)
    assert torch.equal(unpack_bits(pack_bits(values, bits), bits, 19), values)


def test_any_bytes_unpack_to_codes_within_range() -> None:
    for bits in range(1, 9):
        noise = torch.randint(0, 256, (3, packed_bytes(21, bits)), generator=generator(bits)).to(torch.uint8)
        assert int(unpack_bits(noise, bits, 21).max()) < 1 << bits
