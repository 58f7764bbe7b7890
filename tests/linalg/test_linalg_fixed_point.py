"""Integer factors: exact products, the error that was asked for, and nothing that could round."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from linalg_matrices import generator, power_law, with_spectrum

from mfs_decompose.linalg.deround import balance
from mfs_decompose.linalg.fixed_point import LARGEST_CODE, FixedFactors, is_exact, quantise_fixed


def _factors(rank: int, rows: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    sigma = power_law(rank, 1.5) * 0.3
    matrix = with_spectrum(sigma, rows, columns, seed)
    u, s, vt = torch.linalg.svd(matrix, full_matrices=False)
    return balance(u[:, :rank] * s[:rank], vt[:rank].mT.contiguous())


def _slow_product(factors: FixedFactors) -> np.ndarray:
    """The product in Python's integers and fractions."""
    left, right = factors.left.tolist(), factors.right.tolist()
    rows, columns = len(left[0]), len(right[0])
    found = np.empty((rows, columns), object)
    for i in range(rows):
        for j in range(columns):
            found[i, j] = sum(
                (Fraction(2) ** e * left[k][i] * right[k][j] for k, e in enumerate(factors.exponents)), Fraction(0)
            )
    return found


@pytest.mark.parametrize("rank", [1, 5, 16])
def test_the_product_is_exact(rank: int) -> None:
    left, right = _factors(rank, 23, 17, rank)
    factors = quantise_fixed(left, right, 1e-6)
    assert factors is not None and factors.rank == rank
    found = factors.rows(0, 23).numpy()
    exact = _slow_product(factors)
    assert all(Fraction(found[i, j]) == exact[i, j] for i in range(23) for j in range(17))


def test_any_order_of_directions_and_any_window_gives_the_same_bits() -> None:
    left, right = _factors(12, 40, 31, 2)
    factors = quantise_fixed(left, right, 1e-7)
    assert factors is not None
    whole = factors.rows(0, 40)
    order = torch.randperm(12, generator=generator(1))
    turned = FixedFactors(
        factors.left[order], factors.right[order], tuple(factors.exponents[at] for at in order.tolist())
    )
    assert torch.equal(turned.rows(0, 40), whole)
    assert torch.equal(torch.cat([factors.rows(0, 7), factors.rows(7, 40)]), whole)
    one_by_one = sum(
        torch.outer(u.double() * 2.0**e, v.double())
        for u, v, e in zip(factors.left, factors.right, factors.exponents, strict=True)
    )
    assert torch.equal(one_by_one, whole)


@pytest.mark.parametrize("error", [1e-3, 1e-5, 1e-7])
def test_the_error_is_about_what_was_asked_for(error: float) -> None:
    left, right = _factors(9, 200, 150, 3)
    factors = quantise_fixed(left, right, error)
    assert factors is not None
    off = factors.rows(0, 200) - left.double() @ right.double().mT
    # Directions that are smaller than the error are rounded to nothing: less than their share.
    assert 0.5 * error < float(off.square().mean().sqrt()) < 1.3 * error


def test_strong_directions_have_more_bits() -> None:
    left, right = _factors(8, 200, 150, 4)
    factors = quantise_fixed(left, right, 1e-6)
    assert factors is not None
    peaks = factors.left.abs().amax(dim=1).tolist()
    assert peaks[0] > 8 * peaks[-1] > 0


def test_directions_of_nothing_are_left_out() -> None:
    left, right = _factors(6, 30, 20, 5)
    left[:, 3] = 0
    factors = quantise_fixed(left, right, 1e-5)
    assert factors is not None and factors.rank == 5
    none = quantise_fixed(torch.zeros(30, 2), right[:, :2], 1e-5)
    assert none is not None and none.rank == 0
    assert torch.equal(none.rows(3, 9), torch.zeros(6, 20, dtype=torch.float64))


@pytest.mark.parametrize("error", [1e-12, 0.0, float("nan")])
def test_an_error_that_cannot_be_met_is_refused(error: float) -> None:
    left, right = _factors(6, 30, 20, 6)
    assert quantise_fixed(left, right, error) is None


def test_what_is_not_finite_is_refused() -> None:
    left, right = _factors(6, 30, 20, 7)
    left[3, 2] = torch.inf
    assert quantise_fixed(left, right, 1e-5) is None


@given(st.integers(0, 40), st.integers(1, 24), st.integers(1, 24), st.integers(1, 5))
def test_exactness_is_judged_by_the_worst_sum(spread: int, left_bits: int, right_bits: int, rank: int) -> None:
    left = torch.full((rank, 2), (1 << left_bits) - 1, dtype=torch.int32)
    right = torch.full((rank, 3), -((1 << right_bits) - 1), dtype=torch.int32)
    exponents = tuple(spread if k == 0 else 0 for k in range(rank))
    worst = sum(((1 << left_bits) - 1) * ((1 << right_bits) - 1) << (e - min(exponents)) for e in exponents)
    assert is_exact(FixedFactors(left, right, exponents)) == (worst < 2**53)


def test_codes_ranks_and_exponents_out_of_range_are_not_exact() -> None:
    one = torch.ones(1, 2, dtype=torch.int32)
    assert is_exact(FixedFactors(one, one, (500,)))
    assert not is_exact(FixedFactors(one, one, (501,)))
    assert not is_exact(FixedFactors(one, one, (-501,)))
    assert not is_exact(FixedFactors(one * (LARGEST_CODE + 1), one, (0,)))
    assert not is_exact(FixedFactors(one * -(2**31), one, (0,)))
    many = torch.zeros(4097, 2, dtype=torch.int32)
    assert not is_exact(FixedFactors(many, many, (0,) * 4097))
    empty = torch.zeros(2, 0, dtype=torch.int32)
    assert is_exact(FixedFactors(empty, empty, (0, 0)))
