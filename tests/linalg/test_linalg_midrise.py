"""Odd integers times a byte a group: values, widths, no shrinkage, and the slow answer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from linalg_matrices import generator

from mfs_decompose.linalg.bands import WIDTHS
from mfs_decompose.linalg.midrise import Levels, dequantise_levels, integers, quantise_levels
from mfs_decompose.linalg.shapes import GROUP


def directions(rank: int, length: int, seed: int) -> torch.Tensor:
    return torch.randn(rank, length, generator=generator(seed))


def by_hand(levels: Levels) -> list[list[float]]:
    top = (1 << levels.bits) - 1
    return [
        [
            (2 * code - top) * levels.scales[at].tolist()[n // GROUP] * float(levels.gains[at])
            for n, code in enumerate(row)
        ]
        for at, row in enumerate(levels.codes.tolist())
    ]


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 64), (5, 65), (2, 130)])
def test_values_are_what_the_formula_says(bits: int, shape: tuple[int, int]) -> None:
    levels = quantise_levels(directions(*shape, seed=1), bits)
    assert levels.codes.dtype == levels.scales.dtype == torch.uint8
    assert int(levels.codes.max()) < 1 << bits
    assert torch.allclose(dequantise_levels(levels), torch.tensor(by_hand(levels), dtype=torch.float64), rtol=1e-15)


@pytest.mark.parametrize(("bits", "error"), [(8, 5e-5), (6, 8e-4), (4, 0.013), (3, 0.05), (2, 0.19)])
def test_the_error_of_gaussian_directions(bits: int, error: float) -> None:
    values = directions(16, 640, seed=2)
    found = dequantise_levels(quantise_levels(values, bits)) - values
    assert 0.5 * error < float(found.square().sum() / values.square().sum()) < error


@pytest.mark.parametrize("bits", WIDTHS)
def test_nothing_shrinks(bits: int) -> None:
    values = directions(7, 203, seed=3) * torch.linspace(0.1, 3, 203)
    along = (dequantise_levels(quantise_levels(values, bits)) * values).sum(dim=1)
    assert torch.allclose(along, values.to(torch.float64).square().sum(dim=1), rtol=1e-12)


@given(st.integers(1, 4), st.integers(1, 150), st.sampled_from(WIDTHS), st.integers(0, 5))
def test_codes_are_the_nearest_levels_of_their_scale(rank: int, length: int, bits: int, seed: int) -> None:
    values = directions(rank, length, seed)
    levels = quantise_levels(values, bits)
    plain = quantise_levels(values, bits)  # the same twice
    assert torch.equal(plain.codes, levels.codes) and torch.equal(plain.gains, levels.gains)
    unit = values.abs().amax(dim=1).to(torch.float64) * 1.05 / ((1 << bits) - 1) / 255
    for row in range(rank):
        for column in range(length):
            step = float(levels.scales[row, column // GROUP]) * float(unit[row])
            if step == 0:
                continue
            grid = [(2 * code + 1 - (1 << bits)) * step for code in range(1 << bits)]
            x = float(values[row, column])
            chosen = abs(grid[int(levels.codes[row, column])] - x)
            assert chosen <= min(abs(level - x) for level in grid) + 1e-5 * step


def test_a_group_far_below_the_others_is_left_out() -> None:
    values = torch.cat([directions(1, 64, 4), directions(1, 64, 5) * 1e-7], dim=1)
    levels = quantise_levels(values, 4)
    assert levels.scales[0, 0] > 0
    assert levels.scales[0, 1] == 0
    assert not dequantise_levels(levels)[0, 64:].any()


@pytest.mark.parametrize("bits", WIDTHS)
def test_zeros_and_constants(bits: int) -> None:
    zeros = torch.tensor([[0.0, -0.0] * 40])
    assert not dequantise_levels(quantise_levels(zeros, bits)).any()
    constant = torch.full((2, 70), -3.0)
    assert torch.allclose(dequantise_levels(quantise_levels(constant, bits)), constant.to(torch.float64), rtol=1e-6)
    assert quantise_levels(torch.zeros(0, 70), bits).codes.shape == (0, 70)


@pytest.mark.parametrize("bits", WIDTHS)
def test_a_window_of_integers_is_a_part_of_the_whole(bits: int) -> None:
    levels = quantise_levels(directions(3, 203, seed=6), bits)
    whole = integers(levels.codes, levels.scales, bits)
    for start, stop in ((0, 203), (0, 0), (1, 64), (63, 65), (64, 128), (70, 203), (203, 203)):
        assert torch.equal(integers(levels.codes[:, start:stop], levels.scales, bits, start), whole[:, start:stop])


def test_large_values_matter_more_than_the_least_error() -> None:
    """A search for the least squared error would clip the one large value to spend levels on the others."""
    values = directions(1, 64, seed=7)
    values[0, 5] = 7.0
    found = dequantise_levels(quantise_levels(values, 3))
    assert abs(float(found[0, 5]) - 7.0) < 0.15 * 7.0
