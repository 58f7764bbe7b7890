"""Digits of 1, 2, 4 and 8 bits: where each stands, and which one says that a number escapes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfs_decompose.linalg.digits import ESCAPE, WIDTHS, most, pack, packed_size, unpack


@given(st.sampled_from(WIDTHS), st.lists(st.integers(0, 255), max_size=50))
def test_symbols_come_back(width: int, numbers: list[int]) -> None:
    symbols = [number if number < most(width) else ESCAPE for number in numbers]
    packed = pack(np.array(symbols, np.uint8), width)
    assert packed.size == packed_size(len(symbols), width) == -(-len(symbols) // (8 // width))
    assert unpack(packed, width, len(symbols)).tolist() == symbols


@pytest.mark.parametrize("width", WIDTHS)
def test_packing_leaves_the_symbols_alone(width: int) -> None:
    symbols = np.array([0, ESCAPE, 0, 0, ESCAPE], np.uint8)
    kept = symbols.copy()
    pack(symbols, width)
    assert np.array_equal(symbols, kept)


def test_where_digits_stand() -> None:
    assert pack(np.array([1, 2, 3, 4, 5], np.uint8), 4).tolist() == [0x41, 0x52, 0x03]
    assert pack(np.array([1, 2, 0, 0, ESCAPE], np.uint8), 2).tolist() == [0b110001, 0b10]
    assert pack(np.array([0] * 8 + [ESCAPE] + [0] * 2 + [ESCAPE], np.uint8), 1).tolist() == [1 << 4, 1 << 5]
