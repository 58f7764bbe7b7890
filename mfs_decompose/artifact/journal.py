"""What an unfinished run has done: one checked line for each finished piece of work.

A line is canonical JSON with its number and a checksum of itself, written by one `write`.  A kill can tear the last
line and a power loss can lose or garble the last few; everything from the first bad line on is dropped, which costs
repeated work and never a wrong result.  So lines are not synced one by one: what a line speaks of is synced before.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mfs_decompose.artifact.atomic import fsync_dir, shortage_named
from mfs_decompose.artifact.canonical import canonical_bytes, load_canonical
from mfs_decompose.errors import ArtifactInvalid

JOURNAL_NAME: Final = "journal.jsonl"
_CHECK_DIGITS: Final = 16
_MAX_LINE: Final = 64_000_000


@dataclass(frozen=True, slots=True)
class JournalLine:
    """One finished piece of work: what kind, and what the writer says about it."""

    kind: str
    payload: Mapping[str, Any]


class Journal:
    """Append-only and thread-safe; the caller holds the lock of the folder."""

    def __init__(self, descriptor: int, path: Path, lines: list[JournalLine], end: int, dropped: int) -> None:
        self._descriptor = descriptor
        self._path = path
        self._lines = lines
        self._end = end
        self._mutex = threading.Lock()
        self.dropped_bytes = dropped
        """What was behind the last good line when the journal was opened."""

    @classmethod
    def open(cls, folder: Path) -> Journal:
        """Open the journal of a folder, new or with what an earlier run left; a bad tail is cut off."""
        path = folder / JOURNAL_NAME
        data = path.read_bytes() if path.exists() else b""
        lines, end = _replay(data)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        if end != len(data):
            os.ftruncate(descriptor, end)
        fsync_dir(folder)
        return cls(descriptor, path, lines, end, len(data) - end)

    def lines(self) -> tuple[JournalLine, ...]:
        """All good lines, oldest first: those of earlier runs and those appended since."""
        with self._mutex:
            return tuple(self._lines)

    def append(self, kind: str, payload: Mapping[str, Any]) -> None:
        """Add a line with one `write`, from any thread.

        Raises:
            ArtifactInvalid: the payload is not plain JSON.
            ResourceShortage: the disk is full; the journal is as it was.
        """
        with self._mutex:
            data = _encode(len(self._lines), kind, payload)
            with shortage_named(self._path, len(data)):
                count = os.pwrite(self._descriptor, data, self._end)
                if count != len(data):  # nearly full: the rest fails, and says with which error
                    try:
                        os.pwrite(self._descriptor, data[count:], self._end + count)
                    except OSError:
                        os.ftruncate(self._descriptor, self._end)
                        raise
            self._end += len(data)
            self._lines.append(JournalLine(kind, payload))

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _encode(number: int, kind: str, payload: Mapping[str, Any]) -> bytes:
    body = {"kind": kind, "number": number, "payload": payload}
    return canonical_bytes({"check": _check(body), **body})


def _check(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical_bytes(body)).hexdigest()[:_CHECK_DIGITS]


def _replay(data: bytes) -> tuple[list[JournalLine], int]:
    """The longest good prefix: its lines and its length in bytes."""
    lines: list[JournalLine] = []
    end = 0
    for text in data.splitlines(keepends=True):
        line = _decode(text, len(lines))
        if line is None:
            break
        lines.append(line)
        end += len(text)
    return lines, end


def _decode(text: bytes, number: int) -> JournalLine | None:
    try:
        document = load_canonical(text, "a journal line", _MAX_LINE)
    except ArtifactInvalid:
        return None
    if not isinstance(document, dict) or document.keys() != {"check", "kind", "number", "payload"}:
        return None
    check = document.pop("check")
    if check != _check(document) or document["number"] != number or not isinstance(document["payload"], dict):
        return None
    return JournalLine(document["kind"], document["payload"])
