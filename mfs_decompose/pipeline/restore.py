"""Give checkpoints back: an artifact into folders that transformers loads.

A restored folder holds the variant's own config, tokenizer, generation config and chat template byte for byte, and its
weights in the files and the order they came in. Every tensor is held against the digest recorded when the artifact was
written, before the folder gets its name.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mfs_decompose.artifact.atomic import fsync_dir, publish_dir, require_writable, write_file
from mfs_decompose.artifact.files import hash_file
from mfs_decompose.artifact.layout import content_name
from mfs_decompose.artifact.reader import Family
from mfs_decompose.artifact.shard import write_shard
from mfs_decompose.errors import ArtifactInvalid, OutputBusy, ResourceShortage
from mfs_decompose.events import NullSink, ProgressSink
from mfs_decompose.pipeline.adapter_job import plan_adapter
from mfs_decompose.pipeline.checkpoint_job import BASE, CheckpointJob, RestoreOptions, plan_checkpoint
from mfs_decompose.pipeline.scheduler import one_torch_thread
from mfs_decompose.provenance import free_disk
from mfs_decompose.units import format_bytes

if TYPE_CHECKING:
    pass

__all__ = ["RestoreOptions", "Restored", "restore"]


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
    base: str | Path | None = None,
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
        plan = plan_adapter if options.form == "adapter" else plan_checkpoint
        jobs = [plan(family, id, options) for id in wanted]
        folders = {job.id: out if len(wanted) == 1 and not nested else out / job.id for job in jobs}
        for folder in folders.values():
            _check_free(folder, artifact)
        _check_disk(out, sum(job.nbytes + _side_bytes(family, job) for job in jobs))
        _check_shards(family, [job.id for job in jobs if not job.digests], sink)
        sink.start("restoring", sum(job.data_bytes for job in jobs))
        done = tuple(_write(family, job, folders[job.id], sink) for job in jobs)
        sink.finish()
    return done


def _write(family: Family, job: CheckpointJob, folder: Path, progress: ProgressSink) -> Restored:
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


def _checked(job: CheckpointJob, names: list[str]) -> Iterator[memoryview]:
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


def _check_shards(family: Family, ids: list[str], progress: ProgressSink) -> None:
    """Where no digest of a tensor will be compared, hold the files it is decoded from against the file table."""
    if not ids:
        return
    names = {name for id in ids if id != BASE for name in family.variant(id).shards}
    base = family.manifest.base
    if base.store == "copy":  # any other base is proven tensor by tensor as it is read
        names.update(base.shards)
    progress.start("checking shards", sum(family.manifest.files[name].size for name in names))
    for name in sorted(names):
        if hash_file(family.path / name, progress.advance).sha256 != family.manifest.files[name].sha256:
            raise ArtifactInvalid(
                f"{family.path / name} is damaged: it does not have the digest it was written with",
                hint="Get the artifact again from where it came from.",
            )
    progress.finish()


def _check_free(folder: Path, artifact: Path) -> None:
    if folder.resolve().is_relative_to(artifact.resolve()):
        raise OutputBusy(f"the output {folder} lies inside the artifact", hint="Choose another --out.")
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise OutputBusy(
            f"expected {folder} to be absent or empty, found something there", hint="Choose another --out."
        )
    require_writable(folder.parent)


def _side_bytes(family: Family, job: CheckpointJob) -> int:
    """Bytes of config, tokenizer and the other files beside the weights, of the base and the variant together."""
    base = family.manifest.base.source
    sources = ([base] if base is not None else []) + ([family.variant(job.id).source] if job.id != BASE else [])
    digests = {digest for source in sources for digest in source.files.values()}
    return sum(family.manifest.files[content_name(digest)].size for digest in digests)


def _check_disk(out: Path, needed: int) -> None:
    free = free_disk(out)
    if needed > free:
        raise ResourceShortage(
            f"restoring needs {format_bytes(needed)} of disk, and {format_bytes(free)} is free",
            hint="Free some space, or restore one variant at a time.",
        )
