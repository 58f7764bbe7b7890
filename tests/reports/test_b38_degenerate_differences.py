"""B38: an SVD that aborts on one layer whose difference is not finite or has equal singular values.

Right: the layer is found before the factorisation, stored exactly, named; the run goes on with all others.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from report_runs import Notes, Tensors, back, run, same_bits, tensors_of, toy

from mfs_decompose.artifact.verify import verify

SIZE = 36


def layers(dtype: torch.dtype = torch.float32) -> Tensors:
    generator = torch.Generator().manual_seed(38)
    weights = {f"layers.{at}.weight": torch.randn(SIZE, SIZE, generator=generator).to(dtype) for at in range(4)}
    return {**weights, "experts": torch.randn(3, SIZE, SIZE, generator=generator).to(dtype)}


def rotation(seed: int) -> torch.Tensor:
    """A matrix whose singular values are all 1."""
    q, _ = torch.linalg.qr(torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(seed)))
    assert isinstance(q, torch.Tensor)
    return q


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["layers.2.weight", "experts"])
@pytest.mark.parametrize(
    "recipe",
    [
        {"objective.rank": 3},
        {"deltas.default.codec": "lowrank", "objective.budget": "60%"},
        {"deltas.default.codec": "auto", "objective.budget": "60%"},
    ],
)
def test_one_bad_element_costs_one_matrix(tmp_path: Path, value: float, where: str, recipe: dict[str, object]) -> None:
    base = layers()
    generator = torch.Generator().manual_seed(39)
    own = {name: weight + 0.01 * torch.randn(weight.shape, generator=generator) for name, weight in base.items()}
    own[where].view(-1, SIZE)[SIZE // 2, 5] = value
    sink = Notes()
    run(tmp_path / "art", toy(tmp_path / "base", base), {"v": toy(tmp_path / "v", own)}, recipe, sink)
    tensors = tensors_of(tmp_path / "art", "v")
    for name, found in tensors.items():
        assert math.isfinite(found["error"]) and math.isfinite(found["energy"])
        assert found["nonfinite"] == (name == where)
        if name not in (where, "experts") and recipe.get("deltas.default.codec") == "auto":
            assert found["tree"]["codec"] in ("banded", "deadzone", "sum", "lossless")
        elif name != where:
            assert found["tree"]["codec"] == "lowrank"
    weights = back(tmp_path / "art", "v", tmp_path / "out")
    if where == "experts":
        assert [child["codec"] for child in tensors[where]["tree"]["children"]] == ["lossless", "lowrank"]
        assert same_bits(weights[where][0], own[where][0])
        assert bool(torch.isfinite(weights[where][1:]).all())
    else:
        assert tensors[where]["tree"]["codec"] == "lossless" and same_bits(weights[where], own[where])
    (note,) = [message for message in sink.notes if "NaN or infinite" in message]
    assert where in note and "1 value" in note
    assert verify(tmp_path / "art", "values").ok


@pytest.mark.parametrize("rank", [1, 5, SIZE])
def test_equal_singular_values(tmp_path: Path, rank: int) -> None:
    """Every choice of directions is as good as another; r of n of them explain r / n, and all explain everything."""
    base = layers()
    own = {name: weight.clone() for name, weight in base.items()}
    for at in range(4):
        own[f"layers.{at}.weight"] += 0.1 * rotation(at)
    for at in range(3):
        own["experts"][at] += 0.1 * rotation(10 + at)
    recipe = {"objective.rank": rank, "deltas.default.factors": "int8"}
    run(tmp_path / "art", toy(tmp_path / "base", base), {"v": toy(tmp_path / "v", own)}, recipe)
    for found in tensors_of(tmp_path / "art", "v").values():
        assert found["tree"]["codec"] == "lowrank"
        assert found["error"] / found["energy"] == pytest.approx(1 - rank / SIZE, abs=2e-3)


def test_constant_and_rank_one_and_zero_differences(tmp_path: Path) -> None:
    base = layers()
    own = {name: weight.clone() for name, weight in base.items()}
    own["layers.0.weight"] += 0.25
    own["layers.1.weight"] = own["layers.1.weight"].clone()
    own["layers.2.weight"][:, 3] += 1.0
    own["experts"][1] += 0.25
    recipe = {"objective.rank": 4, "deltas.default.factors": "bf16"}
    run(tmp_path / "art", toy(tmp_path / "base", base), {"v": toy(tmp_path / "v", own)}, recipe)
    tensors = tensors_of(tmp_path / "art", "v")
    assert [tensors[f"layers.{at}.weight"]["tree"]["codec"] for at in (0, 1, 2)] == ["lowrank", "identical", "lowrank"]
    for name in ("layers.0.weight", "layers.2.weight", "experts"):
        assert tensors[name]["error"] < 1e-4 * tensors[name]["energy"]
