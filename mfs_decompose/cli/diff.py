"""`mfs diff`: what differs between two models, or two artifacts."""

from __future__ import annotations

from typing import Annotated

import typer

from mfs_decompose.cli.options import BaseOption, OfflineFlag, output_of
from mfs_decompose.cli.progress import make_sink


def command(
    ctx: typer.Context,
    a: Annotated[
        str, typer.Argument(metavar="A", show_default=False, help="A checkpoint, ART::ID, ART::base or an artifact.")
    ],
    b: Annotated[str, typer.Argument(metavar="B", show_default=False, help="The same, to hold against it.")],
    tensors: Annotated[
        int, typer.Option("--tensors", min=0, metavar="N", help="Show this many tensors, the most changed first.")
    ] = 20,
    weights: Annotated[
        bool, typer.Option("--weights/--no-weights", help="Read the weights, or only names, shapes and digests.")
    ] = True,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit 23 when something differs.")] = False,
    base: BaseOption = None,
    offline: OfflineFlag = False,
) -> None:
    """Show what differs between two models: tensors, config, tokenizer, stop ids, other files.

    A and B are a checkpoint (a folder, or org/name[@rev] of the Hub), ART::ID for a variant of an artifact as it is
    restored, or ART::base. Tensors are compared bit by bit: how many elements changed, the largest change, |A-B|/|A|
    and the cosine. Keys that only say where a file came from do not count, and neither do two spellings of the same.

    Two whole artifacts are compared by what their manifests record; nothing is decoded.

    Examples:
      mfs diff ./base ./math
      mfs diff ./math art::math --tensors 5
      mfs diff art::base art::code --no-weights
      mfs diff art art --exit-code
    """
    from mfs_decompose.cli.diff_shown import show_artifacts, show_models
    from mfs_decompose.errors import DifferencesFound
    from mfs_decompose.pipeline.diff import ModelsDiff, diff

    output = output_of(ctx)
    found = diff(a, b, weights=weights, base=base, offline=offline, progress=make_sink(output))
    output.document(found.to_json())
    if isinstance(found, ModelsDiff):
        show_models(output, found, tensors)
    else:
        show_artifacts(output, found)
    if exit_code and not found.equal:
        raise DifferencesFound(f"{a} and {b} differ")
