"""Batched truncated SVD of deltas: the leading directions, and exactly what they leave behind.

A randomised range finder (Halko, Martinsson and Tropp 2011) on the short side, with as much oversampling as rank and
two power iterations, orthonormalised in between. The sketch is exact on its own range, so the Frobenius residual
`||A||^2 - ||A Q||^2` is measured and not estimated. Where the sketch would be nearly as wide as the matrix, the Gram
matrix of the short side is diagonalised instead: the full spectrum at the same cost.

A matrix that fails goes down a ladder, alone: randomised, Gram, LAPACK in fp32, LAPACK in fp64. A layer is never
skipped: None says that nothing worked, and the caller stores that one exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from mfs_decompose.linalg.orthonormal import orthonormalise, peak
from mfs_decompose.linalg.seeds import random_matrix
from mfs_decompose.linalg.shapes import POWER_ITERATIONS, sketch_width, uses_gram
from mfs_decompose.linalg.sums import squared_norm

_NO_CONVERGENCE = torch.linalg.LinAlgError  # type: ignore[attr-defined]  # public, but not in its module's __all__


@dataclass(frozen=True)
class Truncation:
    """`A ~ left.T @ right`, strongest direction first.

    left [R, M] holds the directions of the rows times sqrt(sigma), right [R, N] those of the columns times sqrt(sigma),
    both fp32; energy [R] the squared singular values in fp64; total is ||A||_F^2. The residual of rank r is
    `total - energy[:r].sum()`.
    """

    left: torch.Tensor
    right: torch.Tensor
    energy: torch.Tensor
    total: float

    @property
    def rank(self) -> int:
        return int(self.energy.numel())


def truncated_svd(batch_BMN: torch.Tensor, rank: int, keys: Sequence[int]) -> list[Truncation | None]:
    """Factorise B finite fp32 matrices of one shape, each under its own random key; None where nothing worked.

    The result of a matrix depends on its values, the rank, its key and B; its last bits also on the number of torch
    threads, since LAPACK shares out its work by them: set one where bytes matter.
    """
    wide = batch_BMN.shape[1] < batch_BMN.shape[2]
    tall = batch_BMN.mT if wide else batch_BMN
    rank = min(rank, tall.shape[2])
    first = _gram if uses_gram(rank, tall.shape[2]) else _randomised
    found = list(first(tall, rank, keys))
    for at, truncation in enumerate(found):
        if truncation is None or not is_sound(truncation):
            found[at] = _descend(tall[at : at + 1], rank, keys[at : at + 1])
    if wide:
        found = [t and Truncation(t.right, t.left, t.energy, t.total) for t in found]
    return found


def _descend(tall: torch.Tensor, rank: int, keys: Sequence[int]) -> Truncation | None:
    if not bool(torch.isfinite(tall).all()):
        return None
    ladder: tuple[Callable[..., Sequence[Truncation | None]], ...] = (_gram, _lapack_fp32, _lapack_fp64)
    for method in ladder:
        try:
            truncation = method(tall, rank, keys)[0]
        except _NO_CONVERGENCE:
            continue
        if truncation is not None and is_sound(truncation):
            return truncation
    return None


def is_sound(truncation: Truncation) -> bool:
    """Whether all of it is finite, and it explains no more than there is."""
    # An Inf does not raise in a CPU SVD: it gives NaN factors. So look, always.
    finite = bool(torch.isfinite(truncation.left).all() and torch.isfinite(truncation.right).all())
    if not finite or not math.isfinite(truncation.total):
        return False
    return float(truncation.energy.sum()) <= truncation.total * (1 + 1e-4)  # false for a NaN


def _randomised(tall: torch.Tensor, rank: int, keys: Sequence[int]) -> list[Truncation | None]:
    width = sketch_width(rank, tall.shape[2])
    basis = torch.stack([random_matrix(key, tall.shape[2], width) for key in keys]).to(tall.device)
    for _ in range(POWER_ITERATIONS):
        image = tall @ basis
        basis = orthonormalise(tall.mT @ (image / peak(image)))
    image = tall @ basis
    return [from_range(image[at], basis[at], rank, squared_norm(tall[at])) for at in range(tall.shape[0])]


def from_range(image_ML: torch.Tensor, basis_NL: torch.Tensor, rank: int, total: float) -> Truncation | None:
    """The truncation of A from an orthonormal basis Q [N, L] and A Q [M, L]: an L x L eigenproblem in fp64."""
    wide = image_ML.to(torch.float64)
    gram = wide.mT @ wide
    found = _strongest(gram, rank)
    return found and _balanced(image_ML @ found[1], basis_NL @ found[1], found[0], total)


def _strongest(gram: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The largest eigenvalues [R], fp64, and their vectors [L, R], fp32; None where the solver gave up."""
    if not bool(torch.isfinite(gram).all()):
        return None
    try:
        values, vectors = torch.linalg.eigh(gram)
    except _NO_CONVERGENCE:
        return None
    return values.flip(0)[:rank].clamp(min=0.0), vectors.flip(1)[:, :rank].to(torch.float32).contiguous()


def _balanced(image_MR: torch.Tensor, right_NR: torch.Tensor, energy: torch.Tensor, total: float) -> Truncation | None:
    """Give both sides sqrt(sigma), so that both are quantised with the same relative step, and fix the signs."""
    if not bool(torch.isfinite(energy).all()):
        return None  # a NaN is not above the threshold below: it would pass for a delta of rank 0
    sigma = energy.sqrt()
    # Directions below fp32 resolution of the strongest are noise of the solver; they would divide by almost nothing.
    kept = sigma > 1e-7 * sigma[:1].clamp(min=torch.finfo(torch.float64).tiny)
    count = int(kept.sum())
    root = sigma[:count].sqrt().to(torch.float32)
    left = (image_MR[:, :count] / root).mT
    right = (right_NR[:, :count] * root).mT
    largest = left.gather(1, left.abs().argmax(dim=1, keepdim=True)) if count else left[:, :1]
    sign = torch.where(largest < 0, -1.0, 1.0)
    return Truncation((left * sign).contiguous(), (right * sign).contiguous(), energy[:count], total)


def _gram(tall: torch.Tensor, rank: int, keys: Sequence[int]) -> list[Truncation | None]:
    del keys
    found: list[Truncation | None] = []
    for matrix in tall:
        wide = matrix.to(torch.float64)
        found.append(from_gram(wide.mT @ wide, rank, squared_norm(matrix), partial(torch.mm, matrix)))
    return found


def from_gram(
    gram_NN: torch.Tensor, rank: int, total: float, multiply: Callable[[torch.Tensor], torch.Tensor]
) -> Truncation | None:
    """The truncation from `A^T A` in fp64 and a way to multiply A with an [N, R] basis."""
    found = _strongest(gram_NN, rank)
    return found and _balanced(multiply(found[1]), found[1], found[0], total)


def _lapack_fp32(tall: torch.Tensor, rank: int, keys: Sequence[int]) -> list[Truncation | None]:
    del keys
    return [_lapack(matrix, rank) for matrix in tall]


def _lapack_fp64(tall: torch.Tensor, rank: int, keys: Sequence[int]) -> list[Truncation | None]:
    del keys
    return [_lapack(matrix.to(torch.float64), rank) for matrix in tall]


def _lapack(matrix: torch.Tensor, rank: int) -> Truncation | None:
    u, sigma, vt = torch.linalg.svd(matrix, full_matrices=False)
    image = (u[:, :rank] * sigma[:rank]).to(torch.float32)
    energy = sigma[:rank].to(torch.float64).square()
    return _balanced(image, vt[:rank].mT.to(torch.float32), energy, squared_norm(matrix))
