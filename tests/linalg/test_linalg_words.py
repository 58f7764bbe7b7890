"""Words: differences, narrowing and planes give every word back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfs_decompose.linalg.words import (
    Words,
    from_planes,
    narrow,
    narrow_size,
    rotate,
    to_planes,
    trailing_zeros,
    undo_zigzag,
    widen,
    word_type,
    zigzag_difference,
)

SIZES = [1, 2, 4, 8]


def drawn(size: int, count: int, seed: int) -> Words:
    words: Words = np.random.default_rng(seed).integers(0, 256, count * size, dtype=np.uint8).view(word_type(size))
    return words


@pytest.mark.parametrize("size", SIZES)
def test_zigzag_puts_small_differences_first(size: int) -> None:
    half = 1 << (8 * size - 1)
    signed = [0, -1, 1, -2, 2, -100, 100, half - 1, -half]
    own = np.array([number % (1 << 8 * size) for number in signed], word_type(size))
    coded = zigzag_difference(own, np.zeros_like(own))
    assert coded.dtype == own.dtype
    assert [int(code) for code in coded] == [2 * n if n >= 0 else -2 * n - 1 for n in signed]


@given(st.sampled_from(SIZES), st.integers(0, 40), st.integers(0, 1000))
def test_a_difference_is_undone_whatever_the_base(size: int, count: int, seed: int) -> None:
    own, base = drawn(size, count, seed), drawn(size, count, seed + 1)
    kept = own.copy()
    out = np.empty_like(own)
    numbers = zigzag_difference(own, base, out=out)
    assert numbers is out and np.array_equal(own, kept)
    undo_zigzag(numbers, base)
    assert np.array_equal(numbers, own)


def test_neighbours_of_the_same_sign_differ_by_one() -> None:
    # What makes a small change of a weight a small number.
    values = np.array([1.0, -1.0, 1e-30, np.finfo(np.float32).max], np.float32)
    with np.errstate(over="ignore"):
        after = np.nextafter(values, np.sign(values) * np.inf, dtype=np.float32)
        numbers = zigzag_difference(after.view("<u4"), values.view("<u4"))
    assert numbers.tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("words", "zeros"),
    [([0x30, 0x10, 0], 4), ([1], 0), ([0, 0], 0), ([], 0), ([0x8000, 0x8000], 15), ([0x8000, 0x8001], 0)],
)
def test_trailing_zeros_of_all_words_together(words: list[int], zeros: int) -> None:
    assert trailing_zeros(np.array(words, "<u2")) == zeros


@pytest.mark.parametrize("size", SIZES)
def test_narrowed_words_come_back(size: int) -> None:
    for dropped in range(8 * size):
        words = (drawn(size, 9, dropped) >> dropped) << dropped
        small = narrow(words, dropped)
        assert small.itemsize == narrow_size(size, dropped) == min(s for s in SIZES if 8 * s >= 8 * size - dropped)
        assert np.array_equal(widen(small, dropped, size), words)
        assert widen(small, dropped, size).itemsize == size


@pytest.mark.parametrize(("size", "bits"), [(1, 8), (1, 5), (2, 16), (2, 9), (4, 32), (4, 19), (8, 64), (8, 35)])
def test_a_rotation_is_undone_by_the_rest_of_it(size: int, bits: int) -> None:
    words = drawn(size, 30, bits) & word_type(size).type((1 << bits) - 1)
    turned = rotate(words, bits, 1)
    top = 1 << (bits - 1)
    assert [int(w) for w in turned] == [(int(w) * 2 & (2 * top - 1)) | int(bool(int(w) & top)) for w in words]
    assert np.array_equal(rotate(turned, bits, bits - 1), words)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [0, 1, 7])
def test_planes_hold_lowest_bytes_first(size: int, count: int) -> None:
    words = drawn(size, count, 3)
    data = to_planes(words)
    assert list(data) == [int(word) >> (8 * plane) & 255 for plane in range(size) for word in words]
    back = from_planes(data, size)
    assert np.array_equal(back, words) and back.flags.writeable
