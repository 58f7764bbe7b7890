"""One budget for tensors of every kind, for one lambda: the drift that a byte must save.

Tensors are cut step by step, have directions that get bits by strength, or are open: bands, coded rests and all bits
are weighed against each other (plan/mixes.py). Those with bands alone get all that is left, to the last byte that a
direction fits into.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mfs_decompose.linalg.bands import WIDTHS, BandLadder, Bands, bands_bytes, direction_bytes
from mfs_decompose.plan.allocate import Candidate, Key, MatrixKey, allocate
from mfs_decompose.plan.mixes import Mix, MixCandidate, energy_lost, mix_bytes, mix_drift, split

ROUNDS = 4
"""How often what was chosen is sized, and chosen again for what it really took, at most."""

ALMOST = 1.5
"""Times the drift of bands and coded rests that all bits of a merged LoRA may have as they are served, if they are no
dearer: predicted drift is right within a factor of 1.25, and `restore` gives the bits. They may lose no more energy
either: what is served lacks the rounding of the merge, which lies in no strong direction and yet makes all of the KL
(5.7e-5, 6.7e-6 for a unit; bands of the same bytes lose nine tenths of its energy and have 3.1e-5)."""

_TURNS = 60

PARTS = (1.0, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.02, 0.0)
"""Of a budget for bands; predicted drift changes little between two neighbours."""

FLATTERED = 0.4
"""By how much ln KL rises above the prediction from all bytes in bands to none: 0 to .75 where it was measured. Not of
merged LoRAs, of which rounding is left out and not what was learnt: 2 % of the checkpoint with a fifth of it in rests
had .82 of the KL of bands alone, .98 predicted; 5 % with .6 and .7 in rests .60 and .65, .73 and .71 predicted."""


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
    return chosen, _Banded(banded).spend(budget - sum_of_steps(steps, chosen))


def choose_mixes(mixes: Mapping[Key, MixCandidate], budget: float) -> dict[Key, Mix]:
    """How to store open tensors within a budget.

    Bytes are split between bands and coded rests where the predicted drift is least; a tensor of which all bits cost no
    more keeps them, and so do all where the budget holds that. Bytes of what is coded are as foretold.
    """
    if all(one.exact_bytes is not None for one in mixes.values()):
        everything = dict.fromkeys(mixes, Mix(exact=True))
        if math.fsum(mix_taken(mixes[key], mix) for key, mix in everything.items()) <= budget:
            return everything
    best, kept = _best_split(mixes, budget), dict[Key, Mix]()
    while cheaper := {
        key: found for key, mix in best.items() if key not in kept and (found := _all_bits(mixes[key], mix)) is not None
    }:
        kept |= cheaper  # and the bytes that they leave go to the others
        free = {key: one for key, one in mixes.items() if key not in kept}
        best = _best_split(free, budget - math.fsum(mix_taken(mixes[key], mix) for key, mix in kept.items()))
    return {key: kept.get(key) or best[key] for key in mixes}


def _all_bits(candidate: MixCandidate, mix: Mix) -> Mix | None:
    """The cheapest way to keep all bits for no more bytes than a mix takes, and for hardly more drift."""
    ways = [Mix(exact=True)] if candidate.exact_bytes is not None else []
    ways += [Mix(peeled=True)] if candidate.peeled is not None else []
    most, worst, lost = mix_taken(candidate, mix), ALMOST * mix_drift(candidate, mix), energy_lost(candidate, mix)
    fair = [
        way
        for way in ways
        if mix_taken(candidate, way) <= most
        and mix_drift(candidate, way) <= worst
        and energy_lost(candidate, way) <= lost
    ]
    return min(fair, key=lambda way: mix_taken(candidate, way), default=None)


def choose_again(mixes: Mapping[Key, MixCandidate], picked: Mapping[Key, Mix], budget: float) -> dict[Key, Mix]:
    """The same bands and exact tensors once more is known of bytes: only the step of the rests is found anew."""
    exact = {key: mix for key, mix in picked.items() if mix.keeps_bits}
    left = budget - math.fsum(mix_taken(mixes[key], mix) for key, mix in exact.items())
    others = {key: one for key, one in mixes.items() if key not in exact}
    return {**exact, **split(others, {key: picked[key].bands for key in others}, left)}


def _best_split(mixes: Mapping[Key, MixCandidate], budget: float) -> dict[Key, Mix]:
    """Of all parts that bands may get, the one of least predicted drift, see `FLATTERED`."""
    banded = _Banded({key: as_banded(one) for key, one in mixes.items()})
    found: dict[Key, Mix] = {}
    least = math.inf
    for part in PARTS:
        mix = split(mixes, banded.spend(int(budget * part)), budget)
        learnt, rounding = (
            math.fsum(mix_drift(one, mix[key]) for key, one in mixes.items() if (one.peeled is not None) == merged)
            for merged in (False, True)
        )
        drift = math.exp(FLATTERED * (1.0 - part)) * learnt + rounding
        if drift < least:
            found, least = mix, drift
    return found


def mix_taken(candidate: MixCandidate, mix: Mix) -> float:
    """What a mix takes, the header included that its first byte costs."""
    nbytes = mix_bytes(candidate, mix)
    return nbytes + candidate.entry_bytes if nbytes else 0.0


def beside_mixes(
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


class _Banded:
    """Banded tensors that share a budget, headers included, whatever the order they are given in."""

    def __init__(self, banded: Mapping[Key, BandedCandidate]) -> None:
        self._keys = sorted(banded)
        self._own = [banded[key] for key in self._keys]
        self._ladder = BandLadder([(one.energy, one.shape) for one in self._own])

    def spend(self, budget: int) -> dict[Key, Bands]:
        # Headers are paid for at first, for all that could have a direction beside; what those without one do not need
        # goes to the others.
        unused = set(range(len(self._own))) - self._affordable(budget)
        found: list[Bands] = []
        for _ in range(3):
            headers = sum(one.entry_bytes for at, one in enumerate(self._own) if at not in unused)
            found = self._ladder.spend(budget - headers, unused)
            idle = {at for at, bands in enumerate(found) if not sum(bands)} - unused
            if not idle:
                break
            unused |= idle
        return dict(zip(self._keys, found, strict=True))

    def _affordable(self, budget: int) -> set[int]:
        """Those whose headers and cheapest directions a budget holds together, worth most for its bytes first."""
        first = [one.entry_bytes + direction_bytes(one.shape, WIDTHS[-1]) for one in self._own]
        users = [at for at, one in enumerate(self._own) if len(one.energy) and one.energy[0] > 0]
        taken: set[int] = set()
        for at in sorted(users, key=lambda at: (-self._own[at].energy[0] / first[at], at)):
            if first[at] <= budget:
                taken.add(at)
                budget -= first[at]
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
    ladder = BandLadder([(one.energy, one.shape) for one in banded.values()])  # headers are paid for beforehand
    low, high = max(math.log2(peak) - 200.0, -1000.0), max(math.log2(peak) + 1.0, -1000.0)
    for _ in range(_TURNS):
        middle = (low + high) / 2
        lam = 2.0**middle
        low, high = (middle, high) if _steps_at(steps, lam) + ladder.bytes_at(lam) > budget else (low, middle)
    return float(2.0**high)


def _steps_at(steps: Sequence[Candidate], lam: float) -> int:
    total = 0
    for one in steps:
        count = sum(value >= lam * one.step_bytes for value in one.energy)
        total += one.entry_bytes + count * one.step_bytes if count else 0
    return total
