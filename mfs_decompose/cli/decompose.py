"""`mfs decompose`: a base and its fine-tunes into one artifact."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mfs_decompose.cli.calibration_text import CalibrateOption, calibration_gauges
from mfs_decompose.cli.decompose_text import MaxTokensOption, TextOption, held_line, target_gauges
from mfs_decompose.cli.exactness import ERROR, RESTORED, explain_error, restored
from mfs_decompose.cli.options import (
    INPUTS,
    OUTPUT,
    BaseOption,
    DeviceOption,
    MaxDiskOption,
    MaxRamOption,
    OfflineFlag,
    OutOption,
    ThreadsOption,
    named_refs,
    output_of,
)
from mfs_decompose.cli.out import Output
from mfs_decompose.cli.plan_file import check_place, planned_recipe, planned_refs
from mfs_decompose.cli.progress import make_sink
from mfs_decompose.errors import UsageError

if TYPE_CHECKING:
    from mfs_decompose.pipeline.request import DecomposeReport, DecomposeRequest

PLAN = "Plan"

# The keys of the recipe that have an option of their own.
OPTION_OF = {
    "base.mode": "--base-mode",
    "base.store": "--base-store",
    "deltas.default.codec": "--codec",
    "objective.budget": "--budget",
    "objective.budget_total": "--budget-total",
    "objective.rank": "--rank",
    "objective.density": "--density",
    "objective.target": "--target",
    "seed": "--seed",
    "output.shard_size": "--shard-size",
    "limits.max_ram": "--max-ram",
    "limits.max_disk": "--max-disk",
    "deltas.keep_exact": "--keep-exact",
}

Variants = Annotated[
    list[str] | None,
    typer.Option(
        "--variants",
        "-V",
        metavar="[ID=]REF...",
        show_default=False,
        help="Fine-tunes: folders, or org/name[@rev] of the Hub; takes several. A bare one is named by its last part. "
        "Needed without --plan.",
        rich_help_panel=INPUTS,
    ),
]
RecipeOption = Annotated[
    str | None,
    typer.Option("--recipe", "-r", metavar="NAME|FILE", help="A shipped recipe or a file.", rich_help_panel=PLAN),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change any key of the recipe; repeatable.", rich_help_panel=PLAN),
]


def _plan(flag: str, metavar: str, help: str) -> Any:
    return typer.Option(flag, metavar=metavar, show_default=False, help=help, rich_help_panel=PLAN)


def command(
    ctx: typer.Context,
    *,
    variants: Variants = None,
    out: OutOption,
    base: BaseOption = None,
    calibrate: CalibrateOption = None,
    text: TextOption = None,
    max_tokens: MaxTokensOption = None,
    offline: OfflineFlag = False,
    recipe: RecipeOption = None,
    sets: SetOption = None,
    base_mode: Annotated[
        str | None,
        _plan(
            "--base-mode",
            "MODE",
            "known (default with --base), shared, mean (default without), refined; auto takes what is smaller.",
        ),
    ] = None,
    base_store: Annotated[
        str | None, _plan("--base-store", "HOW", "copy, reference or hardlink; copy by default.")
    ] = None,
    codec: Annotated[
        str | None,
        _plan(
            "--codec",
            "NAME",
            "auto (default), lowrank, sparse, sign, ternary, kbit, deadzone, rowsparse; exact: lossless, lora-exact, "
            "raw.",
        ),
    ] = None,
    keep_exact: Annotated[
        bool | None,
        typer.Option(
            "--keep-exact/--no-keep-exact",
            show_default=False,
            help="Store what a lossy codec gets wrong as well, beside the budget: all bits come back.",
            rich_help_panel=PLAN,
        ),
    ] = None,
    budget: Annotated[
        str | None, _plan("--budget", "5%|80MB", "Cap for each variant, all bytes counted; 5% by default.")
    ] = None,
    budget_total: Annotated[
        str | None,
        _plan("--budget-total", "5%|80MB", "One cap for all variants together, spent where it helps most."),
    ] = None,
    rank: Annotated[int | None, _plan("--rank", "R", "The same rank for every matrix, instead of a budget.")] = None,
    density: Annotated[str | None, _plan("--density", "2%", "Share of each row's entries, for --codec sparse.")] = None,
    target: Annotated[
        str | None,
        _plan(
            "--target", "kl=X|ppl=X", "The smallest that drifts no further, measured on --text: KL or |ln ppl ratio|."
        ),
    ] = None,
    seed: Annotated[int | None, _plan("--seed", "N", "Seed of the random sketches; 0 by default.")] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", "-n", help="Show what would be done, from headers alone.", rich_help_panel=PLAN),
    ] = False,
    spectra: Annotated[
        bool,
        typer.Option(
            "--spectra",
            help="With --dry-run: read the weights as well, and foresee other budgets, and with --calibrate drift.",
            rich_help_panel=PLAN,
        ),
    ] = False,
    save_plan: Annotated[
        Path | None,
        typer.Option(
            "--save-plan", metavar="FILE", help="With --dry-run: write the plan to this file.", rich_help_panel=PLAN
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option("--plan", metavar="FILE", help="Run exactly this saved plan.", rich_help_panel=PLAN),
    ] = None,
    shard_size: Annotated[
        str | None,
        typer.Option("--shard-size", metavar="BYTES", help="Cut files at this size.", rich_help_panel=OUTPUT),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume/--no-resume", help="Go on where a killed run was.", rich_help_panel=OUTPUT),
    ] = True,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace the artifact, once the new one is whole.", rich_help_panel=OUTPUT),
    ] = False,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    max_ram: MaxRamOption = None,
    max_disk: MaxDiskOption = None,
) -> None:
    """Turn a base and its fine-tunes into one family artifact.

    Every tensor of every variant is accounted for. The same command resumes a run that was killed, and writes
    nothing when the artifact is there already.

    Examples:
      mfs decompose --base ./base --variants math=./math code=./code --out art
      mfs decompose --base ./base --variants ./math --out art --budget 3% --dry-run
      mfs decompose --base ./base --variants ./math --out art --dry-run --spectra
      mfs decompose --base ./base --variants ./math --out art --codec lossless
      mfs decompose --base ./base --variants ./code --out art --target kl=1e-3 --text humaneval.jsonl:prompt
      mfs decompose --base ./base --variants lora=./tuned-lora --out art
      mfs decompose --base ./base --variants ./math --out art --rank 16 --dry-run --save-plan plan.json
      mfs decompose --plan plan.json --out art
    """
    from mfs_decompose.recipe.load import parse_set

    output = output_of(ctx)
    if save_plan is not None and not dry_run:
        raise UsageError("--save-plan needs --dry-run", hint="Add --dry-run; --plan FILE runs the plan afterwards.")
    if spectra and (not dry_run or save_plan is not None):
        raise UsageError(
            "--spectra needs --dry-run, and goes without --save-plan", hint="Add --dry-run; ask for the plan apart."
        )
    if save_plan is not None:
        check_place(save_plan)
    values = (
        base_mode, base_store, codec, budget, budget_total, rank, density, target, seed, shard_size, max_ram,
        max_disk, keep_exact,
    )  # fmt: skip
    options = {key: value for key, value in zip(OPTION_OF, values, strict=True) if value is not None}
    overrides = parse_set(sets or []) | options
    refs = named_refs(variants or [], "--variants")
    asked, origins = _request(plan, recipe, overrides, {key: OPTION_OF[key] for key in options}, base, refs, out)
    request = replace(
        asked,
        device=device,
        offline=offline,
        threads=threads,
        resume=resume,
        overwrite=overwrite,
        argv=tuple(sys.argv[1:]),
    )
    gauges = target_gauges(request.recipe, text, calibrate, max_tokens, device, request.out, measure=not dry_run)
    if spectra:
        from mfs_decompose.cli.forecast import show_forecast

        show_forecast(output, replace(request, calibrate=calibration_gauges(calibrate, device)))
        return
    if dry_run:
        from mfs_decompose.cli.dry_run import dry_run as show_plan

        show_plan(output, request, origins, save_plan)
        return
    if overwrite and request.out.exists() and not output.confirm(f"replace {request.out}"):
        raise typer.Exit(2)
    from mfs_decompose.pipeline.decompose import decompose

    request = replace(request, calibrate=calibration_gauges(calibrate, device), gauges=gauges)
    _show_report(output, decompose(request, make_sink(output)))


def _request(
    plan: Path | None,
    recipe: str | None,
    overrides: Mapping[str, object],
    options: Mapping[str, str],
    base: str | None,
    refs: Mapping[str, str],
    out: Path,
) -> tuple[DecomposeRequest, Mapping[str, str]]:
    """What is to be made of what, from a saved plan or from the command line, and the origin of each recipe value."""
    from mfs_decompose.pipeline.planned import PlannedRequest
    from mfs_decompose.pipeline.request import DecomposeRequest
    from mfs_decompose.plan.saved import read_plan
    from mfs_decompose.recipe.load import load_with_origins

    if plan is None:
        if not refs:
            raise UsageError(
                "expected --variants, found none", hint="Name the fine-tunes: --variants math=./math code=./code"
            )
        effective, origins = load_with_origins(recipe, overrides, options)
        return DecomposeRequest(variants=refs, out=out, recipe=effective, base=base), origins
    saved = read_plan(plan)
    effective, origins = planned_recipe(saved, recipe, overrides, options)
    base, refs = planned_refs(saved, base, refs)
    return PlannedRequest(variants=refs, out=out, recipe=effective, base=base, saved=saved), origins


def _held_json(report: DecomposeReport, id: str) -> dict[str, Any]:
    """What a target came to for a variant; null of an adapter, which is kept as it is; nothing without a target."""
    if report.target is None:
        return {}
    held = report.target.variants.get(id)
    return {"target": None if held is None else held.model_dump()}


def _show_report(output: Output, report: DecomposeReport) -> None:
    from mfs_decompose.units import format_bytes, format_duration, format_fraction

    output.document(
        {
            "schema": "mfs.decompose/1",
            "artifact": str(report.out),
            "artifact_digest": report.artifact_digest,
            "written": report.written,
            "variants": [
                {
                    "id": v.id,
                    "footprint": v.footprint,
                    "bytes": v.bytes,
                    "checkpoint_bytes": v.checkpoint_bytes,
                    "rel_error": v.rel_error,
                    "codecs": dict(v.codecs),
                }
                | _held_json(report, v.id)
                for v in report.variants
            ],
            "base_bytes": report.base_bytes,
            "total_bytes": report.total_bytes,
            "stages": dict(report.stages),
            "bytes_read": report.bytes_read,
            "resumed_units": report.resumed_units,
        }
        | ({} if report.target is None else {"target": report.target.asked})
    )
    rows = [
        (
            v.id,
            format_fraction(v.footprint),
            format_bytes(v.bytes),
            format_bytes(v.checkpoint_bytes),
            f"{v.rel_error:.3g}",
            restored(v.exact_tensors, v.tensors, adapter=v.adapter),
        )
        for v in report.variants
    ]
    output.table(
        ("variant", "footprint", "bytes", "of its checkpoint", ERROR, RESTORED),
        rows,
        right=("footprint", "bytes", "of its checkpoint", ERROR),
    )
    if report.target is not None:
        for v in report.variants:
            output.line(held_line(v.id, report.target.asked, report.target.variants.get(v.id), v.bytes))
    if said := explain_error(v.rel_error for v in report.variants):
        output.say(said)
    if not report.written:
        output.say(f"{report.out} is finished already: nothing was written")
        output.detail(f"mfs verify {report.out} checks its bytes")
        return
    resumed = f", {report.resumed_units} units taken from the run before" if report.resumed_units else ""
    output.say(
        f"wrote {report.out}: {format_bytes(report.total_bytes)} with a base of {format_bytes(report.base_bytes)}, "
        f"in {format_duration(sum(report.stages.values()))}{resumed}"
    )
    output.say(f"next: mfs verify {report.out} --level values")
