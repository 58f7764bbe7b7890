"""An artifact held against the checkpoints it was made from."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mfs_decompose.artifact.reader import Family
from mfs_decompose.artifact.records import TensorRecord, relative_error
from mfs_decompose.artifact.values import StoredTensor, open_tensor, row_bytes
from mfs_decompose.errors import SourceIncompatible
from mfs_decompose.events import ProgressSink
from mfs_decompose.source.checkpoint import TensorReader
from mfs_decompose.source.resolve import open_source

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
        return asdict(self)


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


def _error(reader: TensorReader, record: TensorRecord, stored: StoredTensor, name: str) -> float | None:
    """||served - original||^2 of one tensor; None where the original is another one."""
    import torch

    from mfs_decompose.linalg.sums import squared_norm

    digest = hashlib.sha256()
    errors: list[float] = []
    for start, stop in stored.blocks():
        own = reader.rows(name, start, stop)
        digest.update(row_bytes(own))
        if stored.exact:
            same = torch.equal(_bits(stored.restored(start, stop)), _bits(own))
            errors.append(0.0 if same else math.inf)
        else:
            errors.append(squared_norm(stored.served(start, stop).to(torch.float64) - own.to(torch.float64)))
    return math.fsum(errors) if digest.hexdigest() == record.original_sha256 else None


def _bits(values: Any) -> Any:
    import torch

    return values.contiguous().reshape(-1).view(torch.uint8)


def _stranger(id: str, ref: str, name: str) -> SourceIncompatible:
    return SourceIncompatible(
        f"{ref} is not the checkpoint that variant {id!r} was made from: tensor {name!r} differs",
        hint=f"Give the original: --against {id}=FOLDER",
    )
