"""Small artifacts made with the writer's own functions and raw codec nodes, and the checkpoints they are made from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from mfs_decompose.artifact.canonical import canonical_bytes, digest_of
from mfs_decompose.artifact.files import FileRecord, copy_file, hardlink_file
from mfs_decompose.artifact.layout import MANIFEST, base_shard_name, variant_shard_name
from mfs_decompose.artifact.records import (
    BaseRecord,
    BaseTensor,
    Blob,
    CoverageRecord,
    IndexFile,
    PlatformRecord,
    SourceRecord,
    SourceShard,
    TensorRecord,
    ToolRecord,
    VariantRecord,
)
from mfs_decompose.artifact.shard import Entry, library_order, split_into_shards, write_shard
from mfs_decompose.artifact.shard_reader import shard_metadata
from mfs_decompose.artifact.writer import finish_artifact, store_content, write_run_record
from mfs_decompose.codec.tree import CodecNode, Part
from mfs_decompose.source.checkpoint import Checkpoint, TensorReader, open_checkpoint, read_sidecar

Store = Literal["copy", "reference", "hardlink", "mean"]

TOOL = ToolRecord(name="mfs", version="0.1", torch="2.13.0", numpy="2.4", safetensors="0.8", zstandard="0.25")
PLATFORM = PlatformRecord(device="cpu", capability="DEFAULT")
RECIPE = {"schema": "mfs.recipe/1", "objective": {"budget": 0.05}, "seed": 7}


@dataclass(frozen=True)
class Made:
    """An artifact and the checkpoints it was made from."""

    path: Path
    base: Path
    variants: dict[str, Path]


def make_sources(root: Path) -> Made:
    """A base in two shards and two variants: other values, a grown embedding, a tensor more and one less."""
    generator = torch.Generator().manual_seed(11)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    base = {
        "embed.weight": draw(11, 3).bfloat16(),
        "layer.0.weight": draw(5, 3).bfloat16(),
        "layer.1.weight": draw(3, 7),
        "norm.weight": draw(7).half(),
        "position": torch.tensor(9),
        "empty": torch.zeros(0, 4),
        "also.empty": torch.zeros(5, 0),
    }
    zeta = {**base, "layer.0.weight": draw(5, 3).bfloat16(), "embed.weight": draw(13, 3).bfloat16()}
    alpha = {**base, "layer.1.weight": draw(3, 7), "head.weight": draw(2, 3).bfloat16()}
    del alpha["norm.weight"]
    folders = {
        "base": _save(root / "base", base, shards=2),
        "zeta": _save(root / "zeta", zeta, shards=1),
        "alpha": _save(root / "alpha", alpha, shards=2),
    }
    return Made(root / "family", folders["base"], {"alpha": folders["alpha"], "zeta": folders["zeta"]})


def make_artifact(root: Path, store: Store = "copy", *, shard_size: int = 90, hints: bool = False) -> Made:
    """A whole artifact at `root`/family, every changed tensor raw and every other identical."""
    made = make_sources(root)
    made.path.mkdir()
    files: list[FileRecord] = []
    base_source = open_checkpoint(made.base, "base")
    base = _base_record(made.path, base_source, store, files)
    variants = [
        _variant_record(made.path, number, open_checkpoint(folder, id), base_source, base, shard_size, files)
        for number, (id, folder) in enumerate(sorted(made.variants.items()), 1)
    ]
    tensors = sum(len(variant.tensors) for variant in variants) + (len(base.tensors) if base.source else 0)
    if hints:
        paths = {id: str(folder) for id, folder in made.variants.items()}
        write_run_record(made.path, {"hints": {"base": str(made.base), "variants": paths}})
    finish_artifact(
        made.path,
        tool=TOOL,
        platform=PLATFORM,
        recipe=RECIPE,
        base=base,
        variants=list(reversed(variants)),
        coverage=CoverageRecord(tensors=tensors, groups=7),
        files=files,
    )
    return made


def edit_manifest(folder: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest and give it a right digest again, as an attacker would."""
    document = json.loads((folder / MANIFEST).read_bytes())
    edit(document)
    document["digest"] = digest_of(document)
    (folder / MANIFEST).write_bytes(canonical_bytes(document))


def oracle_sha256(family: Any, variant_id: str, name: str, progress: Any) -> str:
    """What `values.restored_sha256` must give for raw and identical tensors, without any codec."""
    node = family.tree(variant_id, name)
    record = family.variant(variant_id).tensors[name]
    if node.codec == "raw":
        data = family.blob(variant_id, name)
    else:
        rows = record.shape[0] if record.shape else 1
        data = bytes(family.base_raw(record.base_name, 0, rows).numpy())
    progress.advance(len(data))
    return hashlib.sha256(data).hexdigest()


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, by its path inside."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _save(folder: Path, tensors: dict[str, torch.Tensor], shards: int) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "toy", "name": folder.name}) + "\n")
    (folder / "tokenizer.json").write_text('{"version": "1.0"}\n')
    (folder / "notes.bin").write_bytes(b"left out")
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(tensors.items())[number::shards])
        save_file(part, folder / file, {"leftover": "yes"})  # one key: the library writes several in any order
        weight_map.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def _source_record(folder: Path, source: Checkpoint, files: list[FileRecord]) -> SourceRecord:
    def keep(data: bytes) -> str:
        files.append(store_content(folder, data))
        return files[-1].sha256

    for shard in source.shards:
        keep(shard.raw)
    index = None
    if source.index is not None:
        index = IndexFile(name=source.index.name, sha256=keep(read_sidecar(source, source.index)))
    return SourceRecord(
        kind="local",
        shards=tuple(SourceShard(file=s.file, size=s.size, header_sha256=s.sha256) for s in source.shards),
        index=index,
        files={sidecar.name: keep(read_sidecar(source, sidecar)) for sidecar in source.sidecars},
        left_out=source.left_out,
    )


def _base_record(folder: Path, source: Checkpoint, store: Store, files: list[FileRecord]) -> BaseRecord:
    shards: list[FileRecord] = []
    with TensorReader(source) as reader:
        data = {name: bytes(reader.raw(name).numpy()) for name in source.tensors}
    if store == "mean":
        entries = library_order(Entry(t.name, t.dtype, t.shape, t.nbytes) for t in source.tensors.values())
        name = folder / base_shard_name(1, 1)
        shards.append(write_shard(name, entries, (data[entry.name] for entry in entries), shard_metadata("base", 1)))
    elif store != "reference":
        put = copy_file if store == "copy" else hardlink_file
        for number, shard in enumerate(source.shards, 1):
            shards.append(put(source.root / shard.file, folder / base_shard_name(number, len(source.shards))))
    files.extend(shards)
    return BaseRecord(
        mode="mean" if store == "mean" else "known",
        store="copy" if store == "mean" else store,
        source=None if store == "mean" else _source_record(folder, source, files),
        shards=tuple(shard.path for shard in shards),
        tensors={
            name: BaseTensor(dtype=t.dtype, shape=t.shape, sha256=hashlib.sha256(data[name]).hexdigest())
            for name, t in source.tensors.items()
        },
        bytes=sum(shard.size for shard in shards),
    )


def _variant_record(
    folder: Path,
    number: int,
    source: Checkpoint,
    base_source: Checkpoint,
    base: BaseRecord,
    shard_size: int,
    files: list[FileRecord],
) -> VariantRecord:
    with TensorReader(source) as reader:
        data = {name: bytes(reader.raw(name).numpy()) for name in source.tensors}
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in data.items()}
    same = {name for name in data if name in base.tensors and base.tensors[name].sha256 == digests[name]}
    cut = split_into_shards([Entry.of_bytes(name, len(data[name])) for name in data if name not in same], shard_size)
    shards: list[FileRecord] = []
    blobs: dict[str, Blob] = {}
    for index, entries in enumerate(cut):
        path = folder / variant_shard_name(number, index + 1)
        chunks = (data[entry.name] for entry in entries)
        shards.append(write_shard(path, entries, chunks, shard_metadata(source.id, index + 1)))
        blobs.update({e.name: Blob(shard=index, entry=e.name, nbytes=e.nbytes) for e in entries})
    files.extend(shards)
    records = {}
    for name, spec in source.tensors.items():
        partner = base_source.tensors.get(name)
        part = Part("data", spec.dtype, spec.shape, 0, spec.nbytes)
        kind: Literal["same", "resized", "only_in_variant"] = "only_in_variant"
        if partner is not None:
            kind = "same" if partner.shape == spec.shape else "resized"
        records[name] = TensorRecord(
            dtype=spec.dtype,
            shape=spec.shape,
            kind=kind,
            base_name=name if partner else None,
            common_rows=min(spec.rows, partner.rows) if partner else 0,
            tree=(CodecNode("identical") if name in same else CodecNode("raw", parts=(part,))).to_json(),
            blob=blobs.get(name),
            energy=0.0 if name in same else 2.5,
            error=0.0,
            original_sha256=digests[name],
            restored_sha256=digests[name],
            exact=True,
            nonfinite=0,
        )
    return VariantRecord(
        id=source.id,
        source=_source_record(folder, source, files),
        shards=tuple(shard.path for shard in shards),
        tensors=records,
        missing=tuple(sorted(base.tensors.keys() - data.keys())),
        checkpoint_bytes=source.tensor_bytes,
        bytes=sum(shard.size for shard in shards),
    )
