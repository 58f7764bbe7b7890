"""What `mfs decompose --dry-run --spectra` shows: bytes of a ladder of targets, and drift of a ladder of budgets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mfs_decompose.cli.out import Output
from mfs_decompose.cli.progress import make_sink
from mfs_decompose.units import format_bytes, format_fraction

if TYPE_CHECKING:
    from mfs_decompose.pipeline.forecast_ladder import Rung, TargetRung, VariantForecast
    from mfs_decompose.pipeline.request import DecomposeRequest

LEFT = "left of the delta"
"""Column of the share of the delta's energy, weighted as allocation weighs it, that would be missing."""

_BEYOND = "+"  # marks sizes above what pass 1 fitted for


def show_forecast(output: Output, request: DecomposeRequest) -> None:
    """Read, fit, foresee and print.

    Raises:
        MfsError: as `forecast` does.
    """
    from mfs_decompose.pipeline.forecast import forecast
    from mfs_decompose.pipeline.forecast_json import to_json

    found = forecast(request, make_sink(output))
    output.document(to_json(found))
    show_variants(output, found.variants)
    output.line()
    shared = f", shared delta {format_bytes(found.shared_bytes)}" if found.shared_bytes else ""
    output.line(f"base: {found.base_mode}, {found.base_store}, {format_bytes(found.base_bytes)}{shared}")
    if found.keep_exact:
        output.line("corrections for --keep-exact come on top: only encoding tells their bytes")
    output.say(f"dry run: nothing was encoded; what was read and fitted is kept in {found.work} for the run itself")


def show_variants(output: Output, variants: Sequence[VariantForecast]) -> None:
    """Tables of both ladders, and what they leave out."""
    for number, one in enumerate(variants):
        if number:
            output.line()
        _show(output, one)
    ladders = [one for one in variants if one.budgets]
    if not ladders:
        return
    output.line()
    output.line(
        f"`{LEFT}`: the share of its energy, weighted as allocation weighs it, that would be missing; it orders sizes "
        "of one variant and is no drift"
    )
    if any(not rung.fitted for one in ladders for rung in one.budgets):
        output.line(f"{_BEYOND} above the budget that was fitted for: a run at that budget can only do better")
    if not all(one.measured for one in ladders):
        output.line("drift is not foreseen without text to measure it on: give --calibrate FILE")


def _show(output: Output, one: VariantForecast) -> None:
    output.line(f"{one.id}: {format_bytes(one.checkpoint_bytes)} checkpoint{_planned(one)}")
    if one.budgets:
        columns = ("budget", "bytes", LEFT, *(("KL foreseen",) if one.measured else ()))
        output.table(columns, [_budget_row(rung, one.measured) for rung in one.budgets], right=columns)
    if one.targets:
        output.line()
        columns = ("target KL", "bytes", "footprint", LEFT)
        output.table(columns, [_target_row(rung, one) for rung in one.targets], right=columns)
    if one.unforeseen:
        output.line(f"{one.unforeseen} tensors have a fixed size, and their error is in no figure above")


def _planned(one: VariantForecast) -> str:
    rung = one.planned
    if rung is None:
        return ""
    if one.adapter:
        return f", kept as it is: {format_bytes(rung.cap)} at most"
    if rung.nbytes is None:
        return f"; its budget, {format_bytes(rung.cap)}, does not hold what must be exact"
    assert rung.left is not None
    kl = "" if rung.kl is None else f", KL {rung.kl:.2g}"
    left = f"{format_fraction(rung.left)} {LEFT}"
    share = format_fraction(rung.nbytes / one.checkpoint_bytes) if one.checkpoint_bytes else "-"
    return f"; as planned {format_bytes(rung.nbytes)} or {share}: {left}{kl}"


def _budget_row(rung: Rung, measured: bool) -> tuple[str, ...]:
    mark = "" if rung.fitted else _BEYOND
    if rung.nbytes is None or rung.left is None:
        return (format_fraction(rung.budget), "too small", "-", *(("-",) if measured else ()))
    row = (format_fraction(rung.budget), format_bytes(rung.nbytes), _left(rung.left) + mark)
    return row if not measured else (*row, "-" if rung.kl is None else f"{rung.kl:.2g}{mark}")


def _target_row(rung: TargetRung, of: VariantForecast) -> tuple[str, ...]:
    if rung.nbytes is None or rung.left is None:
        return (f"{rung.kl:.0e}", "out of reach", "-", "-")
    mark = "" if rung.fitted else _BEYOND
    share = rung.nbytes / of.checkpoint_bytes if of.checkpoint_bytes else 0.0
    return (f"{rung.kl:.0e}", format_bytes(rung.nbytes) + mark, format_fraction(share), _left(rung.left))


def _left(left: float) -> str:
    return "nothing" if left == 0.0 else format_fraction(left)
