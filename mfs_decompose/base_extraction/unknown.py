"""Variants that are an unknown base plus a merged LoRA each: the rank of every one, from their differences alone.

The difference of two such variants has rank `r_i + r_j`, up to the noise of two roundings (Horwitz, Kahana and Hoshen,
Recovering the Pre-Fine-Tuning Weights of Generative Models, 2024). With three variants or more, the ranks follow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

import torch

from mfs_decompose.base_extraction.deltas import delta_rows
from mfs_decompose.linalg.rounding_noise import GRIDS, count_units, predict_noise
from mfs_decompose.linalg.svd import Truncation, truncated_svd

_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
_NOISE = 1.6  # times what is predicted: the noise of real merges is 0.8 to 1.0 of it, and truncation is not exact
_CLEAR = 1.5  # by which the last direction stands out of the noise that a direction holds on the average
_MOST = 0.25  # of the short side: more directions in all would be no low-rank change


def family_ranks(weights: Sequence[torch.Tensor], key: int) -> tuple[int, ...] | None:
    """The rank by which each of K >= 3 matrices [O, I] differs from a base that they have in common.

    None where they do not look like one base with low-rank changes: differences of too many directions, ranks that
    contradict each other, or too many of them to tell the base from the changes.
    """
    count = len(weights)
    if count < 3 or any(own.dtype not in _NAMES for own in weights):
        return None
    short = min(weights[0].shape)
    noises = [_noise(own) for own in weights]
    pairs: dict[tuple[int, int], int] = {}
    for i, j in combinations(range(count), 2):
        rank = _rank(delta_rows(weights[i], weights[j]), int(_MOST * short), noises[i] + noises[j], key)
        if rank is None:
            return None
        pairs[i, j] = pairs[j, i] = rank
    ranks = [_own(index, pairs, count) for index in range(count)]
    if any(2 * rank < 0 for rank in ranks) or sum(ranks) > short or not any(ranks):
        return None
    fits = all(abs(ranks[i] + ranks[j] - rank) <= 1 for (i, j), rank in pairs.items())
    return tuple(ranks) if fits else None


def _own(index: int, pairs: dict[tuple[int, int], int], count: int) -> int:
    """The rank of one, from the smallest that two others leave for it: directions in common make pairs smaller."""
    others = [other for other in range(count) if other != index]
    found = [(pairs[index, i] + pairs[index, j] - pairs[i, j]) / 2 for i, j in combinations(others, 2)]
    found.sort()
    return max(0, round(found[len(found) // 2]))


def _rank(delta: torch.Tensor, most: int, noise: float, key: int) -> int | None:
    """Directions of a difference that are not noise; None where so many do not explain it."""
    if most < 1:
        return None
    found: Truncation | None = truncated_svd(delta[None], most, [key])[0]
    if found is None:
        return None
    if found.total <= _NOISE * noise:
        return 0
    floor = _CLEAR * _edge(delta.shape, noise)
    rank = int((found.energy > floor).sum())
    return rank if rank < most and found.residual(rank) <= _NOISE * noise else None


def _edge(shape: torch.Size, noise: float) -> float:
    """The largest squared singular value of independent noise of that energy (Marchenko and Pastur)."""
    rows, columns = shape
    variance = noise / (rows * columns)
    return variance * (math.sqrt(rows) + math.sqrt(columns)) ** 2


def _noise(own: torch.Tensor) -> float:
    """The energy of rounding a matrix to its grid."""
    name = _NAMES[own.dtype]
    assert name in GRIDS
    return predict_noise(count_units(own), name, 0, 0.0, on_grid=False)
