from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from safetensors.torch import _TYPES

from mfs_decompose.source import dtypes

KNOWN = [
    *("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL", "C64"),
    *("F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ", "F8_E8M0"),
]


@pytest.mark.parametrize("name", KNOWN)
def test_sizes_and_types_agree_with_torch(name: str) -> None:
    assert dtypes.is_known(name)
    assert dtypes.torch_dtype(name).itemsize == dtypes.item_size(name)


@pytest.mark.parametrize("name", sorted(_TYPES))
def test_types_agree_with_the_safetensors_library(name: str) -> None:
    assert dtypes.torch_dtype(name) == _TYPES[name]


@pytest.mark.parametrize("name", ["F4", "F6_E2M3", "F6_E3M2", "f32", "", "I128"])
def test_types_without_whole_bytes_are_unknown(name: str) -> None:
    assert not dtypes.is_known(name)


def test_only_four_floats_are_codable() -> None:
    assert {name for name in KNOWN if dtypes.is_float(name)} == {"F64", "F32", "F16", "BF16"}
    assert dtypes.torch_dtype("BF16") is torch.bfloat16


def test_the_floor_imports_without_torch() -> None:
    modules = "align, checkpoint, dtypes, folder, foreign_file, header, lineage, naming, strict_json, tying, weights"
    code = f"from mfs_decompose.source import {modules}; import sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
