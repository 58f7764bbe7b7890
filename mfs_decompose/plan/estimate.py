"""What a run will take, from headers alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mfs_decompose.codec.sizes import fit_bytes
from mfs_decompose.plan.cap import ENTRY_BYTES, SHARD_BYTES, shard_overhead
from mfs_decompose.plan.model import Item, Plan, VariantPlan
from mfs_decompose.plan.share import ROUNDS
from mfs_decompose.source.checkpoint import Checkpoint
from mfs_decompose.source.header import TensorSpec

_STEP_TEXT = 24  # of the journal: what one step explains
_ITEM_TEXT = 4_000  # of journal and manifest: digests, tree and name of one tensor
_SLICE_TEXT = 700  # of both, if no two neighbours of a stack are stored alike


@dataclass(frozen=True)
class VariantEstimate:
    """Most bytes a variant's shards can have: its cap, or the sum over its tensors.

    Weights that are NaN or infinite, which no lossy codec takes, are not foreseen.
    """

    id: str
    bytes: int
    checkpoint_bytes: int


@dataclass(frozen=True)
class Estimate:
    """Upper bounds, in bytes; `read_bytes` are weights: for the base as stored, and in both passes."""

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
    tensors = sum(spec.nbytes for spec in plan.base_tensors.values())
    made = plan.base_mode in ("mean", "refined")
    if made:
        base_bytes = tensors + sum(_header_bytes(spec) for spec in plan.base_tensors.values())
    elif base is not None and plan.base_store == "copy":
        base_bytes = sum(shard.size for shard in base.shards)
    sources = [*variants, *([base] if base is not None else [])]
    files = sum(sidecar.size for source in sources for sidecar in source.sidecars)
    files += sum(len(shard.raw) for source in sources for shard in source.shards)
    files += sum(source.index.size for source in sources if source.index is not None)
    fits = sum(_scratch_bytes(item) for item in plan.items())
    encoded = sum(variant.bytes for variant in own)
    largest = sorted((unit.peak_bytes for unit in plan.units), reverse=True)[:threads]
    if plan.base_mode == "shared":  # what deltas have in common, in bf16
        fits += sum(2 * spec.numel for spec in plan.base_tensors.values())
    text = sum(_text_bytes(item) for item in plan.items())
    stage = tensors * (len(variants) if base is None else 1)
    again = sum(_read_again(item, plan.recipe.objective.capped) for item in plan.items())
    return Estimate(
        variants=own,
        base_bytes=base_bytes,
        files_bytes=files,
        read_bytes=stage + sum(unit.read_bytes for unit in plan.units) + again,
        peak_ram=sum(largest),
        disk_bytes=(2 if made else 1) * base_bytes + files + 2 * encoded + fits + text + 1_000_000,
    )


def _variant(plan: Plan, variant: VariantPlan) -> VariantEstimate:
    if variant.adapter:
        kept = variant.unavoidable_bytes
        nbytes = kept + shard_overhead(kept // ENTRY_BYTES, kept, plan.recipe.output.shard_size)
        return VariantEstimate(variant.id, nbytes, variant.checkpoint_bytes)
    items = [item for item in plan.items() if item.variant == variant.id]
    most = sum(_most(item) + ENTRY_BYTES for item in items)
    total = most + shard_overhead(len(items), most, plan.recipe.output.shard_size)
    if variant.cap is not None:  # which the corrections of lossy codecs lie outside of
        total = min(variant.cap + sum(item.common.nbytes for item in items if item.keep_exact), total)
    return VariantEstimate(variant.id, total, variant.checkpoint_bytes)


def _most(item: Item) -> int:
    if item.auto:
        return item.spec.nbytes * (2 if item.keep_exact else 1)
    own = _fit_bytes(item) + item.beside_bytes if item.fitted else item.most_bytes
    return own + (item.common.nbytes if item.keep_exact else 0)


def _fit_bytes(item: Item) -> int:
    return item.matrices * item.steps * item.step_bytes


def _scratch_bytes(item: Item) -> int:
    """Bytes of an item's fits between the passes."""
    if item.matrix is None:
        return 0
    return item.matrices * item.steps * fit_bytes(item.codec, item.matrix, item.params)


def _text_bytes(item: Item) -> int:
    slices = _SLICE_TEXT * item.matrices if item.stacked else 0
    return _ITEM_TEXT + slices + _STEP_TEXT * item.matrices * item.steps


def _read_again(item: Item, capped: bool) -> int:
    """Bytes read once a tensor is surveyed: to encode it (lossless beside a budget: twice), and to measure.

    An open one is sampled in pass 1 as well, for its curves and for what all bits take, and sized up to ROUNDS times;
    to code it takes reading it twice.
    """
    if item.codec == "identical":
        return 0
    both = item.spec.nbytes + (item.base.nbytes if item.base is not None else 0)
    if item.codec == "adapter":
        return both - item.spec.nbytes
    if item.auto:
        return (2 + 2 * ROUNDS + 2 + 1) * both + item.tail_bytes
    if item.fitted or item.direct:
        return both + item.tail_bytes
    if item.codec == "raw":
        return 2 * item.spec.nbytes
    return (2 if capped else 1) * (both + item.spec.nbytes) + both


def _header_bytes(spec: TensorSpec) -> int:
    return len(spec.name.encode()) + ENTRY_BYTES + SHARD_BYTES
