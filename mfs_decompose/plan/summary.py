"""A plan as `mfs decompose --dry-run --json` prints it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mfs_decompose import __version__
from mfs_decompose.plan.estimate import Estimate
from mfs_decompose.plan.model import Item, Plan
from mfs_decompose.plan.saved import PLAN_SCHEMA, describe_sources
from mfs_decompose.provenance import free_disk
from mfs_decompose.source.checkpoint import Checkpoint


def summarise(
    plan: Plan,
    estimate: Estimate,
    base: Checkpoint | None,
    variants: Sequence[Checkpoint],
    out: Path,
    start: Checkpoint | None = None,
) -> dict[str, Any]:
    """Plain JSON, schema `mfs.plan/1`: upper bounds in bytes, and codecs as planned before any weight is read.

    `start` is where a refined base may start from, which is no base. `sources` has the size and header digest of every
    file of weights: plan/saved.py binds a plan to them.
    """
    counts = {
        variant.id: Counter(_planned(item) for item in plan.items() if item.variant == variant.id)
        for variant in variants
    }
    # Of an adapter it is the tensors of its merge that are planned.
    given = [len(one.tensors) if one.adapter is None else counts[one.id].total() for one in variants]
    return {
        "schema": PLAN_SCHEMA,
        "version": __version__,
        "recipe": plan.recipe.canonical(),
        "base": {"mode": plan.base_mode, "store": plan.base_store, "bytes": estimate.base_bytes}
        | ({"auto": True} if plan.base_auto else {}),
        "variants": [
            {
                "id": variant.id,
                "checkpoint_bytes": variant.checkpoint_bytes,
                "max_bytes": variant.bytes,
                "max_footprint": variant.bytes / variant.checkpoint_bytes if variant.checkpoint_bytes else 0.0,
                "codecs": dict(sorted(counts[variant.id].items())),
            }
            for variant in estimate.variants
        ],
        "sources": describe_sources(base or start, variants),
        "coverage": {
            "tensors": sum(given) + (0 if base is None else len(base.tensors)),
            "planned": len(plan.items()) + (0 if base is None else len(plan.base_tensors)),
            "groups": plan.groups,
        },
        "lineage": None,
        "read_bytes": estimate.read_bytes,
        "peak_ram": estimate.peak_ram,
        "disk_bytes": estimate.disk_bytes,
        "disk_free": free_disk(out),
    }


def _planned(item: Item) -> str:
    """The codec with what lies above it, as the text of a codec tree is spelled."""
    if item.auto:
        return "corrected(auto)" if item.keep_exact else "auto"
    codec = item.codec if item.residual is None else f"sum({item.codec}+{item.residual[0]})"
    return f"corrected({codec})" if item.keep_exact else codec
