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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from mfs_decompose.artifact.atomic import shortage_named
from mfs_decompose.artifact.card import codec_counts
from mfs_decompose.artifact.files import FileRecord
from mfs_decompose.artifact.layout import MANIFEST
from mfs_decompose.artifact.manifest import Manifest
from mfs_decompose.artifact.reader import Family
from mfs_decompose.artifact.records import PlatformRecord, ToolRecord
from mfs_decompose.artifact.writer import write_run_record
from mfs_decompose.errors import OutputBusy
from mfs_decompose.events import NullSink, ProgressSink
from mfs_decompose.pipeline.assemble import Piece, finish
from mfs_decompose.pipeline.base_stage import (
    base_units,
    digest_known_base,
    make_mean_base,
    open_stored,
    store_known_base,
)
from mfs_decompose.pipeline.choices import choose_all
from mfs_decompose.pipeline.device import choose_device, platform_facts
from mfs_decompose.pipeline.encode import Encoded, Encoder
from mfs_decompose.pipeline.finished import matches_finished
from mfs_decompose.pipeline.prepare import Prepared, check_disk, memory_limit, prepare, thread_count
from mfs_decompose.pipeline.reading import Sources
from mfs_decompose.pipeline.request import DecomposeReport, DecomposeRequest, VariantReport
from mfs_decompose.pipeline.scheduler import Stop, one_torch_thread, run_units
from mfs_decompose.pipeline.survey import Surveyed, Surveyor
from mfs_decompose.pipeline.workspace import Workspace, open_workspace, publish_finished
from mfs_decompose.plan.allocate import Key
from mfs_decompose.plan.fingerprint import fingerprint
from mfs_decompose.plan.model import Unit
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
    prepared = prepare(request)
    for note in prepared.alignment.notes:
        sink.note(note, "warning")
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
    memory = memory_limit(request.recipe, prepared.plan)
    facts = fingerprint(prepared.plan, prepared.base, prepared.variants, platform, tool)
    with one_torch_thread(), ExitStack() as stack:
        readers = {v.id: stack.enter_context(TensorReader(v)) for v in prepared.variants}
        base = None if prepared.base is None else stack.enter_context(TensorReader(prepared.base))
        workspace = stack.enter_context(open_workspace(request.out, facts, request.resume))
        if workspace.done.nothing:  # else an earlier run has checked these very sources
            check_lineage(base, [readers[id] for id in sorted(readers)], prepared.alignment)
        run = _Run(request, prepared, workspace, readers, base, device, memory, sink)
        manifest = run.finish(ToolRecord(**tool), PlatformRecord(**platform))  # type: ignore[arg-type]
        run.write_record(manifest)
        sink.start("publishing", None)
        workspace.publish(request.out, request.overwrite)
        sink.finish()
    return _report(request.out, written=True, run=run)


class _Run:
    """The steps that read weights, in order; what is done already is taken from the workspace."""

    def __init__(
        self,
        request: DecomposeRequest,
        prepared: Prepared,
        workspace: Workspace,
        readers: Mapping[str, TensorReader],
        base: TensorReader | None,
        device: str,
        memory: int,
        sink: ProgressSink,
    ) -> None:
        self.request, self.prepared, self.plan = request, prepared, prepared.plan
        self.workspace, self.readers, self.sink = workspace, readers, sink
        self.device, self.memory = device, memory
        # One unit at a time on a GPU: it is the unit that is parallel there.
        self.threads = thread_count(request) if device == "cpu" else 1
        self.stages: dict[str, float] = {}
        self.resumed = workspace.done.units
        check_disk(request, prepared.estimate, _folder_bytes(workspace.root))
        with self._stage("base"):
            self.base_files, self.sources = self._store_base(base)
        with self._stage("pass 1"):
            self._survey()
        self.surveyed = self._surveyed()
        with self._stage("allocate"):
            self.choices = choose_all(self.plan, self.surveyed)
        with self._stage("pass 2"):
            self._encode()

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.stages[name] = time.perf_counter() - started

    def _store_base(self, base: TensorReader | None) -> tuple[list[FileRecord], Sources]:
        workspace, plan, sink = self.workspace, self.plan, self.sink
        units = base_units(plan, len(self.readers))
        if base is not None:
            records = store_known_base(workspace, plan, base.checkpoint, sink)
            digest_known_base(workspace, units, base, self.threads, self.memory, sink)
            return records, Sources(base, self.readers)
        records = make_mean_base(workspace, plan, units, self.readers, self.threads, self.memory, sink)
        stored = open_stored(workspace.folder, [record.path for record in records])
        return records, Sources(TensorReader(stored), self.readers)

    def _surveyor(self) -> Surveyor:
        recipe = self.plan.recipe
        return Surveyor(self.sources, recipe.seed, self.device, recipe.objective.budget is not None, self.sink.advance)

    def _survey(self) -> None:
        left = [unit for unit in self.plan.units if unit.number not in self.workspace.done.surveyed]
        surveyor = self._surveyor()

        def work(unit: Unit, stop: Stop) -> list[Surveyed]:
            return _write_fits(surveyor, unit, self.workspace.fits_path(unit.number), stop)

        def done(unit: Unit, found: list[Surveyed]) -> None:
            self.workspace.record_survey(unit.number, [item.to_json() for item in found])

        self.sink.start("pass 1: read and factorise", sum(unit.read_bytes for unit in left))
        run_units(left, work, done, self.threads, self.memory)
        self.sink.finish()

    def _surveyed(self) -> dict[Key, Surveyed]:
        found = self.workspace.done.surveyed
        return {
            item.key: Surveyed.from_json(facts)
            for unit in self.plan.units
            for item, facts in zip(unit.items, found[unit.number], strict=True)
        }

    def _encode(self) -> None:
        left = [unit for unit in self.plan.units if unit.number not in self.workspace.done.encoded]
        encoder, surveyor = Encoder(self.sources, self.sink.advance), self._surveyor()

        def work(unit: Unit, stop: Stop) -> list[Encoded]:
            fits = self._fits(unit, surveyor, stop)
            blobs = self.workspace.blobs_path(unit.number)
            with (
                shortage_named(blobs, sum(item.spec.nbytes for item in unit.items)),
                open(fits, "rb") if fits else nullcontext() as source,
                open(blobs, "w+b") as output,
            ):
                return [self._encode_item(encoder, unit, at, source, output, stop) for at in range(len(unit.items))]

        def done(unit: Unit, found: list[Encoded]) -> None:
            self.workspace.record_encoding(unit.number, [item.to_json() for item in found])

        self.sink.start("pass 2: encode and measure", sum(self._weight(unit) for unit in left))
        run_units(left, work, done, self.threads, self.memory)
        self.sink.finish()

    def _encode_item(
        self, encoder: Encoder, unit: Unit, at: int, fits: BinaryIO | None, output: BinaryIO, stop: Stop
    ) -> Encoded:
        item = unit.items[at]
        return encoder.encode(item, self.surveyed[item.key], self.choices[item.key], fits, output, stop)

    def _fits(self, unit: Unit, surveyor: Surveyor, stop: Stop) -> Path | None:
        """The fits that pass 2 of a unit needs, made again where scratch has lost them."""
        lossy = any(self.surveyed[item.key].fit is not None for item in unit.items)
        if not lossy:
            return None
        path = self.workspace.fits_path(unit.number)
        if not self.workspace.has_fits(unit.number):
            _write_fits(surveyor, unit, path, stop)
        return path

    def _weight(self, unit: Unit) -> int:
        chosen = [item for item in unit.items if self.choices[item.key].codec not in ("identical", "alias")]
        return sum(item.spec.nbytes for item in chosen)

    def _pieces(self) -> dict[Key, Piece]:
        return {
            item.key: Piece(
                item, self.surveyed[item.key], Encoded.from_json(facts), self.workspace.blobs_path(unit.number)
            )
            for unit in self.plan.units
            for item, facts in zip(unit.items, self.workspace.done.encoded[unit.number], strict=True)
        }

    def finish(self, tool: ToolRecord, platform: PlatformRecord) -> Manifest:
        """Step 8 up to the manifest."""
        self._say_nonfinite()
        with self._stage("write"):
            return finish(
                self.workspace,
                self.plan,
                self.prepared.base,
                self.prepared.variants,
                self.base_files,
                self._pieces(),
                tool,
                platform,
                self.sink,
            )

    def _say_nonfinite(self) -> None:
        for key, facts in sorted(self.surveyed.items()):
            if facts.nonfinite:
                count = f"{facts.nonfinite} value{'' if facts.nonfinite == 1 else 's'}"
                self.sink.note(
                    f"{key[1]} of variant {key[0]!r} holds {count} that are NaN or infinite; stored exactly", "warning"
                )

    def write_record(self, manifest: Manifest) -> None:
        """run.json: what is true of this run only."""
        base = self.prepared.base
        write_run_record(
            self.workspace.folder,
            {
                "schema": "mfs.run/1",
                "digest": manifest.digest,
                "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "argv": list(self.request.argv),
                "stages": {name: round(seconds, 3) for name, seconds in self.stages.items()},
                "bytes_read": self.sources.bytes_read,
                "resumed_units": self.resumed,
                "hints": {
                    "base": None if base is None else str(base.root.absolute()),
                    "variants": {v.id: str(v.root.absolute()) for v in self.prepared.variants},
                },
                "stats": stats_of(self.prepared),
            },
        )


def stats_of(prepared: Prepared) -> dict[str, Any]:
    """Sizes and times of the source files: how a later run knows them again without reading them."""
    sources = [*prepared.variants, *([prepared.base] if prepared.base is not None else [])]
    return {source.id: [[shard.file, shard.size, shard.mtime_ns] for shard in source.shards] for source in sources}


def _write_fits(surveyor: Surveyor, unit: Unit, path: Path, stop: Stop) -> list[Surveyed]:
    with shortage_named(path, sum(item.spec.nbytes for item in unit.items)), open(path, "wb") as scratch:
        found = surveyor.survey(unit, scratch, stop)
        empty = scratch.tell() == 0
    if empty:
        path.unlink()
    return found


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _report(out: Path, *, written: bool, run: _Run | None = None) -> DecomposeReport:
    with Family.open(out) as family:
        manifest, digest = family.manifest, family.artifact_digest
    variants: Sequence[VariantReport] = [
        VariantReport(v.id, v.bytes, v.checkpoint_bytes, v.footprint, v.rel_error, codec_counts(v))
        for v in manifest.variants
    ]
    return DecomposeReport(
        out=out,
        written=written,
        artifact_digest=digest,
        base_bytes=manifest.base.bytes,
        total_bytes=manifest.total_bytes,
        checkpoint_bytes=sum(v.checkpoint_bytes for v in manifest.variants),
        variants=tuple(variants),
        stages=dict(run.stages) if run else {},
        bytes_read=run.sources.bytes_read if run else 0,
        resumed_units=run.resumed if run else 0,
    )
