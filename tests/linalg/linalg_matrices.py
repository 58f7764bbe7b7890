"""Matrices with a known spectrum, and the slow answers that fast ones are held against."""

from __future__ import annotations

import torch


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def orthonormal(rows: int, columns: int, seed: int) -> torch.Tensor:
    """An fp64 [rows, columns] matrix with orthonormal columns."""
    drawn = torch.randn(rows, columns, generator=generator(seed), dtype=torch.float64)
    basis: torch.Tensor = torch.linalg.qr(drawn)[0]
    return basis


def with_spectrum(sigma: torch.Tensor, rows: int, columns: int, seed: int) -> torch.Tensor:
    """An fp32 [rows, columns] matrix with the singular values `sigma`, as far as fp32 can hold them."""
    left = orthonormal(rows, sigma.numel(), seed)
    right = orthonormal(columns, sigma.numel(), seed + 1000)
    return ((left * sigma.to(torch.float64)) @ right.mT).to(torch.float32)


def power_law(count: int, exponent: float) -> torch.Tensor:
    return torch.arange(1, count + 1, dtype=torch.float64) ** -exponent


def smallest_residual(matrix: torch.Tensor, rank: int) -> float:
    """The least `||A - B||_F^2` of any B of this rank (Eckart and Young), in fp64."""
    return float(torch.linalg.svdvals(matrix.to(torch.float64))[rank:].square().sum())


def residual(matrix: torch.Tensor, left_RM: torch.Tensor, right_RN: torch.Tensor) -> float:
    """`||A - left^T right||_F^2` in fp64, the long way."""
    product = left_RM.to(torch.float64).mT @ right_RN.to(torch.float64)
    return float((matrix.to(torch.float64) - product).square().sum())
