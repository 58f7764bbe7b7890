"""run.json: what is true of one run only, and outside of every digest."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mfs_decompose.artifact.manifest import Manifest
from mfs_decompose.artifact.writer import write_run_record
from mfs_decompose.pipeline.prepare import Prepared
from mfs_decompose.source.ref import redact


def write_run(
    folder: Path,
    manifest: Manifest,
    prepared: Prepared,
    argv: Sequence[str],
    stages: Mapping[str, float],
    bytes_read: int,
    resumed_units: int,
    trials: Mapping[str, list[dict[str, Any]]] | None = None,
) -> None:
    """Write when, how long, from where: later commands try these places, and let digests decide.

    `trials` are, by variant, the sizes that were measured for a target.
    """
    base = prepared.base
    write_run_record(
        folder,
        {
            "schema": "mfs.run/1",
            "digest": manifest.digest,
            "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "argv": [redact(word) for word in argv],
            "stages": {name: round(seconds, 3) for name, seconds in stages.items()},
            "bytes_read": bytes_read,
            "resumed_units": resumed_units,
            "hints": {
                "base": None if base is None else base.pinned,
                "variants": {variant.id: variant.pinned for variant in prepared.variants},
            },
            "stats": _stats(prepared),
        }
        | ({"target": {id: list(tried) for id, tried in trials.items()}} if trials is not None else {}),
    )


def _stats(prepared: Prepared) -> dict[str, Any]:
    """Sizes and times of the source files: how a later run knows them again without reading them."""
    sources = [*prepared.variants, *([prepared.base] if prepared.base is not None else [])]
    return {source.id: [[shard.file, shard.size, shard.mtime_ns] for shard in source.shards] for source in sources}
