"""Progress of long stages: a bar for people, a line every few seconds for logs, JSON lines for programs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from mfs_decompose.cli.out import Output, visible
from mfs_decompose.errors import UsageError
from mfs_decompose.events import Level, ProgressSink
from mfs_decompose.units import format_bytes, format_duration

if TYPE_CHECKING:
    from rich.progress import Progress

ProgressMode = Literal["auto", "bar", "plain", "json", "none"]

PLAIN_EVERY_S = 5.0
JSON_EVERY_S = 1.0
# A rate from the first moments of a stage would promise anything.
_ETA_AFTER_S = 1.0


def make_sink(output: Output, mode: str | None = None) -> ProgressSink:
    """The sink of a mode, by default the one that the global options ask for.

    `auto` draws a bar where somebody watches and writes lines where nobody does. Under --quiet only warnings come
    through, whatever the mode, except `json`.

    Raises:
        UsageError: there is no such mode.
    """
    mode = mode or output.progress
    if mode not in get_args(ProgressMode):
        raise UsageError(f"expected --progress {', '.join(get_args(ProgressMode))}, found {mode!r}")
    if mode == "json":
        return JsonSink(output)
    if mode == "none" or output.verbosity < 0:
        return NotesSink(output)
    if mode == "bar" or (mode == "auto" and output.is_terminal()):
        return BarSink(output)
    return PlainSink(output)


@dataclass(slots=True)
class Stage:
    """One running stage: bytes done, bytes in all where known, and when it began."""

    name: str
    total: int | None
    began: float
    done: int = 0

    def eta(self, now: float) -> float | None:
        """Seconds left at the rate so far; None where there is no telling."""
        elapsed = now - self.began
        if self.total is None or self.done <= 0 or elapsed < _ETA_AFTER_S:
            return None
        return max(self.total - self.done, 0) * elapsed / self.done

    def describe(self, now: float) -> str:
        """`1.2 GB of 3 GB, 210 MB/s, 8.6 s left`."""
        parts = [format_bytes(self.done) + (f" of {format_bytes(self.total)}" if self.total is not None else "")]
        elapsed = now - self.began
        if self.done and elapsed >= _ETA_AFTER_S:
            parts.append(f"{format_bytes(int(self.done / elapsed))}/s")
        left = self.eta(now)
        if left is not None and left > 0:
            parts.append(f"{format_duration(left)} left")
        return ", ".join(parts)


class NotesSink:
    """Passes notes on and keeps quiet about progress. The ground of the other sinks: one lock, one stage at a time."""

    def __init__(self, output: Output, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._output = output
        self._clock = clock
        self._lock = threading.RLock()
        self._stage: Stage | None = None

    def start(self, stage: str, total_bytes: int | None) -> None:
        with self._lock:
            if self._stage is not None:
                self.finish()
            self._stage = Stage(visible(stage, keep=""), total_bytes, self._clock())
            amount = "" if total_bytes is None else f", {format_bytes(total_bytes)}"
            self._output.record("stage", f"{self._stage.name}: begun{amount}")
            self._started(self._stage)

    def advance(self, nbytes: int) -> None:
        with self._lock:
            if self._stage is not None:
                self._stage.done += nbytes
                self._advanced(self._stage)

    def finish(self) -> None:
        with self._lock:
            stage, self._stage = self._stage, None
            if stage is not None:
                self._output.record("stage", f"{stage.name}: done, {_summary(stage, self._clock())}")
                self._finished(stage)

    def note(self, message: str, level: Level = "info") -> None:
        with self._lock:
            (self._output.warn if level == "warning" else self._output.say)(message)

    def _started(self, stage: Stage) -> None:
        return None

    def _advanced(self, stage: Stage) -> None:
        return None

    def _finished(self, stage: Stage) -> None:
        return None


class PlainSink(NotesSink):
    """A line at most every few seconds, and one when a stage is done."""

    def __init__(
        self, output: Output, *, every_s: float = PLAIN_EVERY_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(output, clock=clock)
        self._every_s = every_s
        self._last = 0.0

    def _started(self, stage: Stage) -> None:
        self._last = stage.began

    def _advanced(self, stage: Stage) -> None:
        now = self._clock()
        if now - self._last >= self._every_s:
            self._last = now
            self._output.say(f"{stage.name}: {stage.describe(now)}", logged=False)

    def _finished(self, stage: Stage) -> None:
        self._output.say(f"{stage.name}: {_summary(stage, self._clock())}", logged=False)


class JsonSink(NotesSink):
    """JSON lines on stderr: start, progress at most once a second, finish. Bytes and seconds."""

    def __init__(
        self, output: Output, *, every_s: float = JSON_EVERY_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(output, clock=clock)
        self._every_s = every_s
        self._last = 0.0

    def _started(self, stage: Stage) -> None:
        self._last = stage.began
        self._emit("start", stage, stage.began)

    def _advanced(self, stage: Stage) -> None:
        now = self._clock()
        if now - self._last >= self._every_s:
            self._last = now
            self._emit("progress", stage, now)

    def _finished(self, stage: Stage) -> None:
        self._emit("finish", stage, self._clock())

    def _emit(self, event: str, stage: Stage, now: float) -> None:
        eta = stage.eta(now) if event == "progress" else None
        self._output.event(
            {
                "event": event,
                "stage": stage.name,
                "done_bytes": stage.done,
                "total_bytes": stage.total,
                "elapsed_s": round(now - stage.began, 3),
                "eta_s": None if eta is None else round(eta, 3),
            }
        )


class BarSink(NotesSink):
    """A bar with bytes, speed and time left; a finished stage leaves one line."""

    def __init__(self, output: Output, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(output, clock=clock)
        self._bar: Progress | None = None
        output.attach(self._stop)

    def _started(self, stage: Stage) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[words]}", markup=False),
            console=self._output.talk_console,
            transient=True,
        )
        self._bar.add_task(stage.name, total=stage.total, words=stage.describe(stage.began))
        self._output.live = True
        self._bar.start()

    def _advanced(self, stage: Stage) -> None:
        if self._bar is not None:
            task = self._bar.task_ids[0]
            self._bar.update(task, completed=stage.done, words=stage.describe(self._clock()))

    def _finished(self, stage: Stage) -> None:
        self._stop()
        self._output.say(f"{stage.name}: {_summary(stage, self._clock())}", logged=False)

    def _stop(self) -> None:
        with self._lock:
            bar, self._bar = self._bar, None
            if bar is not None:
                bar.stop()
                self._output.live = False


def _summary(stage: Stage, now: float) -> str:
    amount = f"{format_bytes(stage.done)} in " if stage.done or stage.total is not None else ""
    return f"{amount}{format_duration(now - stage.began)}"
