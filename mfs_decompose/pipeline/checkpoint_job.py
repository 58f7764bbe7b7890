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
from mfs_decompose.codec.base import DECODE_ELEMENTS, block_rows
from mfs_decompose.errors import UsageError
from mfs_decompose.source.dtypes import is_float, item_size
from mfs_decompose.source.header import TensorSpec, parse_header

if TYPE_CHECKING:
    import torch

    from mfs_decompose.linalg.rounding import Rounding

Dtype = Literal["original", "float32"]
Layout = Literal["original", "single"]

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
        source, exact = record.source, all(tensor.exact for tensor in record.tensors.values())
        inexact = [name for name, tensor in record.tensors.items() if not tensor.exact]
        if options.exact and inexact:
            raise UsageError(
                f"expected all {len(specs)} tensors of variant {id!r} to be exact, found {len(inexact)} that are not",
                hint="Leave --exact out, or decompose with --codec lossless.",
            )

        def blocks(name: str) -> Iterator[memoryview]:
            return _variant_blocks(family, id, name, dtype, options.rounding)

    stored = options.dtype == "original" and (options.rounding == "stochastic" or exact)
    return _lay_out(family, id, source, specs, blocks, digests if stored else {}, options, exact)


def _variant_blocks(
    family: Family, id: str, name: str, dtype: torch.dtype | None, rounding: Rounding
) -> Iterator[memoryview]:
    stored = open_tensor(family, id, name)
    for start, stop in stored.blocks():
        yield row_bytes(stored.restored(start, stop, dtype, rounding))


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
    own = [(shard.file, family.file_bytes(shard.header_sha256)) for shard in source.shards] if source else []
    shards: dict[str, ShardPlan] = {}
    headers: dict[str, bytes | None] = {}
    if options.layout == "original" and own:
        for (file, raw), size in zip(own, [shard.size for shard in source.shards] if source else [], strict=True):
            metadata, tensors = parse_header(Path(file), raw, size)
            entries = tuple(_entry(target[info.name]) for info in tensors)
            shards[file] = ShardPlan(entries, {key: text for key, text in metadata.items() if key != "format"})
            headers[file] = raw if options.dtype == "original" else None
    else:
        shards[_SINGLE] = ShardPlan(tuple(library_order([_entry(spec) for spec in target.values()])), {})
        headers[_SINGLE] = None
    index: tuple[str, bytes] | None = None
    if source is not None and source.index is not None and options.layout == "original":
        index = (source.index.name, _index(family.file_bytes(source.index.sha256), shards, options.dtype))
    return CheckpointJob(id, shards, headers, blocks, digests, index, _side_files(family, source, options.dtype), exact)


def _target(spec: TensorSpec, dtype: Dtype) -> TensorSpec:
    return TensorSpec(spec.name, "F32", spec.shape) if dtype == "float32" and is_float(spec.dtype) else spec


def _entry(spec: TensorSpec) -> Entry:
    return Entry(spec.name, spec.dtype, spec.shape, spec.numel * item_size(spec.dtype))


def _index(original: bytes, shards: Mapping[str, ShardPlan], dtype: Dtype) -> bytes:
    if dtype == "original":
        return original
    document = json.loads(original)
    if isinstance(document.get("metadata"), dict) and "total_size" in document["metadata"]:
        document["metadata"]["total_size"] = sum(plan.data_bytes for plan in shards.values())
    return (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()


def _side_files(family: Family, source: SourceRecord | None, dtype: Dtype) -> dict[str, Callable[[], bytes]]:
    """Config, tokenizer and the rest; for a mean base, what all variants agree on."""
    if source is not None:
        names = dict(source.files)
    else:
        shared = [set(variant.source.files.items()) for variant in family.manifest.variants]
        names = dict(sorted(set.intersection(*shared))) if shared else {}

    def read(name: str, digest: str) -> bytes:
        data = family.file_bytes(digest)
        return _float32_config(data) if name == "config.json" and dtype == "float32" else data

    return {name: (lambda n=name, d=digest: read(n, d)) for name, digest in names.items()}  # type: ignore[misc]


def _float32_config(data: bytes) -> bytes:
    """The config with the dtype of the weights beside it: transformers would round them to what stands there."""
    document = json.loads(data)
    key = "torch_dtype" if "torch_dtype" in document else "dtype"
    document[key] = "float32"
    return (json.dumps(document, indent=2) + "\n").encode()
