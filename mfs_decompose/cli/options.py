"""Options that several commands share, each with one spelling and one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer

from mfs_decompose.cli.out import Output
from mfs_decompose.errors import UsageError

INPUTS = "Inputs"
OUTPUT = "Output"
MACHINE = "Machine"


def text_option(help: str) -> Any:
    """`--text`, of which every command says what for."""
    return typer.Option(
        "--text", metavar="FILE[:FIELD+FIELD]...", show_default=False, help=help, rich_help_panel=INPUTS
    )


# Global, in front of the command or anywhere after it.
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
ProgressOption = Annotated[
    Literal["auto", "bar", "plain", "json", "none"],
    typer.Option("--progress", help="How to show progress on stderr: a bar, lines, or JSON lines."),
]
QuietFlag = Annotated[bool, typer.Option("--quiet", "-q", help="Only warnings and errors on stderr.")]
VerboseCount = Annotated[
    int, typer.Option("--verbose", "-v", count=True, show_default=False, help="Say more; repeat for more still.")
]
NoColorFlag = Annotated[bool, typer.Option("--no-color", help="No colour; NO_COLOR does the same.")]
DebugFlag = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error; MFS_DEBUG=1 does the same.")]
LogFileOption = Annotated[
    Path | None,
    typer.Option("--log-file", metavar="FILE", help="Append what is said, stages and tracebacks here, with UTC times."),
]
YesFlag = Annotated[bool, typer.Option("--yes", help="Answer every question with yes.")]

# Shared by commands.
ArtifactArgument = Annotated[
    Path, typer.Argument(metavar="ARTIFACT", show_default=False, help="Folder of a family artifact.")
]
VariantOption = Annotated[str | None, typer.Option("--variant", metavar="ID", help="Only this variant.")]
BaseOption = Annotated[
    str | None,
    typer.Option(
        "--base", "-b", metavar="REF", help="Folder of the base, or org/name[@rev] of the Hub.", rich_help_panel=INPUTS
    ),
]
OfflineFlag = Annotated[
    bool, typer.Option("--offline", help="Take models of the Hub from the cache alone.", rich_help_panel=INPUTS)
]
OriginalsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--originals",
        metavar="ID=REF",
        help="Where the variants' own checkpoints are now; takes several.",
        rich_help_panel=INPUTS,
    ),
]
OutOption = Annotated[
    Path,
    typer.Option("--out", "-o", metavar="DIR", show_default=False, help="Folder to write.", rich_help_panel=OUTPUT),
]
DeviceOption = Annotated[
    str,
    typer.Option(
        "--device", metavar="NAME", help="auto (cuda where there is one), cpu, cuda or cuda:N.", rich_help_panel=MACHINE
    ),
]
ScratchOption = Annotated[
    Path | None,
    typer.Option(
        "--scratch", metavar="DIR", help="Where checkpoints are restored to meanwhile.", rich_help_panel=MACHINE
    ),
]
ThreadsOption = Annotated[
    int | None,
    typer.Option("--threads", min=1, metavar="N", help="CPU threads; by default all.", rich_help_panel=MACHINE),
]
MaxRamOption = Annotated[
    str | None,
    typer.Option("--max-ram", metavar="BYTES", help="Memory to stay under, such as 24GB.", rich_help_panel=MACHINE),
]
MaxDiskOption = Annotated[
    str | None,
    typer.Option("--max-disk", metavar="BYTES", help="Disk to stay under, such as 200GB.", rich_help_panel=MACHINE),
]


def output_of(ctx: typer.Context) -> Output:
    """The output of the running command."""
    return cast(Output, ctx.obj)


def named_refs(values: Sequence[str], option: str) -> dict[str, str]:
    """Read `id=REF` values; a bare path is named by its last part.

    Raises:
        UsageError: an id comes twice or cannot name a variant, or a reference is empty.
    """
    from mfs_decompose.artifact.layout import is_variant_id
    from mfs_decompose.source.ref import SourceRef

    refs: dict[str, str] = {}
    for value in values:
        name, equals, ref = value.partition("=")
        if not equals or ("/" in name and _is_path(value)):
            name, ref = SourceRef.parse(value).name if value else "", value
        if not ref:
            raise UsageError(f"{option}: expected ID=REF, found {value!r}")
        if not is_variant_id(name):
            raise UsageError(
                f"{option}: expected an id of letters, digits and . _ - (not base or all), found {name!r}",
                hint=f"name it yourself: {option} ID={ref}",
            )
        if name in refs:
            raise UsageError(
                f"{option}: the id {name!r} names both {refs[name]} and {ref}",
                hint=f"give each its own id: {option} ID={ref}",
            )
        refs[name] = ref
    return refs


def _is_path(value: str) -> bool:
    """Whether a value with slashes in front of its `=` is a path that has one in it, and no id with a slash."""
    return value.startswith((".", "/")) or Path(value).exists()
