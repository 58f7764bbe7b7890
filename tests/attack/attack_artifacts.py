"""How an attacker changes a real artifact: with every digest right again."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mfs_decompose.artifact.canonical import canonical_bytes, digest_of
from mfs_decompose.artifact.shard import Entry, ShardPlan
from mfs_decompose.artifact.shard_reader import shard_metadata

Json = Any


@dataclass
class Target:
    """A copy of an artifact, its manifest as JSON and its first variant's blobs in memory, to be changed at will."""

    folder: Path
    document: Json
    blobs: dict[str, bytes]
    order: list[str]  # of the entries in the shard

    @classmethod
    def copy(cls, artifact: Path, to: Path) -> Target:
        folder = shutil.copytree(artifact, to)
        document = json.loads((folder / "manifest.json").read_bytes())
        target = cls(folder, document, {}, [])
        target.order = list(target._header())
        for name, record in target.entries.items():
            target.blobs[name] = target._read(record["blob"])
        return target

    @property
    def variant(self) -> Json:
        return next(variant for variant in self.document["variants"] if variant["id"] == "many")

    @property
    def tensors(self) -> dict[str, Json]:
        found: dict[str, Json] = self.variant["tensors"]
        return found

    @property
    def entries(self) -> dict[str, Json]:
        """Records that have bytes, by tensor: the variant's own and its adapter's."""
        kept = {**self.tensors, **(self.variant.get("adapter") or {"tensors": {}})["tensors"]}
        return {name: record for name, record in kept.items() if record.get("blob")}

    def fresh(self) -> Target:
        """The same to be changed, with this one left as it is; both write to one folder."""
        return Target(self.folder, json.loads(json.dumps(self.document)), dict(self.blobs), self.order)

    def seal(self) -> None:
        """Write the one shard of the variant, and the manifest, so that all sizes and digests agree."""
        (name,) = self.variant["shards"]
        entries, data = [], []
        for tensor, record in sorted(self.entries.items(), key=self._place):
            record["blob"]["nbytes"] = len(self.blobs[tensor])
            entries.append(Entry.of_bytes(record["blob"]["entry"], len(self.blobs[tensor])))
            data.append(self.blobs[tensor])
        header = ShardPlan(tuple(entries), shard_metadata("many", 1)).header()
        content = header + b"".join(data)
        (self.folder / name).write_bytes(content)
        self.document["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        self.variant["bytes"] = len(content)
        for tensor, kept in (self.variant.get("adapter") or {"tensors": {}})["tensors"].items():
            kept["sha256"] = hashlib.sha256(self.blobs.get(tensor, b"")).hexdigest()
        self.document["digest"] = digest_of(self.document)
        (self.folder / "manifest.json").write_bytes(canonical_bytes(self.document))

    def claim_shape(self, name: str, shape: list[int], *, also_base: bool = False) -> None:
        """Say that a tensor has this shape, in its record and in the header of its source, and of the base's."""
        self.tensors[name]["shape"] = shape
        self._forge(self.variant, name, shape)
        self.variant["checkpoint_bytes"] = _nbytes(self.tensors)
        if also_base:
            self.document["base"]["tensors"][self.tensors[name]["base_name"]]["shape"] = shape
            self._forge(self.document["base"], name, shape)

    def _forge(self, owner: Json, name: str, shape: list[int]) -> None:
        """A new header, with its own name in files/, for the source of `owner`, in which a tensor has this shape."""
        (shard,) = owner["source"]["shards"]
        old = f"files/{shard['header_sha256']}"
        header = json.loads((self.folder / old).read_bytes()[8:])
        header[name]["shape"] = shape
        end = 0
        for key, entry in header.items():
            if key != "__metadata__":
                size = math.prod(entry["shape"]) * _SIZES[entry["dtype"]]
                entry["data_offsets"], end = [end, end + size], end + size
        text = json.dumps(header).encode()
        raw = len(text).to_bytes(8, "little") + text
        digest = hashlib.sha256(raw).hexdigest()
        (self.folder / "files" / digest).write_bytes(raw)
        shard.update(header_sha256=digest, size=len(raw) + end)
        self.document["files"][f"files/{digest}"] = {"size": len(raw), "sha256": digest}
        sources = [*self.document["variants"], self.document["base"]]
        if all(old != f"files/{s['header_sha256']}" for one in sources for s in one["source"]["shards"]):
            self.document["files"].pop(old, None)

    def _place(self, pair: tuple[str, Json]) -> tuple[int, str]:
        entry = str(pair[1]["blob"]["entry"])
        return (self.order.index(entry) if entry in self.order else len(self.order), entry)

    def _header(self) -> Json:
        raw = self._shard.read_bytes()
        return json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])

    @property
    def _shard(self) -> Path:
        (name,) = self.variant["shards"]
        return self.folder / str(name)

    def _read(self, blob: Json) -> bytes:
        raw = self._shard.read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        low, high = self._header()[blob["entry"]]["data_offsets"]
        return raw[start + low : start + high]


_SIZES = {"BF16": 2, "F32": 4, "I64": 8}


def _nbytes(tensors: Mapping[str, Json]) -> int:
    return sum(math.prod(one["shape"]) * _SIZES[one["dtype"]] for one in tensors.values())


def nodes_of(tree: Json) -> Iterator[Json]:
    """Every node of a codec tree, itself first."""
    yield tree
    for child in tree.get("children", []):
        yield from nodes_of(child)
