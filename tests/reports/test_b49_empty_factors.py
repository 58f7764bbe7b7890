"""B49: factors of shape [0], as ZeRO-3 saves them without gathering: refused and explained, never "no change"."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from adapter_cases import Q, factors, refuse, toy_base


@pytest.mark.parametrize("shape", [(0,), (0, 8), (4, 0)])
@pytest.mark.parametrize("side", ["A", "B"])
def test_they_are_named_with_the_cause(tmp_path: Path, side: str, shape: tuple[int, ...]) -> None:
    name = f"base_model.model.{Q}.lora_{side}.weight"
    error = refuse(tmp_path, toy_base(), factors(Q, 12, 8, 4) | {name: torch.zeros(shape)})
    assert f"1 of 2 tensors of the adapter in {tmp_path / 'adapter'} are empty: {name}" in error.message
    assert "ZeRO-3" in (error.hint or "")


@pytest.mark.parametrize("side", ["A", "B"])
def test_one_factor_alone(tmp_path: Path, side: str) -> None:
    tensors = factors(Q, 12, 8, 4)
    del tensors[f"base_model.model.{Q}.lora_{side}.weight"]
    error = refuse(tmp_path, toy_base(), tensors)
    assert f"expected lora_A and lora_B for {Q}" in error.message
