"""Bands: each direction gets the width that an exhaustive search gives it, and a budget is spent to the last bytes."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfs_decompose.linalg.bands import (
    ERROR,
    MOST_MADE_UP,
    NOISE,
    RATE,
    RATE_LONG,
    WIDTHS,
    BandLadder,
    Bands,
    allocate_bands,
    bands_bytes,
    choose_bands,
    direction_bytes,
    loss,
    made_up,
)

_ENERGIES = st.lists(st.floats(1e-12, 1e3), min_size=0, max_size=12).map(lambda found: sorted(found, reverse=True))
_SHAPES = st.tuples(st.integers(8, 400), st.integers(8, 400))


def widths_of(bands: Bands, count: int) -> list[int]:
    """The width of each direction, 0 for those left out."""
    found = [bits for bits, many in zip(WIDTHS, bands, strict=True) for _ in range(many)]
    return found + [0] * (count - len(found))


def cost_of(energy: float, bits: int, shape: tuple[int, int], lam: float) -> float:
    return energy if bits == 0 else energy * NOISE * ERROR[bits] + lam * direction_bytes(shape, bits)


def loss_of(energies: list[float], bands: Bands) -> float:
    return sum(
        e * (loss((2, 2), b) if b else 1.0) for e, b in zip(energies, widths_of(bands, len(energies)), strict=True)
    )


@given(_ENERGIES, _SHAPES, st.floats(1e-9, 10.0))
def test_every_direction_has_the_width_of_least_cost(energies: list[float], shape: tuple[int, int], lam: float) -> None:
    bands = choose_bands(energies, shape, lam)
    assert sum(bands) <= len(energies)
    for energy, bits in zip(energies, widths_of(bands, len(energies)), strict=True):
        least = min(cost_of(energy, other, shape, lam) for other in (0, *WIDTHS))
        assert cost_of(energy, bits, shape, lam) == pytest.approx(least, rel=1e-9)


def test_widths_fall_along_the_spectrum_and_all_occur() -> None:
    energies = [4.0**-at for at in range(14)]
    bands = choose_bands(energies, (576, 1536), 1e-9)
    assert all(count > 0 for count in bands)
    assert choose_bands(energies, (576, 1536), 1e3) == (0,) * 5
    assert choose_bands([], (576, 1536), 1e-9) == (0,) * 5
    assert choose_bands([1.0, 0.0, 0.0], (64, 64), 1e-9) == (1, 0, 0, 0, 0)


@pytest.mark.parametrize("bits", WIDTHS)
def test_a_direction_costs_its_codes_and_gain(bits: int) -> None:
    assert direction_bytes((65, 33), bits) == 2 + (65 * bits + 7) // 8 + (33 * bits + 7) // 8  # whole bytes a row
    assert bands_bytes((65, 33), tuple(3 if one == bits else 0 for one in WIDTHS)) == 3 * direction_bytes(
        (65, 33), bits
    )


@pytest.mark.parametrize("bits", WIDTHS)
def test_codes_of_longer_sides_are_given_what_coding_takes(bits: int) -> None:
    def coded(length: int, rate: int) -> int:
        return (length * rate + 511) // 512  # rates are 64ths of a bit

    assert direction_bytes((576, 1536), bits) == 2 + coded(576, RATE[bits]) + coded(1536, RATE[bits])
    assert direction_bytes((191, 192), bits) == 2 + (191 * bits + 7) // 8 + coded(192, RATE[bits])
    vocabulary = 2 + coded(49152, RATE_LONG[bits]) + 49152 // 64 + coded(576, RATE[8])
    assert direction_bytes((49152, 576), bits) == direction_bytes((576, 49152), bits) == vocabulary


@given(st.lists(st.tuples(_ENERGIES, _SHAPES), min_size=1, max_size=4), st.integers(0, 20_000))
def test_a_budget_is_never_exceeded_and_nothing_more_fits(
    tensors: list[tuple[list[float], tuple[int, int]]], budget: int
) -> None:
    found = allocate_bands(tensors, budget)
    spent = sum(bands_bytes(shape, bands) for (_, shape), bands in zip(tensors, found, strict=True))
    assert spent <= budget
    for (energies, shape), bands in zip(tensors, found, strict=True):
        assert sum(bands) <= len(energies)
        if sum(bands) < len(energies):  # one more direction at the least width does not fit
            assert spent + direction_bytes(shape, WIDTHS[-1]) > budget


@given(st.lists(st.tuples(_ENERGIES, _SHAPES), max_size=4), st.floats(1e-9, 10.0))
def test_a_ladder_knows_what_one_lambda_takes(tensors: list[tuple[list[float], tuple[int, int]]], lam: float) -> None:
    ladder = BandLadder(tensors)
    taken = [choose_bands(energies, shape, lam) for energies, shape in tensors]
    nbytes = sum(bands_bytes(shape, bands) for (_, shape), bands in zip(tensors, taken, strict=True))
    assert ladder.bytes_at(lam) == nbytes
    spent = ladder.spend(nbytes)  # and nothing is better spent at that size than by one lambda
    ours, theirs = (
        sum(loss_of(energies, bands) for (energies, _), bands in zip(tensors, found, strict=True))
        for found in (spent, taken)
    )
    assert ours <= theirs * (1 + 1e-9)


@given(st.lists(st.tuples(_ENERGIES, _SHAPES), min_size=2, max_size=4), st.integers(0, 20_000))
def test_what_is_left_out_leaves_all_to_the_others(
    tensors: list[tuple[list[float], tuple[int, int]]], budget: int
) -> None:
    found = BandLadder(tensors).spend(budget, unused=[0])
    assert found == [(0,) * 5, *allocate_bands(tensors[1:], budget)]


def test_the_allocation_is_close_to_the_best_there_is() -> None:
    tensors = [([9.0, 2.0, 0.3], (40, 24)), ([5.0, 4.0], (90, 17))]
    options = [[b for b in itertools.product(range(4), repeat=5) if sum(b) <= len(energies)] for energies, _ in tensors]
    for budget in range(20, 420, 13):
        found = allocate_bands(tensors, budget)
        ours = sum(loss_of(energies, bands) for (energies, _), bands in zip(tensors, found, strict=True))
        best = min(
            sum(loss_of(energies, bands) for (energies, _), bands in zip(tensors, pick, strict=True))
            for pick in itertools.product(*options)
            if sum(bands_bytes(shape, bands) for (_, shape), bands in zip(tensors, pick, strict=True)) <= budget
        )
        # A whole direction is a large step for so few: the hull misses by less than the strongest that it leaves out.
        assert ours <= best + 2.0


def test_more_bytes_never_lose_more_and_a_strong_tensor_gets_more() -> None:
    spectrum = [1.7**-at for at in range(60)]
    tensors = [(spectrum, (200, 70)), ([100 * e for e in spectrum], (200, 70)), ([0.0, 0.0], (9, 9)), ([], (8, 8))]
    losses = []
    for budget in (500, 1000, 2000, 4000, 8000):
        found = allocate_bands(tensors, budget)
        losses.append(sum(loss_of(energies, bands) for (energies, _), bands in zip(tensors, found, strict=True)))
        assert sum(found[1]) >= sum(found[0])
        assert found[2:] == [(0,) * 5, (0,) * 5]
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize("scale", [1e-80, 1e60])
def test_the_scale_of_the_energies_does_not_matter(scale: float) -> None:
    spectrum = [1.5**-at for at in range(40)]
    shapes = [(200, 70), (64, 500)]
    plain = allocate_bands([(spectrum, shape) for shape in shapes], 3000)
    assert allocate_bands([([e * scale for e in spectrum], shape) for shape in shapes], 3000) == plain


@given(_ENERGIES, _SHAPES, st.integers(0, 14), st.floats(0.0, 10.0), st.sampled_from((1e-60, 1.0, 1e60)))
def test_what_is_made_up_is_bounded_and_of_no_scale(
    energies: list[float], shape: tuple[int, int], rank: int, beyond: float, scale: float
) -> None:
    times = made_up(energies, sum(energies) + beyond, shape, rank)
    assert 1.0 <= times <= MOST_MADE_UP
    scaled = [energy * scale for energy in energies]
    assert made_up(scaled, (sum(energies) + beyond) * scale, shape, rank) == pytest.approx(times)
    assert made_up(energies, sum(energies) + beyond, shape, rank + 1) <= times or rank == 0


def test_nothing_is_made_up_for_where_nothing_is_left_out_or_nothing_kept() -> None:
    energies = [4.0, 2.0, 1.0]
    assert made_up(energies, 7.0, (8, 9), 3) == 1.0
    assert made_up(energies, 7.0, (8, 9), 0) == made_up([], 0.0, (8, 9), 0) == made_up([0.0], 0.0, (8, 9), 1) == 1.0
    assert made_up(energies, 6.999, (8, 9), 3) == 1.0  # a sum that was rounded


def test_directions_that_were_not_fitted_count_as_if_they_were_alike() -> None:
    known = made_up([9.0, 1.0, 0.5, 0.5, 0.5, 0.5], 12.0, (6, 40), 1)
    assert made_up([9.0, 1.0], 12.0, (6, 40), 1) == pytest.approx(known)
    assert known == pytest.approx(1 + (1 + 4 * 0.25) / 81)


def test_outputs_on_inputs_like_the_delta_stay_as_they_were_in_the_mean() -> None:
    import torch

    delta = torch.randn(40, 30, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    u, s, v = torch.linalg.svd(delta, full_matrices=False)
    s = s * 0.8 ** torch.arange(30)
    delta = (u * s) @ v
    for rank in (3, 8, 20):
        stored = (
            made_up(s.square().tolist(), float(s.square().sum()), (40, 30), rank) * (u[:, :rank] * s[:rank]) @ v[:rank]
        )
        metric = delta.mT @ delta
        agree = float((stored @ metric * delta).sum() / (delta @ metric * delta).sum())
        assert agree == pytest.approx(1.0) or rank == 3
        assert agree > float(
            ((u[:, :rank] * s[:rank]) @ v[:rank] @ metric * delta).sum() / (delta @ metric * delta).sum()
        )


def test_no_tensor_library_is_loaded() -> None:
    script = "import sys, mfs_decompose.linalg.shapes as s; sys.modules.pop('torch', None)\n"
    script += "import mfs_decompose.linalg.bands; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
