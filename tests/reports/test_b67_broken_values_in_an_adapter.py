"""B67 (the adapter's part): NaN and Inf inside an adapter are refused, counted apart, with the tensor named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from adapter_cases import Q, factors, refuse, toy_base


@pytest.mark.parametrize(("value", "nans", "infinities"), [(torch.inf, 0, 1), (-torch.inf, 0, 1), (torch.nan, 1, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_value_is_enough(tmp_path: Path, value: float, nans: int, infinities: int, dtype: torch.dtype) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in factors(Q, 12, 8, 4).items()}
    name = f"base_model.model.{Q}.lora_B.weight"
    tensors[name][5, 2] = value
    error = refuse(tmp_path, toy_base(), tensors)
    assert f"{name!r} is broken: {nans} of its 48 values are NaN and {infinities} infinite" in error.message
