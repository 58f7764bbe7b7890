"""The rank that an error asks for, against the spectrum by LAPACK in fp64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from linalg_matrices import generator, power_law, residual, smallest_residual, with_spectrum

from mfs_decompose.linalg import adaptive
from mfs_decompose.linalg.adaptive import LEAST_TARGET, least_rank, svd_to_target
from mfs_decompose.linalg.shapes import covered_rank, sketch_width
from mfs_decompose.linalg.svd import Truncation, truncated_svd

_SHAPES = [(330, 270), (270, 330), (251, 251)]


def best_rank(matrix: torch.Tensor, target: float) -> int:
    """The least rank at which the best approximation there is meets a relative error."""
    energy = torch.linalg.svdvals(matrix.to(torch.float64)).square()
    allowed = target**2 * float(energy.sum())
    return next(rank for rank in range(energy.numel() + 1) if float(energy[rank:].sum()) <= allowed)


def error(matrix: torch.Tensor, found: Truncation) -> float:
    return math.sqrt(residual(matrix, found.left, found.right)) / float(matrix.to(torch.float64).norm())


@pytest.mark.parametrize("target", [0.95, 0.8, 0.5, 0.3, 0.1])
@pytest.mark.parametrize("exponent", [0.3, 0.6, 1.5])
@pytest.mark.parametrize(("rows", "columns"), _SHAPES)
def test_the_target_is_met_at_about_the_least_rank(rows: int, columns: int, exponent: float, target: float) -> None:
    matrix = with_spectrum(power_law(min(rows, columns), exponent) * 1e-4, rows, columns, seed=1)
    found = svd_to_target(matrix, target, key=7)
    assert found is not None
    assert found.left.shape == (found.rank, rows) and found.right.shape == (found.rank, columns)
    best = best_rank(matrix, target)
    assert best <= found.rank <= best + 1 + best // 50
    assert error(matrix, found) <= target * (1 + 1e-6)
    assert math.sqrt(found.residual() / found.total) == pytest.approx(error(matrix, found), rel=1e-4)
    assert found.rank == 0 or found.residual(found.rank - 1) > target**2 * found.total


def test_no_block_is_made_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    widths: list[int] = []
    real = adaptive.iterate

    def counted(tall: torch.Tensor, start: torch.Tensor, outside: torch.Tensor | None) -> torch.Tensor:
        widths.append(start.shape[1])
        basis = real(tall, start, outside)
        if outside is not None:
            assert float((outside.mT @ basis).abs().max()) < 1e-5
        return basis

    monkeypatch.setattr(adaptive, "iterate", counted)
    matrix = with_spectrum(power_law(400, 0.3), 430, 400, seed=2)
    found = svd_to_target(matrix, 0.8, key=1)
    assert found is not None and 32 < found.rank <= 64
    assert widths == [48, 32, 64] and sum(widths) == sketch_width(64, 400)


def test_most_bounds_the_rank() -> None:
    matrix = torch.randn(300, 200, generator=generator(3))
    found = svd_to_target(matrix, 0.1, key=1, most=25)
    assert found is not None and found.rank == 25
    assert found.residual() > 0.1**2 * found.total
    assert found.residual() <= 1.03 * smallest_residual(matrix, 25)
    one = svd_to_target(matrix, 0.1, key=1, most=1)
    assert one is not None and one.rank == 1


@pytest.mark.parametrize("shape", [(300, 200), (200, 300), (40, 23)])
def test_exactly_low_rank(shape: tuple[int, int]) -> None:
    matrix = with_spectrum(torch.linspace(3, 1, 5), *shape, seed=4)
    found = svd_to_target(matrix, LEAST_TARGET, key=1)
    assert found is not None and found.rank == 5
    assert error(matrix, found) < 1e-5


@pytest.mark.parametrize("shape", [(300, 200), (200, 300), (30, 20)])
def test_zero_needs_no_rank(shape: tuple[int, int]) -> None:
    found = svd_to_target(torch.zeros(shape), 0.5, key=1)
    assert found is not None and found.rank == 0
    assert found.left.shape == (0, shape[0]) and found.right.shape == (0, shape[1])


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_what_is_not_finite_gives_none(value: float) -> None:
    matrix = torch.randn(300, 200, generator=generator(5))
    matrix[7, 7] = value
    assert svd_to_target(matrix, 0.5, key=1) is None


def test_what_fails_goes_down_the_ladder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptive, "from_range", lambda *_: None)
    matrix = with_spectrum(power_law(200, 1.0), 300, 200, seed=6)
    found = svd_to_target(matrix, 0.3, key=1)
    assert found is not None
    assert best_rank(matrix, 0.3) <= found.rank <= best_rank(matrix, 0.3) + 1


def test_the_key_decides() -> None:
    matrix = torch.randn(300, 200, generator=generator(7))
    one, same, other = (svd_to_target(matrix, 0.9, key) for key in (1, 1, 2))
    assert one is not None and same is not None and other is not None
    assert torch.equal(one.left, same.left) and not torch.equal(one.energy[:1], other.energy[:1])


@given(st.lists(st.floats(0, 10), max_size=8), st.floats(0, 30))
def test_least_rank_by_counting(energies: list[float], allowed: float) -> None:
    energy = torch.tensor(sorted(energies, reverse=True), dtype=torch.float64)
    total = float(energy.sum()) + 1.0
    found = Truncation(torch.empty(len(energies), 3), torch.empty(len(energies), 2), energy, total)
    meets = [rank for rank in range(len(energies) + 1) if total - float(energy[:rank].cumsum(0)[-1:].sum()) <= allowed]
    assert least_rank(found, allowed) == (meets[0] if meets else len(energies))


@given(st.integers(1, 500))
def test_a_sketch_covers_the_rank_it_was_made_for(rank: int) -> None:
    assert covered_rank(sketch_width(rank, 10**6)) == rank


def test_the_second_answer_is_as_good_as_a_sketch_for_that_rank() -> None:
    matrix = with_spectrum(power_law(400, 0.3), 420, 400, seed=8)
    found = svd_to_target(matrix, 0.85, key=1)
    assert found is not None
    plain = truncated_svd(matrix[None], found.rank, [1])[0]
    assert plain is not None
    assert found.residual() <= plain.residual() * 1.003
