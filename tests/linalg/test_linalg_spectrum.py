"""Spectra by the Gram matrix, held against LAPACK's SVD in fp64."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from linalg_matrices import generator, power_law, with_spectrum

from mfs_decompose.linalg import spectrum
from mfs_decompose.linalg.spectrum import blocked_spectrum, gram_spectra, resolution

SHAPES = [(37, 23), (23, 37), (31, 31), (5, 90), (90, 5), (1, 9), (9, 1), (1, 1)]


def squares(matrix: torch.Tensor) -> torch.Tensor:
    """The slow answer: squared singular values by a full SVD in fp64."""
    return torch.linalg.svdvals(matrix.to(torch.float64)).square()


def drawn(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(shape, generator=generator(seed))


def reader(matrix: torch.Tensor, asked: list[tuple[int, int]] | None = None) -> Callable[[int, int], torch.Tensor]:
    def read(start: int, stop: int) -> torch.Tensor:
        if asked is not None:
            asked.append((start, stop))
        return matrix[start:stop]

    return read


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [1.0, 1e-25, 1e25])
def test_a_batch_has_the_spectra_of_its_matrices(shape: tuple[int, int], scale: float) -> None:
    batch = drawn(3, *shape, scale=scale)
    found = gram_spectra(batch)
    assert found.shape == (3, min(shape))
    assert found.dtype == torch.float64
    for one, matrix in zip(found, batch, strict=True):
        assert torch.equal(one, one.sort(descending=True).values)
        assert torch.allclose(one, squares(matrix), rtol=1e-9, atol=resolution(one))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("cut", [1, 4, 1000])
def test_a_matrix_read_in_blocks_has_the_same_spectrum(shape: tuple[int, int], cut: int) -> None:
    matrix = drawn(*shape, seed=1)
    edges = [*range(0, shape[0], cut), shape[0]]
    found = blocked_spectrum(reader(matrix), edges, shape[1])
    assert torch.allclose(found, squares(matrix), rtol=1e-9, atol=resolution(found))


def test_how_often_blocks_are_read() -> None:
    edges = [0, 4, 8, 9]
    tall, wide = drawn(9, 5), drawn(9, 14)
    asked: list[tuple[int, int]] = []
    blocked_spectrum(reader(tall, asked), edges, 5)
    assert asked == list(pairwise(edges))
    asked.clear()
    blocked_spectrum(reader(wide, asked), edges, 14)
    assert asked == [(0, 4), (4, 8), (8, 9), (4, 8), (8, 9), (8, 9)]


@pytest.mark.parametrize("shape", [(40, 30), (30, 40)])
def test_the_slices_that_products_are_summed_in_change_nothing(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = drawn(*shape, seed=2)
    monkeypatch.setattr(spectrum, "_CHUNK", 100)
    for found in (gram_spectra(matrix[None])[0], blocked_spectrum(reader(matrix), [0, 7, shape[0]], shape[1])):
        assert torch.allclose(found, squares(matrix), rtol=1e-9, atol=resolution(found))


def test_small_singular_values_are_as_good_as_promised() -> None:
    sigma = torch.logspace(0, -8, 41, dtype=torch.float64)
    matrix = with_spectrum(sigma, 300, 200, seed=3)
    exact = squares(matrix)  # of the fp32 matrix: what fp32 made of the planted values is part of it
    found = gram_spectra(matrix[None])[0]
    error = (found.sqrt() / exact.sqrt() - 1).abs()
    ratio = (exact / exact[0]).sqrt()
    assert float(error[ratio >= 1e-5].max()) < 1e-4
    assert float(error[ratio >= 1e-6].max()) < 5e-2
    assert float((found - exact).abs().max()) <= resolution(found)


@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 40),
    rank=st.integers(0, 40),
    decay=st.floats(0, 3),
    seed=st.integers(0, 99),
)
def test_any_spectrum_is_within_the_resolution(rows: int, columns: int, rank: int, decay: float, seed: int) -> None:
    rank = min(rank, rows, columns)
    matrix = with_spectrum(power_law(rank, decay), rows, columns, seed)
    found = gram_spectra(matrix[None])[0]
    exact = squares(matrix)
    assert float((found - exact).abs().max()) <= resolution(found)
    assert float(found.min()) >= 0.0
    assert float(found.sum()) == pytest.approx(float(exact.sum()), rel=1e-9, abs=1e-300)


def test_nothing_has_the_spectrum_of_nothing() -> None:
    zeros = torch.zeros(2, 6, 4)
    assert torch.equal(gram_spectra(zeros), torch.zeros(2, 4, dtype=torch.float64))
    assert resolution(gram_spectra(zeros)[0]) == 0.0
    assert resolution(torch.empty(0, dtype=torch.float64)) == 0.0


def test_a_solver_that_gives_up_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def give_up(_: torch.Tensor) -> torch.Tensor:
        raise torch.linalg.LinAlgError("no convergence")  # type: ignore[attr-defined]

    matrix = drawn(12, 20, seed=4)
    monkeypatch.setattr(torch.linalg, "eigvalsh", give_up)
    found = gram_spectra(matrix[None])[0]
    assert torch.allclose(found, squares(matrix), rtol=1e-9, atol=resolution(found))


def test_the_number_of_blocks_moves_last_bits_only() -> None:
    matrix = drawn(64, 30, seed=5)
    whole, cut = (blocked_spectrum(reader(matrix), edges, 30) for edges in ([0, 64], [0, 9, 33, 64]))
    assert float((whole - cut).abs().max()) <= resolution(whole)
