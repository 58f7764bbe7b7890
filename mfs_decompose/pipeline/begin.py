"""The first half of a run, up to where every tensor is known: what a forecast needs, and what encoding goes on from.

All of it is journalled in the run's workspace, so whoever comes second pays for nothing again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from mfs_decompose.artifact.files import FileRecord
from mfs_decompose.events import ProgressSink
from mfs_decompose.pipeline.allocation import Allocator
from mfs_decompose.pipeline.bases import Staging, add_shared, store_base
from mfs_decompose.pipeline.calibrate import Calibration, calibrate_all
from mfs_decompose.pipeline.device import crowded_out
from mfs_decompose.pipeline.keep_adapter import require_finite
from mfs_decompose.pipeline.passes import Job, survey_all
from mfs_decompose.pipeline.prepare import Prepared, check_disk, memory_limit, thread_count
from mfs_decompose.pipeline.request import DecomposeRequest
from mfs_decompose.pipeline.scheduler import one_torch_thread
from mfs_decompose.pipeline.shared_stage import SharedStored
from mfs_decompose.pipeline.sizing import size_all
from mfs_decompose.pipeline.surveyed import Surveyed
from mfs_decompose.pipeline.workspace import open_workspace
from mfs_decompose.plan.allocate import Key
from mfs_decompose.plan.drift import drift_weights
from mfs_decompose.plan.fingerprint import fingerprint
from mfs_decompose.plan.model import Plan
from mfs_decompose.plan.shared_groups import without_shares
from mfs_decompose.source.checkpoint import TensorReader
from mfs_decompose.source.lineage import check_lineage


@dataclass(frozen=True)
class Begun:
    """A run that has read everything once. `plan` has the base mode settled; that of `job` has the shared delta taken
    off its caps. `resumed` units were there already.
    """

    plan: Plan
    job: Job
    surveyed: Mapping[Key, Surveyed]
    allocator: Allocator
    calibrations: Mapping[str, Calibration]
    base_files: list[FileRecord]
    shared: SharedStored
    readers: Mapping[str, TensorReader]
    resumed: int


class Clock:
    """Seconds of each stage, as run.json and the benchmarks tell them; of one that is entered twice, together."""

    def __init__(self) -> None:
        self.stages: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.stages[name] = self.stages.get(name, 0.0) + time.perf_counter() - started


@contextmanager
def begin(
    request: DecomposeRequest,
    prepared: Prepared,
    device: str,
    platform: Mapping[str, str],
    tool: Mapping[str, str],
    clock: Clock,
    sink: ProgressSink,
) -> Iterator[Begun]:
    """Kinship, room, the base as stored, pass 1, and weights of drift; the workspace stays open inside the block.

    Raises:
        MfsError: with the exit code of what is wrong, see errors.py.
    """
    # On a GPU units take turns (linalg/device_batches.py): the threads read, subtract, and encode.
    threads = thread_count(request)
    memory = memory_limit(request.recipe, prepared.plan)
    facts = fingerprint(prepared.plan, prepared.base, prepared.variants, platform, tool, prepared.start)
    if request.gauges is not None and request.recipe.objective.target is not None:
        facts["the text of the target"] = dict(request.gauges.identity)
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
        staging = Staging(prepared.plan, workspace, device, threads, memory, sink)
        with clock.stage("base"):
            base_files, sources, plan = store_base(staging, base, readers, prepared.start)
        shared = SharedStored()
        if plan.base_mode == "shared":
            with clock.stage("shared delta"):
                plan, shared = add_shared(replace(staging, plan=plan), sources)
            sources = replace(sources, shared=shared.deltas, common=shared.common)
        job = Job(without_shares(plan, shared.shares), workspace, sources, device, threads, memory, sink)
        with clock.stage("pass 1"):
            surveyed = survey_all(job)
        crowded = crowded_out(device)
        if crowded:
            sink.note(crowded, "warning")
        with clock.stage("allocate"):
            allocator = Allocator(job.plan, surveyed, drift_weights(job.plan), lambda one: size_all(job, surveyed, one))
            calibrations: dict[str, Calibration] = {}
            if request.calibrate is not None:
                calibrations = calibrate_all(job, allocator, request.calibrate, prepared.variants)
                fitted = {id: one.weights for id, one in calibrations.items()}
                allocator = replace(allocator, weights={**allocator.weights, **fitted})
        yield Begun(plan, job, surveyed, allocator, calibrations, base_files, shared, readers, resumed)


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
