"""Truncated SVD of deltas: the leading directions, and exactly what they leave behind.

A randomised range finder (Halko, Martinsson and Tropp 2011) on the short side, with as much oversampling as rank and
two power iterations, orthonormalised in between. The sketch is exact on its own range, so the Frobenius residual
`||A||^2 - ||A Q||^2` is measured and not estimated. Where the sketch would be nearly as wide as the matrix, the Gram
matrix of the short side is diagonalised instead: the full spectrum at the same cost.

A matrix that fails goes down a ladder, alone: randomised, Gram, LAPACK in fp32, LAPACK in fp64. A layer is never
skipped: None says that nothing worked, and the caller stores that one exactly.

The matrices of a batch are worked on one by one. Batched products choose their kernels by the size of the batch, so a
matrix would have other bits beside other ones, and after a batch was halved for want of memory; they are no faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from mfs_decompose.linalg.orthonormal import orthonormalise, peak
from mfs_decompose.linalg.precision import full_fp32
from mfs_decompose.linalg.seeds import random_matrix
from mfs_decompose.linalg.shapes import POWER_ITERATIONS, sketch_width, uses_gram
from mfs_decompose.linalg.sums import squared_norm

_NO_CONVERGENCE = torch.linalg.LinAlgError  # type: ignore[attr-defined]  # public, but not in its module's __all__
_ALIGNMENT = 64  # bytes: what a matrix has in memory of its own, and kernels are chosen by


@dataclass(frozen=True)
class Truncation:
    """`A ~ left.T @ right`, strongest direction first.

    left [R, M] holds the directions of the rows times sqrt(sigma), right [R, N] those of the columns times sqrt(sigma),
    both fp32; energy [R] the squared singular values in fp64; total is ||A||_F^2. One factorisation serves every rank
    up to its own.
    """

    left: torch.Tensor
    right: torch.Tensor
    energy: torch.Tensor
    total: float

    @property
    def rank(self) -> int:
        return int(self.energy.numel())

    def residual(self, rank: int | None = None) -> float:
        """What the first `rank` directions, or all, leave of ||A||_F^2."""
        return max(0.0, self.total - float(self.energy[:rank].sum()))

    def head(self, rank: int) -> Truncation:
        """The truncation to the first `rank` directions."""
        return Truncation(self.left[:rank], self.right[:rank], self.energy[:rank], self.total)

    def transposed(self) -> Truncation:
        """The truncation of A^T."""
        return Truncation(self.right, self.left, self.energy, self.total)


def truncated_svd(batch_BMN: torch.Tensor, rank: int, keys: Sequence[int]) -> list[Truncation | None]:
    """Factorise B fp32 matrices of one shape, each under its own random key; None where one is not finite or nothing
    worked.

    The result of a matrix depends on its values, the rank and its key, and on nothing beside it; its last bits also on
    the device and the number of torch threads, since LAPACK shares out its work by them: set one where bytes matter.
    """
    with full_fp32():
        return [factorise(matrix, rank, key) for matrix, key in zip(batch_BMN, keys, strict=True)]


def factorise(matrix_MN: torch.Tensor, rank: int, key: int) -> Truncation | None:
    """What `truncated_svd` does with each matrix, in the precision that is set."""
    total = squared_norm(matrix_MN)
    if not math.isfinite(total):  # squares of fp32 do not overflow in fp64: the matrix is not finite
        return None
    wide = matrix_MN.shape[0] < matrix_MN.shape[1]
    tall = _aligned(matrix_MN.mT if wide else matrix_MN)
    rank = min(rank, tall.shape[1])
    ladder: tuple[Callable[[torch.Tensor, int, int, float], Truncation | None], ...]
    ladder = (_randomised, _gram, _lapack_fp32, _lapack_fp64)
    for method in ladder[1:] if uses_gram(rank, tall.shape[1]) else ladder:
        try:
            found = method(tall, rank, key, total)
        except _NO_CONVERGENCE:
            continue
        if found is not None and is_sound(found):
            return found.transposed() if wide else found
    return None


def _aligned(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix as it would lie in memory of its own: inside a batch it may begin anywhere."""
    return matrix if matrix.data_ptr() % _ALIGNMENT == 0 else matrix.clone()


def is_sound(truncation: Truncation) -> bool:
    """Whether all of it is finite, and it explains no more than there is."""
    # An Inf does not raise in a CPU SVD: it gives NaN factors. So look, always.
    finite = bool(torch.isfinite(truncation.left).all() and torch.isfinite(truncation.right).all())
    if not finite or not math.isfinite(truncation.total):
        return False
    return float(truncation.energy.sum()) <= truncation.total * (1 + 1e-4)  # false for a NaN


def _randomised(tall: torch.Tensor, rank: int, key: int, total: float) -> Truncation | None:
    short = tall.shape[1]
    start = random_matrix(key, short, sketch_width(rank, short)).to(tall.device)
    basis = iterate(tall, start)
    return from_range(tall @ basis, basis, rank, total)


def iterate(tall_MN: torch.Tensor, start_NL: torch.Tensor, outside_NK: torch.Tensor | None = None) -> torch.Tensor:
    """Power iterations from a start to an orthonormal basis [N, L] of strong input directions.

    With `outside`, an orthonormal basis, they are sought among the directions orthogonal to it.
    """
    basis = start_NL
    for _ in range(POWER_ITERATIONS):
        image = tall_MN @ basis
        basis = tall_MN.mT @ (image / peak(image))
        if outside_NK is None:
            basis = orthonormalise(basis[None])[0]
            continue
        for _again in range(2):  # twice is enough (Parlett): the first time leaves what fp32 rounds
            basis = orthonormalise((basis - outside_NK @ (outside_NK.mT @ basis))[None])[0]
    return basis


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


def _gram(tall: torch.Tensor, rank: int, key: int, total: float) -> Truncation | None:
    del key
    wide = tall.to(torch.float64)
    return from_gram(wide.mT @ wide, rank, total, partial(torch.mm, tall))


def from_gram(
    gram_NN: torch.Tensor, rank: int, total: float, multiply: Callable[[torch.Tensor], torch.Tensor]
) -> Truncation | None:
    """The truncation from `A^T A` in fp64 and a way to multiply A with an [N, R] basis."""
    found = _strongest(gram_NN, rank)
    return found and _balanced(multiply(found[1]), found[1], found[0], total)


def _lapack_fp32(tall: torch.Tensor, rank: int, key: int, total: float) -> Truncation | None:
    del key
    return _lapack(tall, rank, total)


def _lapack_fp64(tall: torch.Tensor, rank: int, key: int, total: float) -> Truncation | None:
    del key
    return _lapack(tall.to(torch.float64), rank, total)


def _lapack(matrix: torch.Tensor, rank: int, total: float) -> Truncation | None:
    u, sigma, vt = torch.linalg.svd(matrix, full_matrices=False)
    image = (u[:, :rank] * sigma[:rank]).to(torch.float32)
    energy = sigma[:rank].to(torch.float64).square()
    return _balanced(image, vt[:rank].mT.to(torch.float32), energy, total)
