"""All singular values of a delta, by the Gram matrix of its short side.

`A^T A` is accumulated in fp64, in which products of fp32 values are exact, and its eigenvalues are the squared singular
values. That costs a third of a full SVD and needs no vectors, so a matrix that is read in row blocks needs memory for
two blocks and the Gram matrix alone.

What the method cannot see: squared values below `resolution(...)`, some units of fp64 times the largest. A singular
value of 1e-5 times the largest comes out right to 1e-4 of itself and better, one of 1e-6 times to a few per cent, and
below 1e-7 nothing may be told from zero. The rounding noise of 16-bit weights lies far above that.

Eigenvalue solvers give other last bits with other numbers of torch threads: set one where bits matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

_NO_CONVERGENCE = torch.linalg.LinAlgError  # type: ignore[attr-defined]  # public, but not in its module's __all__
_CHUNK = 1 << 21  # elements converted to fp64 at a time

ReadRows = Callable[[int, int], torch.Tensor]
"""Reads matrix rows start..stop, finite fp32 [stop - start, N], on any device."""


def gram_spectra(batch_BMN: torch.Tensor) -> torch.Tensor:
    """The squared singular values of B finite fp32 matrices of one shape: fp64 [B, min(M, N)], largest first."""
    count, rows, columns = batch_BMN.shape
    tall = batch_BMN if rows >= columns else batch_BMN.mT
    gram = torch.zeros(count, tall.shape[2], tall.shape[2], dtype=torch.float64, device=batch_BMN.device)
    step = max(1, _CHUNK // max(1, count * tall.shape[2]))
    for start in range(0, tall.shape[1], step):
        part = tall[:, start : start + step].to(torch.float64)
        gram += part.mT @ part
    return _eigenvalues(gram)


def blocked_spectrum(read: ReadRows, edges: Sequence[int], columns: int, device: str = "cpu") -> torch.Tensor:
    """The squared singular values of one finite fp32 matrix [edges[-1], columns]: fp64 [K], largest first.

    `edges` are the rows at which it is cut into blocks, from 0 to its last. A matrix with fewer rows than columns is
    read once for every block it has: the Gram matrix of its rows needs each pair of blocks.
    """
    rows = edges[-1]
    short = min(rows, columns)
    gram = torch.zeros(short, short, dtype=torch.float64, device=device)
    blocks = list(pairwise(edges))
    for at, (start, stop) in enumerate(blocks):
        block = read(start, stop).to(device)
        if rows >= columns:
            _add_product(gram, block.mT, block.mT)
            continue
        _add_product(gram[start:stop, start:stop], block, block)
        for low, high in blocks[at + 1 :]:
            other = read(low, high).to(device)
            _add_product(gram[start:stop, low:high], block, other)
            gram[low:high, start:stop] = gram[start:stop, low:high].mT
    return _eigenvalues(gram[None])[0]


def resolution(energy_K: torch.Tensor) -> float:
    """The squared singular value that cannot be told from zero, given all of them, largest first."""
    if not energy_K.numel():
        return 0.0
    return 2.0 * (energy_K.numel() + 4) * torch.finfo(torch.float64).eps * float(energy_K[0])


def _add_product(gram: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """`gram += left @ right.T` in fp64, a slice of the inner dimension at a time."""
    step = max(1, _CHUNK // max(1, left.shape[0] + right.shape[0]))
    for start in range(0, left.shape[1], step):
        wide = left[:, start : start + step].to(torch.float64)
        gram += wide @ (wide if left is right else right[:, start : start + step].to(torch.float64)).mT


def _eigenvalues(gram_BKK: torch.Tensor) -> torch.Tensor:
    """Largest first, none below zero; on the CPU."""
    try:
        values = torch.linalg.eigvalsh(gram_BKK).flip(1)
    except _NO_CONVERGENCE:
        values = torch.linalg.svdvals(gram_BKK)  # of a positive semidefinite matrix they are the same
    found: torch.Tensor = values.clamp(min=0.0).cpu()
    return found
