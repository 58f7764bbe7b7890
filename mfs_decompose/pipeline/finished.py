"""Whether a finished artifact is what the same command would make."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from mfs_decompose.artifact.reader import Family, read_run_record
from mfs_decompose.artifact.records import SourceRecord, source_digests
from mfs_decompose.events import ProgressSink
from mfs_decompose.pipeline.prepare import Prepared
from mfs_decompose.pipeline.request import DecomposeRequest
from mfs_decompose.plan.weigh import PLAIN
from mfs_decompose.source.checkpoint import Checkpoint, TensorReader, read_sidecar


def matches_finished(
    request: DecomposeRequest,
    prepared: Prepared,
    platform: Mapping[str, str],
    tool: Mapping[str, str],
    progress: ProgressSink,
) -> bool:
    """Compare recipe, versions and sources with the artifact's manifest.

    Source files whose size and time are those of the run are believed; the tensors of others are digested.
    """
    with Family.open(request.out) as family:
        manifest = family.manifest
    run = read_run_record(request.out)
    stats = run.get("stats") if run.get("digest") == manifest.digest else None
    plan = prepared.plan
    same = (
        manifest.recipe == plan.recipe.canonical()
        and manifest.base.mode in ((plan.base_mode, PLAIN[plan.base_mode]) if plan.base_auto else (plan.base_mode,))
        and manifest.base.store == plan.base_store
        and (None if manifest.target is None else manifest.target.measured_on) == _measured_on(request)
        and manifest.platform.model_dump() == dict(platform)
        and manifest.tool.model_dump() == dict(tool)
        and [variant.id for variant in manifest.variants] == [variant.id for variant in prepared.variants]
    )
    if not same:
        return False
    pairs: list[tuple[Checkpoint, SourceRecord, dict[str, str]]] = [
        (checkpoint, record.source, source_digests(record))
        for checkpoint, record in zip(prepared.variants, manifest.variants, strict=True)
    ]
    if prepared.base is not None and manifest.base.source is not None:
        digests = {name: tensor.sha256 for name, tensor in manifest.base.tensors.items()}
        pairs.append((prepared.base, manifest.base.source, digests))
    return all(_same_source(*pair, stats, progress) for pair in pairs)


def _measured_on(request: DecomposeRequest) -> dict[str, Any] | None:
    if request.recipe.objective.target is None or request.gauges is None:
        return None
    return dict(request.gauges.identity)


def _same_source(
    checkpoint: Checkpoint, record: SourceRecord, digests: Mapping[str, str], stats: object, progress: ProgressSink
) -> bool:
    headers = [(shard.file, shard.size, shard.sha256) for shard in checkpoint.shards]
    if headers != [(shard.file, shard.size, shard.header_sha256) for shard in record.shards]:
        return False
    files = {sidecar.name: _digest(read_sidecar(checkpoint, sidecar)) for sidecar in checkpoint.sidecars}
    index = None if checkpoint.index is None else _digest(read_sidecar(checkpoint, checkpoint.index))
    if files != record.files or index != (None if record.index is None else record.index.sha256):
        return False
    known = stats.get(checkpoint.id) if isinstance(stats, dict) else None
    if known == [[shard.file, shard.size, shard.mtime_ns] for shard in checkpoint.shards]:
        return True
    progress.start(f"comparing {checkpoint.id} with the artifact", checkpoint.tensor_bytes)
    with TensorReader(checkpoint) as reader:
        for name, expected in digests.items():
            if _digest(reader.raw(name).numpy().data) != expected:
                return False
            progress.advance(checkpoint.tensors[name].nbytes)
    progress.finish()
    return True


def _digest(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()
