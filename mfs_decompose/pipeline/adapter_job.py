"""An adapter that is to be given back as the folder it came in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from mfs_decompose.artifact.reader import Family
from mfs_decompose.artifact.records import VariantRecord
from mfs_decompose.artifact.shard import Entry, ShardPlan
from mfs_decompose.errors import UsageError
from mfs_decompose.pipeline.checkpoint_job import BASE, CheckpointJob, RestoreOptions
from mfs_decompose.source.header import parse_header


def plan_adapter(family: Family, id: str, options: RestoreOptions) -> CheckpointJob:
    """Lay an adapter out as it was given: the same files, byte for byte.

    Raises:
        UsageError: there is no such variant, it is no adapter, or another form was asked for as well.
    """
    record = None if id == BASE else family.variant(id)
    if record is None or record.adapter is None:
        what = "the base" if record is None else f"variant {id!r}"
        raise UsageError(
            f"expected a variant that was given as an adapter, found {what}, a whole checkpoint",
            hint="Leave --as out.",
        )
    if options.dtype != "original" or options.layout != "original":
        raise UsageError(
            "an adapter is given back as it was, in its own files and dtypes",
            hint="Leave --dtype and --layout out, or --as.",
        )
    return _plan(family, record)


def _plan(family: Family, record: VariantRecord) -> CheckpointJob:
    assert record.adapter is not None
    shards: dict[str, ShardPlan] = {}
    headers: dict[str, bytes | None] = {}
    for shard in record.source.shards:
        raw = family.file_bytes(shard.header_sha256)
        metadata, tensors = parse_header(Path(shard.file), raw, shard.size)
        entries = tuple(Entry(info.name, info.dtype, info.shape, info.nbytes) for info in tensors)
        shards[shard.file] = ShardPlan(entries, {key: text for key, text in metadata.items() if key != "format"})
        headers[shard.file] = raw

    def blocks(name: str) -> Iterator[memoryview]:
        yield memoryview(family.adapter_bytes(record.id, name))

    def reader(digest: str) -> Callable[[], bytes]:
        return lambda: family.file_bytes(digest)

    index = record.source.index
    return CheckpointJob(
        id=record.id,
        shards=shards,
        headers=headers,
        blocks=blocks,
        digests={name: tensor.sha256 for name, tensor in record.adapter.tensors.items()},
        index=None if index is None else (index.name, family.file_bytes(index.sha256)),
        files={name: reader(digest) for name, digest in record.source.files.items()},
        exact=True,
    )
