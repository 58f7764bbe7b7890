from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from mfs_decompose.cli.out import Output
from mfs_decompose.cli.progress import BarSink, JsonSink, NotesSink, PlainSink, Stage, make_sink
from mfs_decompose.errors import UsageError
from mfs_decompose.events import ProgressSink


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def output(err: io.StringIO, *, progress: str = "auto", verbosity: int = 0) -> Output:
    made = Output(io.StringIO(), err)
    made.configure(json_mode=False, progress=progress, verbosity=verbosity, color=False, debug=False, assume_yes=False)
    return made


@pytest.mark.parametrize(
    ("terminal", "verbosity", "mode", "kind"),
    [
        (True, 0, "auto", BarSink),
        (False, 0, "auto", PlainSink),
        (True, 1, "plain", PlainSink),
        (False, 0, "bar", BarSink),
        (True, 0, "none", NotesSink),
        (True, -1, "auto", NotesSink),
        (True, -1, "bar", NotesSink),
        (True, -1, "json", JsonSink),
        (False, 0, "json", JsonSink),
    ],
)
def test_the_mode_and_the_terminal_choose_the_sink(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, verbosity: int, mode: str, kind: type
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    err = Terminal() if terminal else io.StringIO()
    assert type(make_sink(output(err, progress=mode, verbosity=verbosity))) is kind
    assert type(make_sink(output(err, verbosity=verbosity), mode)) is kind


def test_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert type(make_sink(output(Terminal()))) is PlainSink


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(UsageError, match="expected --progress auto, bar, plain, json, none, found 'loud'"):
        make_sink(output(io.StringIO()), "loud")


def test_a_stage_describes_itself() -> None:
    stage = Stage("read", 3_000_000_000, began=100.0)
    assert stage.describe(100.0) == "0 B of 3 GB"
    stage.done = 1_000_000_000
    assert stage.describe(100.5) == "1 GB of 3 GB"
    assert stage.describe(104.0) == "1 GB of 3 GB, 250 MB/s, 8.0 s left"
    stage.done = 3_100_000_000
    assert stage.eta(104.0) == 0.0
    assert Stage("hash", None, began=0.0, done=5_000_000).describe(2.0) == "5 MB, 2.5 MB/s"


def test_plain_lines_come_every_few_seconds_and_at_the_end() -> None:
    err, clock = io.StringIO(), Clock()
    sink = PlainSink(output(err), every_s=5.0, clock=clock)
    sink.start("read", 100_000_000)
    for _ in range(10):
        clock.now += 2.0
        sink.advance(10_000_000)
    sink.finish()
    assert err.getvalue().splitlines() == [
        "read: 30 MB of 100 MB, 5 MB/s, 14.0 s left",
        "read: 60 MB of 100 MB, 5 MB/s, 8.0 s left",
        "read: 90 MB of 100 MB, 5 MB/s, 2.0 s left",
        "read: 100 MB in 20.0 s",
    ]


def test_json_lines_tell_start_progress_and_finish() -> None:
    err, clock = io.StringIO(), Clock()
    sink = JsonSink(output(err, progress="json"), every_s=1.0, clock=clock)
    sink.start("read", 400)
    clock.now += 0.5
    sink.advance(50)
    clock.now += 1.5
    sink.advance(50)
    sink.note("one thing", "warning")
    sink.finish()
    events = [json.loads(line) for line in err.getvalue().splitlines()]
    assert [e["event"] for e in events] == ["start", "progress", "note", "finish"]
    assert events[1] == {
        "event": "progress", "stage": "read", "done_bytes": 100, "total_bytes": 400, "elapsed_s": 2.0, "eta_s": 6.0,
    }  # fmt: skip
    assert events[2] == {"event": "note", "level": "warning", "message": "one thing"}
    assert (events[3]["done_bytes"], events[3]["eta_s"]) == (100, None)


def test_json_knows_no_time_left_without_a_total() -> None:
    err, clock = io.StringIO(), Clock()
    sink = JsonSink(output(err, progress="json"), clock=clock)
    sink.start("hash", None)
    clock.now += 3.0
    sink.advance(7)
    event = json.loads(err.getvalue().splitlines()[-1])
    assert (event["total_bytes"], event["eta_s"], event["done_bytes"]) == (None, None, 7)


@pytest.mark.parametrize("make", [PlainSink, JsonSink, BarSink, NotesSink])
def test_a_new_stage_finishes_the_one_before(make: Callable[..., ProgressSink]) -> None:
    err = io.StringIO()
    sink = make(output(err))
    sink.advance(5)  # no stage: nothing to tell
    sink.finish()
    sink.start("one", 10)
    sink.start("two", None)
    sink.finish()
    sink.finish()
    said = err.getvalue()
    assert make is NotesSink or said.index("one") < said.index("two")
    assert make is not NotesSink or said == ""


@pytest.mark.parametrize("make", [PlainSink, BarSink, NotesSink])
def test_notes_pass_and_quiet_keeps_the_warnings(make: Callable[..., ProgressSink]) -> None:
    for verbosity, expected in ((0, ["[a]", "Warning: b\\x1b"]), (-1, ["Warning: b\\x1b"])):
        err = io.StringIO()
        sink = make(output(err, verbosity=verbosity))
        sink.note("[a]")
        sink.note("b\x1b", "warning")
        assert err.getvalue().splitlines() == expected


@pytest.mark.parametrize("make", [PlainSink, JsonSink, BarSink, NotesSink])
def test_any_thread_may_advance(make: Callable[..., Any]) -> None:
    err = io.StringIO()
    sink = make(output(err))
    sink.start("read", 8 * 500 * 3)
    threads = [threading.Thread(target=lambda: [sink.advance(3) for _ in range(500)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sink._stage.done == 8 * 500 * 3
    sink.finish()
    assert make is NotesSink or "12000" in err.getvalue() or "12 kB" in err.getvalue()


def test_a_bar_shows_bytes_and_leaves_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    err, clock = Terminal(), Clock()
    sink = BarSink(output(err), clock=clock)
    sink.start("read [x]", 4_000_000)
    clock.now += 2.0
    sink.advance(1_000_000)
    sink.note("a note")
    sink.finish()
    said = err.getvalue()
    assert "read [x]" in said
    assert "1 MB of 4 MB, 500 kB/s, 6.0 s left" in said
    assert "a note\n" in said
    assert said.rstrip().endswith("read [x]: 1 MB in 2.0 s")


def test_closing_the_output_stops_a_running_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    err = Terminal()
    made = output(err)
    sink = BarSink(made)
    sink.start("read", 10)
    assert "\x1b[?25l" in err.getvalue()  # the cursor is hidden
    made.close()
    assert "\x1b[?25h" in err.getvalue()
    length = len(err.getvalue())
    sink.advance(1)
    made.close()
    assert len(err.getvalue()) == length
