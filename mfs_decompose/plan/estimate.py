"""What a run will take, from headers alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mfs_decompose.codec.sizes import step_bytes
from mfs_decompose.plan.build import ENTRY_BYTES, SHARD_BYTES
from mfs_decompose.plan.model import Item, Plan, VariantPlan
from mfs_decompose.source.checkpoint import Checkpoint


@dataclass(frozen=True)
class VariantEstimate:
    """Most bytes a variant's shards can have: its cap, or the sum over its tensors."""

    id: str
    bytes: int
    checkpoint_bytes: int


@dataclass(frozen=True)
class Estimate:
    """Upper bounds, in bytes; `read_bytes` are of both passes."""

    variants: tuple[VariantEstimate, ...]
    base_bytes: int
    files_bytes: int
    read_bytes: int
    peak_ram: int
    disk_bytes: int


def estimate(plan: Plan, base: Checkpoint | None, variants: Sequence[Checkpoint], threads: int) -> Estimate:
    """Bound what will be written, read and held."""
    own = tuple(_variant(plan, variant) for variant in plan.variants)
    base_bytes = 0
    if plan.base_mode == "mean":
        base_bytes = sum(spec.nbytes for spec in plan.base_tensors.values())
    elif base is not None and plan.base_store == "copy":
        base_bytes = sum(shard.size for shard in base.shards)
    sources = [*variants, *([base] if base is not None else [])]
    files = sum(sidecar.size for source in sources for sidecar in source.sidecars)
    files += sum(len(shard.raw) for source in sources for shard in source.shards)
    files += sum(source.index.size for source in sources if source.index is not None)
    fits = sum(_fit_bytes(item) for item in plan.items())
    encoded = sum(variant.bytes for variant in own)
    largest = sorted((unit.peak_bytes for unit in plan.units), reverse=True)[:threads]
    twice = sum(item.spec.nbytes + (item.base.nbytes if item.base else 0) for item in plan.items())
    return Estimate(
        variants=own,
        base_bytes=base_bytes,
        files_bytes=files,
        read_bytes=sum(unit.read_bytes for unit in plan.units) + twice,
        peak_ram=sum(largest),
        disk_bytes=(2 if plan.base_mode == "mean" else 1) * base_bytes + files + 2 * encoded + fits + 1_000_000,
    )


def _variant(plan: Plan, variant: VariantPlan) -> VariantEstimate:
    if variant.cap is not None:
        return VariantEstimate(variant.id, min(variant.cap, variant.checkpoint_bytes), variant.checkpoint_bytes)
    items = [item for item in plan.items() if item.variant == variant.id]
    total = sum(_most(item) + ENTRY_BYTES for item in items) + SHARD_BYTES
    return VariantEstimate(variant.id, total, variant.checkpoint_bytes)


def _most(item: Item) -> int:
    return _fit_bytes(item) + item.tail_bytes if item.lossy else item.spec.nbytes


def _fit_bytes(item: Item) -> int:
    return item.steps * step_bytes(item.codec, item.matrix, item.params) if item.matrix is not None else 0
