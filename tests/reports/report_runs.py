"""Small families of any tensors, decomposed, and what an independent reader makes of the result."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checkpoints import random_checkpoint, read_weights

from mfs_decompose.events import Level, NullSink
from mfs_decompose.pipeline.decompose import decompose
from mfs_decompose.pipeline.request import DecomposeReport, DecomposeRequest
from mfs_decompose.pipeline.restore import RestoreOptions, restore
from mfs_decompose.recipe.load import load_recipe

Tensors = dict[str, torch.Tensor]


class Notes(NullSink):
    """Keeps what is said on the way."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, message: str, level: Level = "info") -> None:
        self.notes.append(message)


def toy(folder: Path, tensors: Tensors) -> Path:
    """A checkpoint of these tensors."""
    random_checkpoint(folder, tensors, {"format": "pt"})
    (folder / "config.json").write_text('{"model_type": "toy"}\n')
    return folder


def run(
    out: Path,
    base: Path | None,
    variants: Mapping[str, Path],
    recipe: Mapping[str, object] | None = None,
    sink: NullSink | None = None,
) -> DecomposeReport:
    request = DecomposeRequest(
        variants={id: str(folder) for id, folder in variants.items()},
        out=out,
        recipe=load_recipe(None, dict(recipe or {})),
        base=None if base is None else str(base),
        threads=1,
        device="cpu",
    )
    return decompose(request, sink)


def tensors_of(artifact: Path, id: str) -> dict[str, Any]:
    """The records of a variant's tensors, as plain JSON."""
    variants = json.loads((artifact / "manifest.json").read_bytes())["variants"]
    found: dict[str, Any] = next(variant for variant in variants if variant["id"] == id)["tensors"]
    return found


def back(artifact: Path, id: str, out: Path, **options: Any) -> Tensors:
    """The restored weights, as the safetensors library reads them."""
    (restored,) = restore(artifact, [id], out, RestoreOptions(**options))
    return read_weights(restored.folder)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal in type, shape and every bit, NaN included."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    flat = (values.contiguous().reshape(-1).view(torch.uint8) for values in (one, other))
    return bool(torch.equal(*flat))


def measured_error(original: Tensors, base: Tensors, served: Tensors) -> float:
    """||served - original|| / ||original - base|| over all tensors, in numpy."""

    def squared(one: torch.Tensor, other: torch.Tensor) -> float:
        return float(np.square(one.double().numpy() - other.double().numpy()).sum())

    error = math.fsum(squared(served[name], one) for name, one in original.items())
    energy = math.fsum(squared(one, base[name]) for name, one in original.items())
    return math.sqrt(error / energy) if energy else 0.0
