"""`mfs inspect`: what an artifact holds."""

from __future__ import annotations

from typing import Annotated

import typer

from mfs_decompose.cli.options import ArtifactArgument, VariantOption, output_of


def command(
    ctx: typer.Context,
    artifact: ArtifactArgument,
    variant: VariantOption = None,
    top: Annotated[
        int, typer.Option("--top", min=1, metavar="N", help="With --variant: this many tensors, largest first.")
    ] = 20,
) -> None:
    """Show what an artifact holds: bytes, recorded errors, codecs, configs; with --variant, tensor by tensor.

    Errors are those of the weights as served, measured when the artifact was written. They are no measure of
    behaviour: `mfs eval` is. Stop ids are all those that any file of a variant names; a warning says where the files
    contradict each other.

    Examples:
      mfs inspect art
      mfs inspect art --variant math --top 50
    """
    from mfs_decompose.cli.inspect_settings import show_settings
    from mfs_decompose.pipeline.inspect import inspect, inspect_tensors
    from mfs_decompose.units import format_bytes, format_fraction

    output = output_of(ctx)
    document = inspect(artifact)
    tensors = []
    if variant is not None:
        tensors = inspect_tensors(artifact, variant)
        document["variants"] = [one for one in document["variants"] if one["id"] == variant]
        document["tensors"] = tensors
    output.document(document)
    output.table(
        ("variant", "footprint", "bytes", "of its checkpoint", "relative error", "codecs"),
        [
            (
                one["id"],
                format_fraction(one["footprint"]),
                format_bytes(one["bytes"]),
                format_bytes(one["checkpoint_bytes"]),
                f"{one['rel_error']:.3g}",
                ", ".join(f"{tree} x {count}" for tree, count in one["codecs"].items()),
            )
            for one in document["variants"]
        ],
        right=("footprint", "bytes", "of its checkpoint", "relative error"),
    )
    show_settings(output, document["variants"], None if variant is None else top)
    if tensors:
        shown = sorted(tensors, key=lambda tensor: (-tensor["bytes"], tensor["tensor"]))[:top]
        output.line()
        output.table(
            ("tensor", "shape", "kind", "codec", "bytes", "relative error"),
            [
                (
                    t["tensor"],
                    f"{t['dtype']} {t['shape']}",
                    t["kind"],
                    t["codec"],
                    format_bytes(t["bytes"]),
                    "exact" if t["exact"] else f"{t['rel_error']:.3g}",
                )
                for t in shown
            ],
            right=("bytes", "relative error"),
        )
        if len(shown) < len(tensors):
            output.line(f"{len(tensors) - len(shown)} more tensors: --top {len(tensors)}")
    base = document["base"]
    output.line()
    output.line(
        f"base: {base['mode']}, {base['store']}, {format_bytes(base['bytes'])}; all weights "
        f"{format_bytes(document['total_bytes'])}, other files {format_bytes(document['files_bytes'])}; "
        f"coverage {document['coverage']:g}"
    )
