"""The log file of `--log-file`: what was said, stages, and tracebacks of bugs, each line with its time in UTC.

    2026-11-29T17:11:14.123Z stage: pass 1: begun, 54.2 GB

Lines are appended, so that the runs of a resumed command stand in one file. Access tokens never get in, and control
characters are written out. A text of several lines goes on in indented ones: no text can forge a line.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from mfs_decompose.cli.out import visible
from mfs_decompose.errors import OutputBusy
from mfs_decompose.source.ref import redact

_STAMP = re.compile(rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ")
_STAMP_BYTES = 25


class Log:
    """A log file that is open for appending.

    Raises:
        OutputBusy: nothing can be written there, or the file is no log: a mistyped name must not spoil a model.
    """

    def __init__(self, path: Path, *, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._now = now
        try:
            # A pipe that nobody reads would block: O_NONBLOCK makes it an error.
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
            self._descriptor = os.open(path, flags, 0o666)
        except (OSError, ValueError) as error:
            raise _refused(path, getattr(error, "strerror", None) or str(error)) from None
        head = os.pread(self._descriptor, _STAMP_BYTES, 0) if stat.S_ISREG(os.fstat(self._descriptor).st_mode) else b""
        if head and not _STAMP.match(head):
            os.close(self._descriptor)
            raise OutputBusy(
                f"expected a log of mfs or no file at {path}, found another file", hint="Choose another --log-file."
            )

    def write(self, level: str, text: str) -> None:
        """Append a text as one line, or as many as it has.

        Raises:
            OSError: the disk is full, or the file is out of reach.
        """
        time = self._now().astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        first, *more = redact(text).rstrip("\n").split("\n")
        lines = [first, *(f"  {line}" for line in more)]
        block = "".join(f"{time} {level}: {visible(line, keep='')}\n" for line in lines)
        rest = block.encode("utf-8", "backslashreplace")
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def open_log(path: Path, beginning: str) -> Log:
    """Open a log and write its first line, so that a place where nothing can be written is found before any work.

    Raises:
        OutputBusy: as Log, or the line cannot be written.
    """
    log = Log(path)
    try:
        log.write("start", beginning)
    except OSError as error:
        log.close()
        raise _refused(path, error.strerror or str(error)) from None
    return log


def _refused(path: Path, why: str) -> OutputBusy:
    return OutputBusy(f"cannot write the log file {path}: {why}", hint="Choose another --log-file.")
