"""B46: DoRA's magnitudes decide every output's length: ignoring them is the one wrong answer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from adapter_cases import Q, delta, draw, factors, merge, refuse, toy_base

MAGNITUDE = f"base_model.model.{Q}.lora_magnitude_vector"


@pytest.mark.parametrize("end", ["", ".default", ".weight", ".default.weight"])
def test_outputs_have_the_length_of_their_magnitude(tmp_path: Path, end: str) -> None:
    base = toy_base()
    tensors = factors(Q, 12, 8, 4) | {MAGNITUDE + end: draw("m", 12).abs() + 0.5}
    weights, _ = merge(tmp_path, base, tensors, {"use_dora": True})
    found = weights[f"{Q}.weight"]
    torch.testing.assert_close(found.norm(dim=1), tensors[MAGNITUDE + end].double())
    moved = base[f"{Q}.weight"].double() + delta(tensors, Q, 2.5)
    torch.testing.assert_close(found / found.norm(dim=1)[:, None], moved / moved.norm(dim=1)[:, None])


@pytest.mark.parametrize("promised", [True, False])
def test_config_and_file_that_contradict_each_other(tmp_path: Path, promised: bool) -> None:
    tensors = factors(Q, 12, 8, 4) | ({} if promised else {MAGNITUDE: draw("m", 12)})
    assert f"use_dora {str(promised).lower()}" in refuse(tmp_path, toy_base(), tensors, {"use_dora": promised}).message


def test_magnitudes_of_another_layer(tmp_path: Path) -> None:
    tensors = factors(Q, 12, 8, 4) | {MAGNITUDE: draw("m", 8)}
    assert "8 values for 12 outputs" in refuse(tmp_path, toy_base(), tensors, {"use_dora": True}).message
