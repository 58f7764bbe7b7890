"""B31: a bias of lora_B is scaled like its factors: alpha is not the rank here, or nothing would show."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from adapter_cases import Q, draw, factors, merge, refuse, toy_base

BIAS = f"base_model.model.{Q}.lora_B.bias"


@pytest.mark.parametrize(("rslora", "scale"), [(False, 8.0), (True, 16.0)])
def test_the_bias_is_scaled(tmp_path: Path, rslora: bool, scale: float) -> None:
    base = toy_base(biases=True)
    tensors = factors(Q, 12, 8, 4) | {BIAS: draw("l", 12)}
    config = {"lora_bias": True, "r": 4, "lora_alpha": 32, "use_rslora": rslora}
    weights, _ = merge(tmp_path, base, tensors, config)
    assert torch.equal(weights[f"{Q}.bias"], base[f"{Q}.bias"].double() + scale * tensors[BIAS].double())


def test_on_a_trained_bias(tmp_path: Path) -> None:
    tensors = factors(Q, 12, 8, 4) | {BIAS: draw("l", 12), f"base_model.model.{Q}.base_layer.bias": draw("t", 12)}
    weights, _ = merge(tmp_path, toy_base(biases=True), tensors, {"lora_bias": True, "bias": "lora_only"})
    trained = tensors[f"base_model.model.{Q}.base_layer.bias"].double()
    assert torch.equal(weights[f"{Q}.bias"], trained + 2.5 * tensors[BIAS].double())


@pytest.mark.parametrize("promised", [True, False])
def test_config_and_file_that_contradict_each_other(tmp_path: Path, promised: bool) -> None:
    tensors = factors(Q, 12, 8, 4) | ({} if promised else {BIAS: draw("l", 12)})
    error = refuse(tmp_path, toy_base(biases=True), tensors, {"lora_bias": promised})
    assert f"lora_bias {str(promised).lower()}" in error.message
