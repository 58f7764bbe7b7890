"""Truncated SVD of a matrix that is read in row blocks, so that memory does not grow with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from mfs_decompose.linalg.orthonormal import orthonormalise, peak
from mfs_decompose.linalg.precision import full_fp32
from mfs_decompose.linalg.seeds import random_matrix
from mfs_decompose.linalg.shapes import POWER_ITERATIONS, sketch_width, uses_gram
from mfs_decompose.linalg.sums import squared_norm
from mfs_decompose.linalg.svd import Truncation, from_gram, from_range, is_sound

Blocks = Callable[[], Iterator[tuple[int, torch.Tensor]]]
"""Reads the matrix once more: (first row, fp32 rows) in order. Which rows form a block may depend on shapes alone.

No pass keeps a block once it has asked for the next one.
"""


def blocked_svd(blocks: Blocks, shape: tuple[int, int], rank: int, key: int, device: str = "cpu") -> Truncation | None:
    """Factorise one finite fp32 matrix [M, N] whose blocks lie on `device`; None where the result is not finite.

    Holds one block, and matrices of max(M, N) x 2 rank.
    """
    rows, columns = shape
    short = min(rows, columns)
    rank = min(rank, short)
    with full_fp32():
        if rows >= columns and uses_gram(rank, short):
            found = _tall_gram(blocks, rows, columns, rank, device)
        else:
            basis = random_matrix(key, short, sketch_width(rank, short)).to(device)
            found = _tall(blocks, rows, rank, basis) if rows >= columns else _wide(blocks, columns, rank, basis)
    return found if found is not None and is_sound(found) else None


def _tall_gram(blocks: Blocks, rows: int, columns: int, rank: int, device: str) -> Truncation | None:
    gram, total = _gram(blocks, columns, device)
    return from_gram(gram, rank, total, lambda basis: _multiply(blocks, rows, basis))


def _gram(blocks: Blocks, columns: int, device: str) -> tuple[torch.Tensor, float]:
    gram = torch.zeros(columns, columns, dtype=torch.float64, device=device)
    norms: list[float] = []
    for _, block in blocks():
        wide = block.to(torch.float64)
        gram += wide.mT @ wide
        norms.append(squared_norm(block))
    return gram, math.fsum(norms)


def _tall(blocks: Blocks, rows: int, rank: int, basis: torch.Tensor) -> Truncation | None:
    norms: list[float] = []
    for turn in range(POWER_ITERATIONS):
        basis = orthonormalise(_multiply_there_and_back(blocks, basis, norms if turn == 0 else None)[None])[0]
    return from_range(_multiply(blocks, rows, basis), basis, rank, math.fsum(norms))


def _wide(blocks: Blocks, columns: int, rank: int, basis: torch.Tensor) -> Truncation | None:
    norms: list[float] = []
    for turn in range(POWER_ITERATIONS):
        image = _multiply_transposed(blocks, columns, basis, norms if turn == 0 else None)
        basis = orthonormalise(_multiply(blocks, basis.shape[0], image / peak(image))[None])[0]
    found = from_range(_multiply_transposed(blocks, columns, basis, None), basis, rank, math.fsum(norms))
    return found and found.transposed()


def _multiply_there_and_back(blocks: Blocks, right: torch.Tensor, norms: list[float] | None) -> torch.Tensor:
    product = torch.zeros_like(right, dtype=torch.float64)
    for _, block in blocks():
        part = block @ right
        largest = peak(part)
        product += (block.mT @ (part / largest)).to(torch.float64) * largest
        if norms is not None:
            norms.append(squared_norm(block))
    return product


def _multiply(blocks: Blocks, rows: int, right: torch.Tensor) -> torch.Tensor:
    product = right.new_empty(rows, right.shape[1])
    for first, block in blocks():
        torch.mm(block, right, out=product[first : first + block.shape[0]])
    return product


def _multiply_transposed(blocks: Blocks, columns: int, left: torch.Tensor, norms: list[float] | None) -> torch.Tensor:
    product = left.new_zeros(columns, left.shape[1])
    for first, block in blocks():
        product += block.mT @ left[first : first + block.shape[0]]
        if norms is not None:
            norms.append(squared_norm(block))
    return product
