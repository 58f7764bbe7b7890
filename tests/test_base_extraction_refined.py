"""A base made from the variants: never worse than the mean or the given one, and right where the answer is known."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mfs_decompose.base_extraction import family_ranks, mean_rows, refine
from mfs_decompose.base_extraction.refined import _turns

Weights = Sequence[torch.Tensor]


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def left(weights: Weights, base: torch.Tensor, ranks: Sequence[int]) -> float:
    """The oracle: what full SVDs in fp64 leave beyond the ranks."""
    found = 0.0
    for own, rank in zip(weights, ranks, strict=True):
        found += float(torch.linalg.svdvals(own.double() - base.double())[rank:].square().sum())
    return found


def family(
    seed: int, count: int, shape: tuple[int, int], decay: float, shared: float, dtype: torch.dtype
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A base and variants of it whose deltas have singular values i^-decay, a part of them in common."""
    base = (0.02 * drawn(seed, *shape)).to(dtype)

    def delta(at: int) -> torch.Tensor:
        u, _, v = torch.linalg.svd(drawn(seed + at, *shape), full_matrices=False)
        return (u * torch.arange(1, min(shape) + 1, dtype=torch.float64) ** -decay) @ v

    common = delta(1)
    changes = [0.02 * (shared * common + (1 - shared) * delta(10 + at)) for at in range(count)]
    return base, [(base.double() + change).to(dtype) for change in changes]


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 1000),
    count=st.integers(2, 4),
    shape=st.sampled_from([(18, 11), (9, 23), (16, 16)]),
    decay=st.sampled_from([0.2, 0.7, 1.5]),
    shared=st.sampled_from([0.0, 0.5]),
    rank=st.integers(0, 5),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    with_base=st.booleans(),
)
def test_it_leaves_no_more_than_the_mean_or_the_given_base(
    seed: int, count: int, shape: tuple[int, int], decay: float, shared: float, rank: int,
    dtype: torch.dtype, with_base: bool,
) -> None:  # fmt: skip
    base, weights = family(seed, count, shape, decay, shared, dtype)
    ranks = [rank] * count
    found = refine(weights, ranks, dtype, seed, base if with_base else None)
    assert found is not None and found.base.dtype == dtype and found.base.shape == base.shape
    own = left(weights, found.base, ranks)
    assert own == pytest.approx(found.left, rel=1e-3, abs=1e-9)
    assert own <= left(weights, mean_rows(weights, dtype), ranks) * (1 + 1e-3) + 1e-9
    if with_base:
        assert own <= left(weights, base, ranks) * (1 + 1e-3) + 1e-9


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 1000),
    shape=st.sampled_from([(20, 13), (11, 24)]),
    ranks=st.tuples(st.integers(0, 4), st.integers(0, 4)),
)
def test_two_variants_reach_the_closed_form(seed: int, shape: tuple[int, int], ranks: tuple[int, int]) -> None:
    _, weights = family(seed, 2, shape, 0.6, 0.2, torch.float32)
    found = refine(weights, ranks, torch.float32, seed)
    assert found is not None
    values = torch.linalg.svdvals(weights[0].double() - weights[1].double())
    assert left(weights, found.base, ranks) == pytest.approx(float(values[sum(ranks) :].square().sum()) / 2, rel=1e-3)


@pytest.mark.parametrize(("first", "second"), [(3, 3), (1, 4), (0, 3), (4, 0), (2, 1)])
def test_directions_are_shared_out_in_turn(first: int, second: int) -> None:
    signs = _turns(first, second, first + second)
    assert (signs.count(1.0), signs.count(-1.0)) == (first, second)
    both = 2 * min(first, second)
    assert all(a == -b for a, b in itertools.pairwise(signs[:both]))


def test_one_variant_is_the_base() -> None:
    (own,) = family(3, 1, (12, 9), 0.5, 0.0, torch.bfloat16)[1]
    found = refine([own], [2], torch.bfloat16, 0)
    assert found is not None and torch.equal(found.base, own) and found.left == 0.0


def test_without_directions_it_is_the_mean() -> None:
    _, weights = family(4, 3, (12, 9), 0.5, 0.0, torch.bfloat16)
    found = refine(weights, [0, 0, 0], torch.bfloat16, 0)
    assert found is not None and torch.equal(found.base, mean_rows(weights, torch.bfloat16))


def test_more_than_the_mean_is_gained() -> None:
    _, weights = family(5, 4, (48, 32), 0.5, 0.3, torch.float32)
    found = refine(weights, [4] * 4, torch.float32, 0)
    assert found is not None and found.turns > 1
    assert found.left < 0.85 * left(weights, mean_rows(weights, torch.float32), [4] * 4)


def test_the_same_again_and_another_key() -> None:
    _, weights = family(6, 3, (30, 26), 0.5, 0.3, torch.bfloat16)
    one, two, other = (refine(weights, [3] * 3, torch.bfloat16, key) for key in (1, 1, 2))
    assert one is not None and two is not None and other is not None
    assert torch.equal(one.base, two.base) and one.left == two.left
    assert other.left == pytest.approx(one.left, rel=0.02)


def test_a_variant_that_did_not_change_a_matrix_is_seen() -> None:
    base, (_, _, own) = loras((90, 64), (3, 3, 3), 1e-3)
    weights = [base, base, own]
    ranks = family_ranks(weights, 1)
    assert ranks == (0, 0, 3)
    found = refine(weights, ranks, torch.bfloat16, 1)
    assert found is not None and float((found.base == base).double().mean()) > 0.95


def loras(
    shape: tuple[int, int], ranks: Sequence[int], rms: float, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One base with LoRAs of these ranks merged."""
    base = (0.02 * drawn(31, *shape)).to(dtype)
    found = []
    for at, rank in enumerate(ranks):
        delta = drawn(41 + 2 * at, shape[0], rank) @ drawn(42 + 2 * at, rank, shape[1])
        delta *= rms / max(float(delta.square().mean().sqrt()), 1e-30)
        found.append((base.double() + delta).to(dtype))
    return base, found


@pytest.mark.parametrize("ranks", [(4, 4, 4), (2, 6, 3), (5, 0, 3), (8, 8, 8, 8)])
@pytest.mark.parametrize("rms", [3e-4, 2e-3])
def test_ranks_of_merged_loras_are_found(ranks: tuple[int, ...], rms: float) -> None:
    _, weights = loras((200, 150), ranks, rms)
    assert family_ranks(weights, 3) == ranks


def test_ranks_of_other_precisions() -> None:
    for dtype in (torch.float16, torch.float32):
        assert family_ranks(loras((150, 110), (3, 2, 4), 1e-3, dtype)[1], 3) == (3, 2, 4)


@pytest.mark.parametrize(
    "weights",
    [
        family(8, 3, (60, 50), 0.4, 0.0, torch.bfloat16)[1],
        family(8, 3, (60, 50), 0.4, 0.5, torch.float32)[1],
        loras((80, 60), (3, 3), 1e-3)[1],
        [torch.ones(20, 20, dtype=torch.bfloat16)] * 3,
        [torch.ones(20, 20, dtype=torch.float64)] * 3,
        loras((40, 30), (12, 12, 12), 1e-3)[1],
    ],
)
def test_what_is_no_family_of_loras_has_no_ranks(weights: Weights) -> None:
    assert family_ranks(weights, 1) is None


@pytest.mark.parametrize("rms", [3e-4, 1e-3])
@pytest.mark.parametrize("count", [3, 5])
def test_an_unknown_base_is_recovered_to_rounding(rms: float, count: int) -> None:
    """Nine bits in ten come back, the rest within a unit of the weights' own rounding."""
    base, weights = loras((200, 150), (4,) * count, rms)
    ranks = family_ranks(weights, 1)
    assert ranks == (4,) * count
    found = refine(weights, ranks, torch.bfloat16, 1)
    assert found is not None
    share = float((found.base == base).double().mean())
    off = (found.base.double() - base.double()).abs()
    # A weight that is much smaller than what a LoRA adds was rounded to the variants' grid: it has no more to tell.
    unit = 2.0 ** (math.floor(math.log2(0.02)) - 7)  # of a weight of the usual size
    assert share > 0.9
    exponents = base.double().abs().clamp(min=0.02).log2().floor()
    assert bool((off <= torch.exp2(exponents - 7)).all())
    assert float(off.square().mean().sqrt()) < unit / 8
    noise = left(weights, base, ranks)
    assert left(weights, found.base, ranks) <= noise
