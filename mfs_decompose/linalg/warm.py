"""Truncated SVD that starts from a subspace which is nearly right: two products instead of five.

An alternating minimisation factorises the same matrices again and again, each a little moved. From the directions of
the last time, half a power iteration finds those of this time: a cold sketch would need two whole ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from mfs_decompose.linalg.orthonormal import orthonormalise, peak
from mfs_decompose.linalg.precision import full_fp32
from mfs_decompose.linalg.sums import squared_norm
from mfs_decompose.linalg.svd import Truncation, factorise, from_range, is_sound


def warm_svd(
    batch_BMN: torch.Tensor, rank: int, keys: Sequence[int], starts: Sequence[Truncation | None]
) -> list[Truncation | None]:
    """Factorise B fp32 matrices of one shape from truncations of matrices near them; None as in `truncated_svd`.

    A start with more directions than `rank` finds better ones. Where there is none, or it fails, the matrix is
    factorised from its key as `truncated_svd` does.
    """
    with full_fp32():
        given = zip(batch_BMN, keys, starts, strict=True)
        return [_warm(matrix, rank, start) or factorise(matrix, rank, key) for matrix, key, start in given]


def _warm(matrix: torch.Tensor, rank: int, start: Truncation | None) -> Truncation | None:
    total = squared_norm(matrix)
    if start is None or start.rank < min(rank, *matrix.shape) or not math.isfinite(total):
        return None
    wide = matrix.shape[0] < matrix.shape[1]
    tall, known_RN = (matrix.mT, start.left) if wide else (matrix, start.right)
    image = tall @ (known_RN / peak(known_RN)).mT
    basis_MR = orthonormalise((image / peak(image))[None])[0]
    found = from_range(tall.mT @ basis_MR, basis_MR, min(rank, tall.shape[1]), total)
    if found is None or not is_sound(found):
        return None
    return found if wide else found.transposed()
