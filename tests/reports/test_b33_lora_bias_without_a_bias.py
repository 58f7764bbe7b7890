"""B33: lora_bias on a layer that has no bias: refused with the reason, before any work."""

from __future__ import annotations

from pathlib import Path

from adapter_cases import Q, draw, factors, refuse, toy_base


def test_it_is_refused(tmp_path: Path) -> None:
    tensors = factors(Q, 12, 8, 4) | {f"base_model.model.{Q}.lora_B.bias": draw("l", 12)}
    error = refuse(tmp_path, toy_base(), tensors, {"lora_bias": True})
    assert f"adds a bias (lora_bias) to {Q}, which has none in the base" in error.message
    assert "PEFT cannot merge such an adapter either" in (error.hint or "")
