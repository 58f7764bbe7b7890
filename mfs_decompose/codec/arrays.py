"""Arrays of a codec as bytes, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from mfs_decompose.codec.base import Fetch
from mfs_decompose.codec.tree import CodecNode, Part
from mfs_decompose.errors import ArtifactInvalid
from mfs_decompose.source.dtypes import item_size, torch_dtype

_NAMES = {torch.uint8: "U8", torch.int8: "I8", torch.uint16: "U16", torch.int32: "I32", torch.bfloat16: "BF16"}
_NAMES |= {torch.float16: "F16", torch.float32: "F32"}  # of fits in scratch


def tensor_bytes(values: torch.Tensor) -> bytes:
    """The bytes of a tensor, row-major, little-endian."""
    flat = values.detach().contiguous().cpu().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


def head_parts(arrays: Mapping[str, torch.Tensor], names: Sequence[str], steps: int) -> tuple[tuple[Part, ...], bytes]:
    """The first `steps` entries of each array, one after another, and where each lies."""
    parts: list[Part] = []
    blob = bytearray()
    for name in names:
        values = arrays[name][:steps]
        data = tensor_bytes(values)
        parts.append(Part(name, _NAMES[values.dtype], tuple(values.shape), len(blob), len(data)))
        blob += data
    return tuple(parts), bytes(blob)


def read_array(node: CodecNode, name: str, fetch: Fetch, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Read one array and hold it against what the codec expects.

    Raises:
        ArtifactInvalid: dtype, shape or bytes are not those expected.
    """
    part = node.part(name)
    expected = math.prod(shape) * item_size(dtype)
    if part.dtype != dtype or part.shape != shape or part.nbytes != expected:
        raise ArtifactInvalid(
            f"array {name!r} of codec {node.codec!r}: expected {dtype} {list(shape)} in {expected} bytes, "
            f"found {part.dtype} {list(part.shape)} in {part.nbytes}"
        )
    if expected == 0:
        return torch.empty(shape, dtype=torch_dtype(dtype))
    data = bytearray(fetch(part.offset, part.nbytes))
    if len(data) != expected:
        raise ArtifactInvalid(f"array {name!r} of codec {node.codec!r}: expected {expected} bytes, found {len(data)}")
    return torch.frombuffer(data, dtype=torch_dtype(dtype)).reshape(shape)
