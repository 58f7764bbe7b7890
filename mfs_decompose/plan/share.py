"""One budget for tensors of every kind, for one lambda: the drift that a byte must save.

Tensors are cut step by step, have directions that get bits by strength, or are open: bands, coded rests and all bits
are weighed against each other (plan/mixes.py). Those with bands alone get all that is left, to the last byte that a
direction fits into.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mfs_decompose.linalg.bands import WIDTHS, Bands, allocate_bands, bands_bytes, choose_bands, direction_bytes
from mfs_decompose.plan.allocate import Candidate, Key, MatrixKey, allocate
from mfs_decompose.plan.mixes import Mix, MixCandidate, mix_bytes, mix_drift, split

ROUNDS = 4
"""How often what was chosen is sized, and chosen again for what it really took, at most."""

_TURNS = 60

PARTS = (1.0, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.02, 0.0)
"""Of a budget for bands; predicted drift changes little between two neighbours."""

FLATTERED = 0.8
"""By how much ln KL rises above the prediction from all bytes in bands to none: -.3 to 1.6 where it was measured."""


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


def choose_mixes(
    steps: Sequence[Candidate],
    banded: Mapping[Key, BandedCandidate],
    mixes: Mapping[Key, MixCandidate],
    budget: float,
) -> dict[Key, Mix]:
    """How to store open tensors so that, beside what others get at the same lambda, they stay within a budget.

    Bytes are split between bands and coded rests where the predicted drift is least; a tensor of which all bits cost no
    more keeps them, and so do all where the budget holds that. Bytes of what is coded are as foretold.
    """
    if not mixes:
        return {}
    own = budget - _beside(steps, banded, mixes, int(budget))
    exact = {key: one.exact_bytes + one.entry_bytes for key, one in mixes.items() if one.exact_bytes is not None}
    if len(exact) == len(mixes) and math.fsum(exact.values()) <= own:
        return dict.fromkeys(mixes, Mix(exact=True))
    best, kept = _best_split(mixes, own), set[Key]()
    while cheaper := {key for key in exact.keys() - kept if exact[key] <= _taken(mixes[key], best[key])}:
        kept |= cheaper  # and the bytes that they leave go to the others
        free = {key: one for key, one in mixes.items() if key not in kept}
        best = _best_split(free, own - math.fsum(exact[key] for key in kept))
    return {key: best.get(key, Mix(exact=True)) for key in mixes}


def choose_again(
    steps: Sequence[Candidate],
    banded: Mapping[Key, BandedCandidate],
    mixes: Mapping[Key, MixCandidate],
    picked: Mapping[Key, Mix],
    budget: float,
) -> dict[Key, Mix]:
    """The same bands and exact tensors once more is known of bytes: only the step of the rests is found anew."""
    own = budget - _beside(steps, banded, mixes, int(budget))
    exact = {key: mix for key, mix in picked.items() if mix.exact}
    own -= math.fsum(_taken(mixes[key], mix) for key, mix in exact.items())
    others = {key: one for key, one in mixes.items() if key not in exact}
    return {**exact, **split(others, {key: picked[key].bands for key in others}, own)}


def _best_split(mixes: Mapping[Key, MixCandidate], budget: float) -> dict[Key, Mix]:
    """Of all parts that bands may get, the one of least predicted drift, coding held to be worth a little less."""

    def drift(part: float) -> float:
        return math.exp(FLATTERED * (1.0 - part)) * _drift(mixes, _split_at(mixes, budget, part))

    return _split_at(mixes, budget, min(PARTS, key=drift))


def _drift(mixes: Mapping[Key, MixCandidate], found: Mapping[Key, Mix]) -> float:
    return math.fsum(mix_drift(mixes[key], mix) for key, mix in found.items())


def _split_at(mixes: Mapping[Key, MixCandidate], budget: float, part: float) -> dict[Key, Mix]:
    """That part of a budget for bands, the rest for rests."""
    return split(mixes, _bands({key: as_banded(one) for key, one in mixes.items()}, int(budget * part)), budget)


def _taken(candidate: MixCandidate, mix: Mix) -> float:
    nbytes = mix_bytes(candidate, mix)
    return nbytes + candidate.entry_bytes if nbytes else 0.0


def _beside(
    steps: Sequence[Candidate],
    banded: Mapping[Key, BandedCandidate],
    mixes: Mapping[Key, MixCandidate],
    budget: int,
) -> int:
    """What tensors that are not open take when bands alone share the budget."""
    if not steps and not banded:
        return 0
    everything = {**banded, **{key: as_banded(one) for key, one in mixes.items()}}
    chosen, bands = share_out(steps, everything, budget)
    fixed = sum(one.entry_bytes + bands_bytes(one.shape, bands[key]) for key, one in banded.items() if sum(bands[key]))
    return fixed + sum_of_steps(steps, chosen)


def as_banded(candidate: MixCandidate) -> BandedCandidate:
    """An open tensor that bands alone will store: energies in units of drift."""
    return BandedCandidate(
        [candidate.weight * energy for energy in candidate.explained], candidate.shape, candidate.entry_bytes
    )


def sum_of_steps(candidates: Sequence[Candidate], steps: Mapping[MatrixKey, int]) -> int:
    """Bytes of an allocation, headers included."""
    taken = ((candidate, steps[candidate.key]) for candidate in candidates)
    return sum(one.entry_bytes + count * one.step_bytes for one, count in taken if count)


def _bands(banded: Mapping[Key, BandedCandidate], budget: int) -> dict[Key, Bands]:
    keys = sorted(banded)
    nothing: Bands = (0,) * len(WIDTHS)
    # Headers are paid for at first, for all that could have a direction beside; what those without one do not need goes
    # to the others.
    unused = set(keys) - _affordable(banded, budget)
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


def _affordable(banded: Mapping[Key, BandedCandidate], budget: int) -> set[Key]:
    """Tensors whose headers and cheapest directions a budget holds together, what is worth most for its bytes first."""
    first = {key: one.entry_bytes + direction_bytes(one.shape, WIDTHS[-1]) for key, one in banded.items()}
    users = [key for key in banded if len(banded[key].energy) and banded[key].energy[0] > 0]
    taken: set[Key] = set()
    for key in sorted(users, key=lambda key: (-banded[key].energy[0] / first[key], key)):
        if first[key] <= budget:
            taken.add(key)
            budget -= first[key]
    return taken


def _spent_on_steps(steps: Sequence[Candidate], banded: Mapping[Key, BandedCandidate], budget: int) -> int:
    """Bytes that the step-by-step tensors get when a byte is worth the same everywhere."""
    lam = lambda_of_bands(steps, banded, budget)
    return max(budget, 0) if lam <= 0.0 else min(_steps_at(steps, lam), budget)


def lambda_of_bands(steps: Sequence[Candidate], banded: Mapping[Key, BandedCandidate], budget: int) -> float:
    """What a byte must save where steps and bands alone spend a budget; 0 where there is nothing to spend it on."""
    peaks = [max(one.energy, default=0.0) for one in steps] + [max(one.energy, default=0.0) for one in banded.values()]
    peak = max(peaks, default=0.0)
    if not 0 < peak < math.inf or budget <= 0:
        return 0.0
    low, high = max(math.log2(peak) - 200.0, -1000.0), max(math.log2(peak) + 1.0, -1000.0)
    for _ in range(_TURNS):
        middle = (low + high) / 2
        lam = 2.0**middle
        low, high = (middle, high) if _steps_at(steps, lam) + _bands_at(banded, lam) > budget else (low, middle)
    return float(2.0**high)


def _bands_at(banded: Mapping[Key, BandedCandidate], lam: float) -> int:
    """Bytes of directions alone: their headers are paid for beforehand."""
    return sum(bands_bytes(one.shape, choose_bands(one.energy, one.shape, lam)) for one in banded.values())


def _steps_at(steps: Sequence[Candidate], lam: float) -> int:
    total = 0
    for one in steps:
        count = sum(value >= lam * one.step_bytes for value in one.energy)
        total += one.entry_bytes + count * one.step_bytes if count else 0
    return total
