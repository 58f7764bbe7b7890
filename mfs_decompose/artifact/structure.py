"""Does the artifact fit together?  Everything that headers can tell, without reading weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from mfs_decompose.artifact.files import read_small_file
from mfs_decompose.artifact.layout import MANIFEST, content_name
from mfs_decompose.artifact.manifest import Manifest
from mfs_decompose.artifact.records import BaseRecord, SourceRecord, SourceShard, VariantRecord
from mfs_decompose.artifact.report import Problem
from mfs_decompose.artifact.shard_reader import (
    check_base_shard,
    check_base_tensors,
    check_blob_shard,
    check_variant_shard,
    read_header,
)
from mfs_decompose.artifact.shared_delta import OWNER, SharedRecord, read_shared_tree
from mfs_decompose.artifact.trees import read_tree
from mfs_decompose.codec.shared import uses_shared
from mfs_decompose.errors import ArtifactInvalid, SourceIncompatible, SourceNotFound
from mfs_decompose.source import dtypes
from mfs_decompose.source.header import MAX_HEADER_BYTES, ShardHeader, parse_header

Specs = dict[str, tuple[str, tuple[int, ...]]]
"""Tensor name -> (dtype, shape)."""

_LENGTH_BYTES: Final = 8


def check_structure(folder: Path, manifest: Manifest, absent: set[str]) -> list[Problem]:
    """Hold shard headers, codec trees and the sources' own headers against the records.

    Args:
        folder: the artifact.
        manifest: loaded, so its records agree with each other.
        absent: files that are missing or have another size; nothing is said about them again.
    """
    problems: list[Problem] = []
    base = manifest.base
    _check_base_shards(folder, base, absent, problems)
    if base.source is not None:
        specs = {name: (tensor.dtype, tensor.shape) for name, tensor in base.tensors.items()}
        problems += _check_source(folder, "base", base.source, specs, absent)
    if manifest.shared is not None:
        _check_shared(folder, manifest.shared, absent, problems)
    for variant in manifest.variants:
        _check_variant(folder, variant, base, absent, problems, manifest.shared)
    return problems


def _check_shared(folder: Path, shared: SharedRecord, absent: set[str], problems: list[Problem]) -> None:
    for index, name in enumerate(shared.shards):
        if name not in absent:
            with _reported(problems, name):
                check_blob_shard(name, OWNER, index, shared.blobs, read_header(folder, name))
    for tensor, record in shared.tensors.items():
        with _reported(problems, MANIFEST, tensor):
            read_shared_tree(tensor, record)


def _check_base_shards(folder: Path, base: BaseRecord, absent: set[str], problems: list[Problem]) -> None:
    if absent.intersection(base.shards):
        return
    headers: list[ShardHeader] = []
    for index, name in enumerate(base.shards):
        with _reported(problems, name):
            header = read_header(folder, name)
            check_base_shard(base, index, header)
            headers.append(header)
    if base.shards and len(headers) == len(base.shards):
        with _reported(problems, base.shards[0]):
            check_base_tensors(base, headers)


def _check_variant(
    folder: Path,
    variant: VariantRecord,
    base: BaseRecord,
    absent: set[str],
    problems: list[Problem],
    shared: SharedRecord | None,
) -> None:
    for index, name in enumerate(variant.shards):
        if name not in absent:
            with _reported(problems, name):
                check_variant_shard(variant, index, read_header(folder, name))
    for name, record in variant.tensors.items():
        with _reported(problems, MANIFEST, name):
            tree = read_tree(variant.id, name, record)
            if uses_shared(tree) and (shared is None or record.base_name not in shared.tensors):
                raise ArtifactInvalid(f"variant {variant.id!r} needs a shared delta that the family does not have")
    own = variant.adapter.tensors if variant.adapter else variant.tensors
    specs = {name: (record.dtype, record.shape) for name, record in own.items()}
    problems += _check_source(folder, f"variant {variant.id!r}", variant.source, specs, absent)
    counted = variant.tensors if variant.adapter is None else base.tensors
    total = sum(math.prod(tensor.shape) * dtypes.item_size(tensor.dtype) for tensor in counted.values())
    if variant.checkpoint_bytes != total:
        what = f"variant {variant.id!r}: expected a checkpoint of {total} bytes, found {variant.checkpoint_bytes}"
        problems.append(Problem(MANIFEST, None, what))


def _check_source(folder: Path, who: str, source: SourceRecord, recorded: Specs, absent: set[str]) -> list[Problem]:
    """The proof of coverage, from the artifact alone: the source's own headers list exactly the recorded tensors."""
    problems: list[Problem] = []
    found: Specs = {}
    for shard in source.shards:
        name = content_name(shard.header_sha256)
        if name not in absent:
            with _reported(problems, name):
                found.update(_read_stored_header(folder / name, name, shard))
    if problems or absent.intersection(content_name(shard.header_sha256) for shard in source.shards):
        return problems  # what is missing below would only be missing because its header is
    for tensor in sorted(name for name in found.keys() | recorded.keys() if found.get(name) != recorded.get(name)):
        has, should = _show(recorded.get(tensor)), _show(found.get(tensor))
        problems.append(
            Problem(MANIFEST, tensor, f"{who}: expected {should} as in the headers of its source, found {has}")
        )
    return problems


def _read_stored_header(path: Path, name: str, shard: SourceShard) -> Specs:
    try:
        raw = read_small_file(path, _LENGTH_BYTES + MAX_HEADER_BYTES)
        if int.from_bytes(raw[:_LENGTH_BYTES], "little") != len(raw) - _LENGTH_BYTES:
            raise ArtifactInvalid(f"expected a source's header in {name}, found another length than it says")
        _, tensors = parse_header(Path(name), raw, shard.size)
    except OSError as error:
        raise ArtifactInvalid(f"cannot read {name}: {error.strerror}") from None
    except (SourceIncompatible, SourceNotFound) as error:
        raise ArtifactInvalid(f"expected the header of {shard.file}, found: {error.message}") from None
    return {tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors}


@contextmanager
def _reported(problems: list[Problem], file: str, tensor: str | None = None) -> Iterator[None]:
    try:
        yield
    except ArtifactInvalid as error:
        problems.append(Problem(file, tensor, error.message))


def _show(spec: tuple[str, tuple[int, ...]] | None) -> str:
    return "no such tensor" if spec is None else f"{spec[0]} {list(spec[1])}"
