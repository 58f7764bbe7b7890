"""Runs decompose in children that kill themselves: `python kill_runner.py '{"base": ..., "picks": ...}'`.

Every call of the progress sink, every line of the journal (before and after it is written) and every fsync is an event.
A rehearsal counts them; then, for every event that is picked, a fork of this process runs until it and dies by SIGKILL,
at one thread and so at the same place every time. Prints what happened as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from mfs_decompose.artifact.journal import Journal
from mfs_decompose.events import Level
from mfs_decompose.pipeline.decompose import decompose
from mfs_decompose.pipeline.request import DecomposeRequest
from mfs_decompose.recipe.load import load_recipe


class Events:
    """A sink that numbers events, and kills its process at one of them."""

    def __init__(self, kill_at: int | None) -> None:
        self.kill_at = kill_at
        self.seen: list[str] = []
        self.stage = "opening"

    def happen(self, what: str) -> None:
        if len(self.seen) == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.seen.append(f"{self.stage}: {what}")

    def start(self, stage: str, total_bytes: int | None) -> None:
        self.stage = stage
        self.happen("start")

    def advance(self, nbytes: int) -> None:
        self.happen("advance")

    def finish(self) -> None:
        self.happen("finish")

    def note(self, message: str, level: Level = "info") -> None:
        self.happen("note")


def run(given: dict[str, Any], out: Path, kill_at: int | None) -> list[str]:
    events = Events(kill_at)
    append, fsync = Journal.append, os.fsync

    def watched_append(self: Journal, kind: str, payload: Any) -> None:
        events.happen(f"before the journal's {kind}")
        append(self, kind, payload)
        events.happen(f"after the journal's {kind}")

    def watched_fsync(descriptor: int) -> None:
        events.happen("fsync")
        fsync(descriptor)

    Journal.append = watched_append  # type: ignore[method-assign]
    os.fsync = watched_fsync  # type: ignore[assignment]
    try:
        request = DecomposeRequest(
            given["variants"],
            out,
            load_recipe(None, given["recipe"]),
            base=given["base"],
            device="cpu",
            threads=1,
            overwrite=given["overwrite"],
        )
        decompose(request, events)
    finally:
        Journal.append, os.fsync = append, fsync  # type: ignore[method-assign]
    return events.seen


def pick(seen: list[str], picks: dict[str, int] | None) -> list[int]:
    """Events at equal distances within the stages that are named; all where none is."""
    if picks is None:
        return list(range(len(seen)))
    chosen: list[int] = []
    for stage, count in picks.items():
        places = [at for at, event in enumerate(seen) if event.startswith(f"{stage}: ")]
        assert len(places) >= count, f"{stage} has {len(places)} events, of {sorted({e.split(':')[0] for e in seen})}"
        chosen.extend(places[(2 * at + 1) * len(places) // (2 * count)] for at in range(count))
    return chosen


def main() -> None:
    given = json.loads(sys.argv[1])
    root = Path(given["root"])
    if given["overwrite"]:
        run({**given, "recipe": given["before"]}, root / "rehearsal", None)
    seen = run(given, root / "rehearsal", None)
    kills = []
    for number, at in enumerate(pick(seen, given["picks"])):
        out = root / f"killed-{number}"
        if given["overwrite"]:
            run({**given, "recipe": given["before"]}, out, None)
        child = os.fork()
        if child == 0:
            run(given, out, at)
            os._exit(3)  # it was to be killed
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, f"event {at}: status {status}"
        kills.append({"at": at, "event": seen[at], "out": str(out)})
    sys.stdout.write(json.dumps({"events": len(seen), "kills": kills}))


if __name__ == "__main__":
    main()
