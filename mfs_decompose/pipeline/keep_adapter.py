"""An adapter's own tensors, kept as they were given: the bytes of its variant in the artifact."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence

from mfs_decompose.artifact.files import FileRecord
from mfs_decompose.artifact.layout import variant_shard_name
from mfs_decompose.artifact.records import AdapterRecord, AdapterTensor, Blob
from mfs_decompose.artifact.shard import Entry, split_into_shards, write_shard
from mfs_decompose.artifact.shard_reader import shard_metadata
from mfs_decompose.artifact.values import row_bytes
from mfs_decompose.codec.adapter import check_adapter_values
from mfs_decompose.events import ProgressSink
from mfs_decompose.pipeline.workspace import Workspace
from mfs_decompose.source.adapter import Merge
from mfs_decompose.source.checkpoint import TensorReader


def keep_adapter(
    workspace: Workspace, number: int, reader: TensorReader, merge: Merge, shard_size: int, progress: ProgressSink
) -> tuple[list[FileRecord], AdapterRecord]:
    """Write the tensors of an adapter, the variant's `number`-th of the artifact, in the order of their names.

    Raises:
        SourceIncompatible: the adapter changed since its header was read.
    """
    tensors = reader.checkpoint.tensors
    names = {f"t{at}": name for at, name in enumerate(sorted(tensors))}
    digests = {name: hashlib.sha256(row_bytes(reader.raw(name))).hexdigest() for name in tensors}
    entries = [Entry.of_bytes(entry, tensors[name].nbytes) for entry, name in names.items() if tensors[name].nbytes]
    files: list[FileRecord] = []
    places: dict[str, Blob] = {}
    for at, shard in enumerate(split_into_shards(entries, shard_size)):
        file = variant_shard_name(number, at + 1)
        record = workspace.done.files.get(file)
        if record is None:
            chunks = _chunks(reader, [names[entry.name] for entry in shard])
            metadata = shard_metadata(reader.checkpoint.id, at + 1)
            record = write_shard(workspace.folder / file, shard, chunks, metadata, progress=progress)
            workspace.record_file(record)
        files.append(record)
        places.update({names[e.name]: Blob(shard=at, entry=e.name, nbytes=e.nbytes) for e in shard})
    return files, AdapterRecord(
        tensors={
            name: AdapterTensor(dtype=info.dtype, shape=info.shape, sha256=digests[name], blob=places.get(name))
            for name, info in sorted(tensors.items())
        },
        config_changes=_plain(merge.config_changes),
    )


def require_finite(reader: TensorReader) -> None:
    """Refuse an adapter that is broken, before any work.

    Raises:
        SourceIncompatible: naming a tensor that holds NaN or infinite values.
    """
    for name in reader.checkpoint.tensors:
        check_adapter_values(name, reader.rows(name))


def _chunks(reader: TensorReader, names: Sequence[str]) -> Iterator[memoryview]:
    for name in names:
        yield row_bytes(reader.raw(name))


def _plain(changes: Mapping[str, object]) -> dict[str, object]:
    return {key: changes[key] for key in sorted(changes)}
