"""Orthonormal bases of tall matrices, in batches."""

from __future__ import annotations

import torch


def peak(matrices_BML: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each matrix, [B, 1, 1]; 1 where all of it is 0.

    A delta of 1e-30 or 1e30 leaves fp32 when it is multiplied with itself, so products are divided by this in between.
    """
    largest = matrices_BML.abs().amax(dim=(-2, -1), keepdim=True)
    return torch.where(largest == 0, torch.ones_like(largest), largest)


def orthonormalise(columns_BNL: torch.Tensor) -> torch.Tensor:
    """An orthonormal fp32 basis [B, N, L] of the columns of each [N, L] matrix, N >= L; whatever their scale.

    CholeskyQR2 (Yamamoto et al. 2015) with the Gram matrix in fp64: two products and two small factorisations,
    several times faster than Householder QR on a batch. Where a matrix is too ill-conditioned for it, that matrix
    alone goes through Householder QR.
    """
    work = (columns_BNL / peak(columns_BNL)).to(torch.float64)
    basis, failed = _cholesky_qr(work)
    basis, failed_again = _cholesky_qr(basis)
    for at in torch.nonzero(failed | failed_again).flatten().tolist():
        basis[at] = torch.linalg.qr(work[at], mode="reduced")[0]
    return basis.to(torch.float32)


def _cholesky_qr(work: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    factor, info = torch.linalg.cholesky_ex(work.mT @ work)
    diagonal = factor.diagonal(dim1=1, dim2=2)
    # A pivot of 1e-7 of the largest: the fp64 Gram matrix carries no more digits than that.
    weak = diagonal.amin(dim=1) <= 1e-7 * diagonal.amax(dim=1)
    failed = (info != 0) | weak | ~torch.isfinite(diagonal).all(dim=1)
    factor = torch.where(
        failed[:, None, None], torch.eye(factor.shape[1], dtype=factor.dtype, device=factor.device), factor
    )
    return torch.linalg.solve_triangular(factor.mT, work, upper=True, left=False), failed
