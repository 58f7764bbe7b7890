"""`mfs demo`: the whole of the main job on the built-in family, offline."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mfs_decompose.cli.options import OUTPUT, ThreadsOption, output_of
from mfs_decompose.cli.out import Output
from mfs_decompose.cli.progress import make_sink

if TYPE_CHECKING:
    from mfs_decompose.fidelity.result import DriftResult
    from mfs_decompose.pipeline.request import DecomposeReport


def command(
    ctx: typer.Context,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="DIR", help="Keep the artifact here.", rich_help_panel=OUTPUT),
    ] = None,
    budget: Annotated[str, typer.Option("--budget", metavar="5%|40kB", help="Cap for each variant.")] = "5%",
    threads: ThreadsOption = None,
) -> None:
    """Decompose, verify, restore and measure a small family that ships with mfs; needs no network.

    The family is a base and three fine-tunes of it: one in full, one a merged LoRA, one with added tokens.

    Examples:
      mfs demo
      mfs demo --out demo-art
    """
    output = output_of(ctx)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="mfs-demo-") as scratch:
        artifact = Path(scratch) / "artifact" if out is None else out
        report = _decompose(output, artifact, budget, threads)
        checked = _verify(output, artifact)
        _restore(output, artifact, Path(scratch) / "restored")
        results = _measure(output, artifact, Path(scratch))
    _close(output, report, checked, results, time.perf_counter() - started, out)


def _decompose(output: Output, artifact: Path, budget: str, threads: int | None) -> DecomposeReport:
    from mfs_decompose.demo import VARIANTS, base_folder, variant_folder
    from mfs_decompose.pipeline.decompose import decompose
    from mfs_decompose.pipeline.request import DecomposeRequest
    from mfs_decompose.recipe.load import load_recipe

    output.say(f"1. mfs decompose --base base --variants {' '.join(VARIANTS)} --out art --budget {budget}")
    request = DecomposeRequest(
        variants={id: str(variant_folder(id)) for id in VARIANTS},
        out=artifact,
        recipe=load_recipe(None, {"objective.budget": budget}),
        base=str(base_folder()),
        device="cpu",
        threads=threads,
        argv=tuple(sys.argv[1:]),
    )
    return decompose(request, make_sink(output))


def _verify(output: Output, artifact: Path) -> int:
    from mfs_decompose.artifact.verify import verify
    from mfs_decompose.errors import ArtifactInvalid

    output.say("2. mfs verify art --level values")
    report = verify(artifact, "values", progress=make_sink(output))
    if not report.ok:
        raise ArtifactInvalid(f"{artifact} is damaged: {report.problems[0].file}: {report.problems[0].what}")
    return report.checked_bytes


def _restore(output: Output, artifact: Path, folder: Path) -> None:
    from mfs_decompose.demo import VARIANTS
    from mfs_decompose.pipeline.restore import restore

    output.say("3. mfs restore art --variant all --out restored")
    restore(artifact, VARIANTS, folder, nested=True, progress=make_sink(output))


def _measure(output: Output, artifact: Path, scratch: Path) -> list[DriftResult]:
    from mfs_decompose.demo import VARIANTS, base_folder, text_of, variant_folder
    from mfs_decompose.fidelity.artifact_drift import DriftRequest, measure_artifact
    from mfs_decompose.fidelity.settings import EvalSettings
    from mfs_decompose.fidelity.text import read_corpus

    results: list[DriftResult] = []
    for id in VARIANTS:
        output.say(f"{len(results) // 2 + 4}. mfs eval art --variant {id} --text {text_of(id).name} --through both")
        place = scratch / f"eval-{id}"
        place.mkdir()
        request = DriftRequest(
            artifact=artifact,
            corpora=[read_corpus(str(text_of(id)))],
            settings=EvalSettings(window=256),
            through=("served", "restored"),
            scratch=place,
            variants=[id],
            originals={id: str(variant_folder(id))},
            base=str(base_folder()),
        )
        results += measure_artifact(request, make_sink(output))[0]
    return results


def _close(
    output: Output,
    report: DecomposeReport,
    checked: int,
    results: list[DriftResult],
    seconds: float,
    out: Path | None,
) -> None:
    """What was saved and what it cost: every figure was measured in this run."""
    from mfs_decompose.cli.eval import show_results
    from mfs_decompose.units import format_bytes, format_duration, format_fraction

    before = report.base_bytes + report.checkpoint_bytes
    document: dict[str, Any] = {
        "schema": "mfs.demo/1",
        "artifact_digest": report.artifact_digest,
        "checkpoints_bytes": before,
        "total_bytes": report.total_bytes,
        "variants": [{"id": v.id, "footprint": v.footprint, "bytes": v.bytes} for v in report.variants],
        "results": [result.to_json() for result in results],
        "verified_bytes": checked,
    }
    output.document(document)
    output.line("saved")
    output.table(
        ("variant", "its checkpoint", "stored as", "footprint"),
        [
            (v.id, format_bytes(v.checkpoint_bytes), format_bytes(v.bytes), format_fraction(v.footprint))
            for v in report.variants
        ],
        right=("its checkpoint", "stored as", "footprint"),
    )
    output.line()
    output.line("what it cost, on text of each variant's own kind (KL in nats a token, against its own original)")
    show_results(output, results)
    output.line()
    output.line(
        f"base and {len(report.variants)} fine-tunes: {format_bytes(before)} as checkpoints, "
        f"{format_bytes(report.total_bytes)} as one artifact; every tensor decoded and verified; "
        f"{format_duration(seconds)} in all"
    )
    if out is not None:
        output.say(f"the artifact is in {out}: mfs inspect {out}")
