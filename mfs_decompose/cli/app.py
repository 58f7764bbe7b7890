"""The program `mfs`: its commands, its global options, and how an error becomes a sentence and an exit code."""

from __future__ import annotations

import errno
import os
import re
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from mfs_decompose import __version__
from mfs_decompose.cli.argv import MULTI, rewrite
from mfs_decompose.cli.group import Entry, LazyGroup
from mfs_decompose.cli.options import (
    DebugFlag,
    JsonFlag,
    LogFileOption,
    NoColorFlag,
    ProgressOption,
    QuietFlag,
    VerboseCount,
    YesFlag,
    output_of,
)
from mfs_decompose.cli.out import Output
from mfs_decompose.errors import Interrupted, MfsError, OutputBusy, ResourceShortage, UsageError

COMMANDS: Mapping[str, Entry] = {
    "decompose": Entry(
        "mfs_decompose.cli.decompose", "Turn a base and its fine-tunes into one artifact.", "Make", resumes=True
    ),
    "restore": Entry("mfs_decompose.cli.restore", "Write a variant back as a full checkpoint.", "Make"),
    "verify": Entry("mfs_decompose.cli.verify", "Check an artifact: structure, checksums, values.", "Check"),
    "inspect": Entry("mfs_decompose.cli.inspect", "Show what an artifact holds: bytes, errors, codecs.", "Check"),
    "diff": Entry("mfs_decompose.cli.diff", "Show what differs between two models or artifacts.", "Check"),
    "eval": Entry("mfs_decompose.cli.eval", "Measure the drift of the variants on text.", "Measure"),
    "bench": Entry("mfs_decompose.cli.bench", "Measure how fast the variants answer together.", "Measure"),
    "recipe": Entry("mfs_decompose.cli.recipe", "List, show, copy and check recipes.", "Help"),
    "doctor": Entry("mfs_decompose.cli.doctor", "Show versions, devices, memory, disk and known problems.", "Help"),
    "demo": Entry("mfs_decompose.cli.demo", "Try all of it on a small built-in family, offline.", "Try"),
}

EXIT_SIGTERM = 128 + signal.SIGTERM
# What the shell reports of a program that a closed pipe ended.
EXIT_BROKEN_PIPE = 128 + 13

_NO_MEMORY = re.compile(r"can't allocate memory|out of memory")  # torch says so in a RuntimeError
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
# Sources and artifacts are checked where they are read: what is left comes from writing.
_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)
_COMPLETION = "_MFS_COMPLETE"
_CHOICE = re.compile(r"Value error, '(.*)' is not one of (.*?)\.?$")


def main(argv: Sequence[str] | None = None, *, commands: Mapping[str, Entry] = COMMANDS) -> int:
    """Run the command line and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    group = build(commands)
    if _COMPLETION in os.environ:
        group.main(words, prog_name="mfs")  # exits
    output = Output()
    before_tail = words[: words.index("--")] if "--" in words else words
    output.json_mode, output.debug = "--json" in before_tail, "--debug" in before_tail or _debug_by_environment()
    output.command_line = shlex.join(["mfs", *words])
    with _sigterm_interrupts() as terminated:
        try:
            code = _guarded(group, words, output, terminated)
            output.record("end", f"exit code {code}")
            return code
        finally:
            log, output.log = output.log, None
            if log is not None:
                log.close()


def build(commands: Mapping[str, Entry]) -> LazyGroup:
    """The Typer group of a table of commands, none of them imported."""
    app = typer.Typer(
        cls=LazyGroup,
        rich_markup_mode=None,
        invoke_without_command=True,
        context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 100},
    )
    app.callback()(_globals)
    group = typer.main.get_command(app)
    assert isinstance(group, LazyGroup)
    group.fill(commands)
    return group


def _version(ctx: typer.Context, wanted: bool) -> None:
    if wanted:
        output = output_of(ctx)
        output.document({"schema": "mfs.version/1", "version": __version__})
        output.line(f"mfs {__version__}")
        raise typer.Exit


def _globals(
    ctx: typer.Context,
    json: JsonFlag = False,
    progress: ProgressOption = "auto",
    quiet: QuietFlag = False,
    verbose: VerboseCount = 0,
    no_color: NoColorFlag = False,
    debug: DebugFlag = False,
    log_file: LogFileOption = None,
    yes: YesFlag = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Turn a base and its fine-tunes into one family artifact, measure the loss, and give every checkpoint back."""
    output = output_of(ctx)
    output.configure(
        json_mode=json,
        progress=progress,
        verbosity=-1 if quiet else verbose,
        color=not no_color,
        debug=debug or _debug_by_environment(),
        assume_yes=yes,
    )
    if log_file is not None:
        from mfs_decompose.cli.log import open_log

        output.log = open_log(log_file, f"{output.command_line} (version {__version__})")
    if ctx.invoked_subcommand is None:
        raise UsageError("expected a command, found none", hint="mfs --help lists the commands; mfs demo tries them")


def _guarded(group: LazyGroup, words: Sequence[str], output: Output, terminated: Sequence[int]) -> int:
    """Run, and turn everything that can be raised into an exit code; `terminated` holds the SIGTERM that came."""
    resumes = False
    try:
        context = group.make_context("mfs", rewrite(words), obj=output)
        with context:
            try:
                group.invoke(context)
            finally:
                entry = getattr(group.commands.get(context.invoked_subcommand or ""), "entry", None)
                resumes = entry is not None and entry.resumes
        output.close()
        if sys.stdout is not None:
            sys.stdout.flush()
        return 0
    except typer.Exit as end:
        output.close()
        return end.exit_code
    except BrokenPipeError:
        _forget_stdout()
        return EXIT_BROKEN_PIPE
    except SystemExit:
        output.close()
        raise
    except BaseException as error:
        told = _told(error, words, resumes)
        code = EXIT_SIGTERM if terminated and isinstance(told, Interrupted) else told.exit_code
        _report(told, error, output, code)
        return code


def _debug_by_environment() -> bool:
    return os.environ.get("MFS_DEBUG", "0") not in ("", "0")


def _report(told: MfsError, error: BaseException, output: Output, code: int) -> None:
    if output.debug or type(told) is MfsError:
        output.record("traceback", "".join(traceback.format_exception(error)))
    try:
        if output.debug:
            output.close()
            traceback.print_exception(error)
        output.error(told, exit_code=code)
    except BrokenPipeError:
        _forget_stdout()


def _told(error: BaseException, words: Sequence[str], resumes: bool) -> MfsError:
    """The error as the user is told it."""
    if isinstance(error, MfsError):
        return error
    if isinstance(error, typer.TyperException):
        return _usage(error, words)
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return Interrupted("interrupted; the same command resumes" if resumes else "interrupted")
    if isinstance(error, OSError) and error.errno in _FULL_DISK:
        where = f": {error.filename}" if error.filename else ""
        return ResourceShortage(f"no space left on the disk{where}", hint="free some space and run the command again")
    if isinstance(error, OSError) and error.errno in _NOT_ALLOWED and error.filename:
        return OutputBusy(f"no access to {error.filename}: {error.strerror}", hint="choose another place")
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error))):
        return ResourceShortage("not enough memory", hint="give --max-ram less, or the machine more")
    words_of_it = " ".join(str(error).split()) or "no message"
    return MfsError(
        f"a bug in mfs: {type(error).__name__}: {words_of_it}",
        hint="run it again with --debug and report the traceback",
    )


def _usage(error: Any, words: Sequence[str]) -> UsageError:
    """A mistake that Typer found, in our words; `error` may carry possibilities, a parameter and a context."""
    message = " ".join((error.message if hasattr(error, "possibilities") else error.format_message()).split())
    message = message.replace("Input should be", "expected").partition(", unable to parse")[0]
    message = _CHOICE.sub(r"expected one of \2, found '\1'", message)
    context, param = getattr(error, "ctx", None), getattr(error, "param", None)
    hint = f"{context.command_path} --help shows what it takes" if context is not None else "see mfs --help"
    if getattr(error, "possibilities", None):
        hint = f"did you mean {error.possibilities[0]}?"
    elif param is not None and param.param_type_name == "argument" and not MULTI.isdisjoint(words):
        option = next(word for word in words if word in MULTI)
        hint = f"put {param.metavar or param.name} before {option}, which takes every word up to the next option"
    return UsageError(message[:1].lower() + message[1:].rstrip("."), hint=hint)


@contextmanager
def _sigterm_interrupts() -> Iterator[list[int]]:
    """Let SIGTERM end the command the way Ctrl-C does; the list tells that it came."""
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return

    def interrupt(signum: int, frame: object) -> None:
        came.append(signum)
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield came
    finally:
        signal.signal(signal.SIGTERM, previous)


def _forget_stdout() -> None:
    """Point stdout at nothing, so that the interpreter's last flush does not complain of the closed pipe."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError, AttributeError):
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
