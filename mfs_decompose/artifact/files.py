"""Whole files: copied, linked and hashed in pieces, so memory does not grow with the file."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final

from mfs_decompose.artifact.atomic import atomic_output, fsync_dir
from mfs_decompose.errors import SourceIncompatible, SourceNotFound, UsageError
from mfs_decompose.events import NullSink, ProgressSink

CHUNK: Final = 8_000_000


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file of an artifact: its path inside the artifact, its size in bytes and the sha256 of its content."""

    path: str
    size: int
    sha256: str


def open_regular(path: Path) -> int:
    """A read-only descriptor of a regular file, for the caller to close.

    Symbolic links are followed: in the cache of the Hub every file is one, and digests decide what is believed.

    Raises:
        OSError: it cannot be opened, or is a folder, a FIFO or a device (which would block a plain `open`).
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return descriptor


def read_small_file(path: Path, limit: int) -> bytes:
    """Read a file of at most `limit` bytes; of a longer one, one byte more, so that the caller can tell.

    Raises:
        OSError: it cannot be read or is no regular file.
    """
    descriptor = open_regular(path)
    with open(descriptor, "rb") as stream:
        return stream.read(limit + 1)


def hash_file(path: Path, advance: Callable[[int], None]) -> FileRecord:
    """Size and sha256 of a file, under its last name; `advance` gets the bytes of each piece.

    Raises:
        OSError: it cannot be read or is no regular file.
    """
    digest, size = sha256(), 0
    descriptor = open_regular(path)
    try:
        while piece := os.read(descriptor, CHUNK):
            digest.update(piece)
            size += len(piece)
            advance(len(piece))
    finally:
        os.close(descriptor)
    return FileRecord(path.name, size, digest.hexdigest())


def copy_file(source: Path, target: Path, progress: ProgressSink | None = None) -> FileRecord:
    """Copy a file atomically and hash it on the way, in pieces of 8 MB.

    Raises:
        SourceNotFound: the source cannot be read.
        SourceIncompatible: the source changed during the copy.
        ResourceShortage: the disk is full; nothing is left under `target`.
    """
    sink, digest = progress or NullSink(), sha256()
    try:
        descriptor = open_regular(source)
    except OSError as error:
        raise _unreadable(source, error) from None
    try:
        before = os.fstat(descriptor)
        with atomic_output(target, before.st_size) as output:
            for piece in _pieces(source, descriptor):
                output.write(piece)
                digest.update(piece)
                sink.advance(len(piece))
            if _state(os.fstat(descriptor)) != _state(before) or output.written != before.st_size:
                raise SourceIncompatible(f"{source} changed while it was copied", hint="run again once it is whole")
    finally:
        os.close(descriptor)
    return FileRecord(target.name, before.st_size, digest.hexdigest())


def hardlink_file(source: Path, target: Path, progress: ProgressSink | None = None) -> FileRecord:
    """Give a source file a second name inside the artifact, and hash it: no byte is copied.

    What changes the source in place changes the artifact too; `verify` finds that, nothing prevents it.

    Raises:
        SourceNotFound: the source cannot be read.
        SourceIncompatible: the source changed while it was hashed.
        UsageError: the two places are not on one file system, or it has no hard links.
    """
    sink = progress or NullSink()
    real = source.resolve()  # a link to a symbolic link of the Hub's cache would not survive the cache
    try:
        before = real.stat()
        record = hash_file(real, sink.advance)
        after = real.stat()
    except OSError as error:
        raise _unreadable(source, error) from None
    if _state(before) != _state(after) or record.size != before.st_size:
        raise SourceIncompatible(f"{source} changed while it was read", hint="run again once it is whole")
    try:
        target.unlink(missing_ok=True)
        os.link(real, target)
    except OSError as error:
        raise UsageError(
            f"expected to hard-link {source} into {target.parent}, found: {error.strerror}",
            hint="use --base-store copy",
        ) from None
    fsync_dir(target.parent)
    return FileRecord(target.name, record.size, record.sha256)


def _pieces(source: Path, descriptor: int) -> Iterator[bytes]:
    while True:
        try:
            piece = os.read(descriptor, CHUNK)
        except OSError as error:
            raise _unreadable(source, error) from None
        if not piece:
            return
        yield piece


def _unreadable(source: Path, error: OSError) -> SourceNotFound:
    return SourceNotFound(f"cannot read {source}: {error.strerror}")


def _state(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns
