"""Tensors of an adapter's merge: nothing is chosen or stored for them, only measured and digested."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import torch

from mfs_decompose.artifact.values import row_bytes
from mfs_decompose.codec.base import DECODE_ELEMENTS, block_rows
from mfs_decompose.codec.opened_adapter import OpenedAdapterTensor
from mfs_decompose.codec.tree import CodecNode
from mfs_decompose.errors import SourceIncompatible
from mfs_decompose.linalg.sums import squared_norm
from mfs_decompose.pipeline.reading import Advance, Sources
from mfs_decompose.pipeline.scheduler import Stop
from mfs_decompose.plan.model import Item
from mfs_decompose.source.dtypes import torch_dtype


def merge_node(item: Item) -> CodecNode:
    """What the manifest says of a merged tensor."""
    assert item.merged is not None
    return CodecNode("adapter", params=dict(item.merged))  # type: ignore[arg-type]  # it came out of JSON


def survey_merged(item: Item, sources: Sources, advance: Advance, stop: Stop) -> tuple[str, float, int]:
    """The digest of the fp32 merge, which is the original, ||delta||^2, and how many values the dtype cannot hold.

    Where the base is NaN or infinite so is the merge; such values count among the latter, and have no part in the norm.

    Raises:
        SourceIncompatible: the adapter makes finite weights too large for fp32.
    """
    opened, digest = _open(item, sources), hashlib.sha256()
    energies: list[float] = []
    lost, limit = 0, torch.finfo(torch_dtype(item.spec.dtype)).max
    for start, end, merged in _blocks(item, sources, advance, stop):
        base = _base_rows(item, sources, start, end)
        delta = merged if base is None else merged - base.to(torch.float64)
        _refuse_overflow(item, base, merged)
        energies.append(squared_norm(torch.where(torch.isfinite(delta), delta, 0.0)))
        digest.update(row_bytes(opened.rounded(merged, start, torch.float32, "nearest")))
        lost += int((~(merged.abs() <= limit)).sum())
    return digest.hexdigest(), math.fsum(energies), lost


def restored_digest(item: Item, sources: Sources, advance: Advance, stop: Stop) -> str:
    """The digest of what restore writes by default: the merge, rounded to the base's dtype."""
    opened, digest = _open(item, sources), hashlib.sha256()
    target = torch_dtype(item.spec.dtype)
    for start, _, merged in _blocks(item, sources, advance, stop):
        digest.update(row_bytes(opened.rounded(merged, start, target, "stochastic")))
    return digest.hexdigest()


def _refuse_overflow(item: Item, base: torch.Tensor | None, merged: torch.Tensor) -> None:
    """Refuse values that fp32 cannot hold, where it can hold the base's; what is no number there stays none."""
    limit = torch.finfo(torch.float32).max
    low, high = torch.aminmax(merged) if merged.numel() else (merged.new_zeros(()), merged.new_zeros(()))
    if -limit <= float(low) <= float(high) <= limit:  # false for NaN, too
        return
    beyond = ~(merged.abs() <= limit)
    if base is not None:
        beyond &= base.to(torch.float64).abs() <= limit  # in bf16 the limit itself would be infinite
    if bool(beyond.any()):
        raise SourceIncompatible(
            f"the adapter {item.variant!r} is broken: merged with its base, {int(beyond.sum())} of {item.spec.numel} "
            f"values of {item.name[:200]!r} are too large for fp32",
            hint="Its training diverged, or it was damaged: give an earlier checkpoint of it.",
        )


def _blocks(item: Item, sources: Sources, advance: Advance, stop: Stop) -> Iterator[tuple[int, int, torch.Tensor]]:
    opened, base = _open(item, sources), sources.of_base(item)
    step = block_rows(item.spec, DECODE_ELEMENTS)
    for start in range(0, item.spec.rows, step):
        stop.check()
        end = min(start + step, item.spec.rows)
        yield start, end, opened.merged(start, end, base)
        advance((end - start) * item.spec.row_bytes)


def _open(item: Item, sources: Sources) -> OpenedAdapterTensor:
    reader = sources.variants[item.variant]
    return OpenedAdapterTensor(merge_node(item), reader.rows, item.spec, item.base)


def _base_rows(item: Item, sources: Sources, start: int, end: int) -> torch.Tensor | None:
    """The base's rows where all of them have one; rows beyond the base's are new, and their delta is themselves."""
    rows = sources.of_base(item)
    if rows is None or item.base is None:
        return None
    common = min(end, item.common_rows)
    if start >= common:
        return None
    found = rows(start, common)
    if common == end:
        return found
    padding = torch.zeros((end - common, *item.spec.shape[1:]), dtype=found.dtype)
    return torch.cat([found, padding])
