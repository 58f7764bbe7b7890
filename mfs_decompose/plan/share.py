"""One budget for tensors of both kinds: those cut step by step, and those whose directions get bits by strength.

Both are solved for one lambda, the energy that a byte must explain: what the first kind spends at it is settled, and
the second kind gets all that is left, to the last byte that a direction fits into.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mfs_decompose.linalg.bands import WIDTHS, Bands, allocate_bands, bands_bytes, choose_bands
from mfs_decompose.plan.allocate import Candidate, Key, MatrixKey, allocate

_TURNS = 60


@dataclass(frozen=True)
class BandedCandidate:
    """A banded tensor: what each direction explains, its shape as a matrix, and what its first byte costs beside."""

    energy: Sequence[float]
    shape: tuple[int, int]
    entry_bytes: int


def share_out(
    steps: Sequence[Candidate], banded: Mapping[Key, BandedCandidate], budget: int
) -> tuple[dict[MatrixKey, int], dict[Key, Bands]]:
    """Steps and bands whose bytes, headers included, stay within `budget`, whatever the order of what is given."""
    if not banded:
        return allocate(steps, budget), {}
    reserved = sum(candidate.entry_bytes for candidate in banded.values())
    own = _spent_on_steps(steps, banded, budget - reserved) if steps else 0
    chosen = allocate(steps, own) if steps else {}
    return chosen, _bands(banded, budget - sum_of_steps(steps, chosen))


def sum_of_steps(candidates: Sequence[Candidate], steps: Mapping[MatrixKey, int]) -> int:
    """Bytes of an allocation, headers included."""
    taken = ((candidate, steps[candidate.key]) for candidate in candidates)
    return sum(one.entry_bytes + count * one.step_bytes for one, count in taken if count)


def _bands(banded: Mapping[Key, BandedCandidate], budget: int) -> dict[Key, Bands]:
    keys = sorted(banded)
    nothing: Bands = (0,) * len(WIDTHS)
    # Headers are paid for all at first; what tensors without a direction do not need goes to the others.
    unused: set[Key] = set()
    found: dict[Key, Bands] = {}
    for _ in range(3):
        users = [key for key in keys if key not in unused]
        left = budget - sum(banded[key].entry_bytes for key in users)
        bands = allocate_bands([(banded[key].energy, banded[key].shape) for key in users], left)
        found = dict.fromkeys(keys, nothing) | dict(zip(users, bands, strict=True))
        idle = {key for key in users if not sum(found[key])}
        if not idle:
            break
        unused |= idle
    return found


def _spent_on_steps(steps: Sequence[Candidate], banded: Mapping[Key, BandedCandidate], budget: int) -> int:
    """Bytes that the step-by-step tensors get when a byte is worth the same everywhere."""
    peaks = [max(one.energy, default=0.0) for one in steps] + [max(one.energy, default=0.0) for one in banded.values()]
    peak = max(peaks, default=0.0)
    if not 0 < peak < math.inf or budget <= 0:
        return max(budget, 0)
    low, high = math.log2(peak) - 200.0, math.log2(peak) + 1.0
    for _ in range(_TURNS):
        middle = (low + high) / 2
        lam = 2.0**middle
        spent = _steps_at(steps, lam) + sum(
            bands_bytes(one.shape, choose_bands(one.energy, one.shape, lam)) for one in banded.values()
        )
        low, high = (middle, high) if spent > budget else (low, middle)
    return min(_steps_at(steps, 2.0**high), budget)


def _steps_at(steps: Sequence[Candidate], lam: float) -> int:
    total = 0
    for one in steps:
        count = sum(value >= lam * one.step_bytes for value in one.energy)
        total += one.entry_bytes + count * one.step_bytes if count else 0
    return total
