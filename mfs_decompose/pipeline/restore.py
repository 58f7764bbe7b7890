"""Give checkpoints back: an artifact into folders that transformers loads.

A restored folder holds the variant's own config, tokenizer, generation config and chat template byte for byte, and its
weights in the files and the order they came in. Every tensor is held against the digest recorded when the artifact was
written, before the folder gets its name.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mfs_decompose.artifact.atomic import fsync_dir, publish_dir, write_file
from mfs_decompose.artifact.reader import Family
from mfs_decompose.artifact.records import SourceRecord
from mfs_decompose.artifact.shard import Entry, ShardPlan, library_order, write_shard
from mfs_decompose.artifact.values import DECODE_ELEMENTS, open_tensor, row_bytes
from mfs_decompose.codec.base import block_rows
from mfs_decompose.errors import ArtifactInvalid, OutputBusy, ResourceShortage, UsageError
from mfs_decompose.events import NullSink, ProgressSink
from mfs_decompose.pipeline.scheduler import one_torch_thread
from mfs_decompose.provenance import free_disk
from mfs_decompose.source.dtypes import is_float, item_size
from mfs_decompose.source.header import TensorSpec, parse_header
from mfs_decompose.units import format_bytes

if TYPE_CHECKING:
    import torch

    from mfs_decompose.linalg.rounding import Rounding

Dtype = Literal["original", "float32"]
Layout = Literal["original", "single"]
_SINGLE = "model.safetensors"
_BASE = "base"


@dataclass(frozen=True)
class RestoreOptions:
    """How to restore: defaults give the digests that the manifest records."""

    dtype: Dtype = "original"
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    layout: Layout = "original"
    exact: bool = False


@dataclass(frozen=True)
class Restored:
    """One restored folder; `exact` when every tensor has the original's bits, `checked` when digests were compared."""

    id: str
    folder: Path
    bytes: int
    tensors: int
    exact: bool
    checked: bool


def restore(
    artifact: Path,
    ids: Iterable[str],
    out: Path,
    options: RestoreOptions | None = None,
    *,
    base: Path | None = None,
    nested: bool = False,
    progress: ProgressSink | None = None,
) -> tuple[Restored, ...]:
    """Write the checkpoints `ids` (variants, or `base`): one into `out` itself, several or `nested` ones into `out/ID`.

    Raises:
        UsageError: no such variant, or `exact` was asked for and a tensor is not.
        OutputBusy: the place is taken.
        ArtifactInvalid: the artifact is damaged: a tensor does not have the digest it was recorded with.
    """
    options, sink = options or RestoreOptions(), progress or NullSink()
    if out.name in ("", ".."):
        out = out.resolve()
    wanted = list(dict.fromkeys(ids))
    with Family.open(artifact, base=base) as family, one_torch_thread():
        jobs = [_job(family, id, options) for id in wanted]
        folders = {job.id: out if len(wanted) == 1 and not nested else out / job.id for job in jobs}
        for folder in folders.values():
            _check_free(folder, artifact)
        _check_disk(out, sum(job.nbytes for job in jobs))
        sink.start("restoring", sum(job.nbytes for job in jobs))
        done = tuple(_write(family, job, folders[job.id], sink) for job in jobs)
        sink.finish()
    return done


@dataclass(frozen=True)
class _Job:
    """One checkpoint to be written: tensors as they will be, where their blocks come from, and files beside them."""

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
        return sum(plan.size for plan in self.shards.values())


def _job(family: Family, id: str, options: RestoreOptions) -> _Job:
    import torch

    dtype = torch.float32 if options.dtype == "float32" else None
    base = family.manifest.base
    if id == _BASE:
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
) -> _Job:
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
    return _Job(id, shards, headers, blocks, digests, index, _side_files(family, source, options.dtype), exact)


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


def _write(family: Family, job: _Job, folder: Path, progress: ProgressSink) -> Restored:
    partial = folder.with_name(f".{folder.name}.mfs-restoring")
    partial.parent.mkdir(parents=True, exist_ok=True)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir()
    try:
        for file, plan in job.shards.items():
            chunks = _checked(job, [entry.name for entry in plan.entries])
            write_shard(
                partial / file, plan.entries, chunks, plan.metadata, header=job.headers[file], progress=progress
            )
        if job.index is not None:
            write_file(partial / job.index[0], job.index[1])
        for name, read in job.files.items():
            write_file(partial / name, read())
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
        publish_dir(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    fsync_dir(folder.parent)
    tensors = sum(len(plan.entries) for plan in job.shards.values())
    return Restored(job.id, folder, job.nbytes, tensors, job.exact, bool(job.digests))


def _checked(job: _Job, names: list[str]) -> Iterator[memoryview]:
    """The blocks of some tensors, each tensor held against its recorded digest as it ends."""
    for name in names:
        digest = hashlib.sha256()
        for block in job.blocks(name):
            digest.update(block)
            yield block
        expected = job.digests.get(name)
        if expected is not None and digest.hexdigest() != expected:
            raise ArtifactInvalid(
                f"tensor {name!r} of {job.id!r} does not restore to what was recorded: the artifact is damaged",
                hint="mfs verify says which file; get the artifact again from where it came from.",
            )


def _check_free(folder: Path, artifact: Path) -> None:
    if folder.resolve().is_relative_to(artifact.resolve()):
        raise OutputBusy(f"the output {folder} lies inside the artifact", hint="Choose another --out.")
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise OutputBusy(
            f"expected {folder} to be absent or empty, found something there", hint="Choose another --out."
        )


def _check_disk(out: Path, needed: int) -> None:
    free = free_disk(out)
    if needed > free:
        raise ResourceShortage(
            f"restoring needs {format_bytes(needed)} of disk, and {format_bytes(free)} is free",
            hint="Free some space, or restore one variant at a time.",
        )
