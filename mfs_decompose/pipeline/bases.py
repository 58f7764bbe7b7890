"""The base of a run, whatever its mode: as stored, what is shared beside it, and what `auto` decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from mfs_decompose.artifact.files import FileRecord
from mfs_decompose.events import ProgressSink
from mfs_decompose.pipeline.base_stage import (
    base_units,
    digest_known_base,
    make_mean_base,
    open_stored,
    store_known_base,
)
from mfs_decompose.pipeline.reading import Sources
from mfs_decompose.pipeline.refined_base import make_refined_base, open_refiner
from mfs_decompose.pipeline.refined_sample import weigh_sample
from mfs_decompose.pipeline.scheduler import Stop
from mfs_decompose.pipeline.shared_stage import SharedStored, store_shared, survey_shared
from mfs_decompose.pipeline.shared_survey import SharedSurveyor
from mfs_decompose.pipeline.workspace import Workspace
from mfs_decompose.plan.model import Plan
from mfs_decompose.plan.weigh import Weighed, weigh_shared
from mfs_decompose.source.checkpoint import Checkpoint, TensorReader

_WEIGH = "base-auto"


@dataclass(frozen=True)
class Staging:
    """What the stages before pass 1 work with."""

    plan: Plan
    workspace: Workspace
    device: str
    threads: int
    memory: int
    sink: ProgressSink


def store_base(
    staging: Staging, base: TensorReader | None, readers: Mapping[str, TensorReader], start: Checkpoint | None
) -> tuple[list[FileRecord], Sources, Plan]:
    """The base's files in the artifact, where its weights are read from now on (as stored), and the mode settled.

    `start` is where a refined base may start from.
    """
    plan, workspace, sink = staging.plan, staging.workspace, staging.sink
    units = base_units(plan)
    if base is None and plan.base_auto:
        plan = _weigh_mean(staging, readers, start)
    if base is not None:
        records = store_known_base(workspace, plan, base.checkpoint, sink)
        digest_known_base(workspace, units, base, staging.threads, staging.memory, sink)
        return records, Sources(base, readers), plan
    make = partial(make_refined_base, start=start) if plan.base_mode == "refined" else make_mean_base
    records = make(workspace, plan, units, readers, staging.threads, staging.memory, sink)
    stored = open_stored(workspace.folder, [record.path for record in records])
    return records, Sources(TensorReader(stored), readers), plan


def add_shared(staging: Staging, sources: Sources) -> tuple[Plan, SharedStored]:
    """The shared delta as stored, or none where `auto` decides for the base alone."""
    plan, workspace, sink = staging.plan, staging.workspace, staging.sink
    threads, memory = staging.threads, staging.memory
    surveyor = SharedSurveyor(sources, plan.recipe.seed, staging.device, sink.advance)
    found = survey_shared(workspace, plan, surveyor, threads, memory, sink)
    if plan.base_auto:
        weighed = weigh_shared(found.curves, found.budget)
        sink.note(weighed.said("shared", "the deltas of the tensors in question"))
        plan = replace(plan, base_mode=weighed.settle("shared"), base_auto=False)
        if plan.base_mode == "known":
            return plan, SharedStored()
    stored = store_shared(workspace, plan, found, surveyor, threads, memory, sink)
    if stored.record is None:
        sink.note("shared delta: none is worth its bytes in any tensor, so there is none")
    return plan, stored


def _weigh_mean(staging: Staging, readers: Mapping[str, TensorReader], start: Checkpoint | None) -> Plan:
    """The plan with the mean or the refined base, whichever a few matrices speak for; journalled."""
    plan, workspace = staging.plan, staging.workspace
    if (_WEIGH, 0) not in workspace.done.steps:
        with open_refiner(plan, readers, start) as refiner:
            count, weighed = weigh_sample(refiner, Stop())
        workspace.record_step(_WEIGH, 0, {"count": count, "plain": weighed.plain, "rich": weighed.rich})
    found = workspace.done.steps[_WEIGH, 0]
    weighed = Weighed(found["plain"], found["rich"])
    staging.sink.note(weighed.said("refined", f"the deltas of {found['count']} matrices that were looked at"))
    return replace(plan, base_mode=weighed.settle("refined"), base_auto=False)
