"""A merged LoRA, stored bit by bit in less than the adapter it came from.

The adapter is peeled off the merge: its rank is found, its product derounded, its factors rounded to integers as coarse
as pays, and what they still get wrong is coded above them. A tree `corrected(fixed)`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mfs_decompose.codec.base import Emit, Rows
from mfs_decompose.codec.corrected import encode_corrected, with_child
from mfs_decompose.codec.fixed import encode_fixed
from mfs_decompose.codec.tree import CodecNode
from mfs_decompose.linalg.boxes import delta_boxes, has_boxes, share_outside
from mfs_decompose.linalg.deround import Pair, deround
from mfs_decompose.linalg.fixed_point import FixedFactors, quantise_fixed
from mfs_decompose.linalg.margins import Merge
from mfs_decompose.linalg.peel import cooling, find_rank, first_tau, least_error, make_problem
from mfs_decompose.source.header import TensorSpec

MAX_RANK = 128
MAX_ELEMENTS = 1 << 26
"""A fit holds about 24 bytes an element, both matrices included; larger matrices are not tried."""

_TWICE_STEPS = 5


@dataclass(frozen=True)
class LoraFit:
    """A merged delta: integer factors, and how it was added to the base."""

    factors: FixedFactors
    merge: Merge


def fit_lora_exact(
    own_OI: torch.Tensor, base_OI: torch.Tensor, key: int, most: int = MAX_RANK, hint: int | None = None
) -> LoraFit | None:
    """Peel a merged LoRA off a matrix [O, I] of bf16 or fp16; None where there is none, or it has more directions.

    `hint` is a rank to try first. Deterministic at one torch thread.
    """
    assert own_OI.shape == base_OI.shape and own_OI.dim() == 2, f"{list(own_OI.shape)} and {list(base_OI.shape)}"
    if own_OI.dtype != base_OI.dtype or not has_boxes(own_OI.dtype) or not 0 < own_OI.numel() <= MAX_ELEMENTS:
        return None
    problem = make_problem(own_OI, base_OI, "once", key)
    if not bool(problem.delta.any()):
        return None
    rank = find_rank(problem, most, hint)
    start = None if rank is None else problem.start(rank)
    if rank is None or start is None:
        return None
    error = least_error(problem, rank)
    pair = deround(problem.low, problem.high, start, cooling(first_tau(problem), error))
    outside = share_outside(problem.low, problem.high, *pair)
    pair, merge = _rounded_twice(own_OI, base_OI, pair, outside, error)
    for _ in range(8):
        factors = quantise_fixed(*pair, error)
        if factors is not None:
            return LoraFit(factors, merge)
        error *= 2
    return None


def _rounded_twice(
    own_OI: torch.Tensor, base_OI: torch.Tensor, pair: Pair, outside: float, error: float
) -> tuple[Pair, Merge]:
    """Whether the delta was rounded before it was added, and the pair fitted to the boxes which that makes."""
    low, high = delta_boxes(own_OI, base_OI, "twice")
    # Where the fit is too coarse to tell, the two leave about as many outside: then it does not matter.
    if share_outside(low, high, *pair) >= 0.8 * outside:
        return pair, "once"
    return deround(low, high, pair, [error] * _TWICE_STEPS), "twice"


def encode_lora_exact(fit: LoraFit, own: Rows, base: Rows, spec: TensorSpec, emit: Emit) -> CodecNode:
    """Write a peeled matrix so that all its bits come back: factors, then their correction."""
    child = encode_fixed(fit.factors, emit)
    return with_child(encode_corrected(own, base, fit.factors.rows, spec, emit, fit.merge), child)
