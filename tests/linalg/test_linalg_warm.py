"""Warm starts against LAPACK in fp64, and against cold ones."""

from __future__ import annotations

import pytest
import torch
from linalg_matrices import generator, power_law, residual, smallest_residual, with_spectrum

from mfs_decompose.linalg import warm
from mfs_decompose.linalg.orthonormal import orthonormalise
from mfs_decompose.linalg.seeds import random_matrix
from mfs_decompose.linalg.sums import squared_norm
from mfs_decompose.linalg.svd import Truncation, from_range, truncated_svd
from mfs_decompose.linalg.warm import warm_svd

_SHAPES = [(310, 230), (230, 310), (241, 241)]


def moved(matrix: torch.Tensor, share: float, seed: int = 5) -> torch.Tensor:
    noise = torch.randn(matrix.shape, generator=generator(seed))
    return matrix + noise * (share * matrix.norm() / noise.norm())


def started(matrix: torch.Tensor, rank: int) -> Truncation:
    found = truncated_svd(matrix[None], rank, [1])[0]
    assert found is not None
    return found


def again(matrix: torch.Tensor, rank: int, start: Truncation | None, key: int = 2) -> Truncation:
    found = warm_svd(matrix[None], rank, [key], [start])[0]
    assert found is not None
    return found


@pytest.mark.parametrize("exponent", [0.3, 0.5, 1.0])
@pytest.mark.parametrize(("rows", "columns"), _SHAPES)
def test_after_a_tenth_of_change_little_is_lost(rows: int, columns: int, exponent: float) -> None:
    rank = 12
    before = with_spectrum(power_law(min(rows, columns), exponent) * 1e-3, rows, columns, seed=3)
    matrix = moved(before, 0.1)
    least = smallest_residual(matrix, rank)
    found = again(matrix, rank, started(before, rank))
    assert found.rank == rank
    assert found.left.shape == (rank, rows) and found.right.shape == (rank, columns)
    measured = residual(matrix, found.left, found.right)
    assert measured == pytest.approx(found.residual(), rel=1e-5)
    assert least * (1 - 1e-6) <= measured <= least * 1.003
    wider = again(matrix, rank, started(before, 2 * rank))
    assert wider.residual() <= least * 1.001
    # A cold start of as many products does not come near.
    basis = orthonormalise(random_matrix(9, columns, rank)[None])[0]
    cold = from_range(matrix @ basis, basis, rank, squared_norm(matrix))
    assert cold is not None and cold.residual() > least * 1.05


@pytest.mark.parametrize(("rows", "columns"), _SHAPES)
def test_of_the_same_matrix_nothing_is_lost(rows: int, columns: int) -> None:
    matrix = with_spectrum(power_law(min(rows, columns), 0.5), rows, columns, seed=4)
    start = started(matrix, 10)
    found = again(matrix, 10, start)
    assert found.residual() <= start.residual() * (1 + 1e-6)
    left, right = found.left.to(torch.float64), found.right.to(torch.float64)
    for side in (left, right):
        gram = side @ side.mT
        assert torch.allclose(gram, torch.diag(gram.diagonal()), atol=1e-4 * float(gram.max()))
    assert bool((found.energy[1:] <= found.energy[:-1]).all())


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_the_scale_does_not_show(monkeypatch: pytest.MonkeyPatch, scale: float) -> None:
    monkeypatch.setattr(warm, "factorise", lambda *_: None)
    matrix = with_spectrum(power_law(60, 0.5), 80, 60, seed=6)
    scaled = matrix * scale
    found = again(scaled, 5, started(scaled, 5))
    assert found.residual() / scale**2 == pytest.approx(again(matrix, 5, started(matrix, 5)).residual(), rel=1e-4)


def test_without_a_start_it_is_a_cold_one() -> None:
    batch = torch.randn(3, 90, 70, generator=generator(7))
    batch[2, 3, 3] = torch.nan
    starts = [
        None,
        started(batch[1], 3),
        started(batch[0], 6),
    ]  # none, one that is too small, one for what is not finite
    found = warm_svd(batch, 6, [11, 12, 13], starts)
    cold = truncated_svd(batch, 6, [11, 12, 13])
    for one, other in zip(found[:2], cold[:2], strict=True):
        assert one is not None and other is not None
        assert torch.equal(one.left, other.left) and torch.equal(one.energy, other.energy)
    assert found[2] is None


def test_what_fails_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = torch.randn(90, 70, generator=generator(8))
    start = started(matrix, 6)
    monkeypatch.setattr(warm, "from_range", lambda *_: None)
    cold = truncated_svd(matrix[None], 6, [2])[0]
    found = again(matrix, 6, start)
    assert cold is not None and torch.equal(found.left, cold.left)


def test_zero() -> None:
    start = started(torch.randn(40, 30, generator=generator(9)), 4)
    found = again(torch.zeros(40, 30), 4, start)
    assert found.rank == 0 and found.total == 0.0
