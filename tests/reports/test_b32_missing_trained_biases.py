"""B32: the config says that biases were trained and older savers left them out: say so; read both spellings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from adapter_cases import Q, draw, factors, merge, refuse, toy_base

V = "model.layers.0.self_attn.v_proj"


@pytest.mark.parametrize("spelling", ["bias", "base_layer.bias"])
def test_both_spellings(tmp_path: Path, spelling: str) -> None:
    tensors = factors(Q, 12, 8, 4) | {f"base_model.model.{Q}.{spelling}": draw("t", 12)}
    weights, found = merge(tmp_path, toy_base(biases=True), tensors, {"bias": "lora_only"})
    assert torch.equal(weights[f"{Q}.bias"], tensors[f"base_model.model.{Q}.{spelling}"].double())
    assert not any("incomplete" in note for note in found.warnings)


@pytest.mark.parametrize(("bias", "count"), [("lora_only", 1), ("all", 2)])
def test_none_of_them(tmp_path: Path, bias: str, count: int) -> None:
    base = toy_base(biases=True)
    weights, found = merge(tmp_path, base, factors(Q, 12, 8, 4), {"bias": bias})
    (note,) = [note for note in found.warnings if "incomplete" in note]
    assert f"{count} keep the base's values" in note
    assert f"{Q}.bias" in note
    assert torch.equal(weights[f"{Q}.bias"], base[f"{Q}.bias"].double())


def test_a_base_without_biases_promises_nothing(tmp_path: Path) -> None:
    _, found = merge(tmp_path, toy_base(), factors(Q, 12, 8, 4), {"bias": "all"})
    assert not any("incomplete" in note for note in found.warnings)


def test_a_bias_of_a_layer_without_one(tmp_path: Path) -> None:
    tensors = factors(Q, 12, 8, 4) | {f"base_model.model.{Q}.bias": draw("t", 12)}
    assert f"not there: {Q}.bias" in refuse(tmp_path, toy_base(), tensors, {"bias": "lora_only"}).message
