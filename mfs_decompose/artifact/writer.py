"""The last steps of writing an artifact: content-addressed files, the file table, the model card, the manifest.

Shards are written before by whoever has their bytes (`shard.py`).  The manifest is written last: a folder without one
is unfinished, whatever else it holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from mfs_decompose.artifact.atomic import fsync_dir, write_file
from mfs_decompose.artifact.canonical import canonical_bytes
from mfs_decompose.artifact.card import render_card
from mfs_decompose.artifact.files import FileRecord, hash_file, read_small_file
from mfs_decompose.artifact.layout import CARD, CONTENT_FOLDER, MANIFEST, RUN, content_name
from mfs_decompose.artifact.licences import MAX_SOURCE_BYTES, read_licences
from mfs_decompose.artifact.manifest import Manifest, manifest_bytes, seal
from mfs_decompose.artifact.records import (
    BaseRecord,
    CoverageRecord,
    FileEntry,
    PlatformRecord,
    SourceRecord,
    ToolRecord,
    VariantRecord,
)
from mfs_decompose.artifact.shared_delta import SharedRecord
from mfs_decompose.artifact.target_record import TargetRecord
from mfs_decompose.errors import ArtifactInvalid


def store_content(folder: Path, data: bytes) -> FileRecord:
    """Put bytes into `files/` under their sha256, once: what is there already is kept if it is sound."""
    digest = sha256(data).hexdigest()
    record = FileRecord(content_name(digest), len(data), digest)
    path = folder / record.path
    if not (path.is_file() and hash_file(path, lambda _: None).sha256 == digest):
        if not path.parent.is_dir():
            path.parent.mkdir()
            fsync_dir(folder)
        write_file(path, data)
    return record


def write_run_record(folder: Path, document: Mapping[str, Any]) -> None:
    """Write run.json: when, argv, timings, local paths.  Outside of digest and verify; replaced as a whole.

    Raises:
        ArtifactInvalid: the document is not plain JSON.
        ResourceShortage: the disk is full.
    """
    write_file(folder / RUN, canonical_bytes(document))


def finish_artifact(
    folder: Path,
    *,
    tool: ToolRecord,
    platform: PlatformRecord,
    recipe: Mapping[str, Any],
    base: BaseRecord,
    variants: Sequence[VariantRecord],
    coverage: CoverageRecord,
    files: Iterable[FileRecord],
    shared: SharedRecord | None = None,
    target: TargetRecord | None = None,
) -> Manifest:
    """Write the model card and, last, the manifest; the folder is then an artifact.

    Args:
        folder: holds every file of `files`, and besides them at most run.json and an earlier card.
        variants: in any order; written by sorted id, which is also how their shards are numbered.
        shared: what the variants have in common, if that is stored.
        target: the drift that variants were cut to hold, if they were.
        files: records of all shards and of all content stored for the sources; double ones count once.

    Raises:
        ArtifactInvalid: the records contradict each other, or the folder holds other files than `files`.
        ResourceShortage: the disk is full; no manifest is left.
    """
    ordered = tuple(sorted(variants, key=lambda variant: variant.id))
    licences = read_licences(base, ordered, lambda digest: _read_content(folder, digest))
    text = render_card(
        base,
        ordered,
        recipe=recipe,
        tool=tool,
        platform=platform,
        licences=licences,
        shared=shared,
        target=target,
    )
    card = text.encode("utf-8")
    write_file(folder / CARD, card)
    records = [*files, FileRecord(CARD, len(card), sha256(card).hexdigest())]
    table = {record.path: FileEntry(size=record.size, sha256=record.sha256) for record in records}
    manifest = seal(
        Manifest(
            tool=tool,
            platform=platform,
            recipe=dict(recipe),
            base=base,
            variants=ordered,
            files=dict(sorted(table.items())),
            coverage=coverage,
            shared=shared,
            target=target,
        )
    )
    _check_folder(folder, table)
    write_file(folder / MANIFEST, manifest_bytes(manifest))
    return manifest


def source_contents(source: SourceRecord) -> list[str]:
    """Paths inside the artifact of everything a source needs there, sorted."""
    return sorted(content_name(digest) for digest in source.contents())


def list_files(folder: Path) -> dict[str, Path]:
    """Everything in an artifact's folder that is not a folder, by its path inside; folders only if unexpected."""
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if path.name == CONTENT_FOLDER and path.is_dir():
            found.update({f"{CONTENT_FOLDER}/{inner.name}": inner for inner in sorted(path.iterdir())})
        else:
            found[path.name] = path
    return found


def _read_content(folder: Path, digest: str) -> bytes:
    """The beginning of a side file that was stored before."""
    try:
        return read_small_file(folder / content_name(digest), MAX_SOURCE_BYTES)
    except OSError as error:
        raise ArtifactInvalid(
            f"expected exactly the recorded files in {folder}, found no whole {content_name(digest)}"
        ) from error


def _check_folder(folder: Path, table: Mapping[str, FileEntry]) -> None:
    found = list_files(folder)
    strangers = sorted(found.keys() - table.keys() - {MANIFEST, RUN})
    absent = sorted(name for name, entry in table.items() if name not in found or _size(found[name]) != entry.size)
    if strangers or absent:
        what = f"{strangers[0]}, which belongs to no record" if strangers else f"no whole {absent[0]}"
        raise ArtifactInvalid(f"expected exactly the recorded files in {folder}, found {what}")


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1
