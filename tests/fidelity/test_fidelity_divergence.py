from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given
from hypothesis import strategies as st

from mfs_decompose.fidelity.divergence import compare_logits
from mfs_decompose.fidelity.figures import TokenFigures

COLUMNS = ("nll_original", "nll_x", "kl", "top1")


def logits(rows: list[list[float]], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(rows, dtype=dtype)


def random_pair(positions: int, vocabulary: int, seed: int, scale: float = 3.0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    original = scale * torch.randn(positions, vocabulary, generator=generator)
    other = original + 0.1 * torch.randn(positions, vocabulary, generator=generator)
    return original, other, torch.randint(vocabulary, (positions,), generator=generator)


def same(left: TokenFigures, right: TokenFigures, tolerance: float = 0.0) -> bool:
    return all(
        np.allclose(getattr(left, name), getattr(right, name), rtol=tolerance, atol=tolerance, equal_nan=True)
        for name in COLUMNS
    )


def test_by_hand() -> None:
    # p = (1/2, 1/4, 1/4) and q = (1/4, 1/4, 1/2); then p = q = (1/3, 1/3, 1/3).
    original = logits([[math.log(2), 0, 0], [5, 5, 5]], torch.float64)
    other = logits([[0, 0, math.log(2)], [-1, -1, -1]], torch.float64)
    found = compare_logits(original, other, torch.tensor([0, 2]))
    np.testing.assert_allclose(found.nll_original, [math.log(2), math.log(3)], rtol=1e-15)
    np.testing.assert_allclose(found.nll_x, [math.log(4), math.log(3)], rtol=1e-15)
    np.testing.assert_allclose(found.kl, [math.log(2) / 2 - math.log(2) / 4, 0], rtol=1e-14, atol=1e-16)
    assert found.top1.tolist() == [0.0, 1.0]


def test_kl_is_of_the_original_against_the_other_and_not_the_reverse() -> None:
    original, other, targets = random_pair(7, 19, seed=1)
    forward, backward = compare_logits(original, other, targets).kl, compare_logits(other, original, targets).kl
    expected = F.kl_div(
        other.double().log_softmax(-1), original.double().log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    np.testing.assert_allclose(forward, expected.numpy(), rtol=1e-12)
    assert not np.allclose(forward, backward, rtol=1e-3)


def test_nll_is_cross_entropy() -> None:
    original, other, targets = random_pair(11, 23, seed=2)
    found = compare_logits(original, other, targets)
    for column, values in ((found.nll_original, original), (found.nll_x, other)):
        expected = F.cross_entropy(values.double(), targets, reduction="none")
        np.testing.assert_allclose(column, expected.numpy(), rtol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 300.0])
def test_equal_logits_drift_by_exactly_nothing(dtype: torch.dtype, scale: float) -> None:
    original, _, targets = random_pair(9, 257, seed=3, scale=scale)
    found = compare_logits(original.to(dtype), original.to(dtype).clone(), targets)
    assert found.kl.tolist() == [0.0] * 9
    assert found.top1.tolist() == [1.0] * 9
    assert found.nll_original.tolist() == found.nll_x.tolist()


def test_a_constant_added_to_all_logits_changes_nothing_and_kl_is_never_negative() -> None:
    original, _, targets = random_pair(50, 211, seed=4)
    kl = compare_logits(original.double(), original.double() + 7.3, targets).kl
    assert kl.min() >= 0
    assert kl.max() < 1e-13


@given(st.integers(1, 30), st.integers(2, 40), st.integers(1, 400))
def test_chunks_change_nothing(positions: int, vocabulary: int, chunk: int) -> None:
    original, other, targets = random_pair(positions, vocabulary, seed=positions * 100 + vocabulary)
    whole = compare_logits(original, other, targets, chunk_elements=10**9)
    assert same(compare_logits(original, other, targets, chunk_elements=chunk), whole, tolerance=1e-14)


def test_float64_never_holds_all_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    original, other, targets = random_pair(40, 30, seed=5)
    seen: list[int] = []
    double = torch.Tensor.double

    def record(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.numel())
        return double(tensor)

    monkeypatch.setattr(torch.Tensor, "double", record)
    compare_logits(original, other, targets, chunk_elements=90)
    assert max(seen) == 90


def test_unlike_vocabularies_are_cut_to_the_shared_rows_and_renormalised() -> None:
    original, other, _ = random_pair(6, 12, seed=6)
    targets = torch.tensor([0, 3, 8, 8, 1, 5])
    expected = compare_logits(original[:, :9].contiguous(), other[:, :9].contiguous(), targets)
    assert same(compare_logits(original, other[:, :9], targets), expected)
    assert same(compare_logits(original[:, :9], other, targets), expected)
    # Renormalised: probabilities over the nine shared rows, and the top is the top of those.
    p = original[:, :9].double().softmax(-1)
    np.testing.assert_allclose(expected.nll_original, -p.log().gather(1, targets[:, None])[:, 0].numpy(), rtol=1e-12)
    taller = torch.cat([original[:, :9], torch.full((6, 3), 99.0)], dim=1)
    assert same(compare_logits(taller, other[:, :9], targets), expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite_show(bad: float) -> None:
    original, other, targets = random_pair(4, 8, seed=7)
    other = other.clone()
    other[2, (int(targets[2]) + 1) % 8] = bad
    found = compare_logits(original, other, targets)
    assert np.isnan(found.nll_x).tolist() == [False, False, True, False]
    assert np.isnan(found.kl).tolist() == [False, False, True, False]
    assert np.isnan(found.top1).tolist() == [False, False, True, False]
    assert np.isfinite(found.nll_original).all()
    mirrored = compare_logits(other, original, targets)
    assert np.isnan(mirrored.nll_original).tolist() == [False, False, True, False]
    assert np.isfinite(mirrored.nll_x).all()


def test_equal_nan_logits_do_not_agree() -> None:
    broken = logits([[float("nan"), 1.0, 2.0]])
    assert np.isnan(compare_logits(broken, broken, torch.tensor([1])).top1).all()


def test_a_target_that_one_side_lacks_is_a_bug_of_the_caller() -> None:
    original, other, _ = random_pair(1, 5, seed=8)
    with pytest.raises(AssertionError, match="outside the shared vocabulary"):
        compare_logits(original, other[:, :4], torch.tensor([4]))


def test_large_logits_stay_exact_where_float32_is_not() -> None:
    original = logits([[2000.0, 1999.0, 0.0]])
    other = logits([[2000.0, 1999.0625, 0.0]])
    p, q = 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(-0.9375))
    expected = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    np.testing.assert_allclose(compare_logits(original, other, torch.tensor([0])).kl, [expected], rtol=1e-9)


def test_concatenate_keeps_order() -> None:
    original, other, targets = random_pair(6, 9, seed=9)
    parts = [compare_logits(original[i : i + 2], other[i : i + 2], targets[i : i + 2]) for i in (0, 2, 4)]
    assert same(TokenFigures.concatenate(parts), compare_logits(original, other, targets), tolerance=1e-14)
