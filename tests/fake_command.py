"""A command for tests of the command line: it says what it was given, then does what it is told to do."""

from __future__ import annotations

import errno
import sys
import time
from typing import Annotated

import typer

from mfs_decompose import errors
from mfs_decompose.cli.group import Entry
from mfs_decompose.cli.options import INPUTS, ArtifactArgument, DeviceOption, OutOption, ThreadsOption, output_of
from mfs_decompose.cli.progress import make_sink

TABLE = {
    "make": Entry("fake_command", "Make a thing.", "Make", resumes=True),
    "look": Entry("fake_command", "Look at a thing.", "Check"),
    "absent": Entry("no_such_module_at_all", "Never imported.", "Check"),
}


def command(
    ctx: typer.Context,
    artifact: ArtifactArgument,
    variants: Annotated[
        list[str] | None,
        typer.Option(
            "--variants", "-V", metavar="ID=REF", help="Fine-tunes [a|b]; takes several.", rich_help_panel=INPUTS
        ),
    ] = None,
    does: Annotated[str, typer.Option("--does", hidden=True)] = "nothing",
    out: OutOption = None,  # type: ignore[assignment]
    threads: ThreadsOption = None,
    device: DeviceOption = "auto",
    rank: Annotated[int, typer.Option("--rank", min=1, metavar="N", help="How many directions.")] = 4,
    resume: Annotated[bool, typer.Option("--resume/--no-resume", help="Go on where it stopped.")] = True,
) -> None:
    """Make a <thing> out of others.

    The first sentence is followed by some more,
    on two lines.

    Examples:
      mfs make art --variants code=./code math=./math
      mfs make art --rank 8
    """
    output = output_of(ctx)
    given = {"artifact": str(artifact), "variants": variants, "rank": rank, "progress": output.progress}
    if does not in ("fail", "wait"):
        output.document({"schema": "fake/1", **given, "verbosity": output.verbosity})
    output.table(["what", "value"], given.items())
    output.say("said")
    output.detail("detailed")
    _do(does, ctx)


def _do(does: str, ctx: typer.Context) -> None:
    output = output_of(ctx)
    if does == "fail" or does in vars(errors):
        kind = errors.ArtifactInvalid if does == "fail" else vars(errors)[does]
        raise kind("expected [bold]a[/], found \x1b[31mb", hint="type c")
    match does:
        case "bug":
            raise ZeroDivisionError("division\nby zero")
        case "exit":
            raise typer.Exit(21)
        case "system exit":
            sys.exit(3)
        case "interrupt":
            raise KeyboardInterrupt
        case "disk":
            raise OSError(errno.ENOSPC, "No space left on device", "/some/where")
        case "memory":
            raise MemoryError
        case "pipe":
            raise BrokenPipeError
        case "talk":
            for number in range(100_000):
                output.line(f"line {number}")
        case "wait":
            sink = make_sink(output)
            sink.start("waiting", 100)
            time.sleep(60)
