"""What a run is made from: two runs may share work only when every facet is equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

from mfs_decompose import __version__
from mfs_decompose.plan.model import Plan
from mfs_decompose.source.checkpoint import Checkpoint, read_sidecar

Fingerprint = Mapping[str, Any]
"""Facet by name, plain JSON."""


def fingerprint(
    plan: Plan,
    base: Checkpoint | None,
    variants: Sequence[Checkpoint],
    platform: Mapping[str, str],
    tool: Mapping[str, str],
    start: Checkpoint | None = None,
) -> dict[str, Any]:
    """All that could change a byte of the artifact, by the name under which a refusal will mention it.

    Weights are known by file names, sizes, times and header digests: rehashing hundreds of gigabytes before work goes
    on would cost more than the work. The small files beside them are digested.
    """
    facets: dict[str, Any] = {
        "the version of mfs": __version__,
        "the recipe": plan.recipe.canonical(),
        "the base mode": f"{'auto' if plan.base_auto else plan.base_mode}, {plan.base_store}",
        "the device": dict(platform),
        "the installed libraries": dict(tool),
        "the variants": [variant.id for variant in plan.variants],
    }
    if start is not None:
        facets["the base to start from"] = _identity(start)
    if base is not None:
        facets["the base"] = _identity(base)
    for checkpoint in variants:
        facets[f"variant {checkpoint.id!r}"] = _identity(checkpoint)
    return facets


def changed_facets(before: Fingerprint, now: Fingerprint) -> list[str]:
    """The names of the facets that differ, in order."""
    names = [*now, *(name for name in before if name not in now)]
    return [name for name in names if before.get(name) != now.get(name)]


def _identity(checkpoint: Checkpoint) -> dict[str, Any]:
    beside = [*checkpoint.sidecars, *([checkpoint.index] if checkpoint.index is not None else [])]
    return {
        "shards": [[shard.file, shard.size, shard.mtime_ns, shard.sha256] for shard in checkpoint.shards],
        "files": [[file.name, sha256(read_sidecar(checkpoint, file)).hexdigest()] for file in beside],
    }
