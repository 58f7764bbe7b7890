"""`mfs decompose`: a base and its fine-tunes into one artifact."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

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
from mfs_decompose.cli.progress import make_sink

if TYPE_CHECKING:
    from mfs_decompose.pipeline.prepare import Prepared
    from mfs_decompose.pipeline.request import DecomposeReport

PLAN = "Plan"

Variants = Annotated[
    list[str],
    typer.Option(
        "--variants",
        "-V",
        metavar="[ID=]REF...",
        show_default=False,
        help="Fine-tunes: folders, or org/name[@rev] of the Hub; takes several. A bare one is named by its last part.",
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
    variants: Variants,
    out: OutOption,
    base: BaseOption = None,
    offline: OfflineFlag = False,
    recipe: RecipeOption = None,
    sets: SetOption = None,
    base_mode: Annotated[
        str | None, _plan("--base-mode", "MODE", "auto, known or mean; auto is known with --base, else mean.")
    ] = None,
    base_store: Annotated[
        str | None, _plan("--base-store", "HOW", "copy, reference or hardlink; copy by default.")
    ] = None,
    codec: Annotated[str | None, _plan("--codec", "NAME", "lowrank (default), sparse, lossless or raw.")] = None,
    budget: Annotated[
        str | None, _plan("--budget", "5%|80MB", "Cap for each variant, all bytes counted; 5% by default.")
    ] = None,
    rank: Annotated[int | None, _plan("--rank", "R", "The same rank for every matrix, instead of a budget.")] = None,
    density: Annotated[str | None, _plan("--density", "2%", "Share of each row's entries, for --codec sparse.")] = None,
    seed: Annotated[int | None, _plan("--seed", "N", "Seed of the random sketches; 0 by default.")] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", "-n", help="Show what would be done, from headers alone.", rich_help_panel=PLAN),
    ] = False,
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
      mfs decompose --base ./base --variants ./math --out art --codec lossless
    """
    from mfs_decompose.pipeline.request import DecomposeRequest
    from mfs_decompose.recipe.load import load_recipe, parse_set

    output = output_of(ctx)
    options = {
        "base.mode": base_mode,
        "base.store": base_store,
        "deltas.default.codec": codec,
        "objective.budget": budget,
        "objective.rank": rank,
        "objective.density": density,
        "seed": seed,
        "output.shard_size": shard_size,
        "limits.max_ram": max_ram,
        "limits.max_disk": max_disk,
    }
    overrides = parse_set(sets or []) | {key: value for key, value in options.items() if value is not None}
    request = DecomposeRequest(
        variants=named_refs(variants, "--variants"),
        out=Path(out),
        recipe=load_recipe(recipe, overrides),
        base=base,
        device=device,
        offline=offline,
        threads=threads,
        resume=resume,
        overwrite=overwrite,
        argv=tuple(sys.argv[1:]),
    )
    if dry_run:
        from mfs_decompose.pipeline.prepare import prepare

        _show_plan(output, prepare(request, make_sink(output), headers_only=True), request.out)
        return
    if overwrite and request.out.exists() and not output.confirm(f"replace {request.out}"):
        raise typer.Exit(2)
    from mfs_decompose.pipeline.decompose import decompose

    _show_report(output, decompose(request, make_sink(output)))


def _show_plan(output: Output, prepared: Prepared, out: Path) -> None:
    from mfs_decompose.plan.summary import summarise
    from mfs_decompose.units import format_bytes, format_fraction

    document = summarise(prepared.plan, prepared.estimate, prepared.base, prepared.variants, out)
    output.document(document)
    rows = [
        (v["id"], format_bytes(v["checkpoint_bytes"]), f"<= {format_bytes(v['max_bytes'])}",
         format_fraction(v["max_footprint"]), ", ".join(f"{codec} x {count}" for codec, count in v["codecs"].items()))
        for v in document["variants"]
    ]  # fmt: skip
    output.table(
        ("variant", "checkpoint", "bytes", "footprint", "tensors"), rows, right=("checkpoint", "bytes", "footprint")
    )
    for note in prepared.alignment.notes:
        output.line(f"note: {note}")
    output.line(
        f"base: {document['base']['mode']}, {document['base']['store']}, {format_bytes(document['base']['bytes'])}; "
        f"coverage {document['coverage']['tensors']} of {document['coverage']['tensors']} tensors in "
        f"{document['coverage']['groups']} groups; lineage: not checked"
    )
    output.line(
        f"disk: {format_bytes(document['disk_bytes'])} needed at most, {format_bytes(document['disk_free'])} free; "
        f"memory: {format_bytes(document['peak_ram'])} at most; reads {format_bytes(document['read_bytes'])}"
    )
    output.say("dry run: nothing was read but headers, and nothing was written")


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
                for v in report.variants
            ],
            "base_bytes": report.base_bytes,
            "total_bytes": report.total_bytes,
            "stages": dict(report.stages),
            "bytes_read": report.bytes_read,
            "resumed_units": report.resumed_units,
        }
    )
    rows = [
        (
            v.id,
            format_fraction(v.footprint),
            format_bytes(v.bytes),
            format_bytes(v.checkpoint_bytes),
            f"{v.rel_error:.3g}",
        )
        for v in report.variants
    ]
    output.table(
        ("variant", "footprint", "bytes", "of its checkpoint", "relative error"),
        rows,
        right=("footprint", "bytes", "of its checkpoint", "relative error"),
    )
    if not report.written:
        output.say(f"{report.out} is finished already: nothing was written")
        return
    resumed = f", {report.resumed_units} units taken from the run before" if report.resumed_units else ""
    output.say(
        f"wrote {report.out}: {format_bytes(report.total_bytes)} with a base of {format_bytes(report.base_bytes)}, "
        f"in {format_duration(sum(report.stages.values()))}{resumed}"
    )
    output.say(f"next: mfs verify {report.out} --level values")
