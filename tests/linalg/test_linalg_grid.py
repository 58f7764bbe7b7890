"""Formats as grids, against exact rational arithmetic and against the casts of other libraries."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mfs_decompose.linalg.grid import (
    GRIDS,
    is_even,
    nearest,
    neighbours,
    ordered,
    powers,
    to_values,
    to_words,
    unit_exponents,
    unordered,
)

_ALL_WORDS = np.arange(1 << 16, dtype=np.uint16)
_SHORT = ["BF16", "F16"]


def _finite_numbers(name: str) -> np.ndarray:
    """All finite numbers of a 16-bit format in order, one zero."""
    values = to_values(_ALL_WORDS, GRIDS[name])
    return np.unique(values[np.isfinite(values)])


@pytest.mark.parametrize(("name", "dtype"), [("BF16", torch.bfloat16), ("F16", torch.float16)])
def test_values_are_those_of_torch(name: str, dtype: torch.dtype) -> None:
    expected = torch.from_numpy(_ALL_WORDS.view(np.int16)).view(dtype).to(torch.float64).numpy()
    np.testing.assert_array_equal(to_values(_ALL_WORDS, GRIDS[name]), expected)


@pytest.mark.parametrize("name", _SHORT)
def test_words_of_all_numbers_come_back(name: str) -> None:
    values = to_values(_ALL_WORDS, GRIDS[name])
    finite = np.isfinite(values)
    np.testing.assert_array_equal(to_words(values[finite], GRIDS[name]), _ALL_WORDS[finite])


def test_fp32_words_come_back() -> None:
    words = np.array([0, 0x80000000, 1, 0x807FFFFF, 0x3F800000, 0x7F7FFFFF, 0xC2280000], np.uint32)
    np.testing.assert_array_equal(to_words(to_values(words, GRIDS["F32"]), GRIDS["F32"]), words)


@pytest.mark.parametrize("name", _SHORT)
def test_order_is_the_order_of_the_values(name: str) -> None:
    order = ordered(_ALL_WORDS)
    assert np.unique(order).size == order.size
    np.testing.assert_array_equal(unordered(order), _ALL_WORDS)
    values = to_values(_ALL_WORDS, GRIDS[name])
    finite = np.isfinite(values)
    by_order = values[finite][np.argsort(order[finite])]
    assert (np.diff(by_order) >= 0).all()


def test_order_of_longer_words_is_a_bijection() -> None:
    words = np.array([0, 1, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFF], np.uint32)
    np.testing.assert_array_equal(unordered(ordered(words)), words)
    assert int(ordered(words)[3]) + 1 == int(ordered(words)[0])  # -0.0 just below +0.0


@pytest.mark.parametrize("name", _SHORT)
def test_neighbours_of_every_number(name: str) -> None:
    numbers = _finite_numbers(name)
    below, above = neighbours(numbers, GRIDS[name])
    np.testing.assert_array_equal(below[1:], numbers[:-1])
    np.testing.assert_array_equal(above[:-1], numbers[1:])
    assert above[-1] - numbers[-1] == numbers[-1] - numbers[-2]  # the grid goes on


def _slow_nearest(value: float, name: str) -> float:
    """Ties to even by exact rationals over all numbers of the format around the value."""
    grid = GRIDS[name]
    exponent = max(math.frexp(value)[1] - 1, grid.least) - grid.mantissa if value else grid.least - grid.mantissa
    unit = Fraction(2) ** exponent
    rounded = round(Fraction(value) / unit) * unit  # Python rounds halves of a Fraction to even
    return float(max(min(rounded, Fraction(grid.largest)), -Fraction(grid.largest)))


_ANY = st.floats(allow_nan=False, allow_infinity=False)
_NEAR = st.tuples(st.sampled_from([2.0**-149, 2.0**-134, 2.0**-24, 6e-5, 0.02, 1.0, 65504.0]), st.floats(-4, 4)).map(
    lambda pair: pair[0] * pair[1]
)


@given(st.lists(_ANY | _NEAR, min_size=1, max_size=20), st.sampled_from(sorted(GRIDS)))
def test_nearest_is_exact(values: list[float], name: str) -> None:
    found = nearest(np.array(values), GRIDS[name])
    assert found.tolist() == [_slow_nearest(value, name) for value in values]


@pytest.mark.parametrize("name", _SHORT)
def test_ties_go_to_even(name: str) -> None:
    numbers = _finite_numbers(name)[::7]
    _, above = neighbours(numbers, GRIDS[name])
    middle = (numbers + above) / 2
    words = ordered(to_words(nearest(middle, GRIDS[name]), GRIDS[name]))
    inside = middle < GRIDS[name].largest
    even = unordered(words)[inside] & 1
    assert not even.any()


@pytest.mark.parametrize("name", _SHORT)
def test_even_is_the_last_bit(name: str) -> None:
    values = to_values(_ALL_WORDS, GRIDS[name])
    finite = np.isfinite(values)
    np.testing.assert_array_equal(is_even(values[finite], GRIDS[name]), (_ALL_WORDS[finite] & 1) == 0)


def test_nearest_is_the_cast_of_numpy_to_fp16() -> None:
    values = np.random.default_rng(1).normal(0, 0.01, 4096) * np.exp2(np.arange(4096) % 30 - 20.0)
    np.testing.assert_array_equal(nearest(values, GRIDS["F16"]), values.astype(np.float16).astype(np.float64))


def test_units_are_powers_of_two_between_neighbours() -> None:
    numbers = np.array([1.0, 1.5, 3.0, 2.0**-130, 0.0])
    grid = GRIDS["BF16"]
    np.testing.assert_array_equal(
        powers(unit_exponents(numbers, grid)), [2.0**-7, 2.0**-7, 2.0**-6, 2.0**-133, 2.0**-133]
    )
