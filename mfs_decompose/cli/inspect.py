"""`mfs inspect`: what an artifact holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mfs_decompose.cli.exactness import ERROR, RESTORED, restored
from mfs_decompose.cli.options import (
    OUTPUT,
    ArtifactArgument,
    BaseOption,
    DeviceOption,
    OfflineFlag,
    OriginalsOption,
    ThreadsOption,
    VariantOption,
    named_refs,
    output_of,
)
from mfs_decompose.errors import UsageError


def command(
    ctx: typer.Context,
    artifact: ArtifactArgument,
    variant: VariantOption = None,
    top: Annotated[
        int, typer.Option("--top", min=1, metavar="N", help="With --variant: this many tensors, largest first.")
    ] = 20,
    spectrum: Annotated[
        bool, typer.Option("--spectrum", help="Read the weights: which kind of change each variant is, and why.")
    ] = False,
    resident: Annotated[
        bool, typer.Option("--resident", help="Read the deltas: the form and bytes each would have in memory.")
    ] = False,
    only: Annotated[
        str | None, typer.Option("--tensors", metavar="GLOB", help="With --spectrum: only tensors of such names.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="DIR",
            help="With --spectrum: folder to write plots to, as SVG.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    frontier: Annotated[
        bool, typer.Option("--frontier", help="Where the bytes went, and what other sizes would leave.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE.svg", help="With --frontier: write a plot of it.", rich_help_panel=OUTPUT),
    ] = None,
    originals: OriginalsOption = None,
    base: BaseOption = None,
    offline: OfflineFlag = False,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
) -> None:
    """Show what an artifact holds: bytes, recorded errors, codecs, configs; with --variant, tensor by tensor.

    Errors are those of the weights as served, measured when the artifact was written. They are no measure of
    behaviour: `mfs eval` is. Stop ids are all those that any file of a variant names; a warning says where the files
    contradict each other.

    With --spectrum the weights are read instead, of the original where it is at hand and else of what is stored. Each
    family of tensors gets its class: identical, lora (few directions explain all but rounding noise), sparse (few
    weights changed), concentrated (few directions hold much of the energy) or flat; then its effective rank, how many
    directions hold 50, 90 and 99 % of the energy, the share of unchanged weights, and how much is rounding noise.

    With --resident the deltas are read as a runtime holds them, and their bytes in memory counted by codec and form.

    With --frontier the bytes of each variant are counted by codec, layer type and depth, beside the errors recorded.
    Where the sources are at hand they are read again, into a temporary folder, and other budgets are foreseen.

    Examples:
      mfs inspect art
      mfs inspect art --variant math --top 50
      mfs inspect art --spectrum --out plots
      mfs inspect art --spectrum --variant math --tensors '*_proj.weight'
      mfs inspect art --resident
      mfs inspect art --frontier --plot frontier.svg
    """
    asked = [name for name, wanted in (("--spectrum", spectrum), ("--resident", resident)) if wanted]
    asked += ["--frontier"] * frontier
    if len(asked) > 1:
        raise UsageError(
            f"expected one of {' and '.join(asked)}, found {'both' if asked[:2] == asked else 'all'}", hint="Ask twice."
        )
    if plot is not None and not frontier:
        raise UsageError("--plot says where --frontier is to be drawn, found no --frontier", hint="Add --frontier.")
    if frontier:
        from mfs_decompose.cli.inspect_frontier import show_frontier
        from mfs_decompose.pipeline.forecast_frontier import FrontierRequest

        if only is not None or out is not None:
            raise UsageError("--tensors and --out go with --spectrum, found --frontier", hint="Leave them out.")
        looked_at = FrontierRequest(
            artifact=artifact,
            variants=None if variant is None else (variant,),
            originals=named_refs(originals or (), "--originals"),
            base=base,
            offline=offline,
            device=device,
            threads=threads,
        )
        show_frontier(output_of(ctx), looked_at, plot)
        return
    if spectrum:
        from mfs_decompose.cli.inspect_spectrum import show_spectrum
        from mfs_decompose.pipeline.spectra import SpectraRequest

        request = SpectraRequest(
            artifact=artifact,
            variants=None if variant is None else (variant,),
            tensors=only,
            originals=named_refs(originals or (), "--originals"),
            base=base,
            offline=offline,
            device=device,
            threads=threads,
        )
        show_spectrum(output_of(ctx), request, out, None if variant is None else top)
        return
    from mfs_decompose.cli.inspect_spectrum import refuse_without_spectrum

    given = {"--tensors": only, "--out": out, "--originals": originals, "--offline": offline}
    refuse_without_spectrum(
        {**given, "--base": base and not resident, "--device": device != "auto", "--threads": threads}
    )
    if resident:
        from mfs_decompose.cli.inspect_resident import show_resident

        show_resident(output_of(ctx), artifact, variant, base)
        return
    _show(ctx, artifact, variant, top)


def _show(ctx: typer.Context, artifact: Path, variant: str | None, top: int) -> None:
    """What the manifest says."""
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
        ("variant", "footprint", "bytes", "of its checkpoint", ERROR, RESTORED, "codecs"),
        [
            (
                one["id"],
                format_fraction(one["footprint"]),
                format_bytes(one["bytes"]),
                format_bytes(one["checkpoint_bytes"]),
                f"{one['rel_error']:.3g}",
                restored(one["exact_tensors"], one["tensors"], adapter="adapter" in one["codecs"]),
                ", ".join(f"{tree} x {count}" for tree, count in one["codecs"].items()),
            )
            for one in document["variants"]
        ],
        right=("footprint", "bytes", "of its checkpoint", ERROR),
    )
    for one in document["variants"]:
        if one["correction_bytes"]:
            share = format_fraction(one["correction_bytes"] / one["checkpoint_bytes"])
            output.line(
                f"{one['id']}: {share} of its checkpoint only corrects restored bits; what is served leaves it out"
            )
    show_settings(output, document["variants"], None if variant is None else top)
    if tensors:
        shown = sorted(tensors, key=lambda tensor: (-tensor["bytes"], tensor["tensor"]))[:top]
        output.line()
        output.table(
            ("tensor", "shape", "kind", "codec", "bytes", ERROR),
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
            right=("bytes", ERROR),
        )
        if len(shown) < len(tensors):
            output.line(f"{len(tensors) - len(shown)} more tensors: --top {len(tensors)}")
    base = document["base"]
    output.line()
    if shared := document.get("shared"):
        output.line(
            f"shared: {format_bytes(shared['bytes'])} for {shared['tensors']} tensors, stored once; footprints hold "
            "the parts of the variants that use it"
        )
    output.line(
        f"base: {base['mode']}, {base['store']}, {format_bytes(base['bytes'])}; all weights "
        f"{format_bytes(document['total_bytes'])}, other files {format_bytes(document['files_bytes'])}; "
        f"coverage {document['coverage']:g}"
    )
