"""Truncated SVD against LAPACK in fp64, and the ladder below it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from linalg_matrices import generator, power_law, residual, smallest_residual, with_spectrum

from mfs_decompose.linalg import svd
from mfs_decompose.linalg.shapes import uses_gram
from mfs_decompose.linalg.svd import Truncation, is_sound, truncated_svd

# (rows, columns, rank): both orientations of sketch and Gram, and square.
_SHAPES = [(230, 150, 9), (150, 230, 9), (120, 71, 20), (71, 120, 20), (90, 90, 5)]


def only(found: Sequence[Truncation | None]) -> Truncation:
    assert len(found) == 1
    assert found[0] is not None
    return found[0]


def fit(matrix: torch.Tensor, rank: int, key: int = 3) -> Truncation:
    return only(truncated_svd(matrix[None], rank, [key]))


def check(matrix: torch.Tensor, found: Truncation) -> None:
    """What a truncation promises, whatever the matrix."""
    rows, columns = matrix.shape
    assert found.left.shape == (found.rank, rows) and found.left.dtype == torch.float32
    assert found.right.shape == (found.rank, columns) and found.right.dtype == torch.float32
    assert found.left.is_contiguous() and found.right.is_contiguous()
    assert found.energy.dtype == torch.float64
    assert found.total == pytest.approx(float(matrix.to(torch.float64).square().sum()), rel=1e-12)
    assert bool((found.energy[1:] <= found.energy[:-1]).all())
    left, right = found.left.to(torch.float64), found.right.to(torch.float64)
    for rank in {0, 1, found.rank // 2, found.rank}:
        reported = found.total - float(found.energy[:rank].sum())
        assert residual(matrix, left[:rank], right[:rank]) == pytest.approx(reported, abs=1e-6 * found.total)
    root = found.energy.sqrt().sqrt()
    assert torch.allclose(left.norm(dim=1), root, rtol=1e-4)
    assert torch.allclose(right.norm(dim=1), root, rtol=1e-4)
    long = left if rows >= columns else right  # where the sign is fixed
    assert bool((long.amax(dim=1) >= -long.amin(dim=1)).all())


def test_the_shapes_take_both_routes() -> None:
    assert {uses_gram(rank, min(rows, columns)) for rows, columns, rank in _SHAPES} == {True, False}


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(("rows", "columns", "rank"), _SHAPES)
def test_residual_is_within_one_percent_of_the_least(rows: int, columns: int, rank: int, exponent: float) -> None:
    short = min(rows, columns)
    matrix = with_spectrum(power_law(short, exponent) * 1e-3, rows, columns, seed=5)
    found = fit(matrix, rank)
    check(matrix, found)
    assert found.rank == rank
    least = smallest_residual(matrix, rank)
    assert least <= residual(matrix, found.left, found.right) * (1 + 1e-6)
    assert residual(matrix, found.left, found.right) <= least * 1.01


@pytest.mark.parametrize(("rows", "columns", "rank"), _SHAPES)
def test_a_strong_part_over_a_flat_tail(rows: int, columns: int, rank: int) -> None:
    # What a merged LoRA looks like: few directions, and the rounding noise of bf16 below them.
    sigma = torch.cat((torch.linspace(3, 1, rank // 2), torch.full((min(rows, columns) - rank // 2,), 0.05)))
    matrix = with_spectrum(sigma, rows, columns, seed=6)
    found = fit(matrix, rank)
    check(matrix, found)
    assert torch.allclose(found.energy[: rank // 2].sqrt(), sigma[: rank // 2].to(torch.float64), rtol=1e-4)
    assert residual(matrix, found.left, found.right) <= smallest_residual(matrix, rank) * 1.01


@pytest.mark.parametrize(("rows", "columns", "rank"), _SHAPES)
def test_white_noise(rows: int, columns: int, rank: int) -> None:
    matrix = torch.randn(rows, columns, generator=generator(7))
    found = fit(matrix, rank)
    check(matrix, found)
    assert residual(matrix, found.left, found.right) <= smallest_residual(matrix, rank) * 1.03


@pytest.mark.parametrize("shape", [(40, 23), (23, 40)])
def test_full_rank_leaves_nothing(shape: tuple[int, int]) -> None:
    matrix = torch.randn(*shape, generator=generator(8))
    for rank in (23, 500):
        found = fit(matrix, rank)
        check(matrix, found)
        assert found.rank == 23
        assert residual(matrix, found.left, found.right) < 1e-10 * found.total


@pytest.mark.parametrize(("rows", "columns", "rank"), _SHAPES)
def test_zero(rows: int, columns: int, rank: int) -> None:
    found = fit(torch.zeros(rows, columns), rank)
    assert found.rank == 0 and found.total == 0.0
    assert found.left.shape == (0, rows) and found.right.shape == (0, columns)


@pytest.mark.parametrize("true_rank", [1, 2, 4])
@pytest.mark.parametrize(("rows", "columns", "rank"), _SHAPES)
def test_fewer_directions_than_asked_for(rows: int, columns: int, rank: int, true_rank: int) -> None:
    sigma = torch.linspace(2, 1, true_rank)
    matrix = with_spectrum(sigma, rows, columns, seed=9)
    found = fit(matrix, rank)
    check(matrix, found)
    assert torch.allclose(found.energy[:true_rank].sqrt(), sigma.to(torch.float64), rtol=1e-5)
    assert residual(matrix, found.left, found.right) < 1e-11 * found.total
    assert residual(matrix, found.left[:true_rank], found.right[:true_rank]) < 1e-11 * found.total


def test_one_entry() -> None:
    matrix = torch.zeros(100, 80)
    matrix[17, 33] = -2.5
    found = fit(matrix, 4)
    check(matrix, found)
    assert found.rank == 1 and float(found.energy) == pytest.approx(6.25)


@pytest.mark.parametrize(("rows", "columns", "rank"), _SHAPES)
def test_equal_singular_values(rows: int, columns: int, rank: int) -> None:
    matrix = with_spectrum(torch.ones(min(rows, columns)), rows, columns, seed=10)
    found = fit(matrix, rank)
    check(matrix, found)
    assert torch.allclose(found.energy, torch.ones(rank, dtype=torch.float64), rtol=1e-5)


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e-20, 1e20, 1e30])
@pytest.mark.parametrize(("rows", "columns", "rank"), _SHAPES)
def test_the_scale_does_not_show(rows: int, columns: int, rank: int, scale: float) -> None:
    matrix = with_spectrum(power_law(min(rows, columns), 1.0), rows, columns, seed=11)
    scaled = (matrix.to(torch.float64) * scale).to(torch.float32)
    plain, found = fit(matrix, rank), fit(scaled, rank)
    assert found.rank == rank
    assert found.total == pytest.approx(plain.total * scale**2, rel=1e-3)
    assert torch.allclose(found.energy / scale**2, plain.energy, rtol=1e-3)
    if scale > 1e-38:  # below that fp32 itself loses digits
        assert residual(scaled, found.left, found.right) <= smallest_residual(scaled, rank) * 1.01
        check(scaled, found)


@pytest.mark.parametrize(("rows", "columns", "rank"), [*_SHAPES, (231, 151, 9), (151, 231, 9), (121, 71, 40)])
def test_a_batch_gives_what_each_matrix_gives(rows: int, columns: int, rank: int) -> None:
    batch = torch.stack(
        [with_spectrum(power_law(min(rows, columns), 1.0 + at / 4), rows, columns, seed=at) for at in range(5)]
    )
    keys = [11, 12, 13, 14, 15]
    together = truncated_svd(batch, rank, keys)
    halves = truncated_svd(batch[:2], rank, keys[:2]) + truncated_svd(batch[2:], rank, keys[2:])
    for at, found in enumerate(together):
        assert found is not None
        check(batch[at], found)
        # The third copy begins at an address of another alignment.
        shifted = torch.empty(batch[at].numel() + 1)[1:].view(rows, columns).copy_(batch[at])
        for other in (halves[at], fit(batch[at].clone(), rank, keys[at]), fit(shifted, rank, keys[at])):
            assert other is not None
            assert torch.equal(found.left, other.left) and torch.equal(found.right, other.right)
            assert torch.equal(found.energy, other.energy) and found.total == other.total


def test_of_a_truncation_every_smaller_rank_is_there() -> None:
    matrix = with_spectrum(power_law(70, 0.5), 90, 70, seed=18)
    found = fit(matrix, 12)
    head = found.head(5)
    check(matrix, head)
    assert head.rank == 5 and head.total == found.total
    assert head.residual() == found.residual(5) == pytest.approx(residual(matrix, head.left, head.right), rel=1e-5)
    assert found.residual(0) == found.total and found.residual() < found.residual(11)
    other = head.transposed()
    assert residual(matrix.mT, other.left, other.right) == pytest.approx(head.residual(), rel=1e-5)


def test_a_residual_is_not_below_zero() -> None:
    empty = torch.empty(1, 5)
    assert Truncation(empty, empty, torch.tensor([1.0 + 1e-7], dtype=torch.float64), 1.0).residual() == 0.0


def test_keys_decide_the_sketch() -> None:
    matrix = torch.randn(200, 150, generator=generator(12))
    one, again, other = fit(matrix, 6, key=1), fit(matrix, 6, key=1), fit(matrix, 6, key=2)
    assert torch.equal(one.left, again.left) and torch.equal(one.energy, again.energy)
    assert not torch.equal(one.energy, other.energy)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("rows", "columns", "rank"), [(300, 260, 40), (260, 300, 120)])
def test_workers_at_one_thread_give_the_same_bits(rows: int, columns: int, rank: int) -> None:
    batch = torch.randn(2, rows, columns, generator=generator(13))
    with ThreadPoolExecutor(2, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        results = [future.result() for future in [pool.submit(truncated_svd, batch, rank, [1, 2]) for _ in range(4)]]
    torch.set_num_threads(1)
    results.append(truncated_svd(batch, rank, [1, 2]))
    for found in zip(*results, strict=True):
        first = found[0]
        assert first is not None
        for other in found[1:]:
            assert other is not None
            assert torch.equal(first.left, other.left) and torch.equal(first.right, other.right)
            assert torch.equal(first.energy, other.energy) and first.total == other.total


Method = Callable[[torch.Tensor, int, int, float], Truncation | None]


def no_convergence(tall: torch.Tensor, rank: int, key: int, total: float) -> Truncation | None:
    raise torch.linalg.LinAlgError("planted")  # type: ignore[attr-defined]


def gives_up(tall: torch.Tensor, rank: int, key: int, total: float) -> Truncation | None:
    return None


def gives_nan(tall: torch.Tensor, rank: int, key: int, total: float) -> Truncation | None:
    left, right = torch.full((rank, tall.shape[0]), torch.nan), torch.zeros(rank, tall.shape[1])
    return Truncation(left, right, torch.zeros(rank, dtype=torch.float64), 1.0)


def gives_nan_energy(tall: torch.Tensor, rank: int, key: int, total: float) -> Truncation | None:
    energy = torch.full((rank,), torch.nan, dtype=torch.float64)
    return Truncation(torch.zeros(rank, tall.shape[0]), torch.zeros(rank, tall.shape[1]), energy, 1.0)


def explains_too_much(tall: torch.Tensor, rank: int, key: int, total: float) -> Truncation | None:
    energy = torch.full((rank,), 1.0, dtype=torch.float64)
    return Truncation(torch.ones(rank, tall.shape[0]), torch.ones(rank, tall.shape[1]), energy, 0.5)


@pytest.mark.parametrize("broken", [1, 2, 3])
@pytest.mark.parametrize("how", [no_convergence, gives_up, gives_nan, gives_nan_energy, explains_too_much])
@pytest.mark.parametrize("shape", [(100, 70), (70, 100)])
def test_each_rung_catches_the_one_above(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], how: Method, broken: int
) -> None:
    ladder = ["_randomised", "_gram", "_lapack_fp32", "_lapack_fp64"]
    for name in ladder[:broken]:
        monkeypatch.setattr(svd, name, how)
    assert not uses_gram(5, 70)
    matrix = with_spectrum(power_law(70, 1.0), *shape, seed=14)
    found = fit(matrix, 5)
    check(matrix, found)
    assert residual(matrix, found.left, found.right) == pytest.approx(smallest_residual(matrix, 5), rel=1e-4)


@pytest.mark.parametrize("how", [no_convergence, gives_up, gives_nan])
def test_below_the_last_rung_there_is_none(monkeypatch: pytest.MonkeyPatch, how: Method) -> None:
    for name in ("_gram", "_lapack_fp32", "_lapack_fp64"):
        monkeypatch.setattr(svd, name, how)
    monkeypatch.setattr(svd, "_randomised", gives_nan)
    assert truncated_svd(torch.randn(2, 100, 90), 5, [1, 2]) == [None, None]


def test_a_solver_that_does_not_converge_fails_one_matrix_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = torch.randn(3, 100, 60, generator=generator(15))
    expected = truncated_svd(batch, 5, [1, 2, 3])
    real, calls = torch.linalg.eigh, iter(range(100))

    def second_time_not(matrix: torch.Tensor) -> object:
        if next(calls) == 1:
            raise torch.linalg.LinAlgError("planted")  # type: ignore[attr-defined]
        return real(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", second_time_not)
    found = truncated_svd(batch, 5, [1, 2, 3])
    for at in (0, 2):
        assert torch.equal(only(found[at : at + 1]).left, only(expected[at : at + 1]).left)
    check(batch[1], only(found[1:2]))


def test_a_solver_that_answers_nan_is_not_a_delta_of_rank_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.linalg.eigh

    def nan_values(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, vectors = real(matrix)
        return values * torch.nan, vectors

    monkeypatch.setattr(torch.linalg, "eigh", nan_values)
    matrix = with_spectrum(power_law(60, 1.0), 100, 60, seed=16)
    for rank in (5, 30):  # the sketch, and the Gram matrix
        found = fit(matrix, rank)
        check(matrix, found)
        assert found.rank == rank


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize(("rows", "columns", "rank"), _SHAPES)
def test_what_is_not_finite_gives_none(rows: int, columns: int, rank: int, value: float) -> None:
    batch = torch.randn(3, rows, columns, generator=generator(17))
    batch[1, 20, 30] = value
    first, second, third = truncated_svd(batch, rank, [1, 2, 3])
    assert second is None
    for at, found in ((0, first), (2, third)):
        assert found is not None
        check(batch[at], found)


def test_what_overflows_fp32_gives_none_or_finite_factors() -> None:
    found = truncated_svd(torch.full((1, 90, 60), 3e38), 4, [1])[0]
    assert found is None or is_sound(found)


@pytest.mark.parametrize("total", [torch.inf, torch.nan])
def test_a_total_that_is_not_finite_is_not_sound(total: float) -> None:
    empty = torch.empty(0, 5)
    assert not is_sound(Truncation(empty, empty, torch.empty(0, dtype=torch.float64), total))
    assert is_sound(Truncation(empty, empty, torch.empty(0, dtype=torch.float64), 1.0))
