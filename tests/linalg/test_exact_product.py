"""The deterministic product and norm, against rational arithmetic, other cuts, other threads and other machines."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mfs_decompose.linalg.exact_norm import exact_column_norms, exact_row_norms
from mfs_decompose.linalg.exact_product import exact_product, exponents
from mfs_decompose.linalg.seeds import random_matrix

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def draw(seed: int, *shape: int, spread: float = 1.0) -> torch.Tensor:
    """Values over several orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    return values * torch.exp(spread * torch.randn(shape, generator=generator, dtype=torch.float64))


def exact(left: torch.Tensor, right: torch.Tensor) -> list[list[Fraction]]:
    rows = [[Fraction(float(x)) for x in row] for row in left]
    columns = [[Fraction(float(x)) for x in column] for column in right.mT]
    return [[sum((x * y for x, y in zip(row, column, strict=True)), Fraction()) for column in columns] for row in rows]


def worst(found: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> Fraction:
    """The largest error in units of R * max|row| * max|column|."""
    truth, errors = exact(left, right), [Fraction()]
    for o, row in enumerate(truth):
        for i, value in enumerate(row):
            size = left.shape[1] * Fraction(float(left[o].abs().max())) * Fraction(float(right[:, i].abs().max()))
            errors.append(abs(Fraction(float(found[o, i])) - value) / size if size else abs(value))
    return max(errors)


def plain_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The sum that artifacts are digested by, without tiles: every bit of it is part of the format."""
    bits = (53 - (left.shape[1] - 1).bit_length()) // 2
    most = -(-60 // bits)

    def slices(rows: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        power = torch.exp2(exponents(rows.abs().amax(dim=1)).clamp(min=-700).double())[:, None]
        rest, found = rows / power, []
        for _ in range(most):
            found.append((rest * 2.0**bits).round())
            rest = rest * 2.0**bits - found[-1]
        return found, power

    (lefts, down), (rights, across) = slices(left.double()), slices(right.mT.double())
    total = torch.zeros(left.shape[0], right.shape[1], dtype=torch.float64)
    for depth in range(most - 1, -1, -1):
        for i in range(depth + 1):
            total += (lefts[i] @ rights[depth - i].mT) * 2.0 ** (-bits * (depth + 2))
    return total * down * across.mT


class TestProduct:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize(("rank", "spread"), [(1, 0.0), (3, 1.0), (16, 2.0), (37, 6.0)])
    def test_the_bound_holds(self, dtype: torch.dtype, rank: int, spread: float) -> None:
        left, right = (draw(seed, *shape, spread=spread) for seed, shape in ((rank, (7, rank)), (99, (rank, 9))))
        left, right = (x.clamp(-6e4, 6e4).to(dtype) for x in (left, right))
        assert worst(exact_product(left, right), left, right) <= Fraction(8, 2**53)

    def test_short_factors_of_like_size_are_multiplied_exactly(self) -> None:
        left, right = draw(1, 11, 16, spread=0.3).to(torch.bfloat16), draw(2, 16, 13, spread=0.3).to(torch.bfloat16)
        assert [[Fraction(float(x)) for x in row] for row in exact_product(left, right)] == exact(left, right)

    @pytest.mark.parametrize("power", [-120, -40, 0, 60])
    def test_a_scale_by_a_power_of_two_changes_the_exponent_alone(self, power: int) -> None:
        left, right = draw(3, 5, 8).float(), draw(4, 8, 6).float()
        expected = exact_product(left, right) * 2.0**power
        assert torch.equal(exact_product(left.double() * 2.0**power, right), expected)

    @given(cut=st.integers(0, 23), seed=st.integers(0, 5), dtype=st.sampled_from(DTYPES))
    def test_a_block_of_rows_or_columns_has_the_bits_of_the_whole(
        self, cut: int, seed: int, dtype: torch.dtype
    ) -> None:
        left, right = draw(seed, 23, 6, spread=3.0).to(dtype), draw(seed + 50, 6, 23, spread=3.0).to(dtype)
        left, right = left.nan_to_num(posinf=1.0, neginf=-1.0), right.nan_to_num(posinf=1.0, neginf=-1.0)
        whole = exact_product(left, right)
        rows = torch.cat([exact_product(left[:cut], right), exact_product(left[cut:], right)])
        columns = torch.cat([exact_product(left, right[:, :cut]), exact_product(left, right[:, cut:])], dim=1)
        for parts in (rows, columns):
            assert torch.equal(parts.view(torch.int64), whole.view(torch.int64))

    def test_no_order_of_the_rank_changes_a_bit(self) -> None:
        left, right = draw(5, 9, 40, spread=2.0).float(), draw(6, 40, 11, spread=2.0).float()
        order = torch.randperm(40, generator=torch.Generator().manual_seed(7))
        assert torch.equal(exact_product(left[:, order], right[order]), exact_product(left, right))
        assert not torch.equal(left[:, order] @ right[order], left @ right)  # what it is for

    def test_zeros_and_nothing(self) -> None:
        zeros = torch.zeros(4, 3)
        zeros[1] = -0.0
        product = exact_product(zeros, draw(8, 3, 5))
        assert torch.equal(product.view(torch.int64), torch.zeros(4, 5, dtype=torch.int64))
        assert exact_product(torch.empty(4, 0), torch.empty(0, 5)).tolist() == [[0.0] * 5] * 4
        assert exact_product(torch.empty(0, 3), draw(9, 3, 5)).shape == (0, 5)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize(
        "shape", [(1, 1, 1), (70, 5, 2049), (300, 33, 301), (3, 4, 70_001), (2051, 2, 40)], ids=str
    )
    @pytest.mark.parametrize("spread", [0.3, 5.0])
    def test_tiles_have_the_bits_of_the_sum_written_plainly(
        self, dtype: torch.dtype, shape: tuple[int, int, int], spread: float
    ) -> None:
        outs, rank, ins = shape
        left, right = draw(21, outs, rank, spread=spread), draw(22, rank, ins, spread=spread)
        left, right = (x.clamp(-6e4, 6e4).to(dtype) for x in (left, right))
        left[outs // 2] = 0
        found, plain = exact_product(left, right), plain_product(left, right)
        assert torch.equal(found.view(torch.int64), plain.view(torch.int64))

    def test_subnormal_factors(self) -> None:
        left, right = torch.full((1, 3), 2.0**-140), torch.full((3, 1), 2.0**100)
        assert exact_product(left, right).item() == 3 * 2.0**-40


class TestNorm:
    @pytest.mark.parametrize(("rows", "columns", "spread"), [(1, 1, 0.0), (5, 300, 1.0), (3, 4099, 5.0)])
    def test_against_rational_arithmetic(self, rows: int, columns: int, spread: float) -> None:
        values = draw(11, rows, columns, spread=spread)
        for row, found in zip(values, exact_row_norms(values), strict=True):
            truth = sum((Fraction(float(x)) ** 2 for x in row), Fraction())
            assert abs(Fraction(float(found)) ** 2 / truth - 1) < Fraction(1, 2**40)

    @given(cut=st.integers(1, 56), seed=st.integers(0, 5))
    def test_any_cut_into_blocks_gives_the_same_bits(self, cut: int, seed: int) -> None:
        values = draw(seed, 57, 9, spread=4.0)
        whole = exact_column_norms(lambda: [values], 57)
        assert torch.equal(exact_column_norms(lambda: [values[:cut], values[cut:]], 57), whole)
        order = torch.randperm(57, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(exact_row_norms(values[order].mT), whole)

    @pytest.mark.parametrize("power", [-300, -1, 0, 250])
    def test_scales(self, power: int) -> None:
        values = draw(12, 4, 33)
        assert torch.equal(exact_row_norms(values * 2.0**power), exact_row_norms(values) * 2.0**power)

    def test_zeros(self) -> None:
        assert exact_row_norms(torch.zeros(3, 8)).tolist() == [0.0] * 3

    def test_powers_of_two_are_their_own_norms(self) -> None:
        assert exact_row_norms(torch.tensor([[0.5], [-4.0], [1.0]])).tolist() == [0.5, 4.0, 1.0]


@pytest.mark.parametrize("value", [1.0, 0.75, -3.0, 2.0**-1022, 2.0**1023, 5e-324, 0.0])
def test_the_exponent_is_the_least_that_bounds(value: float) -> None:
    found = int(exponents(torch.tensor([value], dtype=torch.float64)))
    assert abs(Fraction(value)) < Fraction(2) ** found
    assert found == -1022 or abs(Fraction(value)) >= Fraction(2) ** (found - 1)


def digest() -> str:
    left, right = random_matrix(1, 301, 64), random_matrix(2, 64, 517)
    product = exact_product(left, right)
    return hashlib.sha256(product.numpy().tobytes() + exact_row_norms(product).numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("setting", [("ATEN_CPU_CAPABILITY", "default"), ("MKL_CBWR", "COMPATIBLE")], ids="=".join)
def test_the_same_bits_with_other_threads_and_other_kernels(setting: tuple[str, str]) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2", setting[0]: setting[1]}
    program = "import test_exact_product as here, torch; torch.set_num_threads(2); print(here.digest())"
    command = [sys.executable, "-c", program]
    place = Path(__file__).parent
    done = subprocess.run(command, env=environment, cwd=place, capture_output=True, text=True, check=True)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    assert digest() == done.stdout.strip()
    torch.set_num_threads(before)
