"""Spend a budget over the tensors of a variant: the directions that explain most per byte come first.

For one codec, error falls by `energy[i]` for the bytes of step i, and energies fall: the lower convex hull of every
tensor is its own order of steps (the first few merged, where an entry's header makes the first one dear), and taking
segments by falling energy per byte is the exact optimum of the relaxed problem. What is left after the first segment
that does not fit is filled with those that do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Key = tuple[str, str]
"""(variant, tensor)"""

MatrixKey = tuple[str | int, ...]
"""What names a candidate: the key of its item, and where that is a stack, which matrix of it."""


@dataclass(frozen=True)
class Candidate:
    """A matrix of a lossy tensor: what each step explains of ||delta||^2, and what it costs."""

    key: MatrixKey
    energy: Sequence[float]
    step_bytes: int
    entry_bytes: int


def allocate(candidates: Sequence[Candidate], budget: int) -> dict[MatrixKey, int]:
    """Steps for every candidate so that their bytes, headers included, stay within `budget`.

    Ties go to the name that sorts first, so the answer does not depend on the order of `candidates`.
    """
    steps = {candidate.key: 0 for candidate in candidates}
    segments = [segment for candidate in candidates for segment in _hull(candidate)]
    segments.sort(key=lambda segment: (-segment.slope, segment.key, segment.first))
    closed: set[MatrixKey] = set()
    left = budget
    for segment in segments:
        if segment.key in closed:
            continue
        if segment.nbytes > left:
            closed.add(segment.key)
            continue
        left -= segment.nbytes
        steps[segment.key] = segment.first + segment.count
    by_key = {candidate.key: candidate for candidate in candidates}
    for segment in segments:  # the beginning of a first segment may fit where the whole of it did not
        own = by_key[segment.key]
        fitting = min(segment.count, (left - own.entry_bytes) // own.step_bytes)
        if steps[segment.key] == 0 and fitting > 0:
            left -= own.entry_bytes + fitting * own.step_bytes
            steps[segment.key] = fitting
    return steps


@dataclass(frozen=True, slots=True)
class _Segment:
    key: MatrixKey
    first: int
    count: int
    nbytes: int
    slope: float


def _hull(candidate: Candidate) -> list[_Segment]:
    """Segments of falling slope. Only the first can hold several steps: later ones cost the same and explain less."""
    energies = [value for value in candidate.energy if value > 0.0]
    if not energies:
        return []
    best, explained, count = 0.0, 0.0, 0
    for taken, value in enumerate(energies, start=1):
        explained += value
        slope = explained / (candidate.entry_bytes + taken * candidate.step_bytes)
        if slope <= best:
            break
        best, count = slope, taken
    segments = [_Segment(candidate.key, 0, count, candidate.entry_bytes + count * candidate.step_bytes, best)]
    for at in range(count, len(energies)):
        # Rounding could make a later step look steeper than the one before it, which must be taken first.
        slope = min(energies[at] / candidate.step_bytes, segments[-1].slope)
        segments.append(_Segment(candidate.key, at, 1, candidate.step_bytes, slope))
    return segments
