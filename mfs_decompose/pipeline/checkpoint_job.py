"""One checkpoint that is to be restored: which tensor goes into which file, and where its blocks come from."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mfs_decompose.artifact.reader import Family
from mfs_decompose.artifact.records import SourceRecord
from mfs_decompose.artifact.shard import Entry, ShardPlan, library_order
from mfs_decompose.artifact.values import open_tensor, row_bytes
from mfs_decompose.artifact.variant_files import as_float32, change_config, dump_config, files_of_merge
from mfs_decompose.codec.base import DECODE_ELEMENTS, block_rows
from mfs_decompose.errors import UsageError
from mfs_decompose.source.dtypes import is_float, item_size
from mfs_decompose.source.header import TensorSpec, parse_header

if TYPE_CHECKING:
    import torch


Dtype = Literal["original", "float32"]
Layout = Literal["original", "single"]
Form = Literal["checkpoint", "adapter"]
"""Of a variant that is an adapter: the checkpoint it makes of the base, or the adapter's own folder."""

BASE = "base"
"""The id under which the base is restored."""

_SINGLE = "model.safetensors"


@dataclass(frozen=True)
class RestoreOptions:
    """How to restore: defaults give the digests that the manifest records."""

    dtype: Dtype = "original"
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    layout: Layout = "original"
    exact: bool = False
    form: Form = "checkpoint"


@dataclass(frozen=True)
class CheckpointJob:
    """Tensors as they will be written, where their blocks come from, the digests to expect, and files beside them."""

    id: str
    shards: Mapping[str, ShardPlan]
    headers: Mapping[str, bytes | None]
    blocks: Callable[[str], Iterator[memoryview]]
    digests: Mapping[str, str]
    index: tuple[str, bytes] | None
    files: Mapping[str, Callable[[], bytes]]
    exact: bool

    @property
    def nbytes(self) -> int:
        """Of the weight files."""
        return sum(plan.size for plan in self.shards.values())

    @property
    def data_bytes(self) -> int:
        """Of the weights in them."""
        return sum(plan.data_bytes for plan in self.shards.values())


def plan_checkpoint(family: Family, id: str, options: RestoreOptions) -> CheckpointJob:
    """Lay out a variant, or the base, as `options` say.

    Raises:
        UsageError: there is no such variant, or `exact` was asked for and a tensor is not.
        ArtifactInvalid: what the artifact keeps of the original's files is damaged.
    """
    import torch

    dtype = torch.float32 if options.dtype == "float32" else None
    base = family.manifest.base
    if id == BASE:
        specs = [TensorSpec(name, tensor.dtype, tensor.shape) for name, tensor in base.tensors.items()]
        digests = {name: tensor.sha256 for name, tensor in base.tensors.items()}
        source, exact = base.source, True

        def blocks(name: str) -> Iterator[memoryview]:
            spec = next(spec for spec in specs if spec.name == name)
            step = block_rows(spec, DECODE_ELEMENTS)
            for start in range(0, spec.rows, step):
                rows = family.base_rows(name, start, min(start + step, spec.rows))
                yield row_bytes(rows.to(dtype) if dtype is not None and is_float(spec.dtype) else rows)

    else:
        record = family.variant(id)
        specs = [TensorSpec(name, tensor.dtype, tensor.shape) for name, tensor in record.tensors.items()]
        digests = {name: tensor.restored_sha256 for name, tensor in record.tensors.items()}
        source = record.source if record.adapter is None else base.source
        exact = all(tensor.exact for tensor in record.tensors.values())
        # What is served of an adapter is its original, bit for bit; a checkpoint in the base's dtype rounds it.
        whole = record.adapter is not None and options.dtype == "float32"
        inexact = [name for name, tensor in record.tensors.items() if not (tensor.exact or whole)]
        if options.exact and inexact:
            raise UsageError(
                f"expected all {len(specs)} tensors of variant {id!r} to be exact, found {len(inexact)} that are not",
                hint="Leave --exact out, or decompose with --codec lossless."
                if record.adapter is None
                else "The original of an adapter is a merge in fp32: add --dtype float32, or --as adapter.",
            )

        exact = exact or (whole and not inexact)

        def blocks(name: str) -> Iterator[memoryview]:
            return _variant_blocks(family, id, name, dtype, options)

    stored = options.dtype == "original" and (options.rounding == "stochastic" or exact)
    return _lay_out(family, id, source, specs, blocks, digests if stored else {}, options, exact)


def _variant_blocks(
    family: Family, id: str, name: str, dtype: torch.dtype | None, options: RestoreOptions
) -> Iterator[memoryview]:
    stored = open_tensor(family, id, name)
    for start, stop in stored.blocks():
        if options.exact and dtype is not None and stored.exact:
            rows = stored.restored(start, stop)  # with its corrections, which what is served leaves out
            yield row_bytes(rows.to(dtype) if is_float(stored.spec.dtype) else rows)
        else:
            yield row_bytes(stored.restored(start, stop, dtype, options.rounding))


def _lay_out(
    family: Family,
    id: str,
    source: SourceRecord | None,
    specs: list[TensorSpec],
    blocks: Callable[[str], Iterator[memoryview]],
    digests: Mapping[str, str],
    options: RestoreOptions,
    exact: bool,
) -> CheckpointJob:
    """Decide which tensor goes into which file: the original's own files, or a single one."""
    target = {spec.name: _target(spec, options.dtype) for spec in specs}
    shards: dict[str, ShardPlan] = {}
    headers: dict[str, bytes | None] = {}
    if options.layout == "original" and source is not None:
        left = dict(target)
        for shard in source.shards:
            raw = family.file_bytes(shard.header_sha256)
            metadata, tensors = parse_header(Path(shard.file), raw, shard.size)
            entries = [_entry(left.pop(info.name)) for info in tensors if info.name in left]
            if shard is source.shards[-1]:  # what an adapter adds to its base has no file of its own
                entries += library_order([_entry(spec) for spec in left.values()])
            shards[shard.file] = ShardPlan(tuple(entries), {k: text for k, text in metadata.items() if k != "format"})
            same = [(e.name, e.dtype, e.shape) for e in entries] == [(t.name, t.dtype, t.shape) for t in tensors]
            headers[shard.file] = raw if same else None
    else:
        entries = library_order([_entry(spec) for spec in target.values()])
        shards[_SINGLE] = ShardPlan(tuple(entries), _metadata(family, source))
        headers[_SINGLE] = None
    index: tuple[str, bytes] | None = None
    if source is not None and source.index is not None and options.layout == "original":
        unchanged = all(header is not None for header in headers.values())
        index = (source.index.name, _index(family.file_bytes(source.index.sha256), shards, unchanged))
    return CheckpointJob(
        id, shards, headers, blocks, digests, index, _side_files(family, id, source, options.dtype), exact
    )


def _metadata(family: Family, source: SourceRecord | None) -> dict[str, str]:
    """What the headers of a source say beside their tensors, together; of two that differ, what the first says."""
    found: dict[str, str] = {}
    for shard in () if source is None else source.shards:
        metadata, _ = parse_header(Path(shard.file), family.file_bytes(shard.header_sha256), shard.size)
        found = {**metadata, **found}
    found.pop("format", None)
    return found


def _target(spec: TensorSpec, dtype: Dtype) -> TensorSpec:
    return TensorSpec(spec.name, "F32", spec.shape) if dtype == "float32" and is_float(spec.dtype) else spec


def _entry(spec: TensorSpec) -> Entry:
    return Entry(spec.name, spec.dtype, spec.shape, spec.numel * item_size(spec.dtype))


def _index(original: bytes, shards: Mapping[str, ShardPlan], unchanged: bool) -> bytes:
    if unchanged:
        return original
    document = json.loads(original)
    document["weight_map"] = {entry.name: file for file, plan in shards.items() for entry in plan.entries}
    if isinstance(document.get("metadata"), dict) and "total_size" in document["metadata"]:
        document["metadata"]["total_size"] = sum(plan.data_bytes for plan in shards.values())
    return (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()


def _side_files(family: Family, id: str, source: SourceRecord | None, dtype: Dtype) -> dict[str, Callable[[], bytes]]:
    """Config, tokenizer and the rest; for a mean base, what all variants agree on."""
    record = None if id == BASE else family.variant(id)
    changes: Mapping[str, object] = {}
    if record is not None and record.adapter is not None and source is not None:
        names, changes = files_of_merge(source, record.source), record.adapter.config_changes
    elif source is not None:
        names = dict(source.files)
    else:
        shared = [set(variant.source.files.items()) for variant in family.manifest.variants]
        names = dict(sorted(set.intersection(*shared))) if shared else {}

    def read(name: str, digest: str) -> bytes:
        data = family.file_bytes(digest)
        if name != "config.json" or (dtype == "original" and not changes):
            return data
        document = change_config(json.loads(data), changes)
        return dump_config(as_float32(document) if dtype == "float32" else document)

    return {name: (lambda n=name, d=digest: read(n, d)) for name, digest in names.items()}  # type: ignore[misc]
