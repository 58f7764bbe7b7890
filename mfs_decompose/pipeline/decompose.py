"""The main path: a base and its fine-tunes into one family artifact.

1  open the sources, align them, plan                      headers alone; a dry run ends here
2  is it there already?                                    then nothing is written
3  kinship of the sources, and room for it                 a stranger is refused by name
4  the base as stored
5  pass 1: read, digest, fit                               journalled unit by unit
6  allocate                                                a pure function of pass 1
7  pass 2: cut to size, decode, measure                    journalled unit by unit
8  shards, coverage proof, card, manifest; publish         the manifest last
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from mfs_decompose.artifact.card import codec_counts
from mfs_decompose.artifact.files import FileRecord
from mfs_decompose.artifact.layout import MANIFEST
from mfs_decompose.artifact.reader import Family
from mfs_decompose.artifact.records import PlatformRecord, ToolRecord
from mfs_decompose.errors import OutputBusy
from mfs_decompose.events import NullSink, ProgressSink
from mfs_decompose.pipeline.assemble import finish
from mfs_decompose.pipeline.base_stage import (
    base_units,
    digest_known_base,
    make_mean_base,
    open_stored,
    store_known_base,
)
from mfs_decompose.pipeline.choices import choose_all
from mfs_decompose.pipeline.device import choose_device, crowded_out, platform_facts
from mfs_decompose.pipeline.finished import matches_finished
from mfs_decompose.pipeline.keep_adapter import require_finite
from mfs_decompose.pipeline.passes import Job, encode_all, survey_all
from mfs_decompose.pipeline.prepare import check_disk, memory_limit, prepare, thread_count
from mfs_decompose.pipeline.reading import Sources
from mfs_decompose.pipeline.request import DecomposeReport, DecomposeRequest, VariantReport
from mfs_decompose.pipeline.run_record import write_run
from mfs_decompose.pipeline.scheduler import one_torch_thread
from mfs_decompose.pipeline.survey import Surveyed
from mfs_decompose.pipeline.workspace import Workspace, open_workspace, publish_finished
from mfs_decompose.plan.allocate import Key
from mfs_decompose.plan.fingerprint import fingerprint
from mfs_decompose.plan.model import Plan
from mfs_decompose.provenance import tool_versions
from mfs_decompose.source.checkpoint import TensorReader
from mfs_decompose.source.lineage import check_lineage


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
    # On a GPU units take turns (linalg/device_batches.py): the threads read, subtract, and encode.
    threads = thread_count(request)
    memory = memory_limit(request.recipe, prepared.plan)
    facts = fingerprint(prepared.plan, prepared.base, prepared.variants, platform, tool)
    clock = _Clock()
    with one_torch_thread(), ExitStack() as stack:
        readers = {v.id: stack.enter_context(TensorReader(v)) for v in prepared.variants}
        base = None if prepared.base is None else stack.enter_context(TensorReader(prepared.base))
        workspace = stack.enter_context(open_workspace(request.out, facts, request.resume))
        resumed = workspace.done.units
        if workspace.done.nothing:  # else an earlier run has checked these very sources
            for id in prepared.merges:
                require_finite(readers[id])
            whole = [readers[id] for id in sorted(readers.keys() - prepared.merges.keys())]
            check_lineage(base, whole, prepared.alignment)
        check_disk(request, prepared.estimate, _folder_bytes(workspace.root))
        with clock.stage("base"):
            base_files, sources = _store_base(workspace, prepared.plan, base, readers, threads, memory, sink)
        job = Job(prepared.plan, workspace, sources, device, threads, memory, sink)
        with clock.stage("pass 1"):
            surveyed = survey_all(job)
        crowded = crowded_out(device)
        if crowded:
            sink.note(crowded, "warning")
        with clock.stage("allocate"):
            choices = choose_all(prepared.plan, surveyed)
        with clock.stage("pass 2"):
            pieces = encode_all(job, surveyed, choices)
        _say_nonfinite(surveyed, prepared.merges, sink)
        with clock.stage("write"):
            manifest = finish(
                workspace,
                prepared.plan,
                prepared.base,
                prepared.variants,
                base_files,
                {id: (merge, readers[id]) for id, merge in prepared.merges.items()},
                pieces,
                ToolRecord(**tool),
                PlatformRecord(**platform),  # type: ignore[arg-type]  # pydantic checks the device
                sink,
            )
        write_run(workspace.folder, manifest, prepared, request.argv, clock.stages, sources.bytes_read, resumed)
        sink.start("publishing", None)
        workspace.publish(request.out, request.overwrite)
        sink.finish()
    report = _report(request.out, written=True)
    return replace(report, stages=clock.stages, bytes_read=sources.bytes_read, resumed_units=resumed)


class _Clock:
    """Seconds of each stage, as run.json and the benchmarks tell them."""

    def __init__(self) -> None:
        self.stages: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.stages[name] = time.perf_counter() - started


def _store_base(
    workspace: Workspace,
    plan: Plan,
    base: TensorReader | None,
    readers: Mapping[str, TensorReader],
    threads: int,
    memory: int,
    sink: ProgressSink,
) -> tuple[list[FileRecord], Sources]:
    """The base's files in the artifact, and where its weights are read from now on: the base as stored."""
    units = base_units(plan)
    if base is not None:
        records = store_known_base(workspace, plan, base.checkpoint, sink)
        digest_known_base(workspace, units, base, threads, memory, sink)
        return records, Sources(base, readers)
    records = make_mean_base(workspace, plan, units, readers, threads, memory, sink)
    stored = open_stored(workspace.folder, [record.path for record in records])
    return records, Sources(TensorReader(stored), readers)


def _say_nonfinite(surveyed: Mapping[Key, Surveyed], adapters: Collection[str], sink: ProgressSink) -> None:
    for (id, name), facts in sorted(surveyed.items()):
        if not facts.nonfinite:
            continue
        count = "1 value" if facts.nonfinite == 1 else f"{facts.nonfinite} values"
        what = f"that {'is' if facts.nonfinite == 1 else 'are'} NaN or infinite; stored exactly"
        if id in adapters:
            what = "beyond the base's dtype, which a checkpoint in it cannot hold; --dtype float32 keeps all of fp32"
        sink.note(f"{name} of variant {id!r} holds {count} {what}", "warning")


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _report(out: Path, *, written: bool) -> DecomposeReport:
    with Family.open(out) as family:
        manifest, digest = family.manifest, family.artifact_digest
    return DecomposeReport(
        out=out,
        written=written,
        artifact_digest=digest,
        base_bytes=manifest.base.bytes,
        total_bytes=manifest.total_bytes,
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
