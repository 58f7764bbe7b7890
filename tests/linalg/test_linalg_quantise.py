"""Quantised factors: near what they stand for, and on a grid that makes their products exact in any order."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from linalg_matrices import generator

from mfs_decompose.linalg.quantise import FactorFormat, Quantised, dequantise, grid_bits, quantise

_FORMATS: list[FactorFormat] = ["int4", "int8", "bf16"]
_LEVELS = {"int4": 7, "int8": 127}
_GROUP = 64


def directions(rank: int, length: int, seed: int, spread: float = 6.0) -> torch.Tensor:
    """Directions of very different sizes, with outliers and with groups of zeros."""
    draw = generator(seed)
    values = torch.randn(rank, length, generator=draw)
    values *= torch.exp2(torch.randint(-int(spread), int(spread) + 1, (rank, 1), generator=draw).to(torch.float32))
    outliers = torch.rand(rank, length, generator=draw) > 0.97
    return torch.where(outliers, values * 30, values) * (torch.rand(rank, length, generator=draw) > 0.05)


def on_grid(values: torch.Tensor) -> int:
    """Bits that fp64 values span: log2 of the largest over the unit that all are multiples of, rounded up."""
    exact = [Fraction(value) for value in values.flatten().tolist() if value]
    if not exact:
        return 0
    unit = Fraction(1, max(value.denominator for value in exact))
    common = math.gcd(*(int(value / unit) for value in exact))
    unit *= common & -common
    multiples = [value / unit for value in exact]
    assert all(multiple.denominator == 1 for multiple in multiples)
    return int(max(abs(multiple) for multiple in multiples)).bit_length()


def steps_of(quantised: Quantised, length: int) -> torch.Tensor:
    assert quantised.scales is not None
    return quantised.scales.to(torch.float64).repeat_interleave(_GROUP, dim=1)[:, :length]


@pytest.mark.parametrize("rank", [0, 1, 2, 3, 4, 7, 8, 9, 63, 64, 65, 128, 1000, 4096, 4097, 1 << 20])
def test_two_factors_and_their_sum_fit_into_fp64(rank: int) -> None:
    bits = grid_bits(rank)
    sums = (max(rank, 1) - 1).bit_length()
    assert 2 * bits + sums <= 53
    assert 2 * (bits + 1) + sums > 53
    assert bits >= 16  # enough for the 8 bits of a scale and the 7 of a code, and a window of scales


@given(
    st.sampled_from(_FORMATS),
    st.integers(1, 70),
    st.integers(1, 200),
    st.integers(0, 10**6),
    st.sampled_from([2, 6, 30]),
)
def test_every_value_lies_on_the_grid(fmt: FactorFormat, rank: int, length: int, seed: int, spread: int) -> None:
    quantised = quantise(directions(rank, length, seed, spread), fmt)
    # A code of 7 or 127 and a scale of 8 bits reach at most as far as the grid says; bf16 rounds within it.
    assert on_grid(dequantise(quantised)) <= grid_bits(rank)


@pytest.mark.parametrize("fmt", _FORMATS)
@pytest.mark.parametrize("rank", [1, 5, 64, 130])
def test_products_are_exact_in_any_order(fmt: FactorFormat, rank: int) -> None:
    left = dequantise(quantise(directions(rank, 21, 3), fmt))
    right = dequantise(quantise(directions(rank, 34, 4), fmt))
    product = left.mT @ right
    for seed in range(5):
        order = torch.randperm(rank, generator=generator(seed))
        assert torch.equal(left[order].mT @ right[order], product)
        one_by_one = torch.zeros_like(product)
        for at in order.tolist():
            one_by_one += left[at][:, None] * right[at][None, :]
        assert torch.equal(one_by_one, product)
    for row, column in ((0, 0), (20, 33), (11, 5)):
        terms = zip(left[:, row].tolist(), right[:, column].tolist(), strict=True)
        exact = sum((Fraction(a) * Fraction(b) for a, b in terms), Fraction())
        assert Fraction(float(product[row, column])) == exact


def test_without_the_grid_the_order_would_show() -> None:
    # Otherwise the test above could not fail.
    left = directions(64, 21, 3).to(torch.float64) / 3
    right = directions(64, 34, 4).to(torch.float64) / 3
    order = torch.randperm(64, generator=generator(0))
    assert not torch.equal(left[order].mT @ right[order], left.mT @ right)


@given(st.sampled_from(["int4", "int8"]), st.integers(1, 20), st.integers(1, 200), st.integers(0, 10**6))
def test_codes_are_within_half_a_step(fmt: FactorFormat, rank: int, length: int, seed: int) -> None:
    values = directions(rank, length, seed)
    quantised = quantise(values, fmt)
    assert quantised.codes.dtype == torch.int8
    assert quantised.codes.shape == (rank, length)
    assert quantised.scales is not None
    assert quantised.scales.dtype == torch.bfloat16
    assert quantised.scales.shape == (rank, -(-length // _GROUP))
    assert int(quantised.codes.abs().max()) <= _LEVELS[fmt]
    error = (dequantise(quantised) - values.to(torch.float64)).abs()
    assert bool((error <= steps_of(quantised, length) * 0.5 * (1 + 1e-6)).all())


@pytest.mark.parametrize("fmt", ["int4", "int8"])
def test_a_scale_is_the_least_that_does_not_clip(fmt: FactorFormat) -> None:
    values = directions(9, 130, 12, spread=1)
    quantised = quantise(values, fmt)
    assert quantised.scales is not None
    for group in range(3):
        peaks = values[:, group * _GROUP : (group + 1) * _GROUP].abs().amax(dim=1).to(torch.float64)
        scales = quantised.scales[:, group].to(torch.float64)
        least = peaks / _LEVELS[fmt]
        assert bool((scales >= least * (1 - 1e-6)).all())
        assert bool((scales <= least * (1 + 2**-7) * (1 + 1e-6)).all())


@pytest.mark.parametrize(("fmt", "window"), [("int4", 26 - 3 - 8), ("int8", 26 - 7 - 8)])
def test_scales_below_the_window_are_raised_to_it(fmt: FactorFormat, window: int) -> None:
    # One direction: 26 bits. Groups get scales of 1, 2^-window and 2^-(window + 4).
    levels = _LEVELS[fmt]
    values = torch.zeros(1, 3 * _GROUP)
    values[0, 0], values[0, _GROUP], values[0, 2 * _GROUP] = (
        levels,
        levels * 2.0**-window,
        levels * 2.0 ** -(window + 4),
    )
    quantised = quantise(values, fmt)
    assert quantised.scales is not None
    assert quantised.scales.tolist() == [[1.0, 2.0**-window, 2.0**-window]]
    assert quantised.codes[0, [0, _GROUP, 2 * _GROUP]].tolist() == [levels, levels, round(levels / 16)]


def test_bf16_values_are_those_of_bf16_above_the_grid() -> None:
    values = directions(40, 77, 5, spread=3)
    found = dequantise(quantise(values, "bf16"))
    rounded = values.to(torch.bfloat16).to(torch.float64)
    unit = 2.0 ** (math.frexp(float(rounded.abs().max()))[1] - grid_bits(40))
    assert bool(((found - rounded).abs() <= unit / 2).all())
    large = rounded.abs() >= 256 * unit
    assert torch.equal(found[large], rounded[large])
    assert bool(large.any())


def test_bf16_values_far_below_the_largest_become_zero() -> None:
    values = torch.tensor([[1.0, 2.0**-24, 2.0**-27, -(2.0**-27), 3 * 2.0**-26]])
    assert dequantise(quantise(values, "bf16")).tolist() == [[1.0, 2.0**-24, 0.0, 0.0, 2.0**-24]]


@pytest.mark.parametrize("fmt", _FORMATS)
@pytest.mark.parametrize("shape", [(3, 130), (1, 1), (5, 64)])
def test_zero_stays_zero(fmt: FactorFormat, shape: tuple[int, int]) -> None:
    found = dequantise(quantise(torch.zeros(shape), fmt))
    assert found.shape == shape
    assert not bool(found.any())


@pytest.mark.parametrize("fmt", ["int4", "int8"])
def test_a_group_of_zeros_has_the_scale_zero(fmt: FactorFormat) -> None:
    values = directions(4, 200, 8)
    values[:, 64:128] = 0
    values[2] = 0
    quantised = quantise(values, fmt)
    assert quantised.scales is not None
    assert not bool(quantised.scales[:, 1].any()) and not bool(quantised.scales[2].any())
    found = dequantise(quantised)
    assert not bool(found[:, 64:128].any()) and not bool(found[2].any())
    assert bool(torch.isfinite(found).all())


_TINY = [1e-30, 1e-37, 1e-39, 1e-41, 3e-43, 1.5e-45]


@pytest.mark.parametrize("fmt", ["int4", "int8"])
@pytest.mark.parametrize("scale", _TINY)
def test_tiny_and_subnormal_codes(fmt: FactorFormat, scale: float) -> None:
    values = torch.randn(6, 90, generator=generator(3)) * scale
    quantised = quantise(values, fmt)
    found, steps = dequantise(quantised), steps_of(quantised, 90)
    error = (found - values.to(torch.float64)).abs()
    # No step at all: the largest of the group is too small for fp32 to divide by the levels.
    limit = torch.where(steps > 0, steps / 2 * (1 + 1e-5), _LEVELS[fmt] * 2.0**-149)
    assert bool((error <= limit).all())
    assert on_grid(found) <= grid_bits(6)


@pytest.mark.parametrize("scale", _TINY)
def test_tiny_and_subnormal_bf16(scale: float) -> None:
    values = torch.randn(6, 90, generator=generator(3)) * scale
    found = dequantise(quantise(values, "bf16"))
    error = (found - values.to(torch.float64)).abs()
    grid = float(values.abs().max()) * 2.0 ** (1 - grid_bits(6))
    limit = torch.maximum(values.abs().to(torch.float64) * 2**-8, found.new_tensor(max(2.0**-133, grid)) / 2)
    assert bool((error <= limit).all())
    assert on_grid(found) <= grid_bits(6)


@pytest.mark.parametrize("fmt", _FORMATS)
def test_huge_values(fmt: FactorFormat) -> None:
    values = torch.randn(6, 90, generator=generator(3)) * 1e37
    found = dequantise(quantise(values, fmt))
    assert bool(torch.isfinite(found).all())
    assert float((found - values).norm() / values.norm()) < 0.15


@given(st.sampled_from(_FORMATS), st.integers(1, 200), st.data())
def test_a_window_of_columns_equals_the_whole(fmt: FactorFormat, length: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, length))
    stop = data.draw(st.integers(start, length))
    quantised = quantise(directions(3, length, length), fmt)
    assert torch.equal(dequantise(quantised, start, stop), dequantise(quantised)[:, start:stop])
    assert torch.equal(dequantise(quantised, start), dequantise(quantised)[:, start:])


@pytest.mark.parametrize("fmt", _FORMATS)
def test_a_head_is_the_first_directions(fmt: FactorFormat) -> None:
    quantised = quantise(directions(9, 100, 1), fmt)
    for rank in (0, 1, 5, 9):
        assert torch.equal(dequantise(quantised.head(rank)), dequantise(quantised)[:rank])


@pytest.mark.parametrize("fmt", _FORMATS)
def test_no_direction_at_all(fmt: FactorFormat) -> None:
    assert dequantise(quantise(torch.empty(0, 77), fmt)).shape == (0, 77)


@pytest.mark.parametrize("fmt", _FORMATS)
def test_a_view_quantises_as_its_values(fmt: FactorFormat) -> None:
    values = directions(70, 9, 2).mT
    assert torch.equal(dequantise(quantise(values, fmt)), dequantise(quantise(values.contiguous(), fmt)))
