"""The main path: a base and its fine-tunes into one family artifact.

1  open the sources, align them, plan                      headers alone; a dry run ends here
2  is it there already?                                    then nothing is written
3  kinship of the sources, and room for it                 a stranger is refused by name
4  the base as stored; what variants share beside it       journalled unit by unit
5  pass 1: read, digest, fit                               journalled unit by unit
6  allocate, or search what holds a target                 a pure function of pass 1 and of what is measured
7  pass 2: cut to size, decode, measure                    journalled unit by unit
8  shards, coverage proof, card, manifest; publish         the manifest last
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from mfs_decompose.artifact.card import codec_counts
from mfs_decompose.artifact.layout import MANIFEST
from mfs_decompose.artifact.reader import Family
from mfs_decompose.artifact.records import PlatformRecord, ToolRecord
from mfs_decompose.errors import OutputBusy
from mfs_decompose.events import NullSink, ProgressSink
from mfs_decompose.pipeline.assemble import finish
from mfs_decompose.pipeline.begin import Begun, Clock, begin
from mfs_decompose.pipeline.device import choose_device, platform_facts
from mfs_decompose.pipeline.encode import Choice
from mfs_decompose.pipeline.finished import matches_finished
from mfs_decompose.pipeline.passes import encode_all
from mfs_decompose.pipeline.prepare import Prepared, prepare
from mfs_decompose.pipeline.request import DecomposeReport, DecomposeRequest, VariantReport
from mfs_decompose.pipeline.run_record import write_run
from mfs_decompose.pipeline.survey import Surveyed
from mfs_decompose.pipeline.target import Reached, check_text, reach_target
from mfs_decompose.pipeline.workspace import publish_finished
from mfs_decompose.plan.allocate import Key
from mfs_decompose.provenance import tool_versions
from mfs_decompose.units import format_bytes


def decompose(request: DecomposeRequest, progress: ProgressSink | None = None) -> DecomposeReport:
    """Decompose a family into an artifact at `request.out`.

    The same request on the finished artifact writes nothing; after a kill it goes on where it was.

    Raises:
        MfsError: with the exit code of what is wrong, see errors.py; nothing is left under the final name.
    """
    sink = progress or NullSink()
    if request.out.name in ("", ".."):  # `.` has no name that could be given to what is finished
        request = replace(request, out=request.out.resolve())
    prepared = prepare(request, sink)
    check_text(request.recipe.objective.target, request.gauges, prepared.variants)
    for note in prepared.notes:
        sink.note(note)
    for warning in prepared.warnings:
        sink.note(warning, "warning")
    publish_finished(request.out, request.overwrite)
    device = choose_device(request.device)
    platform, tool = platform_facts(device), tool_versions()
    if (request.out / MANIFEST).exists() and not request.overwrite:
        if matches_finished(request, prepared, platform, tool, sink):
            return _report(request.out, written=False)
        raise OutputBusy(
            f"{request.out} holds a finished artifact that was made from something else",
            hint="Choose another --out, or add --overwrite to replace it.",
        )
    clock = Clock()
    with begin(request, prepared, device, platform, tool, clock, sink) as begun:
        job, surveyed, allocator, workspace = begun.job, begun.surveyed, begun.allocator, begun.job.workspace
        with clock.stage("allocate"):
            reached = _reach(begun, request, prepared)
            choices = allocator.choose() if reached is None else reached.choices
        _say_merged(surveyed, choices, sink)
        with clock.stage("pass 2"):
            pieces = encode_all(job, surveyed, choices)
        _say_nonfinite(surveyed, prepared.merges, sink)
        with clock.stage("write"):
            manifest = finish(
                workspace,
                begun.plan,
                prepared.base,
                prepared.variants,
                begun.base_files,
                {id: (merge, begun.readers[id]) for id, merge in prepared.merges.items()},
                pieces,
                ToolRecord(**tool),
                PlatformRecord(**platform),  # type: ignore[arg-type]  # pydantic checks the device
                sink,
                begun.shared,
                None if reached is None else reached.record,
            )
        bytes_read = job.sources.bytes_read
        trials = None if reached is None else reached.trials
        write_run(workspace.folder, manifest, prepared, request.argv, clock.stages, bytes_read, begun.resumed, trials)
        sink.start("publishing", None)
        workspace.publish(request.out, request.overwrite)
        sink.finish()
    report = _report(request.out, written=True)
    return replace(report, stages=clock.stages, bytes_read=bytes_read, resumed_units=begun.resumed)


def _reach(begun: Begun, request: DecomposeRequest, prepared: Prepared) -> Reached | None:
    """What the recipe's target comes to; None without one."""
    if request.recipe.objective.target is None:
        return None
    assert request.gauges is not None, "check_text saw to it"
    curves = {id: one.curve for id, one in begun.calibrations.items() if one.curve is not None}
    return reach_target(begun.job, begun.allocator, request.gauges, prepared.variants, curves)


def _say_merged(surveyed: Mapping[Key, Surveyed], choices: Mapping[Key, Choice], sink: ProgressSink) -> None:
    """Where a budget bought less drift as served than all bits of a merged LoRA have: what those would have taken."""
    open_, passed_over = Counter[str](), dict[str, list[int]]()
    for key, facts in surveyed.items():
        if facts.open is not None:
            open_[key[0]] += 1
            if facts.open.peeled is not None and choices[key].codec != "lora-exact":
                passed_over.setdefault(key[0], []).append(facts.open.peeled[0])
    for id, sizes in sorted(passed_over.items()):
        if 2 * len(sizes) > open_[id]:  # a full fine-tune can have a matrix or two that look like one
            sink.note(
                f"{id} looks like a merged LoRA: --codec lora-exact would keep all bits of {len(sizes)} matrices in "
                f"{format_bytes(sum(sizes))}; served, more of the delta would be lost"
            )


def _say_nonfinite(surveyed: Mapping[Key, Surveyed], adapters: Collection[str], sink: ProgressSink) -> None:
    for (id, name), facts in sorted(surveyed.items()):
        if not facts.nonfinite:
            continue
        count = "1 value" if facts.nonfinite == 1 else f"{facts.nonfinite} values"
        what = f"that {'is' if facts.nonfinite == 1 else 'are'} NaN or infinite; stored exactly"
        if id in adapters:
            what = "beyond the base's dtype, which a checkpoint in it cannot hold; --dtype float32 keeps all of fp32"
        sink.note(f"{name} of variant {id!r} holds {count} {what}", "warning")


def _report(out: Path, *, written: bool) -> DecomposeReport:
    with Family.open(out) as family:
        manifest, digest = family.manifest, family.artifact_digest
    return DecomposeReport(
        out=out,
        written=written,
        artifact_digest=digest,
        base_bytes=manifest.base.bytes,
        total_bytes=manifest.total_bytes,
        target=manifest.target,
        checkpoint_bytes=sum(variant.checkpoint_bytes for variant in manifest.variants),
        variants=tuple(
            VariantReport(
                id=v.id,
                bytes=v.bytes,
                checkpoint_bytes=v.checkpoint_bytes,
                footprint=v.footprint,
                rel_error=v.rel_error,
                codecs=codec_counts(v),
                tensors=len(v.tensors),
                exact_tensors=sum(tensor.exact for tensor in v.tensors.values()),
                adapter=v.adapter is not None,
            )
            for v in manifest.variants
        ),
    )
