"""What an unfinished `mfs eval --out FILE` has measured: a journal in `FILE.partial/`, a line for each variant."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from mfs_decompose.artifact.journal import Journal
from mfs_decompose.artifact.lock import exclusive_lock
from mfs_decompose.errors import OutputBusy
from mfs_decompose.events import ProgressSink
from mfs_decompose.fidelity.result import DriftResult

_BINDING: Final = "binding"
_VARIANT: Final = "variant"


class ResultLog:
    """The finished variants of a measurement; each is on disk when `add` returns."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def finished(self) -> dict[str, list[DriftResult]]:
        """Results by variant id."""
        return {
            line.payload["id"]: [DriftResult.from_record(record) for record in line.payload["results"]]
            for line in self._journal.lines()
            if line.kind == _VARIANT
        }

    def add(self, id: str, results: Sequence[DriftResult]) -> None:
        """Keep what was measured of one variant."""
        self._journal.append(_VARIANT, {"id": id, "results": [result.record() for result in results]})


@contextlib.contextmanager
def open_result_log(out: Path, binding: Mapping[str, Any], progress: ProgressSink) -> Iterator[ResultLog]:
    """The log of the output file `out`, locked inside the block.

    Args:
        binding: what the results hold for, plain JSON. A log of anything else is thrown away, and a note says why.

    Raises:
        OutputBusy: another run works on the same output, or something else has the log's name.
    """
    folder = _folder_of(out)
    with exclusive_lock(out.with_name(f"{out.name}.lock"), out):
        if folder.exists() and not folder.is_dir():
            raise OutputBusy(
                f"expected to keep unfinished results in the folder {folder}, found a file", hint="choose another --out"
            )
        unlike = _differences(folder, binding)
        if unlike:
            progress.note(f"{folder} was measured with another {' and '.join(unlike)}: measured anew", "warning")
            shutil.rmtree(folder)
        folder.mkdir(exist_ok=True)
        with Journal.open(folder) as journal:
            if not journal.lines():
                journal.append(_BINDING, binding)
            log = ResultLog(journal)
            try:
                yield log
            finally:
                if not log.finished():  # nothing to go on from: leave nothing behind
                    discard_result_log(out)


def discard_result_log(out: Path) -> None:
    """Delete the log once the output file holds all of it."""
    shutil.rmtree(_folder_of(out), ignore_errors=True)


def _folder_of(out: Path) -> Path:
    return out.with_name(f"{out.name}.partial")


def _differences(folder: Path, binding: Mapping[str, Any]) -> list[str]:
    """The names of what a log was bound to that is not so now; none where there is no log yet."""
    if not folder.exists():
        return []
    with Journal.open(folder) as journal:
        lines = journal.lines()
    if not lines:
        return []
    found = lines[0].payload if lines[0].kind == _BINDING else {}
    return sorted(name for name in found.keys() | binding.keys() if found.get(name) != binding.get(name))
