"""Plots of spectra as SVG: the same figures give the same bytes, text stays text, and everything reads in grey.

Each drawn line and cell carries an id (`energy:q_proj`, `noise:q_proj`, `cell:3:q_proj`), by which a program finds it.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mfs_decompose.cli.out import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

    from mfs_decompose.pipeline.spectra_summary import Curve, VariantSummary

OF = {"original": "delta of the original", "stored": "delta as stored"}
_STYLES = ("-", "--", "-.", (0, (5, 1, 1, 1, 1, 1)))
_MARKERS = "osD^v<>pXh*P"
_LETTERS = 0.075  # inches of a letter in a column's label
_SETTINGS: dict[Any, Any] = {  # keys are literals of matplotlib's own
    "svg.hashsalt": "mfs",
    "svg.fonttype": "none",
    "path.simplify": False,
    "text.parse_math": False,
    "font.size": 9,
    "axes.grid": True,
    "grid.color": "0.9",
}


def draw(summary: VariantSummary) -> dict[str, bytes]:
    """The plots of one variant as SVG by file name; none where nothing has a spectrum."""
    curves = {one.family: one.curve for one in summary.families if one.curve is not None}
    if not curves:
        return {}
    title = f"{summary.id}, {OF[summary.of]}"
    drawn: dict[str, Callable[[Figure], None]] = {
        "energy": lambda figure: _draw_energy(_axes(figure), curves, title),
        "singular-values": lambda figure: _draw_singular_values(_axes(figure), curves, title),
        "effective-rank": lambda figure: _draw_effective_rank(figure, summary.cells, title),
    }
    with plain_matplotlib():
        return {f"{summary.id}-{name}.svg": svg(fill) for name, fill in drawn.items()}


def _draw_energy(axes: Axes, curves: dict[str, Curve], title: str) -> None:
    for at, (family, curve) in enumerate(curves.items()):
        _line(axes, at, family, "energy", curve.direction, curve.cumulative)
    axes.set(
        title=f"Cumulative energy: {title}",
        xlabel="strongest directions (count)",
        ylabel="share of the delta's energy (fraction of its squared norm)",
        xscale="log",
        ylim=(0.0, 1.02),
    )
    plain_ticks(axes.xaxis)
    axes.legend(fontsize=8, loc="lower right")


def _draw_singular_values(axes: Axes, curves: dict[str, Curve], title: str) -> None:
    for at, (family, curve) in enumerate(curves.items()):
        kept = [(k, value) for k, value in zip(curve.direction, curve.singular_value, strict=True) if value > 0.0]
        _line(axes, at, family, "singular", [k for k, _ in kept], [value for _, value in kept])
        if curve.noise_level > 0.0:
            axes.axhline(curve.noise_level, color=shade(at), linestyle=":", linewidth=1.0, gid=safe(f"noise:{family}"))
    axes.plot([], [], color="0.3", linestyle=":", linewidth=1.0, label="largest of rounding noise alone, predicted")
    axes.set(
        title=f"Singular values: {title}",
        xlabel="direction (number, strongest first)",
        ylabel="singular value (units of the weights, RMS over matrices)",
        xscale="log",
        yscale="log",
    )
    plain_ticks(axes.xaxis)
    plain_ticks(axes.yaxis)
    axes.legend(fontsize=8, loc="lower left")


def _draw_effective_rank(figure: Figure, cells: Sequence[tuple[int | None, str, float]], title: str) -> None:
    from matplotlib.patches import Rectangle

    families = list(dict.fromkeys(family for _, family, _ in cells))
    layers = sorted({layer for layer, _, _ in cells}, key=lambda layer: -1 if layer is None else layer)
    labels = [_label(family) for family in families]
    longest = max(len(label) for label in labels)
    figure.set_size_inches(max(5.5, 1.2 + 0.55 * len(families)), 1.5 + 0.2 * len(layers) + _LETTERS * longest)
    axes = figure.add_subplot()
    axes.grid(False)
    most = max(rank for _, _, rank in cells)
    for layer, family, rank in cells:
        x, y, dark = families.index(family), layers.index(layer), 0.85 * rank / most
        axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=str(1 - dark), edgecolor="0.8", linewidth=0.5))
        axes.text(
            x, y, f"{rank:.3g}", ha="center", va="center", fontsize=7, color="white" if dark > 0.5 else "black",
            gid=safe(f"cell:{layer}:{family}"),
        )  # fmt: skip
    axes.set(
        title=f"Effective rank: {title}",
        xlabel="tensors (family)",
        ylabel="layer (number)",
        xlim=(-0.5, len(families) - 0.5),
        ylim=(len(layers) - 0.5, -0.5),
    )
    axes.set_xticks(range(len(families)), labels, rotation=90)
    axes.set_yticks(range(len(layers)), ["none" if layer is None else str(layer) for layer in layers], fontsize=7)


def _line(axes: Axes, at: int, family: str, kind: str, x: Sequence[float], y: Sequence[float]) -> None:
    axes.plot(
        x,
        y,
        color=shade(at),
        linestyle=_STYLES[at % len(_STYLES)],
        marker=_MARKERS[at % len(_MARKERS)],
        markevery=(7 * at % 20, 20),
        markersize=4,
        linewidth=1.3,
        label=_label(family),
        gid=safe(f"{kind}:{family}"),
    )


def plain_ticks(axis: Axis) -> None:
    """Numbers on a logarithmic axis without mathematical type, which would need its own fonts; some on a short one."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1.0,) if high > 1e3 * low else (1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _axes(figure: Figure) -> Axes:
    figure.set_size_inches(7.5, 5.0)
    return figure.add_subplot()


def shade(at: int) -> tuple[float, float, float, float]:
    """Colours whose lightness differs as well, none too light for paper."""
    from matplotlib import colormaps

    red, green, blue, alpha = colormaps["viridis"](0.85 * (at * 0.382 % 1.0))
    return red, green, blue, alpha


def _label(family: str) -> str:
    """A family's name; a leading underscore would hide it from the legend."""
    name = safe(family[:60])
    return f" {name}" if name.startswith("_") else name


def safe(name: str) -> str:
    """A stranger's name with what XML cannot hold written out."""
    return visible(name, keep="").encode("utf-8", "backslashreplace").decode()


def svg(fill: Callable[[Figure], None]) -> bytes:
    """A figure that `fill` draws."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    FigureCanvasSVG(figure)
    fill(figure)
    stream = io.BytesIO()
    figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    return stream.getvalue()


@contextmanager
def plain_matplotlib() -> Iterator[None]:
    """Default settings but for ours, whatever the user's own are; no talk of fonts on stderr."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        yield
