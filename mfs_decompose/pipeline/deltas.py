"""Figures of a delta and of the weights it is of, each as pass 1 records them."""

from __future__ import annotations

import math

import torch

from mfs_decompose.linalg.sums import squared_norm


def delta_energy(delta: torch.Tensor) -> tuple[float, bool]:
    """||delta||^2 over its finite elements, and whether all are: squares of fp32 cannot overflow in fp64."""
    energy = squared_norm(delta)
    if math.isfinite(energy):
        return energy, True
    return squared_norm(torch.nan_to_num(delta, 0.0, 0.0, 0.0)), False


def same_bits(own: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether two tensors of one dtype and shape have the same bits, NaN included."""
    return torch.equal(_bits(own), _bits(base))


def count_nonfinite(values: torch.Tensor) -> int:
    """NaN and infinities; none in integers and 8-bit floats, which are never decoded."""
    if not values.is_floating_point() or values.element_size() == 1:
        return 0
    return int(values.numel() - torch.isfinite(values).sum())


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(-1).view(torch.uint8)
