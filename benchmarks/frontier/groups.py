"""Integers in groups of 64 along a row, asymmetric: a step in bf16 and a zero point in a byte for each group."""

from __future__ import annotations

import torch

from mfs_decompose.linalg.shapes import GROUP

HEAD_BYTES = 3


def group_bytes(length: int, bits: int) -> int:
    """Of a row of that many values."""
    return -(-length * bits // 8) + HEAD_BYTES * -(-length // GROUP)


def grid(values_NG: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Step and zero point [N, 1] of one group a row, from least to largest value (0 within)."""
    low, high = values_NG.amin(1, keepdim=True).clamp(max=0), values_NG.amax(1, keepdim=True).clamp(min=0)
    step = ((high - low) / ((1 << bits) - 1)).to(torch.bfloat16).to(torch.float32)
    step = torch.where(step > 0, step, 1.0)
    return step, (-low / step).round().clamp(0, 255)


def snap(values: torch.Tensor, step: torch.Tensor, zero: torch.Tensor, bits: int) -> torch.Tensor:
    """The nearest numbers of the grid."""
    return ((values / step + zero).round().clamp(0, (1 << bits) - 1) - zero) * step


def round_rows(values_NK: torch.Tensor, bits: int) -> torch.Tensor:
    """Every row rounded in groups of 64."""
    rows, length = values_NK.shape
    # Zeros beyond the end change no grid.
    groups = torch.nn.functional.pad(values_NK, (0, -length % GROUP)).view(-1, GROUP)
    return snap(groups, *grid(groups, bits), bits).view(rows, -1)[:, :length] if values_NK.numel() else values_NK


def round_with_feedback(values_RI: torch.Tensor, hessian_II: torch.Tensor, bits_R: torch.Tensor) -> torch.Tensor:
    """Round rows of `bits_R` bits each column by column, the error of a column taken up by those after it.

    GPTQ (Frantar et al. 2023): with H = X^T X, columns in falling order of its diagonal, its mean times 0.01 added to
    it, blocks of 128 columns. Groups are of 64 columns in their own order, and get their grids before anything is
    rounded ("static groups"), so that the order needs no bytes.
    """
    length = values_RI.shape[1]
    steps, zeros, tops = _grids(values_RI, bits_R)
    order = hessian_II.diagonal().argsort(descending=True)
    damped = hessian_II.double()[order][:, order]
    damped.diagonal().add_(0.01 * float(damped.diagonal().mean()) + 1e-30)
    upper = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True).float()
    left, done = values_RI[:, order].clone(), torch.empty_like(values_RI)
    for first in range(0, length, 128):
        last = min(first + 128, length)
        block, errors = left[:, first:last], torch.zeros(values_RI.shape[0], last - first)
        for at in range(last - first):
            column = int(order[first + at])
            step, zero = steps[:, column // GROUP], zeros[:, column // GROUP]
            code = (block[:, at] / step + zero).round().clamp(min=torch.zeros(()), max=tops)
            done[:, column] = (code - zero) * step
            errors[:, at] = (block[:, at] - done[:, column]) / upper[first + at, first + at]
            block[:, at + 1 :] -= errors[:, at : at + 1] * upper[first + at, first + at + 1 : last]
        left[:, last:] -= errors @ upper[first:last, last:]
    return done


def _grids(values_RI: torch.Tensor, bits_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Steps and zero points [R, groups], and the largest code of each row [R]."""
    steps: list[torch.Tensor] = []
    zeros: list[torch.Tensor] = []
    for piece in torch.split(values_RI, GROUP, dim=1):
        pairs = {bits: grid(piece, bits) for bits in set(bits_R.tolist())}
        for kept, at in ((steps, 0), (zeros, 1)):
            rows = torch.empty(len(values_RI), 1)
            for bits, pair in pairs.items():
                rows[bits_R == bits] = pair[at][bits_R == bits]
            kept.append(rows)
    return torch.cat(steps, 1), torch.cat(zeros, 1), 2.0 ** bits_R.float() - 1
