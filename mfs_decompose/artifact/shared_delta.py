"""The shared delta of a family: its records, and reading it.

What variants have in common beside their base, `S`, is stored once: one codec tree a base tensor, its bytes in shards
of their own. Trees of variants name it by the leaf `shared` (codec/shared.py).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import Field

from mfs_decompose.artifact.layout import shared_shard_name
from mfs_decompose.artifact.records import Amount, Blob, Count, Digest, GeneratedPath, Record, TensorName
from mfs_decompose.artifact.shard_reader import check_blob_shard, read_header, read_range
from mfs_decompose.artifact.trees import check_tree
from mfs_decompose.codec.base import matrix_shape
from mfs_decompose.codec.tree import CodecNode
from mfs_decompose.errors import ArtifactInvalid

if TYPE_CHECKING:
    from mfs_decompose.codec.base import Delta
    from mfs_decompose.codec.shared import Shared

OWNER: Final = "shared delta"
"""Whose shards they are, in their headers; no variant can be called so."""


class SharedTensor(Record):
    """The shared delta of one base tensor, of that tensor's shape.

    `energy` is the squared norm of what the deltas of the `variants` that use it have in common, `error` what the
    stored one misses of that; `sha256` is that of its bytes.
    """

    tree: dict[str, Any]
    blob: Blob
    energy: Amount
    error: Amount
    sha256: Digest
    variants: Annotated[int, Field(ge=2)]


class SharedRecord(Record):
    """All of it: shards, the base tensors it is of, and the bytes of the shards, whole."""

    shards: Annotated[tuple[GeneratedPath, ...], Field(min_length=1)]
    tensors: dict[TensorName, SharedTensor]
    bytes: Count

    @property
    def blobs(self) -> dict[str, Blob]:
        """Every entry of its shards, by base tensor."""
        return {name: tensor.blob for name, tensor in self.tensors.items()}

    def share(self, users: Iterable[str]) -> dict[str, int]:
        """What each variant that uses it answers for: equal parts of its bytes, the first ids a byte more."""
        ids = sorted(users)
        return {id: self.bytes // len(ids) + (at < self.bytes % len(ids)) for at, id in enumerate(ids)}


def read_shared_tree(name: str, tensor: SharedTensor) -> CodecNode:
    """The codec tree of a shared delta.

    Raises:
        ArtifactInvalid: it is no tree, is unknown here, or claims other bytes than it has.
    """
    return check_tree(f"the shared delta of {name!r}", tensor.tree, tensor.blob.nbytes)


class SharedReader:
    """Reads the shared delta, from any thread; shards are opened when they are needed."""

    def __init__(self, folder: Path, record: SharedRecord, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """`shapes` are those of the base's tensors."""
        self._folder, self._record, self._shapes = folder, record, shapes
        self._places: dict[int, dict[str, int]] = {}
        self._mutex = threading.Lock()

    def of(self, name: str | None) -> Shared | None:
        """The shared delta of a base tensor; None where it has none.

        Raises:
            ArtifactInvalid: its record cannot be decoded.
        """
        from mfs_decompose.codec.registry import open_delta
        from mfs_decompose.codec.shared import Shared

        tensor = self._record.tensors.get(name or "")
        if name is None or tensor is None:
            return None
        shape = matrix_shape(self._shapes[name])
        if shape is None:
            raise ArtifactInvalid(f"the shared delta of {name!r}: expected a matrix, found another tensor of the base")
        node = read_shared_tree(name, tensor)

        def opened() -> Delta:
            data = self.read(name)
            return open_delta(node, lambda offset, count: data[offset : offset + count], shape)

        return Shared(shape, opened)

    def read(self, name: str) -> bytes:
        """The bytes of one shared delta, held against their digest.

        Raises:
            ArtifactInvalid: they are damaged.
        """
        tensor = self._record.tensors[name]
        start = self._shard_places(tensor.blob.shard)[tensor.blob.entry]
        data = read_range(self._folder / self._record.shards[tensor.blob.shard], start, tensor.blob.nbytes)
        if sha256(data).hexdigest() != tensor.sha256:
            raise ArtifactInvalid(
                f"the shared delta of {name!r} is damaged",
                hint="the artifact is damaged; get it again from where it came from",
            )
        return data

    def _shard_places(self, index: int) -> Mapping[str, int]:
        with self._mutex:
            if index not in self._places:
                header = read_header(self._folder, self._record.shards[index])
                check_blob_shard(self._record.shards[index], OWNER, index, self._record.blobs, header)
                self._places[index] = {tensor.name: tensor.start for tensor in header.tensors}
            return self._places[index]


def shard_names(count: int) -> tuple[str, ...]:
    """Names of that many shards of the shared delta."""
    return tuple(shared_shard_name(number) for number in range(1, count + 1))
