"""Is the artifact what it was when it was written?

Three levels, each with all before it: `quick` reads the manifest and the headers, `checksums` every byte, `values`
decodes every tensor and compares it with what restore promised.  Damage is reported and never raised; what is raised is
what the caller did wrong, such as a base that is not there.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from mfs_decompose.artifact.files import hash_file
from mfs_decompose.artifact.layout import MANIFEST, RUN
from mfs_decompose.artifact.manifest import Manifest, load_manifest
from mfs_decompose.artifact.reader import Family, meant, read_manifest_bytes
from mfs_decompose.artifact.records import VariantRecord
from mfs_decompose.artifact.report import Level, Problem, VerifyReport
from mfs_decompose.artifact.structure import check_structure
from mfs_decompose.artifact.writer import list_files
from mfs_decompose.errors import (
    ArtifactInvalid,
    Interrupted,
    MfsError,
    ResourceShortage,
    SourceIncompatible,
    SourceNotFound,
    UsageError,
)
from mfs_decompose.events import NullSink, ProgressSink

_MAX_THREADS: Final = 8


def verify(
    path: str | Path,
    level: Level = "checksums",
    *,
    base: str | Path | None = None,
    variants: Sequence[str] | None = None,
    progress: ProgressSink | None = None,
) -> VerifyReport:
    """Check an artifact.

    Args:
        path: the artifact's folder.
        level: how deep.
        base: the folder of the base, for `values` of an artifact that refers to it.
        variants: ids whose values are decoded, all by default; the other levels always take the whole artifact.

    Raises:
        SourceNotFound: there is no such folder, or `values` needs a base that is not there.
        SourceIncompatible: the base given is another one.
        UsageError: an id in `variants` is not in the artifact.
    """
    sink = progress or NullSink()
    folder = Path(path)
    try:
        data = read_manifest_bytes(folder)
        manifest = load_manifest(data)
    except ArtifactInvalid as error:
        return VerifyReport(False, level, 0, (Problem(MANIFEST, None, error.message),))
    ids = _choose(manifest, variants)
    checked = len(data)
    problems = _check_files(folder, manifest)
    absent = {problem.file for problem in problems}
    problems += check_structure(folder, manifest, absent)
    if level != "quick":
        names = [name for name in manifest.files if name not in absent]
        found, hashed = _check_digests(folder, manifest, names, sink)
        problems, checked = problems + found, checked + hashed
    if level == "values":
        suspects = {problem.tensor for problem in problems if problem.file == MANIFEST}
        problems += _check_values(folder, base, ids, suspects, sink)
    ordered = tuple(sorted(set(problems), key=lambda problem: (problem.file, problem.tensor or "", problem.what)))
    return VerifyReport(not ordered, level, checked, ordered)


def _choose(manifest: Manifest, wanted: Sequence[str] | None) -> list[str]:
    known = [variant.id for variant in manifest.variants]
    for id in wanted or ():
        if id not in known:
            raise UsageError(
                f"expected variants of this artifact, found {id[:80]!r}{meant(id, known)}",
                hint=f"it has {', '.join(known)}",
            )
    return known if wanted is None else list(wanted)


def _check_files(folder: Path, manifest: Manifest) -> list[Problem]:
    """Every recorded file is there with its size, and nothing else is."""
    try:
        found = list_files(folder)
    except OSError as error:
        return [Problem(str(error.filename), None, f"cannot be listed: {error.strerror}")]
    problems = [
        Problem(name, None, "expected only recorded files, found one that no record names")
        for name in sorted(found.keys() - manifest.files.keys() - {MANIFEST, RUN})
    ]
    for name, entry in manifest.files.items():
        if name not in found:
            problems.append(Problem(name, None, f"expected a file of {entry.size} bytes, found none"))
        elif not found[name].is_file():
            problems.append(Problem(name, None, f"expected a file of {entry.size} bytes, found no regular file"))
        elif (size := found[name].stat().st_size) != entry.size:
            problems.append(Problem(name, None, f"expected {entry.size} bytes, found {size}"))
    return problems


def _check_digests(
    folder: Path, manifest: Manifest, names: Iterable[str], sink: ProgressSink
) -> tuple[list[Problem], int]:
    """Hash files side by side, largest first; the problems, and the bytes that were read."""
    stop = threading.Event()

    def advance(nbytes: int) -> None:
        if stop.is_set():
            raise Interrupted("verify was stopped")
        sink.advance(nbytes)

    def check(name: str) -> tuple[Problem | None, int]:
        expected = manifest.files[name].sha256
        try:
            record = hash_file(folder / name, advance)
        except OSError as error:
            return Problem(name, None, f"cannot be read: {error.strerror}"), 0
        if record.sha256 != expected:
            return Problem(name, None, f"expected sha256 {expected}, found {record.sha256}"), record.size
        return None, record.size

    ordered = sorted(names, key=lambda name: (-manifest.files[name].size, name))
    sink.start("checksums", sum(manifest.files[name].size for name in ordered))
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        futures = [pool.submit(check, name) for name in ordered]
        try:
            results = [future.result() for future in futures]
        except BaseException:  # also Ctrl-C: the threads must not read on for minutes
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    sink.finish()
    return [problem for problem, _ in results if problem], sum(size for _, size in results)


def _check_values(
    folder: Path, base: str | Path | None, ids: Sequence[str], suspects: Set[str | None], sink: ProgressSink
) -> Iterator[Problem]:
    """Decode every tensor of the variants and compare it with the digest of what restore writes.

    Tensors in `suspects` are left alone: their records were found wrong, and a shape that lies is not acted upon.
    """
    try:
        family = Family.open(folder, base=base)
    except ArtifactInvalid:
        return  # a file is missing or cut off, which is reported already
    with family:
        chosen = [variant for variant in family.manifest.variants if variant.id in ids]
        sink.start("values", sum(variant.checkpoint_bytes for variant in chosen))
        for variant in chosen:
            try:
                family.variant(variant.id)
            except ArtifactInvalid:
                continue  # a codec tree is wrong, which is reported already
            for name in sorted(variant.tensors.keys() - suspects):
                what = _compare_value(family, variant, name, sink)
                if what is not None:
                    yield Problem(_place(variant, name), name, f"variant {variant.id!r}: {what}")
        sink.finish()


def _compare_value(family: Family, variant: VariantRecord, name: str, sink: ProgressSink) -> str | None:
    from mfs_decompose.artifact.values import restored_sha256

    try:
        found = restored_sha256(family, variant.id, name, sink)
    except (SourceNotFound, SourceIncompatible, ResourceShortage):
        raise  # the caller's base or machine, not the artifact
    except Exception as error:  # whatever a decoder makes of damaged bytes is a finding, not a crash
        return f"cannot be decoded: {error}" if isinstance(error, MfsError) else f"cannot be decoded: {error!r}"
    expected = variant.tensors[name].restored_sha256
    return None if found == expected else f"expected restored sha256 {expected}, found {found}"


def _place(variant: VariantRecord, name: str) -> str:
    record = variant.tensors[name]
    if variant.adapter is not None and record.tree.get("codec") == "adapter":
        return variant.shards[0]  # of one or, rarely, several
    return variant.shards[record.blob.shard] if record.blob else "base"
