"""The SVD that reads blocks of rows against the one in memory, and how often it reads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from linalg_matrices import generator, power_law, residual, smallest_residual, with_spectrum

from mfs_decompose.linalg.blocked import blocked_svd
from mfs_decompose.linalg.shapes import passes, uses_gram
from mfs_decompose.linalg.svd import truncated_svd

# tall by sketch, tall by Gram, square, wide by sketch, wide where in memory the Gram matrix is used
_SHAPES = [(203, 90, 6), (203, 90, 40), (90, 90, 6), (61, 190, 6), (61, 190, 30)]


class Blocks:
    """Reads a matrix in blocks, and counts how often."""

    def __init__(self, matrix: torch.Tensor, step: int) -> None:
        self.matrix, self.step, self.reads = matrix, step, 0

    def __call__(self) -> Iterator[tuple[int, torch.Tensor]]:
        self.reads += 1
        for start in range(0, self.matrix.shape[0], self.step):
            yield start, self.matrix[start : start + self.step]


@pytest.mark.parametrize("step", [1, 17, 64, 500])
@pytest.mark.parametrize(("rows", "columns", "rank"), _SHAPES)
def test_blocked_equals_in_memory(rows: int, columns: int, rank: int, step: int) -> None:
    matrix = with_spectrum(power_law(min(rows, columns), 1.0) * 1e-4, rows, columns, seed=1)
    blocks = Blocks(matrix, step)
    found = blocked_svd(blocks, (rows, columns), rank, key=21)
    expected = truncated_svd(matrix[None], rank, [21])[0]
    assert found is not None and expected is not None
    assert found.rank == expected.rank == rank
    assert found.left.shape == (rank, rows) and found.right.shape == (rank, columns)
    assert found.total == pytest.approx(expected.total, rel=1e-12)
    assert torch.allclose(found.energy, expected.energy, rtol=1e-3)
    if columns > rows and uses_gram(rank, rows):
        assert residual(matrix, found.left, found.right) <= smallest_residual(matrix, rank) * 1.01
    else:  # the same method, and the same random matrix
        assert torch.allclose(found.energy, expected.energy, rtol=1e-5)
        product, other = found.left.mT @ found.right, expected.left.mT @ expected.right
        assert float((product - other).norm() / other.norm()) < 1e-4
    reported = found.total - float(found.energy.sum())
    assert residual(matrix, found.left, found.right) == pytest.approx(reported, abs=1e-6 * found.total)


@given(st.integers(2, 40), st.integers(2, 40), st.integers(1, 50), st.integers(1, 45))
def test_it_reads_as_often_as_it_says(rows: int, columns: int, rank: int, step: int) -> None:
    blocks = Blocks(torch.randn(rows, columns, generator=generator(rows * columns)), step)
    found = blocked_svd(blocks, (rows, columns), rank, key=2)
    assert blocks.reads == passes((rows, columns), rank)
    assert found is not None
    assert found.rank == min(rank, rows, columns)


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e20, 1e30])
@pytest.mark.parametrize(("rows", "columns", "rank"), _SHAPES)
def test_the_scale_does_not_show(rows: int, columns: int, rank: int, scale: float) -> None:
    matrix = with_spectrum(power_law(min(rows, columns), 1.0), rows, columns, seed=3)
    matrix[: rows // 2] *= 1e-3  # blocks of different sizes
    matrix = (matrix.to(torch.float64) * scale).to(torch.float32)
    found = blocked_svd(Blocks(matrix, 30), (rows, columns), rank, key=4)
    assert found is not None
    assert residual(matrix, found.left, found.right) <= smallest_residual(matrix, rank) * 1.01


@pytest.mark.parametrize(("rows", "columns", "rank"), _SHAPES)
def test_zero(rows: int, columns: int, rank: int) -> None:
    found = blocked_svd(Blocks(torch.zeros(rows, columns), 50), (rows, columns), rank, key=5)
    assert found is not None
    assert found.rank == 0 and found.total == 0.0
    assert found.left.shape == (0, rows) and found.right.shape == (0, columns)


@pytest.mark.parametrize(("rows", "columns", "rank"), _SHAPES)
def test_blocks_of_zeros_among_others(rows: int, columns: int, rank: int) -> None:
    matrix = torch.zeros(rows, columns)
    matrix[30:60] = with_spectrum(power_law(30, 1.0), 30, columns, seed=6)
    found = blocked_svd(Blocks(matrix, 30), (rows, columns), rank, key=7)
    assert found is not None
    assert residual(matrix, found.left, found.right) <= smallest_residual(matrix, rank) * 1.01 + 1e-10 * found.total


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@pytest.mark.parametrize(("rows", "columns", "rank"), _SHAPES)
def test_what_is_not_finite_gives_none(rows: int, columns: int, rank: int, value: float) -> None:
    matrix = torch.randn(rows, columns, generator=generator(8))
    matrix[rows - 1, 3] = value
    assert blocked_svd(Blocks(matrix, 50), (rows, columns), rank, key=9) is None


@pytest.mark.parametrize(("rows", "columns", "rank"), _SHAPES)
def test_what_overflows_fp32_gives_none(rows: int, columns: int, rank: int) -> None:
    assert blocked_svd(Blocks(torch.full((rows, columns), 3e38), 50), (rows, columns), rank, key=9) is None


@pytest.mark.parametrize(("rows", "columns", "rank"), _SHAPES)
def test_a_solver_that_does_not_converge_gives_none(
    monkeypatch: pytest.MonkeyPatch, rows: int, columns: int, rank: int
) -> None:
    def never(matrix: torch.Tensor) -> object:
        raise torch.linalg.LinAlgError("planted")  # type: ignore[attr-defined]

    monkeypatch.setattr(torch.linalg, "eigh", never)
    matrix = torch.randn(rows, columns, generator=generator(10))
    assert blocked_svd(Blocks(matrix, 50), (rows, columns), rank, key=11) is None


def test_the_same_blocks_give_the_same_bits() -> None:
    matrix = torch.randn(203, 90, generator=generator(12))
    one = blocked_svd(Blocks(matrix, 64), (203, 90), 6, key=13)
    other = blocked_svd(Blocks(matrix, 64), (203, 90), 6, key=13)
    assert one is not None and other is not None
    assert torch.equal(one.left, other.left) and torch.equal(one.right, other.right)
