"""`--log-file` and MFS_DEBUG, through the real program and through a command that does what it is told."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from checkpoints import Family
from e2e_program import refused, succeeded
from fake_command import TABLE

from mfs_decompose.cli.app import main
from mfs_decompose.cli.log import Log, open_log
from mfs_decompose.cli.out import Output
from mfs_decompose.cli.progress import BarSink, NotesSink, PlainSink
from mfs_decompose.errors import OutputBusy, UsageError

LINE = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z) ([a-z]+): (.*)")


def entries(path: Path) -> list[tuple[str, str]]:
    """(level, text) of every line; each must be one of ours, and no control character may be in it."""
    found = []
    for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
        match = LINE.fullmatch(line)
        assert match, line
        assert line.isprintable(), line
        found.append((match[2], match[3]))
    return found


def levels(path: Path) -> list[str]:
    return [level for level, _ in entries(path)]


def fake(*words: str) -> int:
    return main(list(words), commands=TABLE)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "run.log"


# Through the real program.


def test_a_run_is_logged_from_its_command_to_its_exit_code(family: Family, tmp_path: Path, log: Path) -> None:
    words = ("decompose", "--base", family.base, "--variants", family.variants["math"], "--out", tmp_path / "art")
    ran = succeeded(*words, "--log-file", log, "-q")
    assert ran.err == ""
    found = entries(log)
    assert found[0][0] == "start"
    assert found[0][1].startswith(f"mfs decompose --base {family.base} ")
    assert found[-1] == ("end", "exit code 0")
    stages = [text for level, text in found if level == "stage"]
    begun = [text.partition(": begun")[0] for text in stages if ": begun" in text]
    done = [text.partition(": done, ")[0] for text in stages if ": done, " in text]
    assert begun
    assert begun == done
    assert stages[0].endswith("B")  # the bytes of the stage
    assert any(level == "info" and text.startswith("wrote ") for level, text in found)  # also under --quiet
    succeeded(*words, "--log-file", log, "-q")
    again = entries(log)
    assert again[: len(found)] == found
    assert again[len(found)][0] == "start"
    assert again[-1] == ("end", "exit code 0")


def test_an_error_and_its_hint_are_logged_without_a_traceback(tmp_path: Path, log: Path) -> None:
    code = main(["decompose", "--base", str(tmp_path / "no"), "--variants", "a=b", "--out", "art", "--rank", "2",
                 "--log-file", str(log)])  # fmt: skip
    assert code == 11
    assert levels(log)[0] == "start"
    assert "error" in levels(log)
    assert "traceback" not in levels(log)
    assert entries(log)[-1] == ("end", "exit code 11")


@pytest.mark.parametrize("place", ["missing/run.log", "folder", "file/run.log"])
def test_a_place_that_cannot_be_written_is_refused_before_work(family: Family, tmp_path: Path, place: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    out = tmp_path / "art"
    words = ("decompose", "--base", family.base, "--variants", family.variants["math"], "--out", out)
    message, hint = refused(14, *words, "--log-file", f"{tmp_path}/{place}")
    assert message.startswith("cannot write the log file ")
    assert hint == "Choose another --log-file."
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_found_before_work(tmp_path: Path) -> None:
    message, _ = refused(14, "recipe", "ls", "--log-file", "/dev/full")
    assert message == "cannot write the log file /dev/full: No space left on device"


def test_a_mistyped_log_file_spoils_nothing(family: Family, tmp_path: Path) -> None:
    for content in (b"{}", (family.base / "config.json").read_bytes(), b"2026-11-29 something else\n"):
        model = tmp_path / "model.safetensors"
        model.write_bytes(content)
        message, _ = refused(14, "recipe", "ls", "--log-file", model)
        assert message == f"expected a log of mfs or no file at {model}, found another file"
        assert model.read_bytes() == content
    model.write_bytes(b"")
    succeeded("recipe", "ls", "--log-file", model)
    assert levels(model) == ["start", "end"]


def test_no_token_gets_in(tmp_path: Path, log: Path) -> None:
    main(["decompose", "--base", "hf://a/b@hf_abcdefghij0123", "--variants", "x=hf_abcdefghij0123/y", "--out",
          str(tmp_path / "art"), "--offline", f"--log-file={log}"])  # fmt: skip
    text = log.read_text()
    assert "abcdefghij" not in text
    assert "hf://a/b@hf_***" in text


def test_the_option_needs_a_value_and_stands_anywhere(log: Path) -> None:
    assert refused(2, "recipe", "ls", "--log-file")[0] == "expected a value after --log-file, found none"
    assert fake("make", "--variants", "a", "b", "--log-file", str(log), "--rank", "3", "art") == 0
    assert fake("make", "art", f"--log-file={log}", "--variants", "a", "b", "--rank", "x") == 2
    assert [text for level, text in entries(log) if level == "end"] == ["exit code 0", "exit code 2"]


# A command that does what it is told.


def test_all_talk_is_logged(log: Path) -> None:
    assert fake("make", "art", "--does", "fail", "--log-file", str(log)) == 20
    assert entries(log)[1:] == [
        ("info", "said"),
        ("detail", "detailed"),
        ("error", "expected [bold]a[/], found \\x1b[31mb"),
        ("hint", "type c"),
        ("end", "exit code 20"),
    ]


def test_a_bug_leaves_its_traceback(log: Path) -> None:
    assert fake("make", "art", "--does", "bug", "--log-file", str(log), "-q") == 1
    found = [text for level, text in entries(log) if level == "traceback"]
    assert found[0] == "Traceback (most recent call last):"
    assert any("_do(does, ctx)" in text for text in found)
    assert found[-2:] == ["  ZeroDivisionError: division", "  by zero"]
    assert entries(log)[-1] == ("end", "exit code 1")


def test_debug_logs_the_traceback_of_any_error(log: Path) -> None:
    assert fake("make", "art", "--does", "fail", "--log-file", str(log), "--debug", "-q") == 20
    assert "traceback" in levels(log)


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_run_says_so_in_its_log(log: Path, sent: signal.Signals, code: int) -> None:
    program = "import sys, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    program += "from fake_command import TABLE; from mfs_decompose.cli.app import main; sys.exit(main(commands=TABLE))"
    tests = Path(__file__).parents[1]
    process = subprocess.Popen(
        [sys.executable, "-c", program, "make", "art", "--does", "wait", "--log-file", str(log)],
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)])},
    )  # fmt: skip
    assert process.stderr is not None
    assert process.stderr.readline() == "said\n"
    while "stage" not in levels(log):
        time.sleep(0.01)
    process.send_signal(sent)
    process.communicate(timeout=30)
    assert process.returncode == code
    assert entries(log)[-3:] == [
        ("stage", "waiting: begun, 100 B"),
        ("error", "interrupted; the same command resumes"),
        ("end", f"exit code {code}"),
    ]


def test_json_keeps_to_itself(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fake("make", "art", "--progress", "json", "--json", "--log-file", str(log)) == 0
    assert levels(log) == ["start", "info", "detail", "end"]
    assert capsys.readouterr().out.startswith("{")


# The environment.


@pytest.mark.parametrize(("value", "shows"), [("1", True), ("yes", True), ("0", False), ("", False), (None, False)])
def test_mfs_debug_is_as_debug(
    value: str | None, shows: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MFS_DEBUG", raising=False)
    if value is not None:
        monkeypatch.setenv("MFS_DEBUG", value)
    assert fake("make", "art", "--does", "bug", "-q") == 1
    assert ("Traceback" in capsys.readouterr().err) is shows
    assert fake("mkae") == 2  # before the global options are read
    assert ("Traceback" in capsys.readouterr().err) is shows


# The file itself.


def test_times_are_utc_whatever_the_zone(log: Path) -> None:
    zone = timezone(timedelta(hours=-7, minutes=-30))
    Log(log, now=lambda: datetime(2026, 11, 29, 20, 45, 7, 5_900, tzinfo=zone)).write("info", "x")
    assert log.read_text() == "2026-11-30T04:15:07.005Z info: x\n"


def test_no_text_forges_a_line(log: Path) -> None:
    writer = Log(log)
    writer.write("info", "a\n2026-11-30T04:15:07.005Z end: exit code 0\r\n\x1b[2Jb\u202e\u2028c\udcff\n")
    found = entries(log)
    assert [level for level, _ in found] == ["info"] * 3
    assert [text for _, text in found] == [
        "a",
        "  2026-11-30T04:15:07.005Z end: exit code 0\\r",
        "  \\x1b[2Jb\\u202e\\u2028c\\udcff",
    ]


def test_two_logs_of_one_file_do_not_overwrite_each_other(log: Path) -> None:
    one, two = open_log(log, "one"), open_log(log, "two")
    for number in range(5):
        one.write("info", f"{number} of one")
        two.write("info", f"{number} of two")
    assert len(entries(log)) == 12


def test_a_file_without_permission_is_refused(log: Path) -> None:
    log.mkdir()
    with pytest.raises(OutputBusy, match="cannot write the log file"):
        open_log(log, "x")


def test_a_log_that_fails_later_ends_with_a_warning_and_not_the_work(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    err = io.StringIO()
    output = Output(io.StringIO(), err)
    output.log = open_log(log, "x")

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    output.say("one")
    output.say("two")
    output.error(UsageError("three"))
    assert err.getvalue().splitlines() == [
        "Warning: the log file ends here: No space left on device",
        "one",
        "two",
        "Error: three",
    ]


@pytest.mark.parametrize("sink", [NotesSink, PlainSink, BarSink])
def test_every_sink_logs_stages_once(log: Path, sink: Callable[..., NotesSink]) -> None:
    times = iter(range(0, 1000, 7))
    output = Output(io.StringIO(), io.StringIO())
    output.log = open_log(log, "x")
    made = sink(output, clock=lambda: float(next(times)))
    made.start("pass\x1b 1", 4_000)
    made.advance(1_500)
    made.note("by the way")
    made.note("careful", "warning")
    made.start("publishing", None)
    made.finish()
    assert [(level, text.partition(" in ")[0]) for level, text in entries(log)[1:]] == [
        ("stage", "pass\\x1b 1: begun, 4 kB"),
        ("info", "by the way"),
        ("warning", "careful"),
        ("stage", "pass\\x1b 1: done, 1.5 kB"),
        ("stage", "publishing: begun"),
        ("stage", "publishing: done, 7.0 s"),
    ]
