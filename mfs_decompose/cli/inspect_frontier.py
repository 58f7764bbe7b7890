"""What `mfs inspect --frontier` shows: where a variant's bytes went, and what other sizes would leave."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mfs_decompose.cli.exactness import ERROR
from mfs_decompose.cli.forecast import show_variants
from mfs_decompose.cli.out import Output
from mfs_decompose.cli.progress import make_sink
from mfs_decompose.errors import OutputBusy
from mfs_decompose.units import format_bytes, format_fraction

if TYPE_CHECKING:
    from mfs_decompose.pipeline.forecast_frontier import FrontierRequest, Spent, VariantFrontier

SCHEMA = "mfs.frontier/1"


def show_frontier(output: Output, request: FrontierRequest, plot: Path | None) -> None:
    """Measure, print and plot.

    Raises:
        OutputBusy: the plot cannot be written to `plot`.
        MfsError: as `measure_frontier` does.
    """
    from mfs_decompose.pipeline.forecast_frontier import measure_frontier

    if plot is not None:
        _check_place(plot, request.artifact)
    digest, variants, why = measure_frontier(request, make_sink(output))
    if plot is not None:
        from mfs_decompose.artifact.atomic import write_file
        from mfs_decompose.cli.forecast_plot import draw_frontier

        write_file(plot, draw_frontier(variants))
        output.say(f"wrote {plot}")
    output.document(
        {
            "schema": SCHEMA,
            "artifact_digest": digest,
            "variants": [_variant_json(one) for one in variants],
            "no_ladder": why,
            "plot": None if plot is None else str(plot),
        }
    )
    for number, one in enumerate(variants):
        if number:
            output.line()
        _show(output, one)
    output.line()
    if why is not None:
        output.line(f"other sizes are not foreseen: {why}")
    else:
        output.line("Other sizes, foreseen from the sources read again:")
        show_variants(output, [one.ladder for one in variants if one.ladder is not None])


def _show(output: Output, one: VariantFrontier) -> None:
    shared = f", {format_bytes(one.shared_bytes)} of it shared" if one.shared_bytes else ""
    output.line(
        f"{one.id}: {format_bytes(one.nbytes + one.shared_bytes)} or {format_fraction(one.footprint)} of its "
        f"checkpoint{shared}; {ERROR} {one.rel_error:.3g}"
    )
    for what, parts in (("codec", one.codecs), ("layer", one.layers), ("depth", one.depths)):
        output.table(
            (what, "tensors", "bytes", "of all", ERROR),
            [_row(part, one.nbytes) for part in parts],
            right=("tensors", "bytes", "of all", ERROR),
        )


def _row(part: Spent, total: int) -> tuple[str, ...]:
    share = format_fraction(part.nbytes / total) if total else "-"
    return (part.name, str(part.tensors), format_bytes(part.nbytes), share, f"{part.rel_error:.3g}")


def _variant_json(one: VariantFrontier) -> dict[str, Any]:
    from mfs_decompose.pipeline.forecast_json import variant_json

    return {
        "id": one.id,
        "bytes": one.nbytes,
        "shared_bytes": one.shared_bytes,
        "checkpoint_bytes": one.checkpoint_bytes,
        "footprint": one.footprint,
        "rel_error": one.rel_error,
        "codecs": _parts(one.codecs),
        "layers": _parts(one.layers),
        "depths": _parts(one.depths),
        "ladder": None if one.ladder is None else variant_json(one.ladder),
    }


def _parts(parts: Sequence[Spent]) -> list[dict[str, Any]]:
    return [{"name": p.name, "tensors": p.tensors, "bytes": p.nbytes, "rel_error": p.rel_error} for p in parts]


def _check_place(plot: Path, artifact: Path) -> None:
    if plot.suffix != ".svg":
        raise OutputBusy(f"expected a file that ends in .svg, found {plot}", hint="Plots are SVG: --plot frontier.svg")
    if plot.resolve().is_relative_to(artifact.resolve()):
        raise OutputBusy(f"the plot {plot} lies inside the artifact", hint="Choose another --plot.")
    if plot.is_dir() or not plot.absolute().parent.is_dir():
        raise OutputBusy(f"expected a place for a file at {plot}, found none", hint="Choose another --plot.")
