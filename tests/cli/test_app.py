from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_command import TABLE

from mfs_decompose import errors
from mfs_decompose.cli.app import COMMANDS, main

TESTS = Path(__file__).parents[1]
PROGRAM = (
    "import sys; from fake_command import TABLE; from mfs_decompose.cli.app import main; sys.exit(main(commands=TABLE))"
)


@pytest.fixture
def mfs(capfd: pytest.CaptureFixture[str]) -> Any:
    """Run a command line in this process: exit code, stdout, stderr."""

    def run(*words: str) -> tuple[int, str, str]:
        code = main(list(words), commands=TABLE)
        return code, *capfd.readouterr()

    return run


def environment(**extra: str) -> dict[str, str]:
    paths = [str(TESTS), str(TESTS.parent)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **extra}


def start(*words: str, **extra: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**extra),
        preexec_fn=heed_interrupts,
    )


def heed_interrupts() -> None:
    """A runner in the background may have left SIGINT ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_the_commands_of_this_version() -> None:
    assert list(COMMANDS) == [
        "decompose", "restore", "verify", "inspect", "diff", "eval", "bench", "recipe", "doctor", "demo",
    ]  # fmt: skip
    assert all(entry.module == f"mfs_decompose.cli.{name}" for name, entry in COMMANDS.items())


def test_a_command_says_its_data_on_stdout_and_talks_on_stderr(mfs: Any) -> None:
    code, out, err = mfs("make", "art", "--rank", "3")
    assert code == 0
    assert "rank       3" in out
    assert err == "said\n"


def test_json_is_one_document_and_no_table(mfs: Any) -> None:
    code, out, err = mfs("make", "art", "--json")
    assert (code, err) == (0, "said\n")
    assert json.loads(out)["schema"] == "fake/1"


@pytest.mark.parametrize(
    "words",
    [
        ("--json", "-v", "--progress", "plain", "make", "art", "--variants", "a", "b", "--rank", "3"),
        ("make", "--json", "art", "-v", "--variants", "a", "b", "--progress=plain", "--rank", "3"),
        ("make", "--variants", "a", "b", "--progress", "plain", "--rank", "3", "art", "-v", "--json"),
        ("make", "-V", "a", "-V", "b", "--rank=3", "-v", "--json", "--progress", "plain", "--", "art"),
    ],
)
def test_global_options_stand_anywhere_and_options_take_several_values(mfs: Any, words: tuple[str, ...]) -> None:
    code, out, err = mfs(*words)
    assert code == 0
    expected = {"artifact": "art", "variants": ["a", "b"], "rank": 3, "progress": "plain", "verbosity": 1}
    assert json.loads(out) == {"schema": "fake/1", **expected}
    assert err == "said\ndetailed\n"


def test_quiet_leaves_the_data(mfs: Any) -> None:
    code, out, err = mfs("make", "art", "-q")
    assert (code, err) == (0, "")
    assert "art" in out


# Errors.


@pytest.mark.parametrize(
    "kind", [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, errors.MfsError)]
)
def test_an_error_is_two_lines_and_an_exit_code(mfs: Any, kind: type[errors.MfsError]) -> None:
    code, out, err = mfs("make", "art", "--does", kind.__name__, "-q")
    assert code == kind.exit_code
    assert err == "Error: expected [bold]a[/], found \\x1b[31mb\nHint: type c\n"
    assert "Error" not in out


def test_an_error_under_json_is_one_document(mfs: Any) -> None:
    code, out, err = mfs("make", "art", "--does", "fail", "--json", "-q")
    assert code == 20
    assert json.loads(out) == {
        "schema": "mfs.error/1",
        "code": "artifact-invalid",
        "exit_code": 20,
        "message": "expected [bold]a[/], found \x1b[31mb",
        "hint": "type c",
    }
    assert err.startswith("Error: expected")


def test_after_a_document_an_error_adds_none(mfs: Any) -> None:
    code, out, err = mfs("make", "art", "--does", "OutputBusy", "--json")
    assert code == 14
    assert json.loads(out)["schema"] == "fake/1"
    assert "Error: expected" in err


def test_debug_shows_the_traceback_and_nothing_else_does(mfs: Any) -> None:
    for does in ("fail", "bug"):
        assert "Traceback" not in mfs("make", "art", "--does", does, "-v")[2]
        _, out, err = mfs("make", "art", "--does", does, "--debug", "--json")
        assert "Traceback" in err
        assert "_do(does, ctx)" in err
        json.loads(out)


def test_a_bug_is_named_as_one_in_one_line(mfs: Any) -> None:
    code, _, err = mfs("make", "art", "--does", "bug", "-q")
    assert code == 1
    assert err.splitlines() == [
        "Error: a bug in mfs: ZeroDivisionError: division by zero",
        "Hint: run it again with --debug and report the traceback",
    ]


def test_a_full_disk_and_a_lack_of_memory_are_no_bugs(mfs: Any) -> None:
    code, _, err = mfs("make", "art", "--does", "disk", "-q")
    assert code == 13
    assert err.startswith("Error: no space left on the disk: /some/where\n")
    code, _, err = mfs("make", "art", "--does", "memory", "-q")
    assert code == 13
    assert err.startswith("Error: not enough memory\n")


def test_a_command_chooses_its_exit_code(mfs: Any) -> None:
    assert mfs("make", "art", "--does", "exit")[0] == 21
    with pytest.raises(SystemExit, match="3"):
        mfs("make", "art", "--does", "system exit")


def test_an_interrupt_says_whether_the_command_resumes(mfs: Any) -> None:
    code, _, err = mfs("make", "art", "--does", "interrupt", "-q")
    assert (code, err) == (130, "Error: interrupted; the same command resumes\n")
    code, _, err = mfs("look", "art", "--does", "interrupt", "-q")
    assert (code, err) == (130, "Error: interrupted\n")


# Usage.


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        ((), "expected a command, found none", "mfs --help lists the commands; mfs demo tries them"),
        (("mkae", "art"), "no such command 'mkae'. Did you mean 'make'?", "mfs --help shows what it takes"),
        (("make", "art", "--varants", "a"), "no such option: --varants", "did you mean --variants?"),
        (("--jsn", "make", "art"), "no such option: --jsn", "did you mean --json?"),
        (("make",), "missing argument 'ARTIFACT'", "mfs make --help shows what it takes"),
        (
            ("make", "--variants", "a", "art"),
            "missing argument 'ARTIFACT'",
            "put ARTIFACT before --variants, which takes every word up to the next option",
        ),
        (("make", "art", "b"), "got unexpected extra argument(s) (b)", "mfs make --help shows what it takes"),
        (
            ("make", "art", "--rank", "x"),
            "invalid value for '--rank': expected a valid integer",
            "mfs make --help shows what it takes",
        ),
        (("make", "art", "--variants"), "expected a value after --variants, found none", None),
        (("make", "art", "--progress"), "expected a value after --progress, found none", None),
    ],
)
def test_a_mistake_of_usage_says_what_to_type(mfs: Any, words: tuple[str, ...], message: str, hint: str | None) -> None:
    code, out, err = mfs(*words)
    assert (code, out) == (2, "")
    assert err.splitlines() == [f"Error: {message}", *([f"Hint: {hint}"] if hint else [])]
    code, out, _ = mfs("--json", *words)
    assert code == 2
    document = json.loads(out)
    assert (document["code"], document["message"], document["hint"]) == ("usage", message, hint)


@pytest.mark.parametrize("words", [("--progress", "loud", "make", "art"), ("make", "art", "--threads", "0")])
def test_a_value_out_of_range_is_a_mistake_of_usage(mfs: Any, words: tuple[str, ...]) -> None:
    code, _, err = mfs(*words)
    assert code == 2
    assert err.startswith("Error: invalid value for '--")


def test_words_after_two_dashes_are_data(mfs: Any) -> None:
    code, out, _ = mfs("make", "--", "--json")
    assert code == 0
    assert "--json" in out
    with pytest.raises(json.JSONDecodeError):
        json.loads(out)


# Help.


def test_help_lists_commands_by_panel_without_importing_them(mfs: Any) -> None:
    for flag in ("--help", "-h"):
        code, out, err = mfs(flag)
        assert (code, err) == (0, "")
        make, check, options = (out.index(f"\n{title}:\n") for title in ("Make", "Check", "Options"))
        assert make < out.index("make    Make a thing.") < check < out.index("absent  Never imported.") < options


def test_help_of_a_command_groups_options_and_keeps_examples(mfs: Any) -> None:
    code, out, _ = mfs("make", "--help")
    assert code == 0
    assert "  Make a <thing> out of others.\n\n  The first sentence is followed by some more, on two lines.\n" in out
    assert "  Examples:\n    mfs make art --variants code=./code math=./math\n    mfs make art --rank 8\n" in out
    assert "Fine-tunes [a|b]; takes several." in out
    titles = [out.index(f"\n{title}:\n") for title in ("Arguments", "Inputs", "Output", "Machine", "Options")]
    assert titles == sorted(titles)
    assert "--does" not in out


def test_version(mfs: Any) -> None:
    from mfs_decompose import __version__

    assert mfs("--version") == (0, f"mfs {__version__}\n", "")
    assert json.loads(mfs("--json", "--version")[1]) == {"schema": "mfs.version/1", "version": __version__}


# A program among others.


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("words", [(), ("--json",)])
def test_a_signal_ends_it_resumably(sent: signal.Signals, code: int, words: tuple[str, ...]) -> None:
    process = start("make", "art", "--does", "wait", *words)
    assert process.stderr is not None
    assert process.stderr.readline() == "said\n"
    process.send_signal(sent)
    out, err = process.communicate(timeout=30)
    assert process.returncode == code
    assert err == "Error: interrupted; the same command resumes\n"
    if words:
        assert (json.loads(out)["code"], json.loads(out)["exit_code"]) == ("interrupted", code)


def test_a_closed_pipe_is_no_error() -> None:
    process = start("make", "art", "--does", "talk", "-q")
    assert process.stdout is not None
    assert process.stdout.readline()
    process.stdout.close()
    assert process.stderr is not None
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=30) == 141
    assert err == ""


def test_a_closed_pipe_inside_a_command_is_quiet(mfs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    code, _, err = mfs("make", "art", "--does", "pipe", "-q")
    assert (code, err) == (141, "")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_any_name_can_be_shown_anywhere(encoding: str) -> None:
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, "make", "\u4e2d\u00e9\x1b[31m", "--does", "fail"],
        capture_output=True, env=environment(PYTHONIOENCODING=encoding), check=False,
    )  # fmt: skip
    assert process.returncode == 20
    out = process.stdout.decode(encoding)
    assert {"ascii": "\\u4e2d\\xe9", "latin-1": "\\u4e2d\u00e9", "utf-8": "\u4e2d\u00e9"}[encoding] in out
    assert "\x1b" not in out + process.stderr.decode(encoding)


def test_the_module_is_the_program() -> None:
    process = subprocess.run(
        [sys.executable, "-m", "mfs_decompose", "--version"],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )
    assert (process.returncode, process.stdout[:4]) == (0, "mfs ")


def test_a_shell_can_complete_commands_and_options() -> None:
    for typed, found in (("mfs ma", "make"), ("mfs make --var", "--variants")):
        process = subprocess.run(
            [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False,
            env=environment(_MFS_COMPLETE="complete_bash", COMP_WORDS=typed, COMP_CWORD=str(len(typed.split()) - 1)),
        )  # fmt: skip
        assert found in process.stdout.split()
