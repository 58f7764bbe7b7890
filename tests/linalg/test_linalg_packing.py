"""Four-bit packing: where each value lies, and that each comes back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mfs_decompose.linalg.packing import pack_int4, unpack_int4

_MATRICES = st.integers(0, 9).flatmap(
    lambda length: st.lists(st.lists(st.integers(-8, 7), min_size=length, max_size=length), min_size=1, max_size=6)
)


@given(_MATRICES)
def test_round_trip(rows: list[list[int]]) -> None:
    codes = torch.tensor(rows, dtype=torch.int8).reshape(len(rows), -1)
    length = codes.shape[1]
    packed = pack_int4(codes)
    assert packed.dtype == torch.uint8
    assert packed.shape == (len(rows), -(-length // 2))
    assert packed.is_contiguous()
    found = unpack_int4(packed, length)
    assert found.dtype == torch.int8
    assert found.is_contiguous()
    assert torch.equal(found, codes)


def test_layout_is_that_of_the_format() -> None:
    codes = torch.tensor([[1, -2, 7], [-8, 0, -1]], dtype=torch.int8)
    assert pack_int4(codes).tolist() == [[0xE1, 0x07], [0x08, 0x0F]]


def test_every_byte_is_a_pair_and_back() -> None:
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(16, 16)
    values = unpack_int4(every, 32)
    assert values.min() == -8 and values.max() == 7
    assert torch.equal(pack_int4(values), every)


def test_the_half_byte_behind_an_odd_row_is_zero() -> None:
    packed = pack_int4(torch.full((3, 5), -1, dtype=torch.int8))
    assert (packed[:, 2] >> 4).tolist() == [0, 0, 0]


def test_a_view_packs_as_its_values() -> None:
    codes = torch.arange(-8, 8, dtype=torch.int8).reshape(2, 8)
    assert torch.equal(pack_int4(codes.mT), pack_int4(codes.mT.contiguous()))
    assert torch.equal(pack_int4(codes[:, 1:6]), pack_int4(codes[:, 1:6].contiguous()))


@pytest.mark.parametrize("shape", [(0, 7), (0, 8), (3, 0), (0, 0)])
def test_nothing(shape: tuple[int, int]) -> None:
    packed = pack_int4(torch.empty(shape, dtype=torch.int8))
    assert packed.shape == (shape[0], -(-shape[1] // 2))
    assert unpack_int4(packed, shape[1]).shape == shape
