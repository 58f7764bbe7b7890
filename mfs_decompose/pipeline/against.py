"""An artifact held against the checkpoints it was made from."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mfs_decompose.artifact.reader import Family
from mfs_decompose.artifact.records import TensorRecord, VariantRecord, relative_error
from mfs_decompose.artifact.values import StoredTensor, open_tensor, row_bytes
from mfs_decompose.errors import SourceIncompatible
from mfs_decompose.events import ProgressSink
from mfs_decompose.pipeline.merge_folder import merged_rows
from mfs_decompose.source.adapter import resolve_adapter
from mfs_decompose.source.checkpoint import Checkpoint, TensorReader, read_sidecar
from mfs_decompose.source.resolve import open_source
from mfs_decompose.source.weights import ADAPTER_CONFIG

if TYPE_CHECKING:
    import torch

_TOLERANCE = 1e-6
"""Relative: served weights are fp32 here, and the recorded error was summed from fp64 deltas."""


@dataclass(frozen=True)
class Compared:
    """One variant against its original: errors recomputed from the weights as served."""

    id: str
    tensors: int
    exact: int
    rel_error: float
    recorded: float
    ok: bool

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"rel_error": self.rel_error if math.isfinite(self.rel_error) else None}


def compare_with_originals(
    artifact: Path, originals: Mapping[str, str], *, base: str | None, progress: ProgressSink
) -> list[Compared]:
    """Recompute the error of every tensor of the given variants.

    Raises:
        UsageError: no such variant.
        SourceIncompatible: a checkpoint is not the one that was decomposed.
    """
    with Family.open(artifact, base=base) as family:
        return [_compare(family, id, ref, progress) for id, ref in sorted(originals.items())]


def _compare(family: Family, id: str, ref: str, progress: ProgressSink) -> Compared:
    record = family.variant(id)
    checkpoint = open_source(ref, id, progress=progress)
    if record.adapter is not None:
        return _compare_adapter(family, record, checkpoint, ref, progress)
    progress.start(f"comparing {id}", checkpoint.tensor_bytes)
    errors: list[float] = []
    energies: list[float] = []
    with TensorReader(checkpoint) as reader:
        for name, tensor in record.tensors.items():
            info = checkpoint.tensors.get(name)
            if info is None or (info.dtype, info.shape) != (tensor.dtype, tensor.shape):
                raise _stranger(id, ref, name)
            error = _error(reader, tensor, open_tensor(family, id, name), name)
            if error is None:
                raise _stranger(id, ref, name)
            errors.append(error)
            energies.append(tensor.energy)
            progress.advance(info.nbytes)
    progress.finish()
    found = relative_error(math.fsum(energies), math.fsum(errors))
    exact = sum(tensor.exact for tensor in record.tensors.values())
    ok = math.isclose(found, record.rel_error, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    return Compared(id, len(record.tensors), exact, found, record.rel_error, ok)


def _compare_adapter(
    family: Family, record: VariantRecord, adapter: Checkpoint, ref: str, progress: ProgressSink
) -> Compared:
    """What is served, against the merge of the adapter's own folder with the artifact's base."""
    assert record.adapter is not None
    config = next((one for one in adapter.sidecars if one.name == ADAPTER_CONFIG), None)
    digest = None if config is None else hashlib.sha256(read_sidecar(adapter, config)).hexdigest()
    if digest != record.source.files.get(ADAPTER_CONFIG):
        raise _stranger(record.id, ref, ADAPTER_CONFIG)
    wanted = {name: (tensor.dtype, tensor.shape) for name, tensor in record.adapter.tensors.items()}
    for name in sorted(wanted.keys() | adapter.tensors.keys()):
        info = adapter.tensors.get(name)
        if info is None or (info.dtype, info.shape) != wanted.get(name):
            raise _stranger(record.id, ref, name)
    merge = resolve_adapter(adapter, family.base_checkpoint())
    progress.start(f"comparing {record.id}", record.checkpoint_bytes)
    errors: list[float] = []
    with TensorReader(adapter) as reader:
        for name, kept in record.adapter.tensors.items():
            if hashlib.sha256(row_bytes(reader.raw(name))).hexdigest() != kept.sha256:
                raise _stranger(record.id, ref, name)
        for name in record.tensors:
            stored = open_tensor(family, record.id, name)
            if name not in merge.tensors or merge.tensors[name].spec != stored.spec:
                raise _stranger(record.id, ref, name)
            for start, stop, rows in merged_rows(merge.tensors[name], reader, family.base_rows):
                served = stored.served(start, stop)
                errors.append(_squared_distance(served, rows))
                progress.advance((stop - start) * stored.spec.row_bytes)
    progress.finish()
    found = relative_error(math.fsum(tensor.energy for tensor in record.tensors.values()), math.fsum(errors))
    ok = math.isclose(found, record.rel_error, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    count = len(record.tensors)
    return Compared(record.id, count, count if found == 0.0 else 0, found, record.rel_error, ok)


def _error(reader: TensorReader, record: TensorRecord, stored: StoredTensor, name: str) -> float | None:
    """||served - original||^2 of one tensor; None where the original is another one."""
    import torch

    digest = hashlib.sha256()
    errors: list[float] = []
    for start, stop in stored.blocks():
        own = reader.rows(name, start, stop)
        digest.update(row_bytes(own))
        if stored.exact and not torch.equal(_bits(stored.restored(start, stop)), _bits(own)):
            errors.append(math.inf)
        if not stored.exact or record.error:  # a corrected delta is served without its corrections
            errors.append(_squared_distance(stored.served(start, stop), own))
    return math.fsum(errors) if digest.hexdigest() == record.original_sha256 else None


def _squared_distance(served: torch.Tensor, own: torch.Tensor) -> float:
    """||served - own||^2, where NaN is no distance from NaN, nor an infinity from itself."""
    import torch

    from mfs_decompose.linalg.sums import squared_norm

    one, other = served.to(torch.float64), own.to(torch.float64)
    same = (one == other) | (one.isnan() & other.isnan())
    return squared_norm(torch.where(same, 0.0, one - other).nan_to_num(nan=math.inf))


def _bits(values: Any) -> Any:
    import torch

    return values.contiguous().reshape(-1).view(torch.uint8)


def _stranger(id: str, ref: str, name: str) -> SourceIncompatible:
    what = name if name == ADAPTER_CONFIG else f"tensor {name!r}"
    return SourceIncompatible(
        f"{ref} is not the checkpoint that variant {id!r} was made from: {what} differs",
        hint=f"Give the original: --against {id}=FOLDER",
    )
