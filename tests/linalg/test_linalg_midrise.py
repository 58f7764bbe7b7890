"""Odd integers times a gain: values, widths, no shrinkage, and the slow answer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from linalg_matrices import generator

from mfs_decompose.linalg.bands import WIDTHS
from mfs_decompose.linalg.midrise import Levels, Quantiser, dequantise_levels, integers


def directions(rank: int, length: int, seed: int) -> torch.Tensor:
    return torch.randn(rank, length, generator=generator(seed))


def by_hand(levels: Levels) -> list[list[float]]:
    top = (1 << levels.bits) - 1
    return [
        [(2 * code - top) * gain for code in row]
        for row, gain in zip(levels.codes.tolist(), levels.gains.tolist(), strict=True)
    ]


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 64), (5, 65), (2, 130)])
def test_values_are_what_the_formula_says(bits: int, shape: tuple[int, int]) -> None:
    levels = Quantiser(directions(*shape, seed=1), bits).levels()
    assert levels.codes.dtype == torch.uint8
    assert levels.gains.dtype == torch.float64
    assert int(levels.codes.max()) < 1 << bits
    assert torch.allclose(dequantise_levels(levels), torch.tensor(by_hand(levels), dtype=torch.float64), rtol=1e-15)


@pytest.mark.parametrize(("bits", "error"), [(8, 9e-5), (6, 1.5e-3), (4, 0.021), (3, 0.075), (2, 0.25)])
def test_the_error_of_gaussian_directions(bits: int, error: float) -> None:
    values = directions(16, 640, seed=2)
    found = dequantise_levels(Quantiser(values, bits).levels()) - values
    assert 0.5 * error < float(found.square().sum() / values.square().sum()) < error


@pytest.mark.parametrize("bits", WIDTHS)
def test_nothing_shrinks(bits: int) -> None:
    values = directions(7, 203, seed=3) * torch.linspace(0.1, 3, 203)
    along = (dequantise_levels(Quantiser(values, bits).levels()) * values).sum(dim=1)
    assert torch.allclose(along, values.to(torch.float64).square().sum(dim=1), rtol=1e-12)


@given(st.integers(1, 4), st.integers(1, 90), st.sampled_from(WIDTHS), st.integers(0, 5))
def test_codes_are_the_nearest_levels_of_one_step_of_the_search(rank: int, length: int, bits: int, seed: int) -> None:
    values = directions(rank, length, seed)
    levels = Quantiser(values, bits).levels()
    top = (1 << bits) - 1
    for row in range(rank):
        x = values[row].to(torch.float64)
        steps = [float(x.abs().max()) * 1.05 * 0.9**turn / top for turn in range(18)]
        off = []
        for step in steps:
            grid = step * torch.arange(-top, top + 1, 2, dtype=torch.float64)
            nearest = (x[:, None] - grid).abs().amin(dim=1)
            chosen = (x - grid[levels.codes[row].long()]).abs()
            off.append(float((chosen - nearest).max()) / step)
        assert min(off) < 1e-4


def test_the_step_is_the_one_that_errs_least_where_values_are_large() -> None:
    values = directions(1, 300, seed=8)
    x = values[0].to(torch.float64)
    levels = Quantiser(values, 3).levels()
    errors = []
    for turn in range(18):
        step = float(x.abs().max()) * 1.05 * 0.9**turn / 7
        odd = (x / (2 * step)).floor().clamp(-4, 3) * 2 + 1
        errors.append((float(((x - odd * step) * x).square().sum()), ((odd + 7) / 2).to(torch.uint8)))
    best = min(errors, key=lambda found: found[0])[1]
    assert torch.equal(levels.codes[0], best)


def test_directions_are_quantised_each_on_its_own_whatever_their_size() -> None:
    values = directions(3, 70, seed=9) * torch.tensor([[1e-30], [1.0], [1e30]])
    together = Quantiser(values, 3).levels()
    for row in range(3):
        alone = Quantiser(values[row : row + 1], 3).levels()
        assert torch.equal(alone.codes[0], together.codes[row]) and float(alone.gains[0]) == float(together.gains[row])


@pytest.mark.parametrize("bits", WIDTHS)
def test_zeros_and_constants(bits: int) -> None:
    zeros = torch.tensor([[0.0, -0.0] * 40])
    assert not dequantise_levels(Quantiser(zeros, bits).levels()).any()
    constant = torch.full((2, 70), -3.0)
    assert torch.allclose(dequantise_levels(Quantiser(constant, bits).levels()), constant.to(torch.float64), rtol=1e-6)
    assert Quantiser(torch.zeros(0, 70), bits).levels().codes.shape == (0, 70)


@pytest.mark.parametrize("bits", WIDTHS)
def test_a_window_of_integers_is_a_part_of_the_whole(bits: int) -> None:
    levels = Quantiser(directions(3, 203, seed=6), bits).levels()
    whole = integers(levels.codes, bits)
    for start, stop in ((0, 203), (0, 0), (1, 64), (63, 65), (64, 128), (70, 203), (203, 203)):
        assert torch.equal(integers(levels.codes[:, start:stop], bits), whole[:, start:stop])


def test_large_values_matter_more_than_the_least_error() -> None:
    """A search for the least squared error would clip the one large value to spend levels on the others."""
    values = directions(1, 64, seed=7)
    values[0, 5] = 7.0
    found = dequantise_levels(Quantiser(values, 3).levels())
    assert abs(float(found[0, 5]) - 7.0) < 0.15 * 7.0


class TestVocabularies:
    """Along a side that is longer than any layer is wide, each 64 values have a scale."""

    @pytest.fixture(autouse=True)
    def _short(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("mfs_decompose.linalg.shapes.LONG_SIDE", 100)

    @staticmethod
    def uneven(rank: int = 6, length: int = 330) -> torch.Tensor:
        """Values whose size changes along the side, as that of a vocabulary's rows does."""
        return directions(rank, length, seed=11) * torch.logspace(0, -2, length)

    @pytest.mark.parametrize("bits", WIDTHS)
    def test_values_are_what_the_formula_says(self, bits: int) -> None:
        levels = Quantiser(self.uneven(), bits).levels()
        assert levels.scales is not None and levels.scales.dtype == torch.uint8 and levels.scales.shape == (6, 6)
        top = (1 << bits) - 1
        for row in (0, 5):
            for n in (0, 63, 64, 200, 329):
                odd = 2 * int(levels.codes[row, n]) - top
                wanted = float(levels.gains[row]) * int(levels.scales[row, n // 64]) * odd
                assert float(dequantise_levels(levels)[row, n]) == pytest.approx(wanted, rel=1e-15)

    @pytest.mark.parametrize("bits", WIDTHS)
    def test_they_are_nearer_than_one_step_for_all(self, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
        values = self.uneven()
        scaled = dequantise_levels(Quantiser(values, bits).levels()) - values
        monkeypatch.setattr("mfs_decompose.linalg.shapes.LONG_SIDE", 1000)
        plain = Quantiser(values, bits).levels()
        assert plain.scales is None
        assert float(scaled.square().sum()) < 0.9 * float((dequantise_levels(plain) - values).square().sum())

    @pytest.mark.parametrize("bits", WIDTHS)
    def test_nothing_shrinks(self, bits: int) -> None:
        values = self.uneven()
        along = (dequantise_levels(Quantiser(values, bits).levels()) * values).sum(dim=1)
        assert torch.allclose(along, values.to(torch.float64).square().sum(dim=1), rtol=1e-12)

    def test_a_group_far_below_the_others_is_left_out(self) -> None:
        values = torch.cat([directions(1, 64, 4), directions(1, 64, 5) * 1e-7], dim=1)
        levels = Quantiser(values, 4).levels()
        assert levels.scales is not None and levels.scales[0, 0] > 0 and levels.scales[0, 1] == 0
        assert not dequantise_levels(levels)[0, 64:].any()

    @pytest.mark.parametrize("bits", WIDTHS)
    def test_a_window_of_integers_is_a_part_of_the_whole(self, bits: int) -> None:
        levels = Quantiser(self.uneven(3, 203), bits).levels()
        whole = integers(levels.codes, bits, levels.scales)
        for start, stop in ((0, 203), (0, 0), (1, 64), (63, 65), (64, 128), (70, 203), (203, 203)):
            found = integers(levels.codes[:, start:stop], bits, levels.scales, start)
            assert torch.equal(found, whole[:, start:stop])

    def test_zeros(self) -> None:
        levels = Quantiser(torch.zeros(2, 130), 2).levels()
        assert levels.scales is not None and not levels.scales.any() and not dequantise_levels(levels).any()
        assert Quantiser(torch.zeros(0, 130), 2).levels().codes.shape == (0, 130)
