"""The predicted rounding noise, held against noise that was made: rounded weights, and the spectra of merges."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from linalg_matrices import generator

from mfs_decompose.linalg.rounding_noise import GRIDS, count_units, predict_noise
from mfs_decompose.linalg.spectrum import gram_spectra
from mfs_decompose.source.dtypes import torch_dtype

ROWS, COLUMNS = 320, 200


def weights(dtype: str, seed: int = 0, *shape: int) -> torch.Tensor:
    drawn = 0.02 * torch.randn(shape or (ROWS, COLUMNS), generator=generator(seed), dtype=torch.float64)
    return drawn.to(torch_dtype(dtype))


def noise_of(own: torch.Tensor, base: torch.Tensor, dtype: str, *, on_grid: bool = True) -> tuple[float, float]:
    """The prediction for a pair of weights, and the energy of their difference."""
    energy = float((own.to(torch.float64) - base.to(torch.float64)).square().sum())
    unchanged = int((own.to(torch.float64) == base.to(torch.float64)).sum())
    return predict_noise(count_units(own), dtype, unchanged, energy, on_grid=on_grid), energy


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_units_are_those_of_numpy(dtype: str) -> None:
    values = torch.cat([weights(dtype, 1).reshape(-1), torch.tensor([0.0, 1.0, -1.5, 1e-7], dtype=torch_dtype(dtype))])
    counts = count_units(values)
    assert int(counts.sum()) == values.numel()
    grid = GRIDS[dtype]
    found = math.fsum(
        count * 4.0 ** (max(exponent - 127, grid.least) - grid.mantissa)
        for exponent, count in enumerate(counts.tolist())
    )
    if dtype == "BF16":  # numpy has none: 16 bits of fp32's 24
        units = np.spacing(np.abs(values.to(torch.float32).numpy())).astype(np.float64) * 2.0**16
        units = np.maximum(units, 2.0**-133)
    else:
        units = np.spacing(np.abs(values.numpy())).astype(np.float64)
    assert found == pytest.approx(float(np.square(units).sum()), rel=1e-12)


def test_what_is_not_finite_has_no_unit() -> None:
    values = torch.tensor([1.0, math.inf, -math.inf, math.nan, 3e38, 0.0])
    counts = count_units(values)
    assert (int(counts.sum()), int(counts[255]), int(counts[0])) == (3, 0, 1)


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
@pytest.mark.parametrize("rms", [1e-5, 3e-5, 1e-4, 3e-4, 3e-3])
def test_the_noise_of_a_known_change_is_predicted(dtype: str, rms: float) -> None:
    """Of d = round(w + l) - w, what is left when the part proportional to l is taken away."""
    base = weights(dtype, 2, 600, 400)
    change = rms * torch.randn(base.shape, generator=generator(3), dtype=torch.float64)
    own = (base.to(torch.float64) + change).to(base.dtype)
    predicted, _ = noise_of(own, base, dtype)
    delta = own.to(torch.float64) - base.to(torch.float64)
    slope = float((delta * change).sum() / change.square().sum())
    assert predicted == pytest.approx(float((delta - slope * change).square().sum()), rel=0.08)


@pytest.mark.parametrize("rms", [5e-5, 2e-4, 1e-3])
def test_it_is_the_tail_of_a_merge(rms: float) -> None:
    """A merge of rank 6: what lies beyond its directions, whatever the gap is like."""
    base, rank = weights("BF16", 4), 6
    left = torch.randn(ROWS, rank, generator=generator(5), dtype=torch.float64)
    right = torch.randn(rank, COLUMNS, generator=generator(6), dtype=torch.float64)
    own = (base.to(torch.float64) + rms / rank**0.5 * (left @ right)).to(torch.bfloat16)
    predicted, _ = noise_of(own, base, "BF16")
    energies = gram_spectra((own.to(torch.float32) - base.to(torch.float32))[None])[0]
    free = (1 - rank / ROWS) * (1 - rank / COLUMNS)
    assert 0.75 < float(energies[rank:].sum()) / (predicted * free) < 1.05


def test_a_base_off_the_grid_spreads_the_noise_evenly() -> None:
    base = weights("F32", 7)
    own = base.to(torch.bfloat16)
    predicted, energy = noise_of(own, base, "BF16", on_grid=False)
    assert predicted == pytest.approx(energy, rel=0.03)  # all there is is rounding


@pytest.mark.parametrize("rms", [0.02, 0.03, 0.05])
def test_a_delta_rounded_before_it_is_added_is_noisier(rms: float) -> None:
    """Both roundings: of the delta in bf16, then of the sum, where the delta is as large as the weights."""
    base = weights("F32", 8)
    change = rms * torch.randn(base.shape, generator=generator(9))
    rounded = change.to(torch.bfloat16).to(torch.float32)
    first = float((rounded.to(torch.float64) - change.to(torch.float64)).square().sum())
    energy = float(rounded.to(torch.float64).square().sum())
    alone = predict_noise(torch.zeros(256, dtype=torch.int64), "BF16", 0, energy, on_grid=True)
    assert alone == pytest.approx(first, rel=0.2)  # where the spread lies in its octave is not known
    own = (base + rounded).to(torch.bfloat16)
    both = float((own.to(torch.float64) - base.to(torch.float64) - change.to(torch.float64)).square().sum())
    assert noise_of(own, base, "BF16", on_grid=False)[0] == pytest.approx(both, rel=0.15)


def test_no_change_is_no_noise() -> None:
    base = weights("BF16", 10)
    assert noise_of(base, base, "BF16") == (0.0, 0.0)
    assert noise_of(base, base, "BF16", on_grid=False) == (0.0, 0.0)
    assert predict_noise(torch.zeros(256, dtype=torch.int64), "F32", 0, 0.0, on_grid=True) == 0.0


@given(
    exponents=st.lists(st.integers(0, 254), min_size=1, max_size=6),
    dtype=st.sampled_from(sorted(GRIDS)),
    share=st.floats(0, 1),
    energy=st.floats(0, 1e30),
)
def test_it_is_a_number_whatever_the_weights_are(exponents: list[int], dtype: str, share: float, energy: float) -> None:
    counts = torch.zeros(256, dtype=torch.int64)
    for exponent in exponents:
        counts[exponent] += 100
    for on_grid in (True, False):
        found = predict_noise(counts, dtype, int(share * int(counts.sum())), energy, on_grid=on_grid)
        assert math.isfinite(found)
        assert found >= 0.0


@given(share=st.floats(0.01, 0.99))
def test_it_never_exceeds_that_of_even_noise_by_much(share: float) -> None:
    """More unchanged weights, less noise: from u^2 / 12 down to nothing."""
    counts = torch.zeros(256, dtype=torch.int64)
    counts[120:123] = torch.tensor([50_000, 100_000, 50_000])
    total = int(counts.sum())
    even = predict_noise(counts, "BF16", 0, 0.0, on_grid=True)
    found = predict_noise(counts, "BF16", int(share * total), 0.0, on_grid=True)
    assert 0.0 <= found <= 1.2 * even
    assert predict_noise(counts, "BF16", total - 1, 0.0, on_grid=True) < 0.01 * even
