"""Every lossy codec on deltas at the edges: the recorded error is the true one, and corrections give all bits back."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from every_codec import RULES
from pipeline_runs import Tensors, record, run, same_bits, toy

from mfs_decompose.artifact.reader import Family
from mfs_decompose.artifact.values import open_tensor
from mfs_decompose.artifact.verify import verify

CODECS = {name: rule for name, rule in RULES.items() if rule["codec"] not in ("lossless", "raw", "lora-exact")}


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + math.prod(shape)))


def pairs() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Base and variant of one tensor for each edge."""
    half, single = torch.bfloat16, torch.float32
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for rows, columns in ((8, 8), (9, 300), (300, 9), (65, 17)):
        for dtype in (half, torch.float16, single):
            base, change = draw(rows, columns), 0.02 * draw(rows, columns, seed=1)
            found[f"{rows}x{columns}.{str(dtype)[6:]}"] = base.to(dtype), (base + change).to(dtype)
    base = draw(24, 33)
    zeros = torch.zeros_like(base)
    found["constant"] = base, base + 0.125
    found["rank"] = base.to(half), (base + 0.1 * draw(24, 1) @ draw(1, 33)).to(half)
    found["one"] = base, base.index_put((torch.tensor(7), torch.tensor(9)), torch.tensor(3.0))
    found["row"] = base.to(half), torch.cat([base[:5] + 0.5, base[5:]]).to(half)
    found["subnormal"] = zeros, 1e-41 * draw(24, 33)
    found["smallest"] = zeros.to(half), (1e-39 * draw(24, 33)).to(half)
    found["signs"] = zeros, torch.where(draw(24, 33) > 0, -0.0, 0.001)
    found["huge"] = 1e30 * base, 1e30 * (base + 0.01 * draw(24, 33, seed=2))
    found["far"] = base.to(half), (1e4 * draw(24, 33, seed=3)).to(half)
    return found


PAIRS = pairs()


def tensors(side: int) -> Tensors:
    found = {f"{codec}.{case}.weight": pair[side].clone() for codec in CODECS for case, pair in PAIRS.items()}
    return {**found, "norm.weight": torch.ones(24)}


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("odd")
    base, own = toy(root / "base", tensors(0)), toy(root / "own", tensors(1))
    recipe = {
        "objective.budget": "60%",
        "deltas.rules": [{"match": f"{name}.*", **rule} for name, rule in CODECS.items()],
    }
    run(root / "lossy", base, {"own": own}, recipe)
    run(root / "exact", base, {"own": own}, {**recipe, "deltas.keep_exact": True})
    return {name: root / name for name in ("lossy", "exact")}


@pytest.mark.parametrize("case", PAIRS)
def test_the_recorded_error_is_the_true_one(case: str, artifacts: dict[str, Path]) -> None:
    base, own = (side.to(torch.float64) for side in PAIRS[case])
    served_by: dict[str, dict[str, torch.Tensor]] = {}
    for name, artifact in artifacts.items():
        records = record(artifact, "own")["tensors"]
        with Family.open(artifact) as family:
            for codec in CODECS:
                one = records[f"{codec}.{case}.weight"]
                stored = open_tensor(family, "own", f"{codec}.{case}.weight")
                served = stored.served(0, stored.spec.rows)
                assert bool(torch.isfinite(served).all())
                energy = float((own - base).square().sum())
                assert one["energy"] == pytest.approx(energy, rel=2.0**-22)
                # Deltas are taken in fp32, and served weights are fp32: either rounds what is measured here.
                rounding = float(own.square().sum() + base.square().sum()) * 2.0**-46 + own.numel() * 2.0**-298
                true = float((served.to(torch.float64) - own).square().sum())
                slack = 2 * math.sqrt(max(true, one["error"]) * rounding) + rounding
                assert one["error"] == pytest.approx(true, rel=1e-9, abs=slack), codec
                served_by.setdefault(codec, {})[name] = served
    for codec, both in served_by.items():
        if not torch.equal(both["lossy"], both["exact"]):
            assert torch.equal(both["exact"].to(torch.float64), own), codec  # nothing was gained by a delta below


@pytest.mark.parametrize("case", PAIRS)
def test_corrections_give_all_bits_back(case: str, artifacts: dict[str, Path]) -> None:
    with Family.open(artifacts["exact"]) as family:
        for codec in CODECS:
            stored = open_tensor(family, "own", f"{codec}.{case}.weight")
            assert stored.exact
            assert same_bits(stored.restored(0, stored.spec.rows), PAIRS[case][1])


def test_both_verify(artifacts: dict[str, Path]) -> None:
    for artifact in artifacts.values():
        assert verify(artifact, "values").ok


def test_no_codec_is_worse_than_nothing(artifacts: dict[str, Path]) -> None:
    for name, one in record(artifacts["lossy"], "own")["tensors"].items():
        assert one["error"] <= 1.0001 * one["energy"], name
