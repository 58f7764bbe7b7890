"""Orthonormal bases: orthonormal whatever comes in, and of the same space where there is one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from linalg_matrices import generator, with_spectrum

from mfs_decompose.linalg.orthonormal import orthonormalise, peak


def departure(basis: torch.Tensor) -> float:
    wide = basis.to(torch.float64)
    return float((wide.mT @ wide - torch.eye(basis.shape[-1], dtype=torch.float64)).abs().max())


def outside(basis: torch.Tensor, columns: torch.Tensor) -> float:
    """The share of the columns' norm that the basis does not span."""
    wide, target = basis.to(torch.float64), columns.to(torch.float64)
    return float((target - wide @ (wide.mT @ target)).norm() / target.norm())


@pytest.fixture
def householder(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What goes through Householder QR."""
    seen: list[torch.Tensor] = []
    real = torch.linalg.qr

    def counted(matrix: torch.Tensor, **options: Any) -> Any:
        seen.append(matrix)
        return real(matrix, **options)

    monkeypatch.setattr(torch.linalg, "qr", counted)
    return seen


@given(st.integers(1, 4), st.integers(1, 12), st.integers(0, 60), st.integers(0, 10**6))
def test_random_batches(batch: int, width: int, extra: int, seed: int) -> None:
    columns = torch.randn(batch, width + extra, width, generator=generator(seed))
    basis = orthonormalise(columns)
    assert basis.dtype == torch.float32
    assert basis.shape == columns.shape
    assert departure(basis) < 1e-6
    for at in range(batch):
        assert outside(basis[at], columns[at]) < 1e-5


@pytest.mark.parametrize("condition", [1.0, 1e3, 1e6, 1e7, 1e8, 1e10, 1e15])
@pytest.mark.parametrize("shape", [(60, 9), (301, 90)])
def test_conditions_up_to_hopeless(shape: tuple[int, int], condition: float) -> None:
    rows, width = shape
    sigma = torch.logspace(0, -float(torch.log10(torch.tensor(condition))), width, dtype=torch.float64)
    columns = with_spectrum(sigma, rows, width, seed=2)[None]
    basis = orthonormalise(columns)
    assert departure(basis) < 1e-6
    assert outside(basis[0], columns[0]) < 1e-6


@pytest.mark.parametrize("kind", ["rank 3", "repeated", "zero columns", "zero", "ones"])
def test_deficient_matrices_get_a_full_basis(kind: str) -> None:
    draw = generator(7)
    columns = torch.randn(70, 11, generator=draw)
    if kind == "rank 3":
        columns = torch.randn(70, 3, generator=draw) @ torch.randn(3, 11, generator=draw)
    elif kind == "repeated":
        columns[:, 5:] = columns[:, :6]
    elif kind == "zero columns":
        columns[:, 4:] = 0
    elif kind == "zero":
        columns = torch.zeros(70, 11)
    else:
        columns = torch.ones(70, 11)
    basis = orthonormalise(columns[None])
    assert departure(basis) < 1e-6
    if kind != "zero":
        assert outside(basis[0], columns) < 1e-6


def test_only_the_matrix_that_fails_goes_through_householder(householder: list[torch.Tensor]) -> None:
    columns = torch.randn(5, 80, 12, generator=generator(1))
    columns[3, :, 6:] = columns[3, :, :6]
    alone = [orthonormalise(columns[at : at + 1])[0] for at in (0, 1, 2, 4)]
    assert not householder
    basis = orthonormalise(columns)
    assert len(householder) == 1
    assert torch.allclose(householder[0], (columns[3] / columns[3].abs().max()).to(torch.float64))
    assert departure(basis) < 1e-6
    for at, expected in zip((0, 1, 2, 4), alone, strict=True):
        assert torch.allclose(basis[at], expected, atol=1e-6)


def test_square(householder: list[torch.Tensor]) -> None:
    assert departure(orthonormalise(torch.randn(3, 20, 20, generator=generator(2)))) < 1e-6
    assert not householder


@pytest.mark.parametrize("scale", [1e-37, 1e-20, 1e20, 1e37])
def test_the_scale_does_not_show(scale: float) -> None:
    columns = torch.randn(2, 50, 8, generator=generator(3))
    assert torch.allclose(orthonormalise(columns * scale), orthonormalise(columns), atol=1e-6)


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_fp64_columns_may_lie_beyond_fp32(scale: float) -> None:
    columns = torch.randn(2, 50, 8, generator=generator(3), dtype=torch.float64)
    basis = orthonormalise(columns * scale)
    assert basis.dtype == torch.float32
    assert torch.allclose(basis, orthonormalise(columns), atol=1e-6)


def test_nan_stays_visible() -> None:
    columns = torch.randn(2, 30, 5, generator=generator(4))
    columns[1, 3, 2] = torch.nan
    basis = orthonormalise(columns)
    assert departure(basis[:1]) < 1e-6
    assert not bool(torch.isfinite(basis[1]).all())


def test_peaks() -> None:
    matrices = torch.tensor([[[1.0, -3.0], [2.0, 0.0]], [[0.0, 0.0], [0.0, -0.0]]])
    assert peak(matrices).tolist() == [[[3.0]], [[1.0]]]
    assert peak(matrices[0]).tolist() == [[3.0]]
