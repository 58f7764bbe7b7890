"""Writes that are whole or absent: a temporary file, fsync, rename, fsync of the folder.

A name without the temporary prefix is complete and on disk.  What a kill leaves behind begins with `.tmp-` and is
removed by the next run, which holds the lock.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from mfs_decompose.artifact.layout import TEMPORARY_PREFIX
from mfs_decompose.errors import OutputBusy, ResourceShortage
from mfs_decompose.units import format_bytes

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_NO_SYNC: Final = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF, errno.EACCES})
_counter = itertools.count()


class Output:
    """An open temporary file; `write` takes any bytes-like object and writes all of it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.written = 0

    def write(self, data: bytes | memoryview) -> None:
        """Write every byte of `data`, which must be contiguous."""
        rest = memoryview(data).cast("B")
        while len(rest):
            count = os.write(self._descriptor, rest)
            self.written += count
            rest = rest[count:]


@contextlib.contextmanager
def atomic_output(path: Path, size: int) -> Iterator[Output]:
    """Give `path` its content all at once, when the block ends without an exception.

    Args:
        path: the final name; what is there is replaced.
        size: bytes that will be written, for the message when the disk is full.

    Raises:
        ResourceShortage: the disk, the quota or the file-size limit is full; names the path and the bytes.
    """
    temporary = path.parent / f"{TEMPORARY_PREFIX}{os.getpid()}-{next(_counter)}"
    with shortage_named(path, size):
        # 0o666 and not tempfile's 0o600: the umask decides who may read an artifact, as for any other file.
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            try:
                yield Output(descriptor)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            temporary.replace(path)
        except BaseException:  # also Ctrl-C: a half-written file must not survive under any name
            temporary.unlink(missing_ok=True)
            raise
        fsync_dir(path.parent)


def write_file(path: Path, data: bytes) -> None:
    """Write a small file atomically.

    Raises:
        ResourceShortage: the disk is full.
    """
    with atomic_output(path, len(data)) as output:
        output.write(data)


def require_writable(folder: Path) -> None:
    """Refuse a place where nothing can be made: the nearest part of the path that exists decides.

    Raises:
        OutputBusy: it is no folder, or may not be written to.
    """
    place = folder.absolute()
    while not os.path.lexists(place):
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise OutputBusy(f"{place} is not a folder that can be written to", hint="Choose another --out.")


def fsync_dir(folder: Path) -> None:
    """Make renames and new names in `folder` durable, where the file system can."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:  # some network file systems have no fsync for folders; the data is synced
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def shortage_named(path: Path, size: int) -> Iterator[None]:
    """Turn a full disk into a `ResourceShortage` that names the path and the bytes."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise ResourceShortage(
            f"expected room for {path} ({format_bytes(size)}), found {_free(path)}",
            hint="free some space or choose another --out, then run the same command again",
        ) from error


def publish_dir(partial: Path, out: Path) -> None:
    """Give a finished folder its final name.

    Raises:
        OutputBusy: something has the name already.
    """
    if os.path.lexists(out):
        raise OutputBusy(
            f"expected no {out} yet, found one that appeared during the run", hint="move it away and run again"
        )
    fsync_dir(partial)
    try:
        partial.rename(out)
    except (FileExistsError, NotADirectoryError, IsADirectoryError):
        raise OutputBusy(f"expected no {out} yet, found one that appeared during the run") from None
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        raise OutputBusy(f"expected no {out} yet, found one that appeared during the run") from None
    fsync_dir(out.parent)


def replace_dir(partial: Path, out: Path) -> None:
    """Put a finished folder in the place of `out`, which is deleted once the new one has its name.

    Two renames, so a crash between them leaves `out` absent and the old folder whole under `set_aside_name(out)`;
    `recover_replaced` puts it back.  At no moment is either folder incomplete under the name `out`.
    """
    recover_replaced(out)
    if not os.path.lexists(out):
        publish_dir(partial, out)
        return
    aside = set_aside_name(out)
    fsync_dir(partial)
    out.rename(aside)
    try:
        fsync_dir(out.parent)
        partial.rename(out)
    except BaseException:
        if not os.path.lexists(out):
            aside.rename(out)
        raise
    fsync_dir(out.parent)
    _discard(out)


def recover_replaced(out: Path) -> bool:
    """Finish or undo a `replace_dir` that a crash interrupted; True when the old folder was put back."""
    aside = set_aside_name(out)
    if os.path.lexists(out) or not os.path.lexists(aside):  # both renames happened; at most the deletion is left
        _discard(out)
        return False
    aside.rename(out)
    fsync_dir(out.parent)
    return True


def set_aside_name(out: Path) -> Path:
    """Where `replace_dir` keeps the old folder between its two renames."""
    return out.with_name(f".{out.name}.mfs-replaced")


def remove_temporaries(folder: Path) -> int:
    """Delete what killed runs left in `folder` and its subfolders; the caller holds the lock.  Returns the count."""
    count = 0
    for path in sorted(folder.rglob(f"{TEMPORARY_PREFIX}*")):
        if path.is_file() and not path.is_symlink():
            path.unlink()
            count += 1
    return count


def _discard(out: Path) -> None:
    """Delete the folder that was set aside, under a third name: half deleted, it must never be put back."""
    aside, doomed = set_aside_name(out), out.with_name(f".{out.name}.mfs-deleted")
    for path in (doomed, aside):
        if os.path.lexists(path):
            if path == aside:
                path = path.rename(doomed)
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def _free(path: Path) -> str:
    try:
        return f"{format_bytes(shutil.disk_usage(path.parent).free)} free"
    except OSError:
        return "a full disk"
