"""Decodes stored tensors and prints what came out; run on its own, in another environment than the one that encoded.

`python portable_decode.py FOLDER` reads the entries that `save` wrote and prints their digests as JSON, decoded as the
package does, and decoded with a planted fault: low-rank products in fp32.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from mfs_decompose.codec import banded, lowrank
from mfs_decompose.codec.banded import Banded
from mfs_decompose.codec.base import Delta, Fetch
from mfs_decompose.codec.deadzone import DeadZone
from mfs_decompose.codec.kbit import KBit, Ternary
from mfs_decompose.codec.opened import OpenedTensor
from mfs_decompose.codec.rowsparse import RowSparse
from mfs_decompose.codec.sign import Sign
from mfs_decompose.codec.summed import Summed
from mfs_decompose.codec.tree import CodecNode
from mfs_decompose.linalg.midrise import integers
from mfs_decompose.linalg.quantise import dequantise
from mfs_decompose.source.dtypes import torch_dtype
from mfs_decompose.source.header import TensorSpec

Digests = dict[str, dict[str, str]]
"""What was decoded of each entry, by kind: its delta in fp64, served in fp32, restored in its own dtype."""


_DIRECT = {codec.name: codec for codec in (Banded(), Sign(), Ternary(), KBit(), DeadZone(), RowSparse())}


@dataclass(frozen=True)
class Entry:
    """A stored tensor with the base it is added to."""

    name: str
    spec: TensorSpec
    node: CodecNode
    data: bytes
    base: bytes


def save(folder: Path, entries: Sequence[Entry]) -> None:
    index = []
    for number, entry in enumerate(entries):
        (folder / f"{number}.data").write_bytes(entry.data)
        (folder / f"{number}.base").write_bytes(entry.base)
        index.append([entry.name, entry.spec.dtype, entry.spec.shape, entry.node.to_json()])
    (folder / "index.json").write_text(json.dumps(index))


def load(folder: Path) -> list[Entry]:
    return [
        Entry(
            name,
            TensorSpec(name, dtype, tuple(shape)),
            CodecNode.from_json(node),
            (folder / f"{number}.data").read_bytes(),
            (folder / f"{number}.base").read_bytes(),
        )
        for number, (name, dtype, shape, node) in enumerate(json.loads((folder / "index.json").read_text()))
    ]


def decode(entries: Sequence[Entry]) -> Digests:
    """Decode every entry in two uneven windows, as a reader with little memory does."""
    found: Digests = {}
    for entry in entries:
        if not entry.base:
            found[entry.name] = {"delta": _decode_delta(entry)}
            continue
        base = torch.frombuffer(bytearray(entry.base), dtype=torch_dtype(entry.spec.dtype)).reshape(entry.spec.shape)
        tensor = OpenedTensor(entry.node, _fetch(entry.data), entry.spec)
        rows, cut = entry.spec.rows, entry.spec.rows // 3
        windows = ((0, cut), (cut, rows))

        def rows_of_base(start: int, stop: int, base: torch.Tensor = base) -> torch.Tensor:
            return base[start:stop]

        found[entry.name] = {
            "delta": _digest(tensor.delta(*window) for window in windows),
            "served": _digest(tensor.served(*window, rows_of_base) for window in windows),
            "restored": _digest(tensor.restored(*window, rows_of_base) for window in windows),
            "nearest": _digest(tensor.restored(*window, rows_of_base, rounding="nearest") for window in windows),
        }
    return found


def open_delta(node: CodecNode, fetch: Fetch, shape: tuple[int, int]) -> Delta:
    """A delta of one of the codecs that write it directly, or a sum of such."""
    if node.codec == "sum":
        return Summed([open_delta(child, fetch, shape) for child in node.children])
    return _DIRECT[node.codec].open(node, fetch, shape)


def _decode_delta(entry: Entry) -> str:
    rows, columns = entry.spec.shape
    delta = open_delta(entry.node, _fetch(entry.data), (rows, columns))
    return _digest(delta.rows(*window) for window in ((0, rows // 3), (rows // 3, rows)))


@contextmanager
def planted_fp32_decode() -> Iterator[None]:
    """Compute low-rank products as one would at first: in fp32."""

    def rows(self: lowrank._Product, start: int, stop: int) -> torch.Tensor:
        left = dequantise(self._u, start, stop).to(torch.float32)
        return (left.mT @ self._v_RI.to(torch.float32)).to(torch.float64)

    def banded_rows(self: banded._Product, start: int, stop: int) -> torch.Tensor:
        u_RO = torch.cat([integers(u.codes[:, start:stop], u.bits, u.scales, start) for u in self._us])
        left = (u_RO * self._gains.unsqueeze(1)).to(torch.float32)
        return (left.mT @ self._v_RI.to(torch.float32)).to(torch.float64)

    honest, honest_banded = lowrank._Product.rows, banded._Product.rows
    lowrank._Product.rows = rows  # type: ignore[method-assign]
    banded._Product.rows = banded_rows  # type: ignore[method-assign]
    try:
        yield
    finally:
        lowrank._Product.rows = honest  # type: ignore[method-assign]
        banded._Product.rows = honest_banded  # type: ignore[method-assign]


def decode_both_ways(entries: Sequence[Entry]) -> Mapping[str, Digests]:
    honest = decode(entries)
    with planted_fp32_decode():
        return {"honest": honest, "planted": decode(entries)}


def _fetch(data: bytes) -> Fetch:
    return lambda offset, count: data[offset : offset + count]


def _digest(pieces: Iterator[torch.Tensor | None]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        assert piece is not None
        digest.update(piece.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    about = {"threads": torch.get_num_threads(), "capability": torch.backends.cpu.get_cpu_capability()}
    json.dump({**about, **decode_both_ways(load(Path(sys.argv[1])))}, sys.stdout)
