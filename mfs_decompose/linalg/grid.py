"""Floating-point formats as grids: round fp64 to the nearest number of a format, and its bits as ordered integers.

Integer and single IEEE operations only, so the result is the same on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.unsignedinteger[Any]]
Doubles = npt.NDArray[np.float64]
Longs = npt.NDArray[np.int64]

_BIAS = 1023  # of fp64


@dataclass(frozen=True)
class Grid:
    """A binary format: its bytes, stored mantissa bits, exponent of its smallest normal number, and largest number."""

    size: int
    mantissa: int
    least: int
    largest: float

    @property
    def word(self) -> np.dtype[np.unsignedinteger[Any]]:
        return np.dtype(f"<u{self.size}")


GRIDS = {
    "BF16": Grid(2, 7, -126, float(2**128 - 2**120)),
    "F16": Grid(2, 10, -14, 65504.0),
    "F32": Grid(4, 23, -126, float(2**128 - 2**104)),
}
"""By the names of safetensors. The numbers of a format lie a unit apart: 2^(exponent - mantissa bits)."""


def unit_exponents(values: Doubles, grid: Grid) -> Longs:
    """The exponent of the unit at each finite value, biased as in fp64."""
    exponents = (values.view(np.int64) >> 52) & 0x7FF
    units: Longs = np.maximum(exponents, _BIAS + grid.least) - grid.mantissa
    return units


def powers(biased: Longs) -> Doubles:
    """2^(biased - 1023), for biased exponents in 1..2046."""
    return (biased << 52).view(np.float64)


def nearest(values: Doubles, grid: Grid) -> Doubles:
    """The nearest number of the format to each finite value, ties to even; the largest where it would overflow."""
    units = unit_exponents(values, grid)
    whole = np.rint(values * powers(2 * _BIAS - units))
    with np.errstate(over="ignore"):
        rounded: Doubles = np.clip(whole * powers(units), -grid.largest, grid.largest)
    return rounded


def is_even(numbers: Doubles, grid: Grid) -> npt.NDArray[np.bool_]:
    """Whether the last bit of each number of the format is 0: ties are rounded to it."""
    half = numbers * powers(2 * _BIAS - 1 - unit_exponents(numbers, grid))
    even: npt.NDArray[np.bool_] = np.rint(half) == half
    return even


def to_words(rounded: Doubles, grid: Grid) -> Words:
    """The bits of numbers of the format."""
    if grid is GRIDS["F16"]:
        return rounded.astype(np.float16).view(grid.word)
    word = rounded.astype(np.float32).view(np.uint32)
    return word if grid.size == 4 else (word >> np.uint32(16)).astype(np.uint16)


def to_values(words: Words, grid: Grid) -> Doubles:
    """The numbers that bits stand for; Inf and NaN where they do."""
    if grid is GRIDS["F16"]:
        return words.view(np.float16).astype(np.float64)
    wide = words if grid.size == 4 else words.astype(np.uint32) << np.uint32(16)
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return wide.view(np.float32).astype(np.float64)


def ordered(words: Words) -> Words:
    """Float bits as integers in the order of the values: a bijection, -0.0 just below +0.0."""
    sign = words.dtype.type(1 << (8 * words.dtype.itemsize - 1))
    return np.where(words & sign, ~words, words | sign)


def unordered(words: Words) -> Words:
    """The inverse of `ordered`."""
    sign = words.dtype.type(1 << (8 * words.dtype.itemsize - 1))
    return np.where(words & sign, words & ~sign, ~words)


def neighbours(numbers: Doubles, grid: Grid) -> tuple[Doubles, Doubles]:
    """The next number of the format below and above each finite number of it; beyond the largest the grid goes on."""
    unit = powers(unit_exponents(numbers, grid))
    # Towards zero from a power of two the unit is half as large; below the smallest normal number it is not.
    edge = (np.abs(numbers) == powers(unit_exponents(numbers, grid) + grid.mantissa)) & (
        np.abs(numbers) > 2.0**grid.least
    )
    inward = np.where(edge, unit / 2, unit)
    below = numbers - np.where(numbers > 0, inward, unit)
    above = numbers + np.where(numbers < 0, inward, unit)
    return below, above
