"""B43: rsLoRA scales by alpha / sqrt(r); a flag that is not known and may change the scale is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from adapter_cases import Q, delta, factors, merge, refuse, toy_base


@pytest.mark.parametrize(("flag", "scale"), [(True, 4.0), (False, 1.0), (None, 1.0)])
def test_the_flag_is_read(tmp_path: Path, flag: bool | None, scale: float) -> None:
    base, tensors = toy_base(), factors(Q, 12, 8, 16)
    weights, found = merge(tmp_path, base, tensors, {"r": 16, "lora_alpha": 16, "use_rslora": flag})
    torch.testing.assert_close(weights[f"{Q}.weight"], base[f"{Q}.weight"].double() + delta(tensors, Q, scale))
    assert found.tensors[f"{Q}.weight"].params["factors"][0]["scale"] == scale


@pytest.mark.parametrize("field", ["use_super_lora", "scaling_factor", "lora_temperature"])
def test_an_unknown_flag_is_refused_by_name(tmp_path: Path, field: str) -> None:
    assert field in refuse(tmp_path, toy_base(), factors(Q, 12, 8, 4), {field: 2.0}).message
