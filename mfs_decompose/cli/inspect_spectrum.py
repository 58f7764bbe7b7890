"""What `mfs inspect --spectrum` shows: which kind of change each variant is, by family of tensors, and plots of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mfs_decompose.cli.out import Output
from mfs_decompose.cli.progress import make_sink
from mfs_decompose.errors import OutputBusy, UsageError
from mfs_decompose.units import format_fraction

if TYPE_CHECKING:
    from mfs_decompose.pipeline.spectra import SpectraRequest, VariantSpectra
    from mfs_decompose.pipeline.spectra_summary import FamilySummary, VariantSummary

_NUMBERS = ("effective rank", "50 %", "90 %", "99 %", "unchanged", "noise")


def refuse_without_spectrum(given: Mapping[str, object]) -> None:
    """Options that mean something with --spectrum alone.

    Raises:
        UsageError: one of them is given.
    """
    for option, value in given.items():
        if value:
            raise UsageError(f"{option} says what --spectrum is to do, found no --spectrum", hint="Add --spectrum.")


def show_spectrum(output: Output, request: SpectraRequest, out: Path | None, top: int | None) -> None:
    """Measure, print and plot; `top` is how many tensors to list, none where None.

    Raises:
        OutputBusy: the plots cannot be written to `out`.
        MfsError: as `measure_spectra` does.
    """
    from mfs_decompose.pipeline.spectra import measure_spectra
    from mfs_decompose.pipeline.spectra_json import to_json
    from mfs_decompose.pipeline.spectra_summary import summarise

    if out is not None:
        _check_folder(out, request.artifact)
    digest, variants = measure_spectra(request, make_sink(output))
    summaries = [summarise(one) for one in variants]
    plots = [] if out is None else _plot(output, summaries, out)
    output.document(to_json(digest, variants, plots))
    for number, (spectra, summary) in enumerate(zip(variants, summaries, strict=True)):
        if number:
            output.line()
        _show(output, summary)
        if top is not None:
            _show_tensors(output, spectra, top)


def _show(output: Output, summary: VariantSummary) -> None:
    from mfs_decompose.cli.spectrum_plots import OF

    output.line(f"{summary.id}: {summary.kind or 'nothing to classify'} ({OF[summary.of]})")
    output.table(
        ("family", "class", "matrices", *_NUMBERS),
        [
            (
                one.family,
                _class(one),
                _counts(one.classes) or str(one.matrices),
                _number(one.effective_rank, "{:.1f}"),
                *(_number(count, "{:g}") for count in one.directions),
                "-" if one.unchanged is None else format_fraction(one.unchanged),
                "-" if one.noise_share is None else format_fraction(one.noise_share),
            )
            for one in summary.families
        ],
        right=_NUMBERS,
    )
    if summary.unclassified:
        output.line(f"{summary.unclassified} tensors have no floats of the base's to differ from")


def _show_tensors(output: Output, spectra: VariantSpectra, top: int) -> None:
    known = [one for one in spectra.matrices if one.facts is not None and one.verdict is not None]
    changed = [(one, one.facts, one.verdict) for one in known if one.facts and one.verdict and one.facts.energy > 0.0]
    changed.sort(key=lambda found: (-found[1].energy, found[0].tensor, found[0].slice or 0))
    if not changed:
        return
    output.line()
    output.table(
        ("tensor", "class", "energy", "because"),
        [
            (_name(one.tensor, one.slice), verdict.kind, f"{facts.energy:.3g}", verdict.why)
            for one, facts, verdict in changed[:top]
        ],
        right=("energy",),
    )
    if len(changed) > top:
        output.line(f"{len(changed) - top} more changed matrices: --top {len(changed)}")


def _plot(output: Output, summaries: Sequence[VariantSummary], out: Path) -> list[str]:
    from mfs_decompose.artifact.atomic import write_file
    from mfs_decompose.cli.spectrum_plots import draw

    written: list[str] = []
    for summary in summaries:
        drawn = draw(summary)
        if not drawn:
            output.say(f"{summary.id}: nothing has a spectrum to plot")
            continue
        out.mkdir(parents=True, exist_ok=True)
        for name, svg in drawn.items():
            write_file(out / name, svg)
            output.say(f"wrote {out / name}")
            written.append(str(out / name))
    return written


def _check_folder(out: Path, artifact: Path) -> None:
    if out.resolve().is_relative_to(artifact.resolve()):
        raise OutputBusy(f"the plots' folder {out} lies inside the artifact", hint="Choose another --out.")
    if out.exists() and not out.is_dir():
        raise OutputBusy(f"expected a folder at {out}, found a file", hint="Choose another --out.")


def _class(one: FamilySummary) -> str:
    return f"{one.kind}, rank {one.rank}" if one.kind == "lora" else one.kind or "-"


def _counts(classes: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} x {count}" for kind, count in classes.items())


def _name(tensor: str, slice: int | None) -> str:
    return tensor if slice is None else f"{tensor}[{slice}]"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
