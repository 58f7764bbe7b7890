"""The plot of `mfs bench runtime` as SVG: overhead against the number of distinct variants, and the recommended cap."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mfs_decompose.cli.spectrum_plots import plain_matplotlib, shade, svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from mfs_decompose.bench.measured import RuntimeBench


def draw_overhead(found: RuntimeBench) -> bytes:
    """Drawn things carry the ids `overhead`, `single:ID`, `limit` and `cap`."""
    with plain_matplotlib():
        return svg(lambda figure: _fill(figure, found))


def _fill(figure: Figure, found: RuntimeBench) -> None:
    from matplotlib.ticker import MaxNLocator

    from mfs_decompose.bench.measured import MOST_OVERHEAD
    from mfs_decompose.cli.spectrum_plots import safe

    figure.set_size_inches(7.5, 4.5)
    axes = figure.add_subplot()
    counts, overheads = [one.variants for one in found.mixed], [one.overhead for one in found.mixed]
    axes.plot(counts, overheads, color=shade(0), marker="o", label="mixed", gid="overhead")
    for at, one in enumerate(found.single, start=1):
        axes.plot(
            [1], [one.overhead], linestyle="", marker="D^v<>pXhs*"[at % 10], color=shade(at), markersize=5,
            label=f" {safe(one.id[:40])} alone", gid=safe(f"single:{one.id}"),
        )  # fmt: skip
    axes.axhline(MOST_OVERHEAD, color="0.4", linestyle=":", gid="limit", label=f"{MOST_OVERHEAD:g} times base rows")
    axes.axvline(found.cap, color="0.4", linestyle="--", gid="cap", label=f"recommended cap: {found.cap}")
    axes.set(
        title=f"A decode step of {found.settings['rows']} rows",
        xlabel="distinct variants in the batch (count)",
        ylabel="median decode step (times that of base rows)",
        ylim=(0.0, None),
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(fontsize=8)
