"""B67 (the merge's part): an adapter that makes finite weights infinite is refused; a broken base is kept as it is."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from adapter_cases import Q, Tensors, draw, factors, toy_base, write
from checkpoints import read_weights
from report_runs import back, run, same_bits, tensors_of

from mfs_decompose.artifact.verify import verify
from mfs_decompose.errors import SourceIncompatible

SCALE = 10 / 4  # alpha over rank, see adapter_cases.write


def decomposed(root: Path, base: Tensors, tensors: Tensors, **config: object) -> Path:
    write(root, base, tensors, config)
    run(root / "art", root / "base", {"x": root / "adapter"}, {"objective.rank": 2})
    return root / "art"


@pytest.mark.parametrize(("factor", "dtype"), [(1e20, torch.float32), (1e160, torch.float64), (1e200, torch.float64)])
def test_factors_whose_product_is_too_large_are_refused(tmp_path: Path, factor: float, dtype: torch.dtype) -> None:
    tensors = {name: tensor.to(dtype) * factor for name, tensor in factors(Q, 12, 8, 4).items()}
    with pytest.raises(SourceIncompatible) as caught:
        decomposed(tmp_path, toy_base(), tensors)
    assert f"of 96 values of '{Q}.weight' are too large for fp32" in caught.value.message
    assert caught.value.hint
    assert not (tmp_path / "art").exists()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_no_number_in_the_base_is_none_in_the_merge(tmp_path: Path, value: float, dtype: torch.dtype) -> None:
    base = {name: tensor.to(dtype) for name, tensor in toy_base().items()}
    base[f"{Q}.weight"][3, 5] = value
    tensors = factors(Q, 12, 8, 4)
    artifact = decomposed(tmp_path, base, tensors)
    assert verify(artifact, level="values").ok

    merged = back(artifact, "x", tmp_path / "f32", dtype="float32")[f"{Q}.weight"]
    a, b = (tensors[f"base_model.model.{Q}.lora_{side}.weight"].double() for side in "AB")
    expected = base[f"{Q}.weight"].double() + SCALE * b @ a
    torch.testing.assert_close(merged.double(), expected, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert not torch.isfinite(merged[3, 5])
    assert int((~torch.isfinite(merged)).sum()) == 1

    energy = tensors_of(artifact, "x")[f"{Q}.weight"]["energy"]
    delta = SCALE * b @ a
    delta[3, 5] = 0.0  # has no part in the norm
    assert energy == pytest.approx(float(delta.square().sum()), rel=1e-9)


def test_a_whole_tensor_in_place_of_a_broken_one(tmp_path: Path) -> None:
    base = toy_base()
    base["lm_head.weight"][7] = math.nan
    head = draw("head", 512, 8)
    tensors = factors(Q, 12, 8, 4) | {"base_model.model.lm_head.weight": head}
    artifact = decomposed(tmp_path, base, tensors, modules_to_save=["lm_head"])
    assert same_bits(back(artifact, "x", tmp_path / "out")["lm_head.weight"], head)
    json.loads((artifact / "manifest.json").read_bytes(), parse_constant=lambda name: pytest.fail(name))


def test_the_rest_of_a_base_beyond_fp32_is_no_fault_of_the_adapter(tmp_path: Path) -> None:
    base = {name: tensor.double() * 1e250 for name, tensor in toy_base().items()}
    artifact = decomposed(tmp_path, base, {name: tensor.double() for name, tensor in factors(Q, 12, 8, 4).items()})
    assert same_bits(read_weights(tmp_path / "base")[f"{Q}.weight"], back(artifact, "x", tmp_path / "o")[f"{Q}.weight"])
