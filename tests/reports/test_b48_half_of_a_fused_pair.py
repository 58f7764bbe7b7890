"""B48: only one half of what others fuse is targeted: the other half does not change."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from adapter_cases import Q, delta, factors, merge, toy_base

GATE, UP = "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"
V = "model.layers.0.self_attn.v_proj"


@pytest.mark.parametrize("targets", [{GATE: (14, 8)}, {Q: (12, 8), V: (6, 8)}], ids=["gate", "q and v"])
def test_the_rest_keeps_its_bits(tmp_path: Path, targets: dict[str, tuple[int, int]]) -> None:
    base = toy_base()
    tensors = {name: value for module, size in targets.items() for name, value in factors(module, *size, 4).items()}
    weights, found = merge(tmp_path, base, tensors)
    for name, value in base.items():
        module = name.removesuffix(".weight")
        if module in targets:
            torch.testing.assert_close(weights[name], value.double() + delta(tensors, module, 2.5))
        else:
            assert found.tensors[name].params is None
            assert torch.equal(weights[name], value.double())
    assert list(found.tensors) == sorted(base)
