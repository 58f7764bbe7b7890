"""Decodes corrected tensors and prints what came out; run in another environment than the one that encoded.

`python portable_corrected.py FOLDER` reads what `save` wrote and prints each tensor's digest as JSON, or `refused`.
Entries whose name begins with `planted` are read with a planted fault, as they were written: their product in fp32.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mfs_decompose.codec.corrected import open_corrected
from mfs_decompose.codec.fixed import open_fixed
from mfs_decompose.codec.tree import CodecNode
from mfs_decompose.errors import ArtifactInvalid
from mfs_decompose.linalg.fixed_point import FixedFactors
from mfs_decompose.source.dtypes import torch_dtype
from mfs_decompose.source.header import TensorSpec

DeltaRows = Callable[[int, int], torch.Tensor]


@dataclass(frozen=True)
class Entry:
    spec: TensorSpec
    node: CodecNode
    data: bytes
    base: bytes


def delta_rows(name: str, factors: FixedFactors) -> DeltaRows:
    """The product as the package computes it, or, for a planted entry, as one would at first."""
    if not name.startswith("planted"):
        return factors.rows

    def rows(start: int, stop: int) -> torch.Tensor:
        scale = torch.tensor([2.0**e for e in factors.exponents]).unsqueeze(1)
        return ((factors.left[:, start:stop].float() * scale).mT @ factors.right.float()).to(torch.float64)

    return rows


def save(folder: Path, entries: Sequence[Entry]) -> None:
    index = []
    for number, entry in enumerate(entries):
        (folder / f"{number}.data").write_bytes(entry.data)
        (folder / f"{number}.base").write_bytes(entry.base)
        index.append([entry.spec.name, entry.spec.dtype, entry.spec.shape, entry.node.to_json()])
    (folder / "index.json").write_text(json.dumps(index))


def load(folder: Path) -> list[Entry]:
    return [
        Entry(
            TensorSpec(name, dtype, tuple(shape)),
            CodecNode.from_json(node),
            (folder / f"{number}.data").read_bytes(),
            (folder / f"{number}.base").read_bytes(),
        )
        for number, (name, dtype, shape, node) in enumerate(json.loads((folder / "index.json").read_text()))
    ]


def decode(entries: Sequence[Entry]) -> dict[str, str]:
    """The digest of every tensor, read in two uneven windows."""
    found = {}
    for entry in entries:
        try:
            found[entry.spec.name] = _decode(entry)
        except ArtifactInvalid:
            found[entry.spec.name] = "refused"
    return found


def _decode(entry: Entry) -> str:
    spec, data = entry.spec, entry.data
    base = torch.frombuffer(bytearray(entry.base), dtype=torch_dtype(spec.dtype)).reshape(spec.shape)
    factors = open_fixed(
        entry.node.children[0], lambda at, count: data[at : at + count], (spec.shape[0], spec.shape[1])
    )
    read = open_corrected(entry.node, lambda at, count: data[at : at + count], spec)
    digest = hashlib.sha256()
    for window in ((0, spec.rows // 3), (spec.rows // 3, spec.rows)):
        rows = read(*window, lambda start, stop: base[start:stop], delta_rows(spec.name, factors))
        digest.update(rows.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    about = {"threads": torch.get_num_threads(), "capability": torch.backends.cpu.get_cpu_capability()}
    json.dump({**about, "found": decode(load(Path(sys.argv[1])))}, sys.stdout)
