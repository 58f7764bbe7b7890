"""What a rank-r approximation leaves of each linear layer's delta, against the least any rank-r matrix can leave.

Everything in fp64. The optimum is the Eckart-Young bound: the sum of all but the r largest squared singular values,
from the eigenvalues of the Gram matrix on the short side. Eigenvalues carry errors of about 1e-16 of the largest,
far below the flat tails that are summed here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

Read = Callable[[str], torch.Tensor]


class Checkpoint:
    """The tensors of all safetensors files of a folder, read one at a time as fp64."""

    def __init__(self, folder: Path) -> None:
        self.shapes: dict[str, list[int]] = {}
        self._files: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            file: Any = safe_open(path, framework="pt")
            for name in file.keys():  # noqa: SIM118  (not a dict)
                self.shapes[name] = file.get_slice(name).get_shape()
                self._files[name] = file

    def __call__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor.double()


def linear_layers(base: Checkpoint) -> Iterator[str]:
    """Names of the two-dimensional weights, embeddings and heads left out: mergekit does not factor those."""
    for name, shape in base.shapes.items():
        if len(shape) == 2 and not any(part in name for part in ("embed", "lm_head", "wte", "wpe")):
            yield name


def least_residual(delta_OI: torch.Tensor, rank: int) -> float:
    """The least squared Frobenius error of any matrix of rank `rank`."""
    short = delta_OI if delta_OI.shape[0] <= delta_OI.shape[1] else delta_OI.T
    energies = torch.linalg.eigvalsh(short @ short.T)
    return float(energies[: max(0, len(energies) - rank)].clamp(min=0).sum())


def adapter_delta(adapter: Checkpoint) -> Read:
    """Reads B @ A of a layer from a PEFT adapter whose alpha equals its rank, as mergekit writes it."""

    def read(name: str) -> torch.Tensor:
        stem = "base_model.model." + name.removesuffix(".weight")
        return adapter(f"{stem}.lora_B.weight") @ adapter(f"{stem}.lora_A.weight")

    return read


def restored_delta(base: Checkpoint, restored: Checkpoint) -> Read:
    """Reads the delta of a layer from a variant restored in fp32."""
    return lambda name: restored(name) - base(name)


def residual_report(
    base_folder: Path, variant_folder: Path, rank: int, *, restored: Path | None, adapter: Path | None
) -> dict[str, Any]:
    """Residual energy of both sides over the optimum: every layer, and summed over the layers."""
    base, variant = Checkpoint(base_folder), Checkpoint(variant_folder)
    sides: dict[str, Read] = {}
    if restored is not None:
        sides["mfs"] = restored_delta(base, Checkpoint(restored))
    if adapter is not None:
        sides["mergekit"] = adapter_delta(Checkpoint(adapter))
    layers, energy = {}, 0.0
    for name in linear_layers(base):
        delta = variant(name) - base(name)
        energy += float(delta.square().sum())
        row = {"exact": least_residual(delta, rank)}
        for side, read in sides.items():
            row[side] = float((delta - read(name)).square().sum())
        layers[name] = row
    exact = math.fsum(row["exact"] for row in layers.values())
    report: dict[str, Any] = {"layers": len(layers), "rel_error_exact": math.sqrt(exact / energy)}
    for side in sides:
        ours = math.fsum(row[side] for row in layers.values())
        excess = {name: row[side] / row["exact"] - 1 for name, row in layers.items() if row["exact"] > 0}
        worst = max(excess, key=lambda name: excess[name])
        report[side] = {
            "rel_error": math.sqrt(ours / energy),
            "excess_energy_total": ours / exact - 1,
            "excess_energy_worst": excess[worst],
            "worst_layer": worst,
        }
    report["energy_by_layer"] = layers
    return report
