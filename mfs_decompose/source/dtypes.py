"""The element types of safetensors, by the names that stand in the file."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Types of less than a byte (F4, F6_E2M3, F6_E3M2) are left out: their rows need not end on a byte,
# so neither row blocks nor `row_bytes` would mean anything.
_SIZES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1,
    "U64": 8, "U32": 4, "U16": 2, "U8": 1,
    "BOOL": 1, "C64": 8,
    "F8_E4M3": 1, "F8_E4M3FNUZ": 1, "F8_E5M2": 1, "F8_E5M2FNUZ": 1, "F8_E8M0": 1,
}  # fmt: skip
_TORCH_NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8",
    "BOOL": "bool", "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2", "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
_CODABLE = frozenset({"F64", "F32", "F16", "BF16"})


def is_known(name: str) -> bool:
    """Whether tensors of this type can be read at all."""
    return name in _SIZES


def item_size(name: str) -> int:
    """Bytes of one element of a known type."""
    return _SIZES[name]


def is_float(name: str) -> bool:
    """Whether a difference of two such tensors means something (F64, F32, F16, BF16): all else is stored exactly."""
    return name in _CODABLE


def torch_dtype(name: str) -> torch.dtype:
    """The torch type of the same bit layout."""
    import torch

    dtype = getattr(torch, _TORCH_NAMES[name])
    assert isinstance(dtype, torch.dtype)
    return dtype
