"""KL against bytes, a panel for each variant, and predicted against measured KL, as SVG that keeps its text as text."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.frontier.treatment import AUTO, ROWS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = Sequence[dict[str, Any]]
_MARKERS = "osD^v<>pXh*Pd8H"


def draw(rows: Rows) -> bytes:
    """The SVG; the same rows give the same bytes."""
    import matplotlib
    from matplotlib.figure import Figure

    one = [row for row in rows if row["table"] == 1 and row["kl"] > 0]
    variants = list(dict.fromkeys(row["variant"] for row in one))
    predicted = [row for row in rows if row["predicted_kl"] and row["kl"] > 0]
    panels = len(variants) + bool(predicted)
    with matplotlib.rc_context({"svg.hashsalt": "mfs", "svg.fonttype": "none", "text.parse_math": False}):
        columns = min(max(panels, 1), 3)
        figure = Figure(figsize=(4.4 * columns, 3.8 * max(1, -(-panels // columns)) + 1.4), layout="constrained")
        for at, variant in enumerate(variants):
            axes = figure.add_subplot(-(-panels // columns), columns, at + 1)
            _draw_variant(axes, [row for row in one if row["variant"] == variant], variant)
        if predicted:
            _draw_predicted(figure.add_subplot(-(-panels // columns), columns, panels), predicted)
        if variants:
            lines = {line.get_label(): line for axes in figure.axes for line in axes.get_lines() if _named(line)}
            figure.legend(list(lines.values()), list(map(str, lines)), loc="outside lower center", ncols=4, fontsize=7)
        out = io.BytesIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return out.getvalue()


def _named(line: Any) -> bool:
    return not str(line.get_label()).startswith("_")


def _draw_variant(axes: Axes, rows: Rows, variant: str) -> None:
    for at, codec in enumerate((AUTO, *ROWS)):
        points = sorted((100 * row["share"], row["kl"]) for row in rows if row["codec"] == codec)
        if not points:
            continue
        own = codec == AUTO or ROWS[codec].own
        style = {"color": "black", "linewidth": 2.0} if codec == AUTO else {"linewidth": 0.9, "alpha": 0.9}
        axes.plot(
            *zip(*points, strict=True),
            marker=_MARKERS[at % len(_MARKERS)],
            markersize=4,
            linestyle="-" if own else "--",
            label=codec,
            gid=f"{variant}:{codec}",
            **style,
        )
    axes.set(xscale="log", yscale="log", title=variant, xlabel="bytes, % of the checkpoint", ylabel="KL, nats a token")
    axes.grid(True, which="major", color="0.9")


def _draw_predicted(axes: Axes, rows: Rows) -> None:
    for at, variant in enumerate(dict.fromkeys(row["variant"] for row in rows)):
        points = [(row["predicted_kl"], row["kl"]) for row in rows if row["variant"] == variant]
        marker = _MARKERS[at % len(_MARKERS)]
        axes.plot(*zip(*points, strict=True), marker, markersize=5, label=f"_{variant}", gid=f"predicted:{variant}")
        axes.annotate(variant, points[0], fontsize=7)
    ends = [value for row in rows for value in (row["predicted_kl"], row["kl"])]
    axes.plot([min(ends), max(ends)], [min(ends), max(ends)], color="0.6", linewidth=0.8, label="_equal")
    axes.set(xscale="log", yscale="log", title="predicted and measured", xlabel="predicted KL", ylabel="measured KL")
