from __future__ import annotations

import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfs_decompose.cli.out import Output, visible
from mfs_decompose.errors import ArtifactInvalid, UsageError


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def made(**settings: Any) -> tuple[Output, io.StringIO, io.StringIO]:
    out, err = io.StringIO(), io.StringIO()
    return configured(Output(out, err), **settings), out, err


def configured(output: Output, **settings: Any) -> Output:
    defaults = {
        "json_mode": False,
        "progress": "auto",
        "verbosity": 0,
        "color": True,
        "debug": False,
        "assume_yes": False,
    }
    output.configure(**{**defaults, **settings})
    return output


def talk(output: Output) -> None:
    output.say("said")
    output.detail("detailed")
    output.warn("warned")
    output.error(UsageError("expected a, found b", hint="type c"))


def test_a_document_goes_out_in_json_mode_only() -> None:
    output, out, _ = made()
    output.document({"schema": "x/1"})
    assert out.getvalue() == ""
    output, out, _ = made(json_mode=True)
    output.document({"schema": "x/1", "name": "\u4e2d\udcff", "share": 0.05, "none": None})
    output.line("data")
    output.table(["a"], [["b"]], title="t")
    assert out.getvalue().isascii()
    assert json.loads(out.getvalue()) == {"schema": "x/1", "name": "\u4e2d\udcff", "share": 0.05, "none": None}


def test_a_second_document_and_one_without_schema_are_bugs() -> None:
    output, _, _ = made(json_mode=True)
    with pytest.raises(AssertionError):
        output.document({"a": 1})
    output.document({"schema": "x/1"})
    with pytest.raises(AssertionError):
        output.document({"schema": "x/1"})


def test_a_figure_that_is_not_a_number_is_no_json() -> None:
    output, _, _ = made(json_mode=True)
    with pytest.raises(ValueError, match="JSON"):
        output.document({"schema": "x/1", "kl": float("nan")})


def test_a_table_is_aligned_and_never_cut_when_piped() -> None:
    output, out, _ = made()
    output.table(["id", "bytes"], [["code", 12], ["m" * 300, 7_000]], right=["bytes"], title="two variants")
    title, head, rule, first, second = out.getvalue().splitlines()
    assert title == "two variants"
    assert head.split() == ["id", "bytes"]
    assert set(rule) == {"\u2500"}
    assert first.endswith("  12")
    assert second == "m" * 300 + "    7000"
    assert all(line == line.rstrip() for line in out.getvalue().splitlines())


def test_a_table_on_a_narrow_terminal_folds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    terminal = Terminal()
    output = configured(Output(terminal, io.StringIO()), color=False)
    output.table(["id", "what"], [["code", "w" * 60]])
    assert terminal.getvalue().count("w") == 60 + 1
    assert max(len(line) for line in terminal.getvalue().splitlines()) <= 30


def test_markup_and_control_characters_are_text() -> None:
    nasty = "[red]x[/red] :smile: \x1b[2J \r\x07 \u202egnp.exe https://a.b"
    shown = "[red]x[/red] :smile: \\x1b[2J \\r\\x07 \\u202egnp.exe https://a.b"
    output, out, err = made()
    output.line(nasty)
    output.table([nasty], [[nasty]])
    output.say(nasty)
    output.error(ArtifactInvalid(nasty, hint=nasty))
    assert out.getvalue().count(shown) == 3
    assert err.getvalue() == f"{shown}\nError: {shown}\nHint: {shown}\n"
    assert not any(c in out.getvalue() + err.getvalue() for c in "\x1b\r\x07\u202e")


def test_a_cell_is_one_line() -> None:
    output, out, _ = made()
    output.table(["a"], [["x\ny\tz"]])
    assert out.getvalue().splitlines()[-1] == "x\\ny\\tz"


@given(st.text())
def test_visible_text_has_no_control_characters(text: str) -> None:
    shown = visible(text, keep="")
    assert all(ord(c) >= 0x20 and not 0x7F <= ord(c) < 0xA0 for c in shown)
    assert shown == text or len(shown) > len(text)


@pytest.mark.parametrize(
    ("verbosity", "expected"),
    [
        (-1, ["Warning: warned"]),
        (0, ["said", "Warning: warned"]),
        (1, ["said", "detailed", "Warning: warned"]),
    ],
)
def test_verbosity_rules_talk_and_never_errors(verbosity: int, expected: list[str]) -> None:
    output, out, err = made(verbosity=verbosity)
    talk(output)
    assert err.getvalue().splitlines() == [*expected, "Error: expected a, found b", "Hint: type c"]
    assert out.getvalue() == ""


def test_talk_is_json_lines_where_progress_is() -> None:
    output, _, err = made(progress="json")
    talk(output)
    events = [json.loads(line) for line in err.getvalue().splitlines()]
    assert [(e["event"], e["level"], e["message"]) for e in events] == [
        ("note", "info", "said"),
        ("note", "warning", "warned"),
        ("note", "error", "expected a, found b"),
        ("note", "hint", "type c"),
    ]


def test_an_error_is_a_document_unless_there_was_one() -> None:
    output, out, _ = made(json_mode=True)
    output.error(UsageError("expected a, found b"), exit_code=143)
    assert json.loads(out.getvalue()) == {
        "schema": "mfs.error/1", "code": "usage", "exit_code": 143, "message": "expected a, found b", "hint": None,
    }  # fmt: skip
    output, out, _ = made(json_mode=True)
    output.document({"schema": "x/1"})
    output.error(UsageError("expected a, found b"))
    assert json.loads(out.getvalue()) == {"schema": "x/1"}


@pytest.mark.parametrize(
    ("terminal", "color", "environment", "coloured"),
    [
        (True, True, {}, True),
        (True, False, {}, False),
        (True, True, {"NO_COLOR": "1"}, False),
        (True, True, {"NO_COLOR": ""}, True),
        (True, True, {"TERM": "dumb"}, False),
        (False, True, {}, False),
    ],
)
def test_colour_only_where_it_is_wanted(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, color: bool, environment: dict[str, str], coloured: bool
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    err = Terminal() if terminal else io.StringIO()
    talk(configured(Output(io.StringIO(), err), color=color))
    assert ("\x1b[" in err.getvalue()) == coloured


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_stream_that_cannot_show_a_character_writes_its_number(encoding: str) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    output = configured(Output(stream, stream))
    output.line("\u2026 \udcff")
    output.table(["\u4e2d"], [["\u00e9"]])
    output.say("\u2026")
    stream.flush()
    text = raw.getvalue().decode(encoding)
    assert "\\udcff" in text
    assert ("\u2026" in text) == (encoding == "utf-8")


def test_a_question_is_answered_by_yes_or_refused_without_a_terminal() -> None:
    output, _, _ = made(assume_yes=True)
    assert output.confirm("overwrite?")
    output, _, _ = made()
    with pytest.raises(UsageError, match=r"overwrite\?: nobody is there to answer"):
        output.confirm("overwrite?")


@pytest.mark.parametrize(
    ("answer", "said"), [("y\n", True), ("YES\n", True), ("n\n", False), ("\n", False), ("", False)]
)
def test_a_question_on_a_terminal(monkeypatch: pytest.MonkeyPatch, answer: str, said: bool) -> None:
    err = Terminal()
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    output = configured(Output(io.StringIO(), err))
    assert output.confirm("overwrite \x1b[2Jit?") is said
    assert err.getvalue() == "overwrite \\x1b[2Jit? [y/N] "


def test_live_displays_are_stopped_once_and_before_an_error() -> None:
    output, _, err = made()
    seen: list[str] = []
    output.attach(lambda: seen.append(err.getvalue()))
    output.error(UsageError("expected a, found b"))
    output.close()
    assert seen == [""]
