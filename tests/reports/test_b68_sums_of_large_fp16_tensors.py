"""B68: an fp16 sum over 160,000 ones is infinite, and finite weights become NaN. Right: every sum is wider."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from report_runs import Tensors, back, measured_error, run, same_bits, tensors_of, toy

COUNT = 160_000
ROWS = 400


def ones_half_masked() -> tuple[Tensors, Tensors]:
    """160,000 ones, and the same with every second one masked; as a matrix, as experts and as a vector."""
    ones = torch.ones(COUNT, dtype=torch.float16)
    masked = ones.clone()
    masked[::2] = 0
    assert math.isinf(ones.sum(dtype=torch.float16))

    def shapes(values: torch.Tensor) -> Tensors:
        return {
            "matrix": values.reshape(ROWS, -1).clone(),
            "experts": values.reshape(10, 40, -1).clone(),
            "vector": values.clone(),
        }

    return shapes(ones), shapes(masked)


@pytest.mark.parametrize(
    "recipe",
    [
        {"objective.rank": 3},
        {"objective.budget": "60%"},
        {"objective.density": "3%", "deltas.default.codec": "sparse"},
        {"deltas.default.codec": "lossless"},
        {"objective.rank": 3, "base.mode": "mean"},
    ],
)
def test_norms_of_the_difference_are_right_and_what_comes_back_is_finite(
    tmp_path: Path, recipe: dict[str, object]
) -> None:
    base, own = ones_half_masked()
    mean = recipe.get("base.mode") == "mean"
    variants = {"masked": toy(tmp_path / "masked", own)}
    if mean:
        variants["other"] = toy(tmp_path / "other", base)
    report = run(tmp_path / "art", None if mean else toy(tmp_path / "base", base), variants, recipe)
    for found in tensors_of(tmp_path / "art", "masked").values():
        assert found["energy"] == (COUNT / 8 if mean else COUNT / 2)  # a half, or a quarter of a half: exact in fp64
        assert 0 <= found["error"] <= found["energy"] and found["nonfinite"] == 0
    assert all(0 <= variant.rel_error < 1 for variant in report.variants)
    weights = back(tmp_path / "art", "masked", tmp_path / "out")
    assert all(bool(torch.isfinite(one).all()) for one in weights.values())
    assert same_bits(weights["vector"], own["vector"])
    if not mean:
        served = back(tmp_path / "art", "masked", tmp_path / "served", dtype="float32")
        assert measured_error(own, base, served) == pytest.approx(report.variants[0].rel_error, rel=1e-5)


@pytest.mark.parametrize(
    "recipe", [{"objective.rank": 2}, {"objective.density": "2%", "deltas.default.codec": "sparse"}]
)
def test_at_the_edge_of_the_range_finite_stays_finite(tmp_path: Path, recipe: dict[str, object]) -> None:
    """Weights at +-60,000 that moved by thousands: base and delta are finite, their sum in fp16 may not be."""
    generator = torch.Generator().manual_seed(68)
    sign = torch.where(torch.rand(64, 48, generator=generator) < 0.5, -1.0, 1.0)
    base = {"w": (60_000 * sign).half(), "e": (60_000 * sign).half().reshape(4, 16, 48)}
    own = {
        name: (one.float() + 5_000 * torch.randn(one.shape, generator=generator)).clamp(-65_504, 65_504).half()
        for name, one in base.items()
    }
    report = run(tmp_path / "art", toy(tmp_path / "base", base), {"v": toy(tmp_path / "v", own)}, recipe)
    assert 0 < report.variants[0].rel_error < 1
    for rounding in ("stochastic", "nearest"):
        weights = back(tmp_path / "art", "v", tmp_path / rounding, rounding=rounding)
        for name, one in weights.items():
            assert bool(torch.isfinite(one).all())
            assert float(one.float().abs().max()) <= 65_504
            moved_back = (one.double() - own[name].double()).norm()
            assert moved_back <= 1.05 * (base[name].double() - own[name].double()).norm()
