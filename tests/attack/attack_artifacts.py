"""Real artifacts of every codec, and how an attacker changes them: with every digest right again."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from adapters import make_adapter
from checkpoints import EMBEDDING, HEAD, random_checkpoint
from merged_loras import merged_lora

from mfs_decompose.artifact.canonical import canonical_bytes, digest_of
from mfs_decompose.artifact.shard import Entry, ShardPlan
from mfs_decompose.artifact.shard_reader import shard_metadata
from mfs_decompose.pipeline.decompose import decompose
from mfs_decompose.pipeline.request import DecomposeRequest
from mfs_decompose.recipe.load import load_recipe

Json = Any

TIED = '{"model_type": "toy", "tie_word_embeddings": true}\n'
RULES: dict[str, Mapping[str, object]] = {
    "banded": {"codec": "lowrank", "factors": "banded"},
    "int4": {"codec": "lowrank", "factors": "int4"},
    "int8": {"codec": "lowrank", "factors": "int8"},
    "bf16": {"codec": "lowrank", "factors": "bf16"},
    "sparse": {"codec": "sparse", "values": "bf16"},
    "few": {"codec": "sparse", "values": "int8"},
    "sign": {"codec": "sign", "scale": "group"},
    "one": {"codec": "sign", "scale": "tensor"},
    "ternary": {"codec": "ternary"},
    "kbit": {"codec": "kbit", "bits": 3},
    "deadzone": {"codec": "deadzone", "step": 1e-2},
    "rowsparse": {"codec": "rowsparse", "rows": 5},
    "sum": {"codec": "lowrank", "factors": "int4", "rank": 2, "residual": {"codec": "kbit", "bits": 2}},
    "lossless": {"codec": "lossless"},
    "raw": {"codec": "raw"},
    "lora": {"codec": "lora-exact"},
}
"""For tensors called `RULE.weight`, and stacks called `RULE.experts.weight`."""

RECIPE: Mapping[str, object] = {
    "objective.budget": "45%",
    "deltas.rules": [{"match": f"{name}.*", **rule} for name, rule in RULES.items()],
}
EXACT: Mapping[str, object] = {**RECIPE, "deltas.keep_exact": True}
ADAPTERS = ("linear", "tokens", "grown", "dora", "dora_conv1d", "experts", "lora_bias")


def make_codecs(root: Path) -> tuple[Path, dict[str, Path]]:
    """A base and the variants `many`, whose tensors go through every codec, and `plain`, which is next to it."""
    draw = torch.Generator().manual_seed(3)
    base: dict[str, torch.Tensor] = {EMBEDDING: torch.randn(37, 24, generator=draw), "norm.weight": torch.ones(24)}
    for number, name in enumerate(RULES):
        base[f"{name}.weight"] = torch.randn(40 + number, 67 - number, generator=draw)
    for name in ("int4", "few", "banded"):
        base[f"{name}.experts.weight"] = torch.randn(3, 20, 18, generator=draw)
    base = {name: weight.to(torch.bfloat16) for name, weight in base.items()}
    base["lossless.float.weight"] = torch.randn(13, 9, generator=draw)
    base["position"] = torch.tensor(9)
    many: dict[str, torch.Tensor] = {}
    for name, weight in base.items():
        columns = weight.shape[-1] if weight.dim() else 1
        change = 0.05 * torch.randn(weight.shape, generator=draw)
        if weight.dim() > 1:
            left = torch.randn(*weight.shape[:-1], 2, generator=draw)
            change = change + 0.3 * left @ torch.randn(2, columns, generator=draw)
        many[name] = (weight.float() + 0.2 * change).to(weight.dtype)
    base["lora.weight"], many["lora.weight"], _ = merged_lora((160, 130), 2, 2e-3, 5)
    many[EMBEDDING] = torch.cat([many[EMBEDDING], many[EMBEDDING][:4]])
    many[HEAD] = many[EMBEDDING].clone()
    plain = {**base, "norm.weight": base["norm.weight"] * 2}
    folders = {id: _checkpoint(root / id, own) for id, own in (("many", many), ("plain", plain))}
    return _checkpoint(root / "base", base), folders


def make_artifacts(root: Path) -> dict[str, Path]:
    """One artifact of all codecs, one with corrections over them, and one of each kind of adapter."""
    base, variants = make_codecs(root / "sources")
    _run(root / "lossy", base, variants, RECIPE)
    _run(root / "exact", base, variants, EXACT)
    for kind in ADAPTERS:
        made = make_adapter(root / "adapters" / kind, kind)
        _run(root / kind, made.base, {"many": made.adapter}, {})
    return {name: root / name for name in ("lossy", "exact", *ADAPTERS)}


def _checkpoint(folder: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    random_checkpoint(folder, tensors, {"format": "pt"})
    (folder / "config.json").write_text(TIED)
    return folder


def _run(out: Path, base: Path, variants: Mapping[str, Path], recipe: Mapping[str, object]) -> None:
    places = {id: str(folder) for id, folder in variants.items()}
    asked = load_recipe(None, dict(recipe))
    decompose(DecomposeRequest(places, out, asked, base=str(base), threads=1, device="cpu"))


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
