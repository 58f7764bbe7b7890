"""Sums of squares against exactly rounded ones, with the same bits at any number of threads."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from linalg_matrices import generator

from mfs_decompose.linalg import sums
from mfs_decompose.linalg.sums import squared_norm


def slow(values: torch.Tensor) -> float:
    return math.fsum(value * value for value in values.to(torch.float64).flatten().tolist())


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@given(st.integers(0, 9001), st.integers(0, 5))
def test_against_the_exactly_rounded_sum(count: int, seed: int) -> None:
    values = torch.randn(count, generator=generator(seed))
    assert squared_norm(values) == pytest.approx(slow(values), rel=1e-14)


@pytest.mark.parametrize("count", [4095, 4096, 4097, 8192, 12289])
def test_around_the_size_of_a_block(count: int) -> None:
    values = torch.randn(count, generator=generator(count)) * 1e-4
    assert squared_norm(values) == pytest.approx(slow(values), rel=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_any_float(dtype: torch.dtype) -> None:
    values = torch.randn(5000, generator=generator(1)).to(dtype)
    assert squared_norm(values) == pytest.approx(slow(values), rel=1e-14)


def test_squares_of_small_and_large_values_neither_vanish_nor_overflow() -> None:
    assert squared_norm(torch.tensor([3e-38, 4e-38])) == pytest.approx(25e-76)
    assert squared_norm(torch.tensor([3e38, 1e38])) == pytest.approx(1e77)


def test_blocks_are_added_without_loss() -> None:
    # One large block, and 250 that are each below half of its last bit.
    values = torch.full((4096 * 251,), 1e-4)
    values[:4096] = 0
    values[0] = 1e6
    assert squared_norm(values) - 1e12 == pytest.approx(250 * 4096 * 1e-8, rel=0.01)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("shape", [(40_000,), (1, 300_001), (2, 4096 * 3), (700, 901), (4096 * 9, 1)])
def test_threads_do_not_show(shape: tuple[int, ...]) -> None:
    values = torch.randn(shape, generator=generator(7)) * torch.logspace(0, -6, shape[-1])
    found = set()
    for count in (1, 2, 3, 4):
        torch.set_num_threads(count)
        found.add(squared_norm(values).hex())
    assert len(found) == 1


@pytest.mark.usefixtures("threads")
def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(50_001, generator=generator(8))
    whole = squared_norm(values)
    monkeypatch.setattr(sums, "_CHUNK", 2 * sums._BLOCK)
    assert squared_norm(values) == whole


def test_order_is_that_of_the_rows() -> None:
    values = torch.randn(300, 200, generator=generator(9))
    assert squared_norm(values.mT) == squared_norm(values.mT.contiguous())
    assert squared_norm(values.mT) == pytest.approx(squared_norm(values), rel=1e-14)
    assert squared_norm(values[::2, ::3]) == pytest.approx(slow(values[::2, ::3]), rel=1e-14)


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0)])
def test_nothing_sums_to_zero(shape: tuple[int, ...]) -> None:
    assert squared_norm(torch.empty(shape)) == 0.0


def test_a_scalar() -> None:
    assert squared_norm(torch.tensor(-3.0)) == 9.0


def test_what_is_not_finite_shows() -> None:
    values = torch.ones(5000)
    values[4321] = torch.inf
    assert squared_norm(values) == math.inf
    values[17] = torch.nan
    assert math.isnan(squared_norm(values))
