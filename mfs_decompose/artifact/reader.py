"""An artifact opened for reading: records, blobs and base rows, all checked on the way."""

from __future__ import annotations

import difflib
import json
import os
import threading
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from mfs_decompose.artifact.base_reader import BaseReader, open_referenced_base, open_stored_base
from mfs_decompose.artifact.canonical import load_strict
from mfs_decompose.artifact.files import read_small_file
from mfs_decompose.artifact.layout import MANIFEST, MAX_MANIFEST_BYTES, MAX_RUN_BYTES, RUN, content_name
from mfs_decompose.artifact.manifest import Manifest, artifact_digest, load_manifest
from mfs_decompose.artifact.records import VariantRecord
from mfs_decompose.artifact.shard_reader import check_variant_shard, read_header, read_range
from mfs_decompose.artifact.shared_delta import SharedReader
from mfs_decompose.artifact.trees import read_trees
from mfs_decompose.codec.tree import CodecNode
from mfs_decompose.errors import ArtifactInvalid, SourceNotFound, UsageError

if TYPE_CHECKING:
    import torch

    from mfs_decompose.codec.shared import Shared
    from mfs_decompose.source.checkpoint import Checkpoint

_CONFIG = "config.json"
_AGAIN = "the artifact is damaged; get it again from where it came from"


class Family:
    """One artifact. Reads from any thread, maps nothing, and opens shards only when they are needed.

    A variant that needs a codec this version does not know is refused when it is asked for; others stay readable.
    """

    def __init__(self, path: Path, manifest: Manifest, digest: str, base: str | None) -> None:
        self.path = path
        self.manifest = manifest
        self.artifact_digest = digest
        """sha256 of the bytes of manifest.json."""
        self._given_base = base
        self._hints = _read_hints(path)
        self._variants = {variant.id: variant for variant in manifest.variants}
        self._mutex = threading.RLock()
        self._trees: dict[str, dict[str, CodecNode]] = {}
        self._places: dict[tuple[str, int], dict[str, int]] = {}
        self._base: BaseReader | None = None
        shapes = {name: tensor.shape for name, tensor in manifest.base.tensors.items()}
        self._shared = None if manifest.shared is None else SharedReader(path, manifest.shared, shapes)

    @classmethod
    def open(cls, path: str | Path, *, base: str | Path | None = None) -> Family:
        """Open an artifact: the manifest is checked in full, and every file is there with its size.

        Args:
            path: the artifact's folder.
            base: the folder of the base, or a model of the Hub, for an artifact that refers to it; without it the
                place is tried where the base was when the artifact was made.

        Raises:
            SourceNotFound: there is no such folder.
            ArtifactInvalid: it is no artifact, a newer one, or damaged.
        """
        folder = Path(path)
        data = read_manifest_bytes(folder)
        manifest = load_manifest(data)
        for name, entry in manifest.files.items():
            try:
                size = (folder / name).stat().st_size
            except OSError as error:
                raise ArtifactInvalid(f"cannot read {folder / name}: {error.strerror}", hint=_AGAIN) from None
            if size != entry.size:
                raise ArtifactInvalid(f"expected {entry.size} bytes in {folder / name}, found {size}", hint=_AGAIN)
        return cls(folder, manifest, artifact_digest(data), os.fspath(base) if base is not None else None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Forget what was opened; idempotent. No file stays open between reads."""
        with self._mutex:
            self._base = None
            self._places.clear()

    @property
    def variant_ids(self) -> tuple[str, ...]:
        """Ids of all variants, sorted."""
        return tuple(self._variants)

    def variant(self, id: str) -> VariantRecord:
        """The record of a variant that this version can decode.

        Raises:
            UsageError: there is no such variant.
            ArtifactInvalid: it needs a codec that is unknown here.
        """
        record = self._record(id)
        self._checked_trees(record)
        return record

    def tree(self, variant_id: str, tensor: str) -> CodecNode:
        """The checked codec tree of a tensor.

        Raises:
            UsageError: there is no such variant or tensor.
            ArtifactInvalid: the variant needs a codec that is unknown here.
        """
        record = self._record(variant_id)
        trees = self._checked_trees(record)
        if tensor not in trees:
            raise UsageError(
                f"expected a tensor of variant {variant_id!r}, found {tensor[:120]!r}{meant(tensor, list(trees))}"
            )
        return trees[tensor]

    def blob(self, variant_id: str, tensor: str) -> bytes:
        """All bytes of a tensor's entry; empty when the tensor needs none.  Raises as `blob_range` does."""
        self.tree(variant_id, tensor)
        blob = self._record(variant_id).tensors[tensor].blob
        return self.blob_range(variant_id, tensor, 0, blob.nbytes) if blob else b""

    def blob_range(self, variant_id: str, tensor: str, offset: int, count: int) -> bytes:
        """`count` bytes of a tensor's entry from byte `offset` on.

        Raises:
            UsageError: there is no such variant or tensor.
            ArtifactInvalid: the range leaves the entry, or the shard is not what the manifest says.
        """
        self.tree(variant_id, tensor)
        record = self._record(variant_id)
        blob = record.tensors[tensor].blob
        nbytes = blob.nbytes if blob else 0
        if not (0 <= offset <= nbytes and 0 <= count <= nbytes - offset):
            raise ArtifactInvalid(
                f"expected a range inside the {nbytes} bytes of tensor {tensor!r} of variant {variant_id!r}, "
                f"found {count} bytes from {offset}"
            )
        if blob is None or count == 0:
            return b""
        start = self._shard_places(record, blob.shard)[blob.entry]
        return read_range(self.path / record.shards[blob.shard], start + offset, count)

    def shared(self, base_name: str | None) -> Shared | None:
        """What the variants have in common in a base tensor, see codec/shared.py; None where that is nothing.

        Raises:
            ArtifactInvalid: its record is damaged.
        """
        return None if self._shared is None else self._shared.of(base_name)

    def adapter_bytes(self, variant_id: str, name: str) -> bytes:
        """All bytes of a tensor of a variant's adapter, held against the digest they were kept under.

        Raises:
            ArtifactInvalid: they are damaged.
        """
        record = self._record(variant_id)
        assert record.adapter is not None, f"{variant_id} is no adapter"
        tensor = record.adapter.tensors[name]
        data = b""
        if tensor.blob is not None:
            start = self._shard_places(record, tensor.blob.shard)[tensor.blob.entry]
            data = read_range(self.path / record.shards[tensor.blob.shard], start, tensor.blob.nbytes)
        if sha256(data).hexdigest() != tensor.sha256:
            raise ArtifactInvalid(f"tensor {name!r} of the adapter {variant_id!r} is damaged", hint=_AGAIN)
        return data

    def base_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows of a base tensor in its own dtype: [stop - start, ...], 0-d for a 0-d tensor.

        Raises:
            SourceNotFound: the base is referred to and cannot be found.
            SourceIncompatible: the folder referred to holds another base.
            ArtifactInvalid: the stored base is damaged, or has no such tensor.
        """
        return self._opened_base().rows(name, start, stop)

    def base_raw(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Bytes of rows of a base tensor: uint8 [(stop - start) * bytes of a row].  Raises as `base_rows` does."""
        return self._opened_base().raw(name, start, stop)

    def base_checkpoint(self) -> Checkpoint:
        """Headers and config of a base that was given; raises as `base_rows` does."""
        source = self.manifest.base.source
        assert source is not None, "a mean base has no checkpoint of its own"
        found = self._opened_base().checkpoint
        return replace(found, config=self._config(source.files[_CONFIG]) if _CONFIG in source.files else {})

    def original_ref(self, id: str) -> str | None:
        """Where the checkpoint of a variant, or `base`, was when the artifact was made; a hint, not a promise."""
        if id == "base":
            return _as_ref(self._hints.get("base"))
        variants = self._hints.get("variants")
        return _as_ref(variants.get(id)) if isinstance(variants, dict) else None

    def file_bytes(self, sha256_hex: str) -> bytes:
        """The content of a file that a source record names by digest.

        Raises:
            ArtifactInvalid: the artifact has no such file, or it is damaged.
        """
        name = content_name(sha256_hex)
        entry = self.manifest.files.get(name)
        if entry is None:
            raise ArtifactInvalid(f"expected {name} in the file table, found no such file")
        data = read_range(self.path / name, 0, entry.size)
        if sha256(data).hexdigest() != sha256_hex:
            raise ArtifactInvalid(f"expected {self.path / name} to match its name, found other content", hint=_AGAIN)
        return data

    def _config(self, sha256_hex: str) -> dict[str, object]:
        try:
            # Not the strict reader: configs of published models hold Infinity.
            config = json.loads(self.file_bytes(sha256_hex))
        except (ValueError, RecursionError) as error:
            raise ArtifactInvalid(f"the config of the base is not JSON: {error}", hint=_AGAIN) from None
        return config if isinstance(config, dict) else {}

    def _record(self, id: str) -> VariantRecord:
        record = self._variants.get(id)
        if record is None:
            known = list(self._variants)
            raise UsageError(
                f"expected a variant of this artifact, found {id[:80]!r}{meant(id, known)}",
                hint=f"it has {', '.join(known[:20])}" if known else "it has none",
            )
        return record

    def _checked_trees(self, record: VariantRecord) -> dict[str, CodecNode]:
        with self._mutex:
            if record.id not in self._trees:
                self._trees[record.id] = read_trees(record)
            return self._trees[record.id]

    def _shard_places(self, record: VariantRecord, index: int) -> dict[str, int]:
        """Where each entry of a shard begins in its file."""
        with self._mutex:
            key = (record.id, index)
            if key not in self._places:
                header = read_header(self.path, record.shards[index])
                check_variant_shard(record, index, header)
                self._places[key] = {tensor.name: tensor.start for tensor in header.tensors}
            return self._places[key]

    def _opened_base(self) -> BaseReader:
        with self._mutex:
            if self._base is None:
                record = self.manifest.base
                if record.store == "reference":
                    self._base = open_referenced_base(record, self._given_base, self.original_ref("base"))
                else:
                    self._base = open_stored_base(self.path, record)
            return self._base


def read_manifest_bytes(folder: Path) -> bytes:
    """The bytes of an artifact's manifest.

    Raises:
        SourceNotFound: there is no such folder.
        ArtifactInvalid: it holds no manifest that can be read.
    """
    if not folder.is_dir():
        found = "a file" if folder.exists() else "nothing"
        raise SourceNotFound(f"expected an artifact's folder at {folder}, found {found}", hint="check the path")
    try:
        return read_small_file(folder / MANIFEST, MAX_MANIFEST_BYTES)
    except FileNotFoundError:
        raise ArtifactInvalid(
            f"expected an artifact, found a folder without {MANIFEST}: {folder}",
            hint="give the folder that `mfs decompose --out` wrote",
        ) from None
    except OSError as error:
        raise ArtifactInvalid(f"cannot read {folder / MANIFEST}: {error.strerror}") from None


def read_run_record(folder: Path) -> dict[str, Any]:
    """run.json, which is outside of digest and trust: whatever is wrong with it, it is only missing."""
    try:
        document = load_strict(read_small_file(folder / RUN, MAX_RUN_BYTES), RUN, MAX_RUN_BYTES)
    except (OSError, ArtifactInvalid):
        return {}
    return document if isinstance(document, dict) else {}


def _read_hints(folder: Path) -> dict[str, Any]:
    hints = read_run_record(folder).get("hints")
    return hints if isinstance(hints, dict) else {}


def _as_ref(value: object) -> str | None:
    return value if isinstance(value, str) and value and "\0" not in value else None


def meant(name: str, known: list[str]) -> str:
    """The name that was probably meant, as the end of a sentence."""
    close = difflib.get_close_matches(name, known, 1)
    return f" (did you mean {close[0]!r}?)" if close else ""
