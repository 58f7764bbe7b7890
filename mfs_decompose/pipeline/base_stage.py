"""The base as stored: copied, linked or referred to when it is known, made when it is the mean."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mfs_decompose.artifact.atomic import shortage_named
from mfs_decompose.artifact.files import FileRecord, copy_file, hardlink_file
from mfs_decompose.artifact.layout import base_shard_name
from mfs_decompose.artifact.shard import Entry, library_order, split_into_shards, write_shard
from mfs_decompose.artifact.shard_reader import shard_metadata
from mfs_decompose.artifact.values import row_bytes
from mfs_decompose.base_extraction import mean_rows
from mfs_decompose.codec.base import DECODE_ELEMENTS, block_rows
from mfs_decompose.events import ProgressSink
from mfs_decompose.pipeline.scheduler import Stop, run_units
from mfs_decompose.pipeline.workspace import Workspace
from mfs_decompose.plan.model import Plan
from mfs_decompose.source.checkpoint import Checkpoint, TensorReader
from mfs_decompose.source.dtypes import torch_dtype
from mfs_decompose.source.header import TensorSpec, read_shard_header

if TYPE_CHECKING:
    import torch

_UNIT_BYTES = 1 << 26


@dataclass(frozen=True, slots=True)
class BaseUnit:
    """Some tensors of the base; the piece that a kill loses at most."""

    number: int
    tensors: tuple[TensorSpec, ...]
    peak_bytes: int


def base_units(plan: Plan) -> tuple[BaseUnit, ...]:
    """The base's tensors, in order of their names, in pieces of about 64 MiB."""
    units: list[BaseUnit] = []
    current: list[TensorSpec] = []
    for name in sorted(plan.base_tensors):
        spec = plan.base_tensors[name]
        if current and sum(tensor.nbytes for tensor in current) + spec.nbytes > _UNIT_BYTES:
            units.append(_unit(len(units), current))
            current = []
        current.append(TensorSpec(spec.name, spec.dtype, spec.shape))
    if current:
        units.append(_unit(len(units), current))
    return tuple(units)


def _unit(number: int, tensors: Sequence[TensorSpec]) -> BaseUnit:
    widest = max(tensor.row_bytes for tensor in tensors)
    return BaseUnit(number, tuple(tensors), 6 * (8 * DECODE_ELEMENTS + 4 * widest))


def store_known_base(workspace: Workspace, plan: Plan, base: Checkpoint, progress: ProgressSink) -> list[FileRecord]:
    """Bring the base's own shard files into the artifact, byte for byte; none for a reference."""
    if plan.base_store == "reference":
        return []
    bring = hardlink_file if plan.base_store == "hardlink" else copy_file
    progress.start(f"base: {plan.base_store}", sum(shard.size for shard in base.shards))
    records: list[FileRecord] = []
    for number, shard in enumerate(base.shards, start=1):
        name = base_shard_name(number, len(base.shards))
        record = workspace.done.files.get(name)
        if record is None:
            record = bring(base.root / shard.file, workspace.folder / name, progress)
            workspace.record_file(record)
        else:
            progress.advance(record.size)
        records.append(record)
    progress.finish()
    return records


def digest_known_base(
    workspace: Workspace,
    units: Sequence[BaseUnit],
    base: TensorReader,
    threads: int,
    memory: int,
    progress: ProgressSink,
) -> None:
    """Digest every tensor of a known base: what restore will hold a base against."""

    def work(unit: BaseUnit, stop: Stop) -> dict[str, str]:
        digests: dict[str, str] = {}
        for spec in unit.tensors:
            digest = hashlib.sha256()
            for start, end in _blocks(spec):
                stop.check()
                digest.update(base.raw(spec.name, start, end).numpy().data)
                progress.advance((end - start) * spec.row_bytes)
            digests[spec.name] = digest.hexdigest()
        return digests

    _run(workspace, units, work, threads, memory, progress, "base: digests")


def make_mean_base(
    workspace: Workspace,
    plan: Plan,
    units: Sequence[BaseUnit],
    variants: Mapping[str, TensorReader],
    threads: int,
    memory: int,
    progress: ProgressSink,
) -> list[FileRecord]:
    """Average the variants, rounded to the dtype they are stored in, into the artifact's base shards."""
    readers, own_names = [variants[id] for id in sorted(variants)], names_of_variants(plan)

    def values(spec: TensorSpec, stop: Stop) -> Iterator[torch.Tensor]:
        return mean_blocks(own_names, readers, spec, stop)

    return make_base(workspace, plan, units, values, "base: mean", threads, memory, progress)


def names_of_variants(plan: Plan) -> dict[tuple[str, str], str]:
    """What a variant calls a tensor of the base: (variant, base tensor) -> its own name."""
    return {
        (item.variant, item.base.name): item.name
        for item in plan.items()
        if item.base is not None and item.kind in ("same", "resized")
    }


def mean_blocks(
    own_names: Mapping[tuple[str, str], str],
    readers: Sequence[TensorReader],
    spec: TensorSpec,
    stop: Stop,
    first: int = 0,
) -> Iterator[torch.Tensor]:
    """The mean of a tensor of the base from a row on, in row blocks, in the dtype it is stored in."""
    for start, end in _blocks(spec):
        stop.check()
        rows = partial(_rows_of, own_names, spec.name, first + start, first + end)
        yield mean_rows(map(rows, readers), torch_dtype(spec.dtype))


def make_base(
    workspace: Workspace,
    plan: Plan,
    units: Sequence[BaseUnit],
    values: Callable[[TensorSpec, Stop], Iterator[torch.Tensor]],
    stage: str,
    threads: int,
    memory: int,
    progress: ProgressSink,
) -> list[FileRecord]:
    """Write what `values` gives of each tensor, in row blocks, into the artifact's base shards."""

    def work(unit: BaseUnit, stop: Stop) -> dict[str, str]:
        digests: dict[str, str] = {}
        path, size = workspace.base_path(unit.number), sum(spec.nbytes for spec in unit.tensors)
        with shortage_named(path, size), open(path, "wb") as output:
            for spec in unit.tensors:
                digest = hashlib.sha256()
                for block in values(spec, stop):
                    data = row_bytes(block)
                    digest.update(data)
                    output.write(data)
                    progress.advance(len(data))
                digests[spec.name] = digest.hexdigest()
        return digests

    shards = _mean_shards(plan)
    names = [base_shard_name(number, len(shards)) for number in range(1, len(shards) + 1)]
    if any(name not in workspace.done.files for name in names):
        workspace.done.base_units = {unit for unit in workspace.done.base_units if workspace.has_base(unit)}
        _run(workspace, units, work, threads, memory, progress, stage)
    places = _places(workspace, units)
    for number, (name, entries) in enumerate(zip(names, shards, strict=True), start=1):
        if name not in workspace.done.files:
            chunks, metadata = _read(entries, places), shard_metadata("base", number)
            workspace.record_file(write_shard(workspace.folder / name, entries, chunks, metadata))
    for unit in units:
        workspace.base_path(unit.number).unlink(missing_ok=True)
    return [workspace.done.files[name] for name in names]


def open_stored(folder: Path, names: Sequence[str]) -> Checkpoint:
    """Base shards of the artifact as a checkpoint to read from."""
    shards = tuple(read_shard_header(folder / name) for name in names)
    tensors = {tensor.name: tensor for shard in shards for tensor in shard.tensors}
    return Checkpoint("base", folder, shards, None, dict(sorted(tensors.items())), (), (), {})


def _run(
    workspace: Workspace,
    units: Sequence[BaseUnit],
    work: object,
    threads: int,
    memory: int,
    progress: ProgressSink,
    stage: str,
) -> None:
    left = [unit for unit in units if unit.number not in workspace.done.base_units]
    progress.start(stage, sum(spec.nbytes for unit in left for spec in unit.tensors))
    run_units(
        left,
        work,  # type: ignore[arg-type]
        lambda unit, digests: workspace.record_base(unit.number, digests),
        threads,
        memory,
    )
    progress.finish()


def _rows_of(
    own_names: Mapping[tuple[str, str], str], name: str, start: int, stop: int, reader: TensorReader
) -> torch.Tensor:
    return reader.rows(own_names[reader.checkpoint.id, name], start, stop)


def _blocks(spec: TensorSpec) -> list[tuple[int, int]]:
    step = block_rows(spec, DECODE_ELEMENTS)
    return [(start, min(start + step, spec.rows)) for start in range(0, spec.rows, step)]


def _mean_shards(plan: Plan) -> list[tuple[Entry, ...]]:
    entries = [Entry(spec.name, spec.dtype, spec.shape, spec.nbytes) for spec in plan.base_tensors.values()]
    return split_into_shards(library_order(entries), plan.recipe.output.shard_size)


def _places(workspace: Workspace, units: Sequence[BaseUnit]) -> dict[str, tuple[Path, int]]:
    places: dict[str, tuple[Path, int]] = {}
    for unit in units:
        offset = 0
        for spec in unit.tensors:
            places[spec.name] = (workspace.base_path(unit.number), offset)
            offset += spec.nbytes
    return places


def _read(entries: Sequence[Entry], places: Mapping[str, tuple[Path, int]]) -> Iterator[bytes]:
    for entry in entries:
        path, offset = places[entry.name]
        yield from read_pieces(path, offset, entry.nbytes)


def read_pieces(path: Path, offset: int, nbytes: int) -> Iterator[bytes]:
    """`nbytes` bytes of a file from `offset`, in pieces of 8 MiB."""
    with open(path, "rb") as stream:
        stream.seek(offset)
        left = nbytes
        while left:
            piece = stream.read(min(left, 1 << 23))
            assert piece, f"{path} ends early"
            left -= len(piece)
            yield piece
