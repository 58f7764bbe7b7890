"""Between the base and pass 1: what the variants have in common beside the base, stored once.

Survey, group by group; one lambda for all; encode, group by group; shards. The delta that pass 1 fits is then
`W_k - (W0 + S)` with S as any reader will decode it.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from mfs_decompose.artifact.files import FileRecord
from mfs_decompose.artifact.layout import shared_shard_name
from mfs_decompose.artifact.records import Blob
from mfs_decompose.artifact.shard import Entry, split_into_shards, write_shard
from mfs_decompose.artifact.shard_reader import shard_metadata
from mfs_decompose.artifact.shared_delta import OWNER, SharedReader, SharedRecord, SharedTensor
from mfs_decompose.codec.banded import Banded
from mfs_decompose.codec.shared import Shared
from mfs_decompose.events import ProgressSink
from mfs_decompose.linalg.bands import Bands, made_up
from mfs_decompose.linalg.sums import squared_norm
from mfs_decompose.pipeline.base_stage import read_pieces
from mfs_decompose.pipeline.scheduler import Stop, run_units
from mfs_decompose.pipeline.shared_survey import SharedSurvey, SharedSurveyor, open_whole
from mfs_decompose.pipeline.workspace import Workspace
from mfs_decompose.plan.allocate import Key
from mfs_decompose.plan.cap import ENTRY_BYTES, shard_overhead
from mfs_decompose.plan.model import Plan
from mfs_decompose.plan.shared_groups import SharedGroup, shared_groups, tied_twins
from mfs_decompose.plan.shared_sizes import SharedBudget, SharedCurves, share_shared

SURVEY, ENCODE, COMMON = "shared-survey", "shared-encode", "shared-common"
_ROWS = 1024


@dataclass(frozen=True)
class SharedStored:
    """The shared delta as stored: its record and files, what each variant answers for, and what items build on.

    `common` is what a delta [O, I] of each item has in common with others, as it was found: bf16, mapped from scratch.
    """

    record: SharedRecord | None = None
    files: tuple[FileRecord, ...] = ()
    shares: Mapping[str, int] = field(default_factory=dict)
    deltas: Mapping[Key, Shared] = field(default_factory=dict)
    common: Mapping[Key, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class SharedFindings:
    """What a survey found of every group, and what may be spent on them."""

    groups: tuple[SharedGroup, ...]
    surveys: tuple[SharedSurvey, ...]
    budget: SharedBudget | None

    @property
    def curves(self) -> list[SharedCurves]:
        """Of groups that at least two variants would use a shared delta of."""
        pairs = zip(self.groups, self.surveys, strict=True)
        return [survey.curves(group) for group, survey in pairs if survey.rests]


def survey_shared(
    workspace: Workspace,
    plan: Plan,
    surveyor: SharedSurveyor,
    threads: int,
    memory: int,
    sink: ProgressSink,
) -> SharedFindings:
    """What is known of every group; what an earlier run found is taken from the journal."""
    groups = shared_groups(plan)
    left = [group for group in groups if (SURVEY, group.number) not in workspace.done.steps]

    def record(group: SharedGroup, found: SharedSurvey) -> None:
        workspace.record_step(SURVEY, group.number, found.to_json())

    def work(group: SharedGroup, stop: Stop) -> SharedSurvey:
        scratch = workspace.step_path(COMMON, group.number)
        try:
            return surveyor.survey(group, scratch, stop)
        finally:
            scratch.unlink(missing_ok=True)

    sink.start("shared delta: survey", None)
    run_units(left, work, record, threads, memory)
    sink.finish()
    surveys = tuple(SharedSurvey.from_json(workspace.done.steps[SURVEY, group.number]) for group in groups)
    exact = {
        item.key
        for group, survey in zip(groups, surveys, strict=True)
        for item in group.items
        if item.variant in survey.exact
    }
    return SharedFindings(groups, surveys, shared_budget(plan, groups, exact))


def shared_budget(plan: Plan, groups: Sequence[SharedGroup], exact_items: Collection[Key]) -> SharedBudget | None:
    """Bytes that the variants may spend on the groups together: of each cap what is free, by share of weights.

    The shared delta takes no more of a cap than is free in the tightest; `exact_items` are not finite.
    """
    if any(variant.cap is None for variant in plan.variants if not variant.adapter):
        return None
    in_groups = {item.key for group in groups for item in group.items}
    total, tightest = 0, []
    for variant in plan.variants:
        if variant.adapter:
            continue
        assert variant.cap is not None
        own = [item for item in plan.items() if item.variant == variant.id]
        # At most: nobody knows yet which of them equal the base's.
        exact = sum(item.most_bytes if not item.fitted else item.beside_bytes for item in own)
        exact += sum(item.common.nbytes for item in own if item.key in exact_items)
        free = variant.cap - exact - len(own) * ENTRY_BYTES
        free -= shard_overhead(len(own), variant.cap, plan.recipe.output.shard_size)
        fitted = sum(item.common.numel for item in own if item.fitted)
        shared = sum(item.common.numel for item in own if item.key in in_groups)
        total += max(free, 0) * shared // max(fitted, 1)
        tightest.append(max(free, 0))
    return SharedBudget(total, 9 * min(tightest) * len(tightest) // 10)


def store_shared(
    workspace: Workspace,
    plan: Plan,
    found: SharedFindings,
    surveyor: SharedSurveyor,
    threads: int,
    memory: int,
    sink: ProgressSink,
) -> SharedStored:
    """Size, encode and write the shared delta; nothing where it is worth nothing."""
    groups, surveys = found.groups, found.surveys
    bands = share_shared(found.curves, found.budget)
    chosen = [group for group in groups if group.name in bands]
    if not chosen:
        return SharedStored()
    users = {group.name: tuple(survey.rests) for group, survey in zip(groups, surveys, strict=True)}
    names = [shared_shard_name(number + 1) for number in range(len(_shards(workspace, plan, chosen)))]
    written = bool(names) and all(name in workspace.done.files for name in names)
    _encode_all(workspace, chosen, bands, users, surveyor, threads, memory, sink, written=written)
    record, files = _write(workspace, plan, chosen, users)
    shapes = {name: spec.shape for name, spec in plan.base_tensors.items()}
    reader = SharedReader(workspace.folder, record, shapes)
    deltas: dict[Key, Shared] = {}
    common: dict[Key, torch.Tensor] = {}
    for group in chosen:
        delta = reader.of(group.name)
        assert delta is not None
        own = {item.variant: item for item in group.items if item.variant in users[group.name]}
        keys = [item.key for item in own.values()]
        for twin in tied_twins(plan, group):
            if twin.variant in own and surveyor.same_bits(own[twin.variant], twin):
                keys.append(twin.key)  # one of the two will hold the bytes for both
        deltas.update(dict.fromkeys(keys, delta))
        whole = open_whole(workspace.step_path(COMMON, group.number), group.matrix)
        common.update(dict.fromkeys(keys, whole))
    return SharedStored(record, tuple(files), record.share({id for id, _ in deltas}), deltas, common)


def _encode_all(
    workspace: Workspace,
    groups: Sequence[SharedGroup],
    bands: Mapping[str, Bands],
    users: Mapping[str, Sequence[str]],
    surveyor: SharedSurveyor,
    threads: int,
    memory: int,
    sink: ProgressSink,
    *,
    written: bool,
) -> None:
    """Encode what no earlier run has; scratch that is lost after the shards were `written` is no loss."""
    done = workspace.done.steps
    left = [
        group
        for group in groups
        if (ENCODE, group.number) not in done
        or not (written or workspace.has_step(ENCODE, group.number))
        or (COMMON, group.number) not in done
        or not workspace.has_step(COMMON, group.number)
    ]

    def work(group: SharedGroup, stop: Stop) -> dict[str, object]:
        return _encode(workspace, group, bands[group.name], users[group.name], surveyor, stop)

    def record(group: SharedGroup, found: dict[str, object]) -> None:
        workspace.record_step(COMMON, group.number, {})
        workspace.record_step(ENCODE, group.number, found)

    sink.start("shared delta: encode", None)
    run_units(left, work, record, threads, memory)
    sink.finish()


def _encode(
    workspace: Workspace,
    group: SharedGroup,
    bands: Bands,
    users: Sequence[str],
    surveyor: SharedSurveyor,
    stop: Stop,
) -> dict[str, object]:
    """Write one shared delta to scratch, and measure what it misses."""
    scratch = workspace.step_path(COMMON, group.number)
    common = surveyor.common(group, [item for item in group.items if item.variant in users], scratch, stop)
    assert common is not None, "it was factorised before"
    sink, rank, found = io.BytesIO(), sum(bands), common.found
    times = made_up(found.energy.tolist(), found.total, group.matrix, rank)

    def emit(data: bytes) -> None:
        sink.write(data)

    node = Banded().encode(found.left[:rank].cpu(), found.right[:rank].cpu(), bands, emit, times)
    data = sink.getvalue()
    delta = Banded().open(node, lambda offset, count: data[offset : offset + count], group.matrix)
    errors = []
    for start in range(0, group.matrix[0], _ROWS):
        stop_row = min(start + _ROWS, group.matrix[0])
        errors.append(squared_norm(delta.rows(start, stop_row) - common.rows(start, stop_row).to(torch.float64)))
    workspace.step_path(ENCODE, group.number).write_bytes(data)
    return {
        "tree": node.to_json(),
        "nbytes": len(data),
        "energy": found.total,
        "error": math.fsum(errors),
        "sha256": hashlib.sha256(data).hexdigest(),
    }


def _shards(workspace: Workspace, plan: Plan, groups: Sequence[SharedGroup]) -> list[tuple[Entry, ...]]:
    """How the encoded deltas are cut into shards; nothing as long as one is not encoded."""
    done = workspace.done.steps
    if any((ENCODE, group.number) not in done for group in groups):
        return []
    entries = [Entry.of_bytes(f"t{at}", done[ENCODE, group.number]["nbytes"]) for at, group in enumerate(groups)]
    return split_into_shards(entries, plan.recipe.output.shard_size)


def _write(
    workspace: Workspace, plan: Plan, groups: Sequence[SharedGroup], users: Mapping[str, Sequence[str]]
) -> tuple[SharedRecord, list[FileRecord]]:
    by_entry = {f"t{at}": group for at, group in enumerate(groups)}
    places: dict[str, Blob] = {}
    files: list[FileRecord] = []
    for at, shard in enumerate(_shards(workspace, plan, groups)):
        name = shared_shard_name(at + 1)
        if name not in workspace.done.files:
            chunks = _chunks(workspace, [by_entry[entry.name] for entry in shard])
            workspace.record_file(write_shard(workspace.folder / name, shard, chunks, shard_metadata(OWNER, at + 1)))
        files.append(workspace.done.files[name])
        places.update({by_entry[e.name].name: Blob(shard=at, entry=e.name, nbytes=e.nbytes) for e in shard})
    for group in groups:
        workspace.step_path(ENCODE, group.number).unlink(missing_ok=True)
    tensors = {}
    for group in groups:
        done = workspace.done.steps[ENCODE, group.number]
        tensors[group.name] = SharedTensor(
            tree=done["tree"],
            blob=places[group.name],
            energy=done["energy"],
            error=done["error"],
            sha256=done["sha256"],
            variants=len(users[group.name]),
        )
    record = SharedRecord(
        shards=tuple(file.path for file in files), tensors=tensors, bytes=sum(file.size for file in files)
    )
    return record, files


def _chunks(workspace: Workspace, groups: Sequence[SharedGroup]) -> Iterator[bytes]:
    for group in groups:
        nbytes = workspace.done.steps[ENCODE, group.number]["nbytes"]
        yield from read_pieces(workspace.step_path(ENCODE, group.number), 0, nbytes)
