"""The mean of the variants against a slow exact one, and deltas against the base as stored."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mfs_decompose.base_extraction import delta_rows, mean_rows

_DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def variants(count: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 1) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [(torch.randn(shape, generator=draw) * 3).to(dtype) for _ in range(count)]


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8)


@given(st.integers(1, 9), st.sampled_from(_DTYPES), st.integers(0, 1000))
def test_the_mean_is_the_exact_one_rounded_once(count: int, dtype: torch.dtype, seed: int) -> None:
    rows = variants(count, (5, 3), dtype, seed)
    mean = mean_rows(rows, dtype)
    assert mean.dtype == dtype and mean.shape == (5, 3)
    for at in itertools.product(range(5), range(3)):
        exact = sum((Fraction(float(values[at])) for values in rows), Fraction()) / count
        expected = torch.tensor(float(exact), dtype=torch.float64).to(dtype)
        assert float(mean[at]) == float(expected)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("dtype", [*_DTYPES, torch.float64])
def test_what_all_variants_share_is_the_base_bit_for_bit(dtype: torch.dtype, count: int) -> None:
    shared = variants(1, (40, 5), dtype)[0]
    shared[0] = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.5])
    shared[1] = torch.finfo(dtype).smallest_normal / 4
    shared[2] = -torch.finfo(dtype).max / 16
    assert torch.equal(bits(mean_rows([shared] * count, dtype)), bits(shared))


def test_the_largest_values_do_not_overflow_on_the_way() -> None:
    for dtype in _DTYPES:
        largest = torch.full((2, 2), torch.finfo(dtype).max, dtype=dtype)
        assert torch.equal(mean_rows([largest, largest, largest], dtype), largest)


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_one_variant_that_is_not_finite_gives_zero_there_alone(dtype: torch.dtype, value: float) -> None:
    rows = variants(3, (4, 6), dtype)
    clean = mean_rows(rows, dtype)
    rows[1][2, 3] = value
    mean = mean_rows(rows, dtype)
    assert float(mean[2, 3]) == 0.0 and not bool(torch.signbit(mean[2, 3]))
    mean[2, 3] = clean[2, 3]
    assert torch.equal(mean, clean)


def test_infinities_of_both_signs_give_zero() -> None:
    inf = torch.full((2,), torch.inf)
    assert mean_rows([inf, -inf], torch.float32).tolist() == [0.0, 0.0]
    assert mean_rows([inf, inf], torch.float32).tolist() == [0.0, 0.0]


def test_variants_are_left_as_they_were() -> None:
    rows = variants(3, (4, 6), torch.float64)
    before = [values.clone() for values in rows]
    mean_rows(rows, torch.float64)
    assert all(torch.equal(values, old) for values, old in zip(rows, before, strict=True))


def test_variants_of_several_dtypes_and_another_for_the_base() -> None:
    rows = [torch.tensor([1.0, 2.0]), torch.tensor([2.0, 2.0], dtype=torch.bfloat16)]
    mean = mean_rows(rows, torch.float16)
    assert mean.dtype == torch.float16 and mean.tolist() == [1.5, 2.0]


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0)])
def test_nothing(shape: tuple[int, ...]) -> None:
    assert mean_rows([torch.empty(shape)] * 2, torch.bfloat16).shape == shape
    assert delta_rows(torch.empty(shape), torch.empty(shape)).shape == shape


def test_any_block_of_rows_equals_the_whole() -> None:
    rows = variants(5, (11, 4), torch.bfloat16)
    whole = mean_rows(rows, torch.bfloat16)
    for start, stop in ((0, 1), (3, 8), (10, 11)):
        assert torch.equal(mean_rows([values[start:stop] for values in rows], torch.bfloat16), whole[start:stop])


@pytest.mark.parametrize("own", _DTYPES)
@pytest.mark.parametrize("base", _DTYPES)
def test_deltas_are_fp32_differences(own: torch.dtype, base: torch.dtype) -> None:
    values, stored = variants(1, (7, 3), own, 2)[0], variants(1, (7, 3), base, 3)[0]
    delta = delta_rows(values, stored)
    assert delta.dtype == torch.float32
    for at in itertools.product(range(7), range(3)):
        exact = float(values[at]) - float(stored[at])
        assert float(delta[at]) == float(torch.tensor(exact, dtype=torch.float64).to(torch.float32))


def test_neighbours_differ() -> None:
    base = torch.tensor([1.0, 100.0, -1e-3, 3e38], dtype=torch.bfloat16)
    own = torch.nextafter(base, torch.zeros_like(base))
    delta = delta_rows(own, base)
    assert bool((delta != 0).all())
    assert torch.equal((base.to(torch.float32) + delta).to(torch.bfloat16), own)


@pytest.mark.parametrize("wide", ["own", "base", "both"])
def test_fp64_is_subtracted_in_fp64(wide: str) -> None:
    own, base = torch.tensor([1.0 + 2.0**-40]), torch.tensor([1.0])
    exact = torch.tensor([1.0 + 2.0**-40], dtype=torch.float64)
    if wide == "own":
        assert delta_rows(exact, base).tolist() == [2.0**-40]
    elif wide == "base":
        assert delta_rows(own, exact).tolist() == [-(2.0**-40)]
    else:
        assert delta_rows(exact, base.to(torch.float64)).tolist() == [2.0**-40]
