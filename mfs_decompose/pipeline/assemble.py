"""The end of a run: shards out of the encoded pieces, the coverage proof, and the manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mfs_decompose.artifact.files import FileRecord
from mfs_decompose.artifact.layout import variant_shard_name
from mfs_decompose.artifact.manifest import Manifest
from mfs_decompose.artifact.records import (
    AdapterRecord,
    BaseRecord,
    BaseTensor,
    Blob,
    IndexFile,
    PlatformRecord,
    SourceRecord,
    SourceShard,
    TensorRecord,
    ToolRecord,
    VariantRecord,
)
from mfs_decompose.artifact.shard import Entry, split_into_shards, write_shard
from mfs_decompose.artifact.shard_reader import shard_metadata
from mfs_decompose.artifact.target_record import TargetRecord
from mfs_decompose.artifact.writer import finish_artifact, store_content
from mfs_decompose.codec.registry import is_exact
from mfs_decompose.codec.tree import CodecNode
from mfs_decompose.events import ProgressSink
from mfs_decompose.pipeline.base_stage import read_pieces
from mfs_decompose.pipeline.coverage import prove_coverage
from mfs_decompose.pipeline.encode import Encoded
from mfs_decompose.pipeline.keep_adapter import keep_adapter
from mfs_decompose.pipeline.shared_stage import SharedStored
from mfs_decompose.pipeline.survey import Surveyed
from mfs_decompose.pipeline.workspace import Workspace
from mfs_decompose.plan.allocate import Key
from mfs_decompose.plan.model import Item, Plan, VariantPlan
from mfs_decompose.source.adapter import Merge
from mfs_decompose.source.checkpoint import Checkpoint, TensorReader, read_sidecar


@dataclass(frozen=True)
class Piece:
    """One item, done: its facts, its encoding, and the scratch file its bytes lie in."""

    item: Item
    surveyed: Surveyed
    encoded: Encoded
    path: Path


def finish(
    workspace: Workspace,
    plan: Plan,
    base: Checkpoint | None,
    variants: Sequence[Checkpoint],
    base_files: Sequence[FileRecord],
    merges: Mapping[str, tuple[Merge, TensorReader]],
    pieces: Mapping[Key, Piece],
    tool: ToolRecord,
    platform: PlatformRecord,
    progress: ProgressSink,
    shared: SharedStored,
    target: TargetRecord | None = None,
) -> Manifest:
    """Write shards, side files, card and manifest; the workspace is an artifact afterwards.

    `merges` says of each variant that is an adapter what it makes of the base, and reads its own tensors. `shared` is
    what was stored for all, `target` the drift that the pieces were chosen to hold.
    """
    files = [*base_files, *shared.files]
    records: list[VariantRecord] = []
    progress.start("writing shards", sum(piece.encoded.nbytes for piece in pieces.values()))
    for number, (variant, checkpoint) in enumerate(zip(plan.variants, variants, strict=True), start=1):
        assert variant.id == checkpoint.id
        own = {key[1]: piece for key, piece in pieces.items() if key[0] == variant.id}
        adapter, places = None, dict[str, Blob]()
        if variant.id in merges:
            merge, reader = merges[variant.id]
            size = plan.recipe.output.shard_size
            shards, adapter = keep_adapter(workspace, number, reader, merge, size, progress)
        else:
            shards, places = _write_shards(workspace, plan, number, own, progress)
        source = _source(workspace, checkpoint, files)
        answered = shared.shares.get(variant.id, 0)
        records.append(_variant_record(plan, variant, source, shards, places, own, adapter, answered))
        files.extend(shards)
    progress.finish()
    base_record = _base_record(workspace, plan, base, base_files, files)
    coverage = prove_coverage(plan, base, variants, set(base_record.tensors), records)
    return finish_artifact(
        workspace.folder,
        tool=tool,
        platform=platform,
        recipe=plan.recipe.canonical(),
        base=base_record,
        variants=records,
        coverage=coverage,
        files=files,
        shared=shared.record,
        target=target,
    )


def _write_shards(
    workspace: Workspace,
    plan: Plan,
    number: int,
    pieces: Mapping[str, Piece],
    progress: ProgressSink,
) -> tuple[list[FileRecord], dict[str, Blob]]:
    """One entry for each tensor that needs bytes, in the order of their names."""
    names = sorted(pieces)
    entries = {f"t{at}": name for at, name in enumerate(names) if pieces[name].encoded.nbytes}
    planned = [Entry.of_bytes(entry, pieces[name].encoded.nbytes) for entry, name in entries.items()]
    records: list[FileRecord] = []
    places: dict[str, Blob] = {}
    owner = plan.variants[number - 1].id
    for at, shard in enumerate(split_into_shards(planned, plan.recipe.output.shard_size)):
        file = variant_shard_name(number, at + 1)
        record = workspace.done.files.get(file)
        if record is None:
            chunks = _chunks([pieces[entries[entry.name]] for entry in shard])
            record = write_shard(
                workspace.folder / file, shard, chunks, shard_metadata(owner, at + 1), progress=progress
            )
            workspace.record_file(record)
        records.append(record)
        places.update({entries[e.name]: Blob(shard=at, entry=e.name, nbytes=e.nbytes) for e in shard})
    return records, places


def _chunks(pieces: Sequence[Piece]) -> Iterator[bytes]:
    for piece in pieces:
        yield from read_pieces(piece.path, piece.encoded.offset, piece.encoded.nbytes)


def _variant_record(
    plan: Plan,
    variant: VariantPlan,
    source: SourceRecord,
    shards: Sequence[FileRecord],
    places: Mapping[str, Blob],
    pieces: Mapping[str, Piece],
    adapter: AdapterRecord | None,
    shared_bytes: int,
) -> VariantRecord:
    return VariantRecord(
        id=variant.id,
        source=source,
        shards=tuple(shard.path for shard in shards),
        tensors={name: _tensor_record(pieces[name], places.get(name), pieces) for name in sorted(pieces)},
        missing=tuple(sorted(plan.missing[variant.id])),
        checkpoint_bytes=variant.checkpoint_bytes,
        bytes=sum(shard.size for shard in shards),
        adapter=adapter,
        shared_bytes=shared_bytes,
    )


def _tensor_record(piece: Piece, blob: Blob | None, pieces: Mapping[str, Piece]) -> TensorRecord:
    item, surveyed, encoded = piece.item, piece.surveyed, piece.encoded
    node = CodecNode.from_json(encoded.tree)
    target = pieces[str(node.params["of"])] if node.codec == "alias" else piece
    error, exact = target.encoded.error, is_exact(CodecNode.from_json(target.encoded.tree))
    assert item.kind != "missing_in_variant"
    return TensorRecord(
        dtype=item.spec.dtype,
        shape=item.spec.shape,
        kind=item.kind,
        base_name=item.base.name if item.base is not None else None,
        common_rows=item.common_rows,
        tree=encoded.tree,
        blob=blob,
        energy=surveyed.energy,
        error=error,
        original_sha256=surveyed.sha256,
        restored_sha256=target.encoded.restored_sha256,
        exact=exact,
        nonfinite=surveyed.nonfinite,
    )


def _base_record(
    workspace: Workspace,
    plan: Plan,
    base: Checkpoint | None,
    base_files: Sequence[FileRecord],
    files: list[FileRecord],
) -> BaseRecord:
    digests = workspace.done.base_digests
    return BaseRecord(
        mode=plan.base_mode,
        store=plan.base_store,
        source=None if base is None else _source(workspace, base, files),
        shards=tuple(record.path for record in base_files),
        tensors={
            name: BaseTensor(dtype=spec.dtype, shape=spec.shape, sha256=digests[name])
            for name, spec in sorted(plan.base_tensors.items())
        },
        bytes=sum(record.size for record in base_files),
    )


def _source(workspace: Workspace, checkpoint: Checkpoint, files: list[FileRecord]) -> SourceRecord:
    """Keep what is needed to write the checkpoint's files again: headers, weight index, side files."""

    def keep(data: bytes) -> str:
        record = store_content(workspace.folder, data)
        files.append(record)
        return record.sha256

    shards = tuple(
        SourceShard(file=shard.file, size=shard.size, header_sha256=keep(shard.raw)) for shard in checkpoint.shards
    )
    assert all(hashlib.sha256(shard.raw).hexdigest() == shard.sha256 for shard in checkpoint.shards)
    index = checkpoint.index
    return SourceRecord(
        kind="hub" if checkpoint.repo else "local",
        repo=checkpoint.repo,
        revision=checkpoint.revision,
        shards=shards,
        index=None if index is None else IndexFile(name=index.name, sha256=keep(read_sidecar(checkpoint, index))),
        files={sidecar.name: keep(read_sidecar(checkpoint, sidecar)) for sidecar in checkpoint.sidecars},
        left_out=checkpoint.left_out,
    )
