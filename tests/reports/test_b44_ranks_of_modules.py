"""B44: ranks of single modules, with rsLoRA: each is scaled by its own; a config that lost them is refused."""

from __future__ import annotations

from pathlib import Path

import torch
from adapter_cases import Q, delta, factors, merge, refuse, toy_base

V = "model.layers.0.self_attn.v_proj"


def test_each_module_by_its_own_rank(tmp_path: Path) -> None:
    base, tensors = toy_base(), factors(Q, 12, 8, 4) | factors(V, 6, 8, 8)
    config = {
        "r": 8,
        "lora_alpha": 6,
        "use_rslora": True,
        "rank_pattern": {"q_proj": 4},
        "alpha_pattern": {"v_proj": 3},
    }
    weights, _ = merge(tmp_path, base, tensors, config)
    for module, scale in ((Q, 6 / 4**0.5), (V, 3 / 8**0.5)):
        expected = base[f"{module}.weight"].double() + delta(tensors, module, scale)
        torch.testing.assert_close(weights[f"{module}.weight"], expected)


def test_ranks_that_are_lost(tmp_path: Path) -> None:
    tensors = factors(Q, 12, 8, 4) | factors(V, 6, 8, 8)
    error = refuse(tmp_path, toy_base(), tensors, {"r": 8, "rank_pattern": {}})
    assert f"{Q}: lora_A is [4, 8] and lora_B [12, 4] where adapter_config.json gives rank 8" in error.message


def test_a_rank_of_zero(tmp_path: Path) -> None:
    error = refuse(tmp_path, toy_base(), factors(Q, 12, 8, 4), {"rank_pattern": {"q_proj": 0}})
    assert "gives rank 0" in error.message
