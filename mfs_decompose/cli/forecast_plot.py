"""The plot of `mfs inspect --frontier` as SVG: the same figures give the same bytes, and everything reads in grey.

Each drawn line, point and bar carries an id (`ladder:math`, `stored:math`, `bytes:math:query`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mfs_decompose.cli.spectrum_plots import plain_matplotlib, plain_ticks, safe, shade, svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from mfs_decompose.pipeline.forecast_frontier import VariantFrontier

_HATCHES = ("", "//", "..", "xx", "\\\\", "--", "++", "oo", "||", "**")
_MARKERS = "osD^v<>pXh*P"
_DASHES = ("--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
_LEAST = 1e-6  # of a delta: what is less, nothing included, is drawn there
_MOST = 1e6  # an error that is no number would leave no axis


def draw_frontier(variants: Sequence[VariantFrontier]) -> bytes:
    """Where bytes went, and beside it what other sizes would leave, where that was foreseen."""
    with plain_matplotlib():
        return svg(lambda figure: _fill(figure, variants))


def _fill(figure: Figure, variants: Sequence[VariantFrontier]) -> None:
    figure.set_size_inches(11.0, 4.8)
    left, right = figure.subplots(1, 2)
    _draw_bytes(left, variants)
    if all(one.ladder is not None for one in variants):
        _draw_ladders(right, variants)
    else:
        _draw_stored(right, variants)


def _draw_bytes(axes: Axes, variants: Sequence[VariantFrontier]) -> None:
    kinds = list(dict.fromkeys(part.name for one in variants for part in one.layers if part.nbytes))
    for at, one in enumerate(variants):
        below = 0.0
        parts = {part.name: part.nbytes for part in one.layers}
        for number, kind in enumerate(kinds):
            share = parts.get(kind, 0) / one.checkpoint_bytes if one.checkpoint_bytes else 0.0
            bars = axes.bar(
                [at], [share], bottom=below, color=shade(number), hatch=_HATCHES[number % len(_HATCHES)],
                edgecolor="white", label=kind if at == 0 else None,
            )  # fmt: skip
            bars[0].set_gid(safe(f"bytes:{one.id}:{kind}"))
            below += share
    axes.set(title="Where the bytes went", ylabel="bytes (share of the variant's checkpoint)")
    axes.set_xticks(range(len(variants)), [safe(one.id[:24]) for one in variants], rotation=90 if variants[4:] else 0)
    if kinds:
        axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0), reverse=True)


def _draw_ladders(axes: Axes, variants: Sequence[VariantFrontier]) -> None:
    for at, one in enumerate(variants):
        assert one.ladder is not None, "ladders are foreseen for all variants or none"
        points = [
            (rung.nbytes / one.checkpoint_bytes, max(rung.left, _LEAST))
            for rung in one.ladder.budgets
            if rung.nbytes is not None and rung.left is not None
        ]
        if points:
            axes.plot(
                *zip(*points, strict=True), color=shade(at), marker=_MARKERS[at % len(_MARKERS)], markersize=4,
                linewidth=1.3, label=safe(f"{one.id}: foreseen"), gid=safe(f"ladder:{one.id}"),
            )  # fmt: skip
        axes.axvline(
            one.footprint, color=shade(at), linestyle=_DASHES[at % len(_DASHES)], linewidth=1.0,
            label=safe(f"{one.id}: as stored"), gid=safe(f"stored:{one.id}"),
        )  # fmt: skip
    axes.set(
        title="What other sizes would leave",
        xlabel="footprint (share of the variant's checkpoint)",
        ylabel="left of the delta (share, weighted as allocation does)",
        yscale="log",
    )
    plain_ticks(axes.yaxis)
    axes.legend(fontsize=7, loc="best")


def _draw_stored(axes: Axes, variants: Sequence[VariantFrontier]) -> None:
    for at, one in enumerate(variants):
        axes.plot(
            [one.footprint], [min(one.rel_error, _MOST)], color=shade(at), marker=_MARKERS[at % len(_MARKERS)],
            linestyle="none", label=safe(one.id), gid=safe(f"stored:{one.id}"),
        )  # fmt: skip
    axes.set(
        title="As stored",
        xlabel="footprint (share of the variant's checkpoint)",
        ylabel="relative error of the delta as served, measured",
        xlim=(0.0, None),
        ylim=(0.0, None),
    )
    axes.legend(fontsize=7, loc="best")
