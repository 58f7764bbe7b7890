"""`mfs decompose --codec auto` through the Python API, and what its artifact serves."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.frontier.treatment import Served
from benchmarks.frontier.work import Work
from mfs_decompose.api import decompose
from mfs_decompose.artifact.reader import Family
from mfs_decompose.pipeline.checkpoint_job import RestoreOptions, plan_checkpoint
from mfs_decompose.pipeline.inspect import inspect

VARIANT = "variant"
STAND_IN = "banded"
"""`--auto-codec banded`: low rank with banded factors, where there is no codec `auto`."""


def without_tables(work: Work, variant: Path, out: Path) -> Path:
    """A variant whose embeddings and heads are the base's, for those that bring their own; made once."""
    if not out.exists():
        from safetensors.torch import save_file

        shutil.copytree(variant, out, ignore=shutil.ignore_patterns("*.safetensors", "*.safetensors.index.json"))
        tensors = work.variant | {name: work.base[name] for name in work.tables}
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def auto(base: Path, variant: Path, out: Path, budget: int, codec: str, options: Mapping[str, Any]) -> Served:
    """Decompose one variant under a budget of bytes, and open what is served.

    Args:
        out: folder of the artifact; what is there is written again.
        codec: `auto` or another; `banded` is `lowrank` with banded factors.
        options: further keys of the recipe.

    Bytes are those of the variant's files, headers included.
    """
    overrides: dict[str, Any] = {"base.store": "reference", **options}
    if codec == STAND_IN:
        overrides["deltas.default.factors"] = "banded"
    shutil.rmtree(out, ignore_errors=True)
    decompose(
        base,
        {VARIANT: variant},
        out,
        budget=budget,
        codec="lowrank" if codec == STAND_IN else codec,
        overrides=overrides,
        device="cpu",
    )
    with Family.open(out, base=base) as family:
        shards = sum(family.manifest.files[shard].size for shard in family.variant(VARIANT).shards)
    return Served({"codec": codec, "codecs": _codecs(out)}, _weights(out, base), shards)


def _codecs(artifact: Path) -> dict[str, int]:
    found: dict[str, int] = inspect(artifact)["variants"][0]["codecs"]
    return found


def _weights(artifact: Path, base: Path) -> Iterator[tuple[str, int, torch.Tensor]]:
    with Family.open(artifact, base=base) as family:
        job = plan_checkpoint(family, VARIANT, RestoreOptions(dtype="float32"))
        for plan in job.shards.values():
            for entry in plan.entries:
                data = bytearray().join(job.blocks(entry.name))
                yield entry.name, 0, torch.frombuffer(data, dtype=torch.float32).view(*entry.shape)
