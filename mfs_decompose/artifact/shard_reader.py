"""Shards of an artifact, opened for reading: each header is held against the manifest before a byte is believed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from mfs_decompose.artifact.files import open_regular
from mfs_decompose.artifact.layout import SCHEMA
from mfs_decompose.artifact.records import BaseRecord, Blob, VariantRecord
from mfs_decompose.artifact.shard import Entry, ShardPlan
from mfs_decompose.errors import ArtifactInvalid, MfsError
from mfs_decompose.source.folder import resolve_inside
from mfs_decompose.source.header import ShardHeader, read_shard_header

_AGAIN = "the artifact is damaged; get it again from where it came from"


def shard_metadata(owner: str, number: int) -> dict[str, str]:
    """What `__metadata__` of a shard we write says beside `format`: two shards of equal shape are told apart by it.

    Args:
        owner: `base`, `shared delta`, or the id of a variant.
        number: the shard's place among its owner's, from 1.
    """
    return {"mfs.owner": owner, "mfs.schema": SCHEMA, "mfs.shard": str(number)}


def read_header(folder: Path, name: str) -> ShardHeader:
    """The header of one of the artifact's shards.

    Raises:
        ArtifactInvalid: the file is missing, no safetensors file, or a link out of the artifact.
    """
    try:
        return read_shard_header(resolve_inside(folder, name))
    except MfsError as error:
        raise ArtifactInvalid(error.message, hint=_AGAIN) from None


def check_variant_shard(variant: VariantRecord, index: int, header: ShardHeader) -> None:
    """Check that a shard holds the blobs that the records place in it, and nothing else.

    Raises:
        ArtifactInvalid: naming the shard and, where it is one tensor's fault, the tensor.
    """
    check_blob_shard(variant.shards[index], variant.id, index, variant.blobs, header)


def check_blob_shard(name: str, owner: str, index: int, blobs: Mapping[str, Blob], header: ShardHeader) -> None:
    """Check that shard `index` of an owner holds those of `blobs` that lie in it; raises as `check_variant_shard`."""
    _check_own_header(name, header, shard_metadata(owner, index + 1))
    found = {tensor.name: (tensor.dtype, tensor.shape) for tensor in header.tensors}
    for tensor, blob in blobs.items():
        if blob.shard == index:
            entry = found.pop(blob.entry, None)
            if entry != ("U8", (blob.nbytes,)):
                raise ArtifactInvalid(
                    f"expected {blob.nbytes} bytes for tensor {tensor!r} in {name}, found {entry or 'none'}",
                    hint=_AGAIN,
                )
    if found:
        raise ArtifactInvalid(f"expected only known entries in {name}, found {sorted(found)[:3]}", hint=_AGAIN)


def check_base_shard(base: BaseRecord, index: int, header: ShardHeader) -> None:
    """Check one shard of a stored base: a copied one has its source's header, one of ours says whose it is.

    Raises:
        ArtifactInvalid: naming the shard.
    """
    name = base.shards[index]
    if base.source is None:
        _check_own_header(name, header, shard_metadata("base", index + 1))
    elif header.sha256 != base.source.shards[index].header_sha256:
        raise ArtifactInvalid(f"expected the source's header in {name}, found another", hint=_AGAIN)


def check_base_tensors(base: BaseRecord, headers: list[ShardHeader]) -> None:
    """Check that the shards of a stored base hold its tensors, each once.

    Raises:
        ArtifactInvalid: naming a tensor.
    """
    found = [(tensor.name, tensor.dtype, tensor.shape) for header in headers for tensor in header.tensors]
    expected = {(name, tensor.dtype, tensor.shape) for name, tensor in base.tensors.items()}
    wrong = set(found) ^ expected
    if wrong or len(found) != len(expected):
        name = min(wrong)[0] if wrong else found[0][0]
        raise ArtifactInvalid(f"expected the base's shards to hold its tensors, found a difference at {name!r}")


def read_range(path: Path, start: int, count: int) -> bytes:
    """Bytes `start` to `start + count` of a file, in memory of their own: nothing is mapped.

    Raises:
        ArtifactInvalid: it is shorter, or cannot be read.
    """
    try:
        descriptor = open_regular(path)
        try:
            pieces: list[bytes] = []
            while count > 0 and (piece := os.pread(descriptor, count, start)):
                pieces.append(piece)
                start, count = start + len(piece), count - len(piece)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ArtifactInvalid(f"cannot read {path}: {error.strerror}", hint=_AGAIN) from None
    if count:
        raise ArtifactInvalid(f"expected {count} more bytes in {path}, found its end", hint=_AGAIN)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _check_own_header(name: str, header: ShardHeader, expected: Mapping[str, str]) -> None:
    """A shard that we wrote says whose it is, and its header has the one spelling we give it."""
    for key, value in expected.items():
        if header.metadata.get(key) != value:
            raise ArtifactInvalid(
                f"expected {key} {value!r} in {name}, found {header.metadata.get(key)!r}", hint=_AGAIN
            )
    entries = {t.name: Entry(t.name, t.dtype, t.shape, t.nbytes) for t in header.tensors}
    # In the order they were written: offsets do not order tensors without bytes.
    written = tuple(entries[key] for key in json.loads(header.raw[8:]) if key != "__metadata__")
    if header.raw != ShardPlan(written, expected).header():
        raise ArtifactInvalid(f"expected the header of {name} as mfs writes it, found another spelling", hint=_AGAIN)
