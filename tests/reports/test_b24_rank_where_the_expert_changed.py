"""B24: experts moved into fused [E, 2I, H] parameters. Each expert is its own matrix, and comes back in 3-D."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from report_runs import Tensors, back, measured_error, run, same_bits, tensors_of, toy

GATE_UP, DOWN = "model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"
COUNT, INNER, HIDDEN, TOUCHED = 4, 32, 64, 2


def fused() -> Tensors:
    generator = torch.Generator().manual_seed(24)
    return {
        GATE_UP: (0.1 * torch.randn(COUNT, 2 * INNER, HIDDEN, generator=generator)).bfloat16(),
        DOWN: (0.1 * torch.randn(COUNT, HIDDEN, INNER, generator=generator)).bfloat16(),
        "model.layers.0.mlp.gate.weight": (0.1 * torch.randn(COUNT, HIDDEN, generator=generator)).bfloat16(),
    }


def one_expert_tuned(base: Tensors, rank: int) -> Tensors:
    """Expert 2 alone, by a rank that a fair share of the budget would not hold."""
    generator = torch.Generator().manual_seed(25)
    own = {name: weight.clone() for name, weight in base.items()}
    for name in (GATE_UP, DOWN):
        rows, columns = own[name].shape[1:]
        change = torch.randn(rows, rank, generator=generator) @ torch.randn(rank, columns, generator=generator)
        own[name][TOUCHED] = (own[name][TOUCHED].float() + 0.02 * change).bfloat16()
    return own


def spent(art: Path, name: str) -> dict[int, int]:
    """Steps of every slice that has any."""
    tree = tensors_of(art, "tuned")[name]["tree"]
    found: dict[int, int] = {}
    for start, child in zip(tree["params"]["splits"], tree["children"], strict=False):
        for at, steps in enumerate(child.get("params", {}).get("slices", [])):
            found[start + at] = steps
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_all_the_rank_goes_to_the_expert_that_changed(tmp_path: Path, dtype: str) -> None:
    base = {name: weight.to(getattr(torch, dtype)) for name, weight in fused().items()}
    own = one_expert_tuned(base, rank=14)
    own = {name: weight.to(getattr(torch, dtype)) for name, weight in own.items()}
    report = run(
        tmp_path / "art",
        toy(tmp_path / "base", base),
        {"tuned": toy(tmp_path / "tuned", own)},
        {"objective.budget": "8%"},
    )
    for name in (GATE_UP, DOWN):
        steps = spent(tmp_path / "art", name)
        assert list(steps) == [TOUCHED]
        assert steps[TOUCHED] >= 14
    assert report.variants[0].rel_error < 0.2
    weights = back(tmp_path / "art", "tuned", tmp_path / "out")
    served = back(tmp_path / "art", "tuned", tmp_path / "served", dtype="float32")
    for name in (GATE_UP, DOWN):
        assert weights[name].shape == own[name].shape and weights[name].dim() == 3
        for at in set(range(COUNT)) - {TOUCHED}:
            assert same_bits(weights[name][at], base[name][at])
    assert measured_error(own, base, served) == pytest.approx(report.variants[0].rel_error, rel=1e-5)


def test_a_rank_is_that_of_every_expert(tmp_path: Path) -> None:
    """Four experts that each moved by rank 3: rank 3 holds all of them, though together they are of rank 12."""
    base = fused()
    generator = torch.Generator().manual_seed(26)
    own = {name: weight.float() for name, weight in base.items()}
    for at in range(COUNT):
        left, right = torch.randn(2 * INNER, 3, generator=generator), torch.randn(3, HIDDEN, generator=generator)
        own[GATE_UP][at] += 0.02 * left @ right
    base = {name: weight.float() for name, weight in base.items()}
    recipe = {"objective.rank": 3, "deltas.default.factors": "bf16"}
    run(tmp_path / "art", toy(tmp_path / "base", base), {"tuned": toy(tmp_path / "tuned", own)}, recipe)
    found = tensors_of(tmp_path / "art", "tuned")[GATE_UP]
    assert found["tree"]["params"]["slices"] == [3] * COUNT
    assert (found["error"] / found["energy"]) ** 0.5 < 0.01
