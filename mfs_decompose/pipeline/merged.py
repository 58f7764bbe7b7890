"""Variants that are adapters, seen as the checkpoints they make of the base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mfs_decompose.errors import SourceIncompatible
from mfs_decompose.plan.model import Plan
from mfs_decompose.source.adapter import Merge, resolve_adapter
from mfs_decompose.source.checkpoint import Checkpoint
from mfs_decompose.source.header import TensorInfo
from mfs_decompose.units import format_fraction


def resolve_adapters(variants: Sequence[Checkpoint], base: Checkpoint) -> dict[str, Merge]:
    """What each adapter among the variants makes of the base, by id; from headers alone.

    Raises:
        SourceIncompatible: an adapter is incomplete, or does not fit the base.
    """
    return {variant.id: resolve_adapter(variant, base) for variant in variants if variant.adapter is not None}


def require_whole(base: Checkpoint | None) -> None:
    """Refuse an adapter in the place of the base.

    Raises:
        SourceIncompatible: it is one.
    """
    if base is not None and base.adapter is not None:
        raise SourceIncompatible(
            f"expected a whole checkpoint as the base, found an adapter: {base.pinned}",
            hint="Give the model that it was trained on with --base, and the adapter with --variants.",
        )


def require_no_adapter(variants: Sequence[Checkpoint]) -> None:
    """Refuse adapters where no base is given.

    Raises:
        SourceIncompatible: naming the first, and the base it says it was trained on.
    """
    for variant in variants:
        if variant.adapter is not None:
            trained = variant.adapter.get("base_model_name_or_path")
            named = f" (it says {trained})" if isinstance(trained, str) and trained else ""
            raise SourceIncompatible(
                f"variant {variant.id!r} is an adapter, and an adapter is nothing without the base it changes",
                hint=f"Give its base with --base REF{named}.",
            )


def say_kept(plan: Plan) -> list[str]:
    """A sentence for each adapter that is larger than the budget which the other variants have to keep."""
    budget = plan.recipe.objective.budget
    return [
        f"{variant.id}: an adapter is kept as it is, whatever the budget: it takes "
        f"{format_fraction(variant.unavoidable_bytes / variant.checkpoint_bytes)} of its base"
        for variant in plan.variants
        if variant.adapter and budget is not None and variant.unavoidable_bytes > budget.cap(variant.checkpoint_bytes)
    ]


def merged_variants(variants: Sequence[Checkpoint], merges: Mapping[str, Merge]) -> tuple[Checkpoint, ...]:
    """The variants, with each adapter as the checkpoint of its merge: it has specs, and no bytes to be read."""
    return tuple(_merged(variant, merges[variant.id]) if variant.id in merges else variant for variant in variants)


def _merged(adapter: Checkpoint, merge: Merge) -> Checkpoint:
    tensors = {
        name: TensorInfo(name, tensor.spec.dtype, tensor.spec.shape, "", 0) for name, tensor in merge.tensors.items()
    }
    return replace(adapter, tensors=tensors, adapter=None, config={})  # see artifact/variant_files.py
