"""The rank that an error asks for: a basis that grows until what it leaves is little enough.

Blocks of random directions are power-iterated among those orthogonal to the basis so far (Yu, Gu and Li 2018), so
nothing is computed twice, and what is left is known after each block without a further pass.
"""

from __future__ import annotations

import math

import torch

from mfs_decompose.linalg.precision import full_fp32
from mfs_decompose.linalg.seeds import random_matrix, stream_key
from mfs_decompose.linalg.shapes import covered_rank, sketch_width, uses_gram
from mfs_decompose.linalg.sums import squared_norm
from mfs_decompose.linalg.svd import Truncation, factorise, from_range, is_sound, iterate

_FIRST_RANK = 16
LEAST_TARGET = 1e-3
"""Below it, fp32 products no longer tell what is left from their own rounding."""


def svd_to_target(matrix_MN: torch.Tensor, target: float, key: int, most: int | None = None) -> Truncation | None:
    """Factorise an fp32 matrix at the least rank with `||A - left.T @ right||_F <= target * ||A||_F`.

    The least rank of the directions found, which is at most a few above the least of any. Of rank `most` where that one
    still leaves more: `residual()` tells. None where the matrix is not finite or nothing worked.
    """
    assert LEAST_TARGET <= target < 1, f"a target of {target}"
    total = squared_norm(matrix_MN)
    if not math.isfinite(total):
        return None
    wide = matrix_MN.shape[0] < matrix_MN.shape[1]
    tall = matrix_MN.mT if wide else matrix_MN
    most = min(most or tall.shape[1], tall.shape[1])
    with full_fp32():
        found = _grow(tall, target**2 * total, key, most, total)
        if found is None or not is_sound(found):
            found = factorise(tall, most, key)
    found = found and found.head(least_rank(found, target**2 * total))
    return found.transposed() if found and wide else found


def least_rank(found: Truncation, allowed: float) -> int:
    """How many directions leave at most `allowed` of ||A||_F^2; all of them where that is not enough."""
    left = found.total - found.energy.cumsum(0)
    return min(found.rank, int((left > allowed).sum()) + 1) if found.total > allowed else 0


def _grow(tall: torch.Tensor, allowed: float, key: int, most: int, total: float) -> Truncation | None:
    short = tall.shape[1]
    basis_NL, image_ML = tall.new_empty(short, 0), tall.new_empty(tall.shape[0], 0)
    rank = min(_FIRST_RANK, most)
    while not uses_gram(rank, short):
        more = sketch_width(rank, short) - basis_NL.shape[1]
        start = random_matrix(stream_key(key, "grow", str(rank)), short, more).to(tall.device)
        block = iterate(tall, start, basis_NL if basis_NL.shape[1] else None)
        basis_NL, image_ML = torch.cat([basis_NL, block], dim=1), torch.cat([image_ML, tall @ block], dim=1)
        found = from_range(image_ML, basis_NL, min(covered_rank(basis_NL.shape[1]), most), total)
        if found is None or found.residual() <= allowed or rank == most:
            return found
        rank = min(2 * rank, most)
    return factorise(tall, most, key)
