"""The proof that nothing was dropped: every tensor of every source is accounted for by exactly one record."""

from __future__ import annotations

from collections.abc import Sequence

from mfs_decompose.artifact.records import CoverageRecord, VariantRecord
from mfs_decompose.plan.model import Plan
from mfs_decompose.source.checkpoint import Checkpoint


class CoverageError(AssertionError):
    """A tensor got lost between the plan and the artifact: a bug, and the artifact is not published."""


def prove_coverage(
    plan: Plan,
    base: Checkpoint | None,
    checkpoints: Sequence[Checkpoint],
    base_names: set[str],
    records: Sequence[VariantRecord],
) -> CoverageRecord:
    """Count the tensors of the sources again, from their headers, and hold the records against them.

    Raises:
        CoverageError: a tensor has no record, or a record has no tensor.
    """
    by_id = {record.id: record for record in records}
    tensors = 0
    for checkpoint in checkpoints:
        record = by_id[checkpoint.id]
        kept = record.tensors if record.adapter is None else record.adapter.tensors
        _equal(f"variant {checkpoint.id!r}", set(checkpoint.tensors), set(kept))
        for name, info in checkpoint.tensors.items():
            stored = kept[name]
            if (stored.dtype, stored.shape) != (info.dtype, info.shape):
                raise CoverageError(f"{name} of {checkpoint.id}: {info.dtype} {info.shape} became {stored}")
        renamed = {tensor.base_name for tensor in record.tensors.values() if tensor.kind in ("same", "resized")}
        absent = {name for name in base_names if name not in record.tensors and name not in renamed}
        _equal(f"what variant {checkpoint.id!r} lacks", absent, set(record.missing))
        tensors += len(record.tensors)
    expected = set(base.tensors) if base is not None else set(plan.base_tensors)
    _equal("the base", expected, base_names)
    return CoverageRecord(tensors=tensors + (len(base.tensors) if base is not None else 0), groups=plan.groups)


def _equal(what: str, expected: set[str], found: set[str]) -> None:
    lost, extra = sorted(expected - found), sorted(found - expected)
    if lost or extra:
        raise CoverageError(f"coverage of {what}: without a record {lost[:5]}, without a tensor {extra[:5]}")
