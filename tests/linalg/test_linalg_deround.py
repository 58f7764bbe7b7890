"""Derounding against gradients by autograd, and against what it is for: the boxes are met."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from linalg_matrices import generator
from merged_loras import merged_lora

from mfs_decompose.linalg.boxes import delta_boxes, has_boxes, share_outside
from mfs_decompose.linalg.deround import _BLOCK, _slopes, balance, deround
from mfs_decompose.linalg.peel import cooling, make_problem


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_slopes_are_those_of_the_loss() -> None:
    delta = torch.randn(40, 30, generator=generator(1), dtype=torch.float64).requires_grad_()
    low = torch.randn(40, 30, generator=generator(2), dtype=torch.float64) - 1
    high, tau = low + torch.rand(40, 30, generator=generator(3), dtype=torch.float64), 0.2
    softplus = torch.nn.functional.softplus
    loss = (softplus((low - delta) / tau) + softplus((delta - high) / tau)).sum()
    (slope,) = torch.autograd.grad(loss, delta, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), delta)
    found, bound = _slopes(delta.detach(), low, high, tau)
    torch.testing.assert_close(found / tau, slope.detach())
    # At least Newton's, and just that where delta lies inside.
    assert bool((bound / tau**2 >= curvature * (1 - 1e-9)).all())
    inside = (delta.detach() > low) & (delta.detach() < high)
    torch.testing.assert_close(bound[inside] / tau**2, curvature[inside])


def test_unbounded_elements_pull_nowhere() -> None:
    delta = torch.zeros(2, 2)
    low, high = torch.full((2, 2), -torch.inf), torch.full((2, 2), torch.inf)
    slope, curvature = _slopes(delta, low, high, 0.1)
    assert not slope.any() and not curvature.any()


def test_balance_keeps_the_product() -> None:
    left = torch.randn(50, 7, generator=generator(4))
    right = torch.randn(33, 7, generator=generator(5)) * 100
    new_left, new_right = balance(left, right)
    torch.testing.assert_close(new_left @ new_right.mT, left @ right.mT, rtol=1e-4, atol=1e-2)
    for side in (new_left, new_right):
        gram = side.double().mT @ side.double()
        torch.testing.assert_close(gram, torch.diag(gram.diagonal()), rtol=0, atol=1e-4 * float(gram.max()))
        assert (gram.diagonal().diff() <= 0).all()


@pytest.mark.parametrize(
    ("dtype", "rounded_first"), [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, False)]
)
def test_the_boxes_are_met_where_a_truncated_svd_misses_them(dtype: torch.dtype, rounded_first: bool) -> None:
    base, own, _ = merged_lora((190, 250), 5, 2e-4, 6, dtype, rounded_first)
    problem = make_problem(own, base, "twice" if rounded_first else "once", 7)
    start = problem.start(5)
    assert start is not None
    before = share_outside(problem.low, problem.high, *start)
    pair = deround(problem.low, problem.high, start, cooling(1e-4, 1e-6 if dtype == torch.bfloat16 else 1e-7))
    after = share_outside(problem.low, problem.high, *pair)
    assert after < 0.01 < 0.05 < before


def test_derounding_comes_nearer_to_the_truth() -> None:
    base, own, truth = merged_lora((210, 160), 4, 1e-4, 8)
    problem = make_problem(own, base, "once", 7)
    start = problem.start(4)
    assert start is not None
    pair = deround(problem.low, problem.high, start, cooling(3e-5, 1e-6))
    errors = [float((left @ right.mT - truth).norm() / truth.norm()) for left, right in (start, pair)]
    assert errors[1] < errors[0] / 5


def test_blocks_of_rows_do_not_change_the_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    base, own, _ = merged_lora((90, 70), 3, 2e-4, 9)
    problem = make_problem(own, base, "once", 7)
    start = problem.start(3)
    assert start is not None
    whole = deround(problem.low, problem.high, start, [1e-4, 3e-5])
    assert problem.low.numel() < _BLOCK
    monkeypatch.setattr("mfs_decompose.linalg.deround._BLOCK", 1000)
    cut = deround(problem.low, problem.high, start, [1e-4, 3e-5])
    torch.testing.assert_close(cut[0] @ cut[1].mT, whole[0] @ whole[1].mT, rtol=1e-3, atol=1e-7)


def test_a_row_without_bounds_stays_finite() -> None:
    base, own, _ = merged_lora((60, 80), 3, 2e-4, 10)
    own = own.clone()
    own[7] = torch.nan
    own[3, 4] = torch.inf
    own[5, 5] = 0.0
    problem = make_problem(own, base, "once", 7)
    assert torch.isfinite(problem.delta).all()
    assert bool((problem.low[7] == -torch.inf).all()) and bool((problem.high[7] == torch.inf).all())
    start = problem.start(3)
    assert start is not None
    left, right = deround(problem.low, problem.high, start, cooling(1e-4, 1e-6))
    assert torch.isfinite(left).all() and torch.isfinite(right).all()


def test_boxes_hold_the_delta_of_the_merge() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        base, own, truth = merged_lora((40, 50), 3, 1e-3, 11, dtype)
        low, high = delta_boxes(own, base, "once")
        assert bool(((low <= truth) & (truth <= high)).float().mean() > 0.999)  # fp32 rounding at the edges
        assert bool((low < high).all())
    assert has_boxes(torch.bfloat16) and not has_boxes(torch.float32)


def test_cooling_falls_to_the_last() -> None:
    taus = cooling(1e-3, 1e-6)
    assert taus[0] == pytest.approx(1e-3) and taus[-1] == pytest.approx(1e-6)
    assert all(0.6 < b / a < 0.8 for a, b in pairwise(taus))
    assert cooling(1e-6, 1e-3) == pytest.approx([1e-6, 1e-6])
