"""Tensors and stored entries that the codec tests share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from mfs_decompose.codec.arrays import head_parts
from mfs_decompose.codec.base import Fit, Rows
from mfs_decompose.codec.registry import exact_codec, lossy_codec
from mfs_decompose.codec.tree import CodecNode, Part
from mfs_decompose.linalg.shapes import GROUP
from mfs_decompose.source.dtypes import torch_dtype
from mfs_decompose.source.header import TensorSpec

LOSSY_FORMATS = [
    ("lowrank", {"factors": "int4"}),
    ("lowrank", {"factors": "int8"}),
    ("lowrank", {"factors": "bf16"}),
    ("sparse", {"values": "bf16"}),
    ("sparse", {"values": "int8"}),
]
"""Every lossy codec with every format it has."""


@dataclass(frozen=True)
class Stored:
    """A codec tree and the bytes it speaks of."""

    node: CodecNode
    data: bytes

    def fetch(self, offset: int, count: int) -> bytes:
        assert 0 <= offset <= offset + count <= len(self.data), "read outside of the entry"
        return self.data[offset : offset + count]

    def with_part(self, name: str, **changes: object) -> CodecNode:
        """The node with one of its arrays described otherwise."""
        parts = tuple(replace(part, **changes) if part.name == name else part for part in self.node.parts)  # type: ignore[arg-type]
        return replace(self.node, parts=parts)

    def with_params(self, **changes: object) -> CodecNode:
        """The node with other parameters; None takes one away."""
        params = {key: value for key, value in {**self.node.params, **changes}.items() if value is not None}
        return replace(self.node, params=params)  # type: ignore[arg-type]

    def without_part(self, name: str) -> CodecNode:
        return replace(self.node, parts=tuple(part for part in self.node.parts if part.name != name))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def decaying(rows: int, columns: int, seed: int, scale: float = 1e-3) -> torch.Tensor:
    """An fp32 delta with a decaying spectrum and heavy tails."""
    draw = generator(seed)
    short = min(rows, columns)
    left = torch.randn(rows, short, generator=draw) / torch.arange(1, short + 1)
    return (left @ torch.randn(short, columns, generator=draw)) * scale


def fit_one(codec: str, delta: torch.Tensor, steps: int, params: Mapping[str, str], key: int = 5) -> Fit:
    fit = lossy_codec(codec).fit(delta[None], steps, [key], params)[0]
    assert fit is not None
    return fit


def blocks_of(delta: torch.Tensor, step: int) -> Iterator[tuple[int, torch.Tensor]]:
    for start in range(0, delta.shape[0], step):
        yield start, delta[start : start + step]


def store_fit(codec: str, fit: Fit, steps: int, params: Mapping[str, str]) -> Stored:
    """The first `steps` steps of a fit as they lie in an artifact."""
    parts, data = head_parts(fit.arrays, lossy_codec(codec).array_names(params), steps)
    group = {"group": GROUP} if codec == "lowrank" else {}
    return Stored(CodecNode(codec, params={**params, **group, "steps": steps}, parts=parts), data)


def store_exact(codec: str, values: torch.Tensor, base: torch.Tensor | None, spec: TensorSpec) -> Stored:
    pieces: list[bytes] = []
    node = exact_codec(codec).encode(rows_of(values), None if base is None else rows_of(base), spec, pieces.append)
    return Stored(node, b"".join(pieces))


def join(first: Stored, second: Stored, splits: list[int]) -> Stored:
    """Two entries, one after the other, as a tensor whose rows are split between them."""
    children = (first.node, second.node.shifted(len(first.data)))
    return Stored(CodecNode("rows", params={"splits": [*splits]}, children=children), first.data + second.data)


def rows_of(values: torch.Tensor) -> Rows:
    """Read a tensor as a source does; one without dimensions is one row."""

    def rows(start: int, stop: int) -> torch.Tensor:
        if not values.dim():
            assert (start, stop) == (0, 1)
            return values
        assert 0 <= start <= stop <= values.shape[0], "read outside of the tensor"
        return values[start:stop]

    return rows


def random_bits(dtype: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """A tensor of any bit patterns: for floats NaNs with payloads, Infs, -0.0 and subnormals among them."""
    spec = TensorSpec("", dtype, shape)
    if dtype == "BOOL":
        return torch.randint(0, 2, shape, generator=generator(seed)).to(torch.bool)
    data = torch.randint(0, 256, (spec.nbytes,), generator=generator(seed), dtype=torch.int32).to(torch.uint8)
    return data.view(torch_dtype(dtype)).reshape(shape)


def bits(values: torch.Tensor) -> bytes:
    return bytes(values.contiguous().reshape(-1).view(torch.uint8).numpy()) if values.numel() else b""


def part_bytes(stored: Stored, part: Part) -> bytes:
    return stored.fetch(part.offset, part.nbytes)
