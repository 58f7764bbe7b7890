"""Runs of the main path on small families, and what an independent reader makes of their results."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from checkpoints import EMBEDDING, HEAD, random_checkpoint, read_weights

from mfs_decompose.events import Level, NullSink, ProgressSink
from mfs_decompose.pipeline.decompose import decompose
from mfs_decompose.pipeline.request import DecomposeReport, DecomposeRequest
from mfs_decompose.pipeline.restore import Restored, RestoreOptions, restore
from mfs_decompose.recipe.load import load_recipe

RUN = "run.json"

Folders = Mapping[str, Path]
Tensors = dict[str, torch.Tensor]


def asked(
    out: Path, base: Path | None, variants: Folders, recipe: Mapping[str, object] | None = None, **changes: Any
) -> DecomposeRequest:
    """A request at one thread, with the overrides of `recipe`."""
    return DecomposeRequest(
        variants={id: str(folder) for id, folder in variants.items()},
        out=out,
        recipe=load_recipe(None, dict(recipe or {})),
        base=None if base is None else str(base),
        **{"threads": 1, "device": "cpu", **changes},
    )


def run(
    out: Path,
    base: Path | None,
    variants: Folders,
    recipe: Mapping[str, object] | None = None,
    sink: ProgressSink | None = None,
    **changes: Any,
) -> DecomposeReport:
    return decompose(asked(out, base, variants, recipe, **changes), sink)


def back(artifact: Path, id: str, out: Path, base: Path | None = None, **options: Any) -> tuple[Restored, Tensors]:
    """Restore one checkpoint: the report, and its weights as the safetensors library reads them."""
    (restored,) = restore(artifact, [id], out, RestoreOptions(**options), base=base)
    return restored, read_weights(restored.folder)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file but run.json, by its path inside."""
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {name: data for name, data in found.items() if name != RUN}


def manifest(folder: Path) -> Any:
    return json.loads((folder / "manifest.json").read_bytes())


def record(folder: Path, id: str) -> Any:
    """A variant's record, as plain JSON."""
    return next(variant for variant in manifest(folder)["variants"] if variant["id"] == id)


def codec_of(folder: Path, id: str, tensor: str) -> str:
    """The codec tree of a tensor in one word."""
    tree = record(folder, id)["tensors"][tensor]["tree"]
    inner = "+".join(child["codec"] for child in tree.get("children", []))
    return f"{tree['codec']}({inner})" if inner else str(tree["codec"])


class Recording(NullSink):
    """Keeps stages and notes, and adds up what was advanced."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.notes: list[tuple[str, Level]] = []
        self.advanced = 0

    def start(self, stage: str, total_bytes: int | None) -> None:
        self.stages.append(stage)

    def advance(self, nbytes: int) -> None:
        self.advanced += nbytes

    def note(self, message: str, level: Level = "info") -> None:
        self.notes.append((message, level))


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal in type, shape and every bit, NaN included."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return bool(torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)))


def doubles(values: torch.Tensor) -> npt.NDArray[np.float64]:
    return values.to(torch.float64).numpy()


def measured_error(original: Tensors, base: Tensors, served: Tensors) -> float:
    """The relative error over all tensors, in numpy: common rows against the base, all rows against the original."""
    errors: list[float] = []
    energies: list[float] = []
    for name, weight in original.items():
        own = doubles(weight)
        errors.append(float(np.square(doubles(served[name]) - own).sum()))
        partner = base.get(name, base.get(EMBEDDING) if name == HEAD else None)
        if partner is not None and own.shape[1:] == tuple(partner.shape[1:]):
            rows = min(own.shape[0], partner.shape[0]) if own.ndim else 1
            energies.append(float(np.square(own[:rows] - doubles(partner)[:rows]).sum()) if own.ndim else 0.0)
    energy = math.fsum(energies)
    return math.sqrt(math.fsum(errors) / energy) if energy else 0.0


BASE = "base"
LARGE, WIDE, THIN, NORM = "large.weight", "wide.weight", "embed.weight", "norm.weight"


def toy_tensors(seed: int = 0) -> Tensors:
    """Matrices of both orientations, a stack, a convolution, and what no lossy codec touches."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    return {
        LARGE: draw(40, 24),
        WIDE: draw(16, 52),
        THIN: draw(33, 24),
        "experts.weight": draw(3, 20, 18),
        "conv.weight": draw(12, 4, 3),
        NORM: draw(24),
        "position": torch.tensor(9),
        "mask": torch.tensor([True, False, True]),
        "empty": torch.zeros(0, 4, dtype=torch.bfloat16),
        "also.empty": torch.zeros(5, 0, dtype=torch.bfloat16),
    }


def moved(tensors: Tensors, seed: int, scale: float = 0.05) -> Tensors:
    """A fine-tune: every float moved by rank 2 and a little noise."""
    generator = torch.Generator().manual_seed(seed)
    found: Tensors = {}
    for name, weight in tensors.items():
        if not weight.is_floating_point() or weight.dim() == 0 or not weight.numel():
            found[name] = weight
            continue
        rows, columns = weight.shape[0], weight.numel() // weight.shape[0]
        change = 0.2 * torch.randn(rows, columns, generator=generator)
        change += torch.randn(rows, 2, generator=generator) @ torch.randn(2, columns, generator=generator)
        found[name] = (weight.float() + scale * change.reshape(weight.shape)).to(weight.dtype)
    return found


def toy(folder: Path, tensors: Tensors, **files: str) -> Path:
    """A folder with these tensors, and text files by their names (`config_json` is config.json)."""
    random_checkpoint(folder, tensors, {"format": "pt"})
    for name, text in {"config_json": '{"model_type": "toy"}\n', **files}.items():
        (folder / name.replace("_", ".")).write_text(text)
    return folder


def toys(root: Path, *ids: str, **changed: Mapping[str, torch.Tensor | None]) -> tuple[Path, dict[str, Path]]:
    """A base and variants of it; `changed` replaces or adds tensors of a variant, None takes them away."""
    base = toy_tensors()
    folders: dict[str, Path] = {}
    for seed, id in enumerate([*ids, *changed], start=1):
        own: dict[str, torch.Tensor | None] = {**moved(base, seed), **changed.get(id, {})}
        folders[id] = toy(root / id, {name: weight for name, weight in own.items() if weight is not None})
    return toy(root / BASE, base), folders


def copied(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to


def planted(tensor: torch.Tensor, row: int, *values: float) -> torch.Tensor:
    """The same with some values at the beginning of a row."""
    changed = tensor.clone()
    changed[row, : len(values)] = torch.tensor(values, dtype=tensor.dtype)
    return changed


def check_restores(artifact: Path, id: str, original: Tensors, out: Path) -> None:
    """Exact tensors have the original's bits; every tensor is there in its type and shape."""
    _, weights = back(artifact, id, out)
    assert weights.keys() == original.keys()
    for name, tensor in record(artifact, id)["tensors"].items():
        assert (weights[name].dtype, weights[name].shape) == (original[name].dtype, original[name].shape)
        assert same_bits(weights[name], original[name]) or not tensor["exact"]
