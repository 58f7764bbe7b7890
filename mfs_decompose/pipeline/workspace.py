"""Where an unfinished artifact lives: `OUT.partial`, with the artifact, a journal and scratch files, under one lock.

Everything that is done is a line in the journal. A killed run leaves the folder; the same command goes on from it, once
it has made sure that it was started from the same things.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mfs_decompose.artifact.atomic import publish_dir, recover_replaced, remove_temporaries, replace_dir
from mfs_decompose.artifact.files import FileRecord
from mfs_decompose.artifact.journal import JOURNAL_NAME, Journal
from mfs_decompose.artifact.layout import MANIFEST, RUN
from mfs_decompose.artifact.lock import exclusive_lock
from mfs_decompose.errors import GateFailed, OutputBusy, ResumeRefused, UsageError
from mfs_decompose.plan.fingerprint import Fingerprint, changed_facets

_ARTIFACT = "artifact"
_SCRATCH = "scratch"


@dataclass
class Done:
    """What the journal says is done: files by name, units of either pass by number."""

    files: dict[str, FileRecord] = field(default_factory=dict)
    base_digests: dict[str, str] = field(default_factory=dict)
    base_units: set[int] = field(default_factory=set)
    scratch_digests: dict[int, str] = field(default_factory=dict)
    surveyed: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    fit_digests: dict[int, str] = field(default_factory=dict)
    encoded: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    steps: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    step_digests: dict[tuple[str, int], str] = field(default_factory=dict)

    @property
    def units(self) -> int:
        """Pieces of work that need not be done again."""
        return len(self.base_units) + len(self.surveyed) + len(self.encoded) + len(self.steps)

    @property
    def nothing(self) -> bool:
        """Whether a run that stops here has nothing to go on from."""
        return not self.units and not self.files


class Workspace:
    """The folder of one run; made by `open_workspace`."""

    def __init__(self, root: Path, journal: Journal, done: Done) -> None:
        self.root = root
        self.folder = root / _ARTIFACT
        """What becomes the artifact: only files under their final names."""
        self.journal = journal
        self.done = done

    def fits_path(self, unit: int) -> Path:
        """The scratch file with the fits of one unit."""
        return self.root / _SCRATCH / f"p1-{unit:06d}.bin"

    def base_path(self, unit: int) -> Path:
        """The scratch file with tensors of a base that is a mean."""
        return self.root / _SCRATCH / f"b-{unit:06d}.bin"

    def blobs_path(self, unit: int) -> Path:
        """The scratch file with the encoded bytes of one unit."""
        return self.root / _SCRATCH / f"p2-{unit:06d}.bin"

    def step_path(self, stage: str, unit: int) -> Path:
        """The scratch file of a unit of any other stage."""
        return self.root / _SCRATCH / f"{stage}-{unit:06d}.bin"

    def record_step(self, stage: str, unit: int, found: dict[str, Any]) -> None:
        """A unit of any other stage is done; what it wrote to `step_path`, if anything, is whole."""
        payload: dict[str, Any] = {"stage": stage, "unit": unit, "found": found}
        payload["sha256"] = _digest(self.step_path(stage, unit))
        self.journal.append("step", payload)
        self.done.steps[stage, unit] = found
        self.done.step_digests[stage, unit] = payload["sha256"]

    def has_step(self, stage: str, unit: int) -> bool:
        """Whether a unit that was recorded still has its scratch, whole."""
        return _digest(self.step_path(stage, unit)) == self.done.step_digests[stage, unit]

    def record_file(self, record: FileRecord) -> None:
        """A file under its final name is whole."""
        self.journal.append("file", {"path": record.path, "size": record.size, "sha256": record.sha256})
        self.done.files[record.path] = record

    def record_base(self, unit: int, digests: Mapping[str, str]) -> None:
        """Digests of some tensors of the base as stored; a mean's bytes lie in `base_path`."""
        payload: dict[str, Any] = {"unit": unit, "digests": dict(digests), "sha256": _digest(self.base_path(unit))}
        self.journal.append("base", payload)
        self.done.base_units.add(unit)
        self.done.base_digests.update(digests)
        self.done.scratch_digests[unit] = payload["sha256"]

    def has_base(self, unit: int) -> bool:
        """Whether the scratch with tensors of a mean base is there, whole."""
        return _digest(self.base_path(unit)) == self.done.scratch_digests[unit]

    def record_survey(self, unit: int, items: list[dict[str, Any]]) -> None:
        """Pass 1 of a unit is done."""
        digest = _digest(self.fits_path(unit))
        self.journal.append("survey", {"unit": unit, "items": items, "sha256": digest})
        self.done.surveyed[unit] = items
        self.done.fit_digests[unit] = digest

    def has_fits(self, unit: int) -> bool:
        """Whether the fits of a surveyed unit are there, whole."""
        return _digest(self.fits_path(unit)) == self.done.fit_digests[unit]

    def record_encoding(self, unit: int, items: list[dict[str, Any]]) -> None:
        """Pass 2 of a unit is done; its fits are no longer needed."""
        payload = {"unit": unit, "items": items, "sha256": _digest(self.blobs_path(unit))}
        self.journal.append("encode", payload)
        self.done.encoded[unit] = items
        self.fits_path(unit).unlink(missing_ok=True)

    def publish(self, out: Path, overwrite: bool) -> None:
        """Give the artifact its final name, and remove what only the run needed."""
        self.journal.close()
        _publish(self.root, out, overwrite)


def partial_folder(out: Path) -> Path:
    """Where the unfinished artifact of `out` lies."""
    return out.with_name(f"{out.name}.partial")


def scratch_folder(out: Path) -> Path:
    """Where a run keeps what only it needs; gone with the run."""
    return partial_folder(out if out.name not in ("", "..") else out.resolve()) / _SCRATCH


@contextmanager
def open_workspace(out: Path, fingerprint: Fingerprint, resume: bool) -> Iterator[Workspace]:
    """The workspace of `out`, new or with what an earlier run left in it.

    What a failed run has done stays for the next one, unless it is nothing, or the same command could never end well.

    Raises:
        OutputBusy: another run works on it.
        ResumeRefused: the earlier run was started from something else.
    """
    root = partial_folder(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(_lock_file(out), out):
        recover_replaced(out)
        _require_ours(root)
        if root.exists() and not resume:
            shutil.rmtree(root)
        for name in (_ARTIFACT, _SCRATCH):
            (root / name).mkdir(parents=True, exist_ok=True)
        remove_temporaries(root)
        with Journal.open(root) as journal:
            done = _replay(root, journal, fingerprint)
            try:
                yield Workspace(root, journal, done)
            except BaseException as error:
                if done.nothing or isinstance(error, UsageError | GateFailed):
                    shutil.rmtree(root, ignore_errors=True)
                raise


def publish_finished(out: Path, overwrite: bool) -> None:
    """Where a run was killed between its last file, run.json, and its last step, do what was left to do."""
    root, lock = partial_folder(out), _lock_file(out)
    if root.exists() or lock.exists():
        with exclusive_lock(lock, out):
            _require_ours(root)
            if (root / _ARTIFACT / MANIFEST).exists() and (root / _ARTIFACT / RUN).exists():
                _publish(root, out, overwrite)
            elif root.exists() and not (root / _ARTIFACT).exists():
                shutil.rmtree(root)  # published already; only the sweeping was left


def _replay(root: Path, journal: Journal, fingerprint: Fingerprint) -> Done:
    done = Done()
    scratch = root / _SCRATCH
    lines = journal.lines()
    if not lines:
        journal.append("begin", dict(fingerprint))
        return done
    changed = changed_facets(lines[0].payload, fingerprint)
    if changed:
        raise ResumeRefused(
            f"the unfinished run in {root} was started from something else; what differs: {', '.join(changed)}",
            hint="Run the earlier command again to finish it, or add --no-resume to start over.",
        )
    for line in lines[1:]:
        payload = line.payload
        if line.kind == "file":
            record = FileRecord(payload["path"], payload["size"], payload["sha256"])
            if _size(root / _ARTIFACT / record.path) == record.size:
                done.files[record.path] = record
        elif line.kind == "base":
            # Scratch that is gone after its shard was written is no loss; the shard's line stands in the journal.
            done.base_digests.update(payload["digests"])
            done.base_units.add(payload["unit"])
            done.scratch_digests[payload["unit"]] = payload["sha256"]
        elif line.kind == "step":
            done.steps[payload["stage"], payload["unit"]] = payload["found"]
            done.step_digests[payload["stage"], payload["unit"]] = payload["sha256"]
        elif line.kind == "survey":
            done.surveyed[payload["unit"]] = payload["items"]
            done.fit_digests[payload["unit"]] = payload["sha256"]
        elif line.kind == "encode" and _digest(scratch / f"p2-{payload['unit']:06d}.bin") == payload["sha256"]:
            done.encoded[payload["unit"]] = payload["items"]
    return done


def _require_ours(root: Path) -> None:
    """Refuse a folder that bears the name of an unfinished run and is none: somebody's own files would be lost.

    Raises:
        OutputBusy: naming it.
    """
    if not os.path.lexists(root):
        return
    if root.is_symlink() or not root.is_dir():
        raise OutputBusy(
            f"{root} is in the way: unfinished work would go there", hint="Move it, or choose another --out."
        )
    names = {path.name for path in root.iterdir()}
    if not names <= {_ARTIFACT, _SCRATCH, JOURNAL_NAME}:
        raise OutputBusy(
            f"{root} is in the way: unfinished work would go there, and it holds other files",
            hint="Move it, or choose another --out.",
        )


def _lock_file(out: Path) -> Path:
    return out.with_name(f"{out.name}.lock")


def _publish(root: Path, out: Path, overwrite: bool) -> None:
    if not out.is_symlink() and out.is_dir() and not any(out.iterdir()):
        out.rmdir()  # an empty folder is as good as none
    (replace_dir if overwrite else publish_dir)(root / _ARTIFACT, out)
    shutil.rmtree(root)


def _digest(path: Path) -> str:
    """The digest of a scratch file, empty where there is none: after a power cut the journal may know more."""
    if not path.exists():
        return ""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1
