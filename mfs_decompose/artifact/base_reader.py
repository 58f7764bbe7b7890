"""The base's weights for whoever decodes a variant: from the artifact's shards, or from the folder referred to."""

from __future__ import annotations

import threading
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mfs_decompose.artifact.records import BaseRecord
from mfs_decompose.artifact.shard_reader import check_base_shard, check_base_tensors, read_header
from mfs_decompose.errors import ArtifactInvalid, SourceIncompatible, SourceNotFound
from mfs_decompose.source.checkpoint import Checkpoint, TensorReader
from mfs_decompose.source.ref import SourceRef
from mfs_decompose.source.resolve import open_source

if TYPE_CHECKING:
    import torch

_BLOCK: Final = 8_000_000


class BaseReader:
    """Rows of base tensors, from any thread.

    A base outside the artifact, or one that others can write through a hard link, is not believed: a tensor is hashed
    in whole when it is first asked for.
    """

    def __init__(self, base: BaseRecord, checkpoint: Checkpoint) -> None:
        self._base = base
        self._reader = TensorReader(checkpoint)
        self._mutex = threading.Lock()
        self._proofs: dict[str, threading.Lock] = {}
        self._proven: set[str] = set()

    @property
    def checkpoint(self) -> Checkpoint:
        """The base's headers; without a config where it lies in the artifact."""
        return self._reader.checkpoint

    def raw(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Bytes of rows `start` to `stop`: uint8 [(stop - start) * bytes of a row].

        Raises:
            SourceIncompatible: the referenced base holds another tensor of that name.
            ArtifactInvalid: the base's shards in the artifact are damaged, or the base has no such tensor.
        """
        self._prove(name)
        return self._read(name, start, stop, typed=False)

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows `start` to `stop` in the tensor's own dtype; raises as `raw` does."""
        self._prove(name)
        return self._read(name, start, stop, typed=True)

    def _read(self, name: str, start: int, stop: int, *, typed: bool) -> torch.Tensor:
        try:
            return self._reader.rows(name, start, stop) if typed else self._reader.raw(name, start, stop)
        except SourceIncompatible as error:
            if self._base.store == "reference":
                raise
            raise ArtifactInvalid(error.message, hint=error.hint) from None

    def _prove(self, name: str) -> None:
        if name not in self._base.tensors:
            raise ArtifactInvalid(f"expected a tensor of the base, found {name[:120]!r}, which it has not")
        if self._base.store == "copy":
            return
        with self._mutex:
            lock = self._proofs.setdefault(name, threading.Lock())
        with lock:
            if name not in self._proven:
                self._check_digest(name)
                self._proven.add(name)

    def _check_digest(self, name: str) -> None:
        info = self._reader.checkpoint.tensors[name]
        step = max(1, _BLOCK // max(1, info.row_bytes))
        digest = sha256()
        for start in range(0, info.rows, step):
            block = self._read(name, start, min(start + step, info.rows), typed=False)
            digest.update(block.numpy().data)
        if digest.hexdigest() == self._base.tensors[name].sha256:
            return
        message = f"expected the base this artifact was made against, found other values in its tensor {name!r}"
        if self._base.store == "reference":
            raise SourceIncompatible(message, hint="pass the right base with --base REF")
        raise ArtifactInvalid(message, hint="the file that is hard-linked into the artifact was changed in place")


def open_stored_base(folder: Path, base: BaseRecord) -> BaseReader:
    """Open the base's shards inside the artifact.

    Raises:
        ArtifactInvalid: their headers are not those recorded.
    """
    headers = [read_header(folder, name) for name in base.shards]
    for index, header in enumerate(headers):
        check_base_shard(base, index, header)
    check_base_tensors(base, headers)
    tensors = {tensor.name: tensor for header in headers for tensor in header.tensors}
    return BaseReader(base, Checkpoint("base", folder, tuple(headers), None, tensors, (), (), {}))


def open_referenced_base(base: BaseRecord, given: str | None, hint: str | None) -> BaseReader:
    """Open the base of an artifact that holds none: what is given, else what it was made from.

    A model of the Hub is fetched at its pinned commit.

    Raises:
        SourceNotFound: neither is there.
        SourceIncompatible: the folder holds no such checkpoint.
    """
    source = base.source
    pinned = f"hf://{source.repo}@{source.revision}" if source is not None and source.repo else None
    root = given or (hint if hint is not None and _is_there(hint) else pinned)
    if root is None:
        wanted = _describe(base)
        raise SourceNotFound(
            f"expected the base that this artifact refers to{wanted}, found none", hint="pass it with --base REF"
        )
    checkpoint = open_source(root, "base")
    for name, tensor in base.tensors.items():
        info = checkpoint.tensors.get(name)
        if info is None or (info.dtype, info.shape) != (tensor.dtype, tensor.shape):
            found = "no such tensor" if info is None else f"{info.dtype} {list(info.shape)}"
            raise SourceIncompatible(
                f"expected {tensor.dtype} {list(tensor.shape)} for tensor {name!r} in the base {root}, found {found}",
                hint="pass the base this artifact was made against with --base REF",
            )
    return BaseReader(base, checkpoint)


def _is_there(hint: str) -> bool:
    folder = SourceRef.parse(hint).folder
    return folder is not None and folder.is_dir()


def _describe(base: BaseRecord) -> str:
    source = base.source
    if source is None or source.repo is None:
        return ""
    return f" ({source.repo} at {source.revision})"
