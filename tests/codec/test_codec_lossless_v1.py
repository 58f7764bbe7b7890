"""Entries of version 1 of the lossless codec, as they were written: they are read for good."""

from __future__ import annotations

import pytest
import torch
from codec_entries import Stored, bits, rows_of

from mfs_decompose.codec.opened import OpenedTensor
from mfs_decompose.codec.tree import CodecNode
from mfs_decompose.errors import ArtifactInvalid
from mfs_decompose.source.header import TensorSpec

_OWN = [0, 0x8000, 1, 0x8001, 0x3F80, 0xBF80, 0x7F80, 0xFF80, 0x7FC1, 0x3F81, 0xBF7F, 0x80, 0x3E00, 0x3E01, 0xBE00]
_BASE = [0x8000, 0, 2, 0x8000, 0x3F7F, 0xBF81, 0x7F7F, 0xFF80, 0x7FC0, 0x3F80, 0xBF80, 0x81, 0x3E00, 0x3DFF, 0xBE01]
_SPEC = TensorSpec("w", "BF16", (5, 3))
_AGAINST = (
    "28b52ffd20189d00006802010101020202000202020100010006f802"
    "28b52ffd2006310000000402000000"
)  # fmt: skip
_ALONE = (
    "28b52ffd2018c1000000ff01fe807f807fc1818080807f807fbf40ff00ffbf4080"
    "28b52ffd20063100000001ffbebe41"
)  # fmt: skip


def words(patterns: list[int]) -> torch.Tensor:
    return torch.tensor(patterns, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).reshape(5, 3)


def entry(data: str, predictor: str, sizes: list[int], rows: int = 4) -> Stored:
    part = {"name": "data", "dtype": "U8", "shape": [sum(sizes)], "offset": 0, "nbytes": sum(sizes)}
    params = {"predictor": predictor, "rows": rows, "sizes": sizes}
    document = {"codec": "lossless", "version": 1, "params": params, "parts": [part]}
    return Stored(CodecNode.from_json(document), bytes.fromhex(data))


@pytest.mark.parametrize(
    ("stored", "base"),
    [(entry(_AGAINST, "base", [28, 15]), words(_BASE)), (entry(_ALONE, "none", [33, 15]), None)],
)
def test_entries_of_version_1_are_read(stored: Stored, base: torch.Tensor | None) -> None:
    opened = OpenedTensor(stored.node, stored.fetch, _SPEC)
    known = None if base is None else rows_of(base)
    assert opened.exact
    for start, stop in ((0, 5), (0, 4), (3, 5), (4, 5), (2, 2)):
        assert bits(opened.restored(start, stop, known)) == bits(words(_OWN)[start:stop])


def test_whole_numbers_of_version_1_are_read() -> None:
    stored = entry("28b52ffd200421000001010101", "base", [13], rows=6)
    own = torch.tensor([[-5, 7], [100, 3]], dtype=torch.int8)
    opened = OpenedTensor(stored.node, stored.fetch, TensorSpec("w", "I8", (2, 2)))
    assert bits(opened.restored(0, 2, rows_of(own + 1))) == bits(own)


def test_chunks_of_one_version_are_not_read_as_the_other() -> None:
    stored = entry(_AGAINST, "base", [28, 15])
    newer = CodecNode("lossless", 2, stored.node.params, stored.node.parts)
    with pytest.raises(ArtifactInvalid, match="a chunk begins with"):
        OpenedTensor(newer, stored.fetch, _SPEC).restored(0, 5, rows_of(words(_BASE)))
