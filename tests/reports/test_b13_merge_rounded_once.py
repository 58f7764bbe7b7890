"""B13: merging moves logits because products and sums are rounded on the way: ours is in fp64, and rounded once."""

from __future__ import annotations

from pathlib import Path

import torch
from adapter_cases import Q, delta, factors, merge, toy_base


def test_the_fp32_merge_is_within_one_rounding_of_the_truth(tmp_path: Path) -> None:
    tensors = {name: 40 * value for name, value in factors(Q, 12, 8, 64).items()}
    base = toy_base()
    weights, _ = merge(tmp_path, base, tensors, {"r": 64, "lora_alpha": 16})
    truth = base[f"{Q}.weight"].double() + delta(tensors, Q, 0.25)
    served = weights[f"{Q}.weight"].float()
    ulp = torch.nextafter(served.abs(), torch.tensor(torch.inf)).double() - served.abs().double()
    assert ((served.double() - truth).abs() <= 0.5001 * ulp).all()
    a, b = (tensors[f"base_model.model.{Q}.lora_{side}.weight"] for side in "AB")
    usual = base[f"{Q}.weight"] + (b @ a) * 0.25
    assert ((usual.double() - truth).abs() > 0.5001 * ulp).any()


def test_bf16_factors_lose_nothing(tmp_path: Path) -> None:
    tensors = {name: value.to(torch.bfloat16) for name, value in factors(Q, 12, 8, 64).items()}
    base = {name: value.to(torch.bfloat16) for name, value in toy_base().items()}
    weights, found = merge(tmp_path, base, tensors, {"r": 64, "lora_alpha": 16})
    truth = base[f"{Q}.weight"].double() + delta(tensors, Q, 0.25)
    assert torch.equal(weights[f"{Q}.weight"], truth)
    assert found.tensors[f"{Q}.weight"].spec.dtype == "BF16"
