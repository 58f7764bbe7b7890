"""The rank of a merge: found where it is low, refused where the delta is dense."""

from __future__ import annotations

import pytest
import torch
from linalg_matrices import generator
from merged_loras import merged_lora

from mfs_decompose.linalg.peel import Problem, find_rank, first_tau, least_error, make_problem, standing_out


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def _problem(shape: tuple[int, int], rank: int, rms: float, seed: int, dtype: torch.dtype = torch.bfloat16) -> Problem:
    base, own, _ = merged_lora(shape, rank, rms, seed, dtype)
    return make_problem(own, base, "once", 3)


@pytest.mark.parametrize(
    ("shape", "rank", "rms"),
    [((150, 210), 1, 1e-4), ((210, 150), 6, 3e-4), ((320, 260), 16, 1e-3), ((300, 420), 12, 1e-4)],
)
def test_the_rank_of_a_merge_is_found(shape: tuple[int, int], rank: int, rms: float) -> None:
    assert find_rank(_problem(shape, rank, rms, rank), 64) == rank


def test_the_rank_of_a_merge_in_fp16_is_found() -> None:
    assert find_rank(_problem((200, 170), 5, 2e-4, 3, torch.float16), 64) == 5


def test_a_merge_without_a_gap_is_found() -> None:
    problem = _problem((400, 380), 8, 2e-5, 5)
    sigma = torch.linalg.svdvals(problem.delta)
    assert float(sigma[7] / sigma[8]) < 1.3  # rounding noise fills the spectrum
    assert standing_out(problem) < 8
    found = find_rank(problem, 64)
    assert found is not None and 7 <= found <= 8


@pytest.mark.parametrize("hint", [4, 9, 11, 20])
def test_a_hint_changes_the_way_and_not_the_answer(hint: int) -> None:
    assert find_rank(_problem((260, 300), 9, 3e-4, 6), 64, hint) == 9


def test_a_dense_delta_has_no_rank() -> None:
    draw = generator(7)
    base = (torch.randn(260, 300, generator=draw) * 0.02).to(torch.bfloat16)
    own = (base.float() + torch.randn(260, 300, generator=draw) * 2e-4).to(torch.bfloat16)
    assert find_rank(make_problem(own, base, "once", 3), 64) is None


def test_a_rank_above_the_most_is_refused() -> None:
    assert find_rank(_problem((260, 300), 24, 1e-3, 8), 16) is None


def test_a_matrix_too_thin_for_any_rank_is_refused() -> None:
    assert find_rank(_problem((3, 300), 1, 1e-3, 9), 64) is None


def test_a_sample_is_spread_over_the_matrix() -> None:
    problem = _problem((100, 37), 2, 1e-3, 10)
    sample = problem.sample(50)
    assert sample.shape == (50, 37)
    assert torch.equal(sample.delta, problem.delta[::2])
    assert torch.equal(sample.low, problem.low[::2]) and torch.equal(sample.high, problem.high[::2])


def test_the_error_that_pays_is_below_the_boxes_and_rises_with_the_rank() -> None:
    problem = _problem((200, 180), 4, 1e-3, 11)
    assert 0 < least_error(problem, 4) < least_error(problem, 16) < first_tau(problem) * 4


def test_weights_that_are_zero_do_not_spoil_the_scales() -> None:
    base, own, _ = merged_lora((200, 180), 4, 1e-3, 12)
    own = own.clone()
    own[::9, ::7] = 0.0
    problem = make_problem(own, base, "once", 3)
    assert first_tau(problem) > 1e-6 and least_error(problem, 4) > 1e-7
