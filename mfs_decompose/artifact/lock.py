"""One run at a time: an exclusive lock on a small file that names its holder.

`flock` belongs to the open file, so it dies with the process and no lock is ever stale.  Where the file system has
no `flock`, the file itself is the lock, created exclusively, and a dead holder on the same host is taken over.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from mfs_decompose.errors import OutputBusy

_NO_FLOCK: Final = frozenset({errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL})
_ATTEMPTS: Final = 100


@contextlib.contextmanager
def exclusive_lock(path: Path, guarded: Path) -> Iterator[None]:
    """Hold the lock file `path`, which stands for the output `guarded`, inside the block; the file is gone afterwards.

    Raises:
        OutputBusy: another run holds it; names its process.
    """
    descriptor = _acquire(path, guarded)
    try:
        yield
    finally:
        # Unlinked while still held: whoever opened the old file meanwhile sees that the name has moved on, and retries.
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _acquire(path: Path, guarded: Path) -> int:
    for _ in range(_ATTEMPTS):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 4096, 0)
            os.close(descriptor)
            raise _busy(path, guarded, holder) from None
        except OSError as error:
            os.close(descriptor)
            if error.errno not in _NO_FLOCK:
                raise
            return _acquire_without_flock(path, guarded)
        if _is_named(descriptor, path):
            return _sign(descriptor)
        os.close(descriptor)  # its holder unlinked it between our open and our lock
    raise OutputBusy(f"expected to lock {path}, found other runs taking it again and again", hint="run again later")


def _acquire_without_flock(path: Path, guarded: Path) -> int:
    for _ in range(_ATTEMPTS):
        try:
            return _sign(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        except FileExistsError:
            holder = path.read_bytes() if path.exists() else b""
            if _may_live(holder):
                raise _busy(path, guarded, holder) from None
            path.unlink(missing_ok=True)
    raise OutputBusy(f"expected to lock {path}, found other runs taking it again and again", hint="run again later")


def _sign(descriptor: int) -> int:
    text = json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode()
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, text, 0)
    return descriptor


def _is_named(descriptor: int, path: Path) -> bool:
    try:
        named = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(descriptor))


def _holder(text: bytes) -> tuple[str | None, int | None]:
    try:
        document = json.loads(text)
        return str(document["host"]), int(document["pid"])
    except (ValueError, TypeError, KeyError):
        return None, None


def _may_live(text: bytes) -> bool:
    """Whether the signer of a lock file may still run.  An empty file is one that is being signed, or a torn one."""
    host, pid = _holder(text)
    if pid is None:
        return len(text) > 0
    if host != socket.gethostname():
        return True  # another machine cannot be asked
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _busy(path: Path, guarded: Path, text: bytes) -> OutputBusy:
    host, pid = _holder(text)
    who = f"process {pid} on {host}" if pid is not None else "another run"
    return OutputBusy(
        f"expected {guarded} to be free, found {who} working on it",
        hint=f"wait for it to end; if no such process runs, delete {path}",
    )
