"""How open tensors are stored within a budget, where only coding them tells what they take.

Curves foretell bytes to about a percent, unless a sample misses what a tensor is like: the deltas of a short fine-tune
are a few units of bf16, and a step that crosses one of those leaps over a tenth of a budget. So what was chosen is
sized, and chosen again for what that says, until one choice fits and one does not; of the two, tensor by tensor, what
saves most drift a byte takes the bytes that are left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mfs_decompose.pipeline.encode import Choice
from mfs_decompose.plan.allocate import Key
from mfs_decompose.plan.mixes import Mix, MixCandidate, between, corrected, mix_drift
from mfs_decompose.plan.share import ROUNDS, choose_again, choose_mixes, mix_taken

Sizes = Callable[[Mapping[Key, Choice]], Mapping[Key, int]]
"""Finds out how many bytes items take whose size no plan can know: those that are entropy-coded."""

_FAR = 1.1  # times what was foretold of all bits: whether a tensor keeps them is then asked again
_LEFT = 1 / 1000  # of a budget, which may stay unused where nothing is left that fits into the last bytes
_NEAR = 1 / 50  # of a budget, between a choice that fits and one that does not: mixing them costs hardly any drift


@dataclass(frozen=True)
class _Round:
    """What was chosen, and what each tensor takes, headers included: known, not foretold."""

    picked: Mapping[Key, Mix]
    costs: Mapping[Key, float]

    @property
    def total(self) -> float:
        return math.fsum(self.costs.values())


def choose_coded(mixes: Mapping[Key, MixCandidate], budget: int, sizes: Sizes) -> tuple[dict[Key, Choice], int]:
    """The open tensors whose bytes only coding tells, and what those take: with the others never more than `budget`."""
    fits: _Round | None = None
    over: _Round | None = None
    known, least = dict(mixes), _LEFT / 4 * budget
    margin = least
    picked = choose_mixes(known, budget - margin)
    for turn in range(1, ROUNDS + 1):
        if not any(mix.sized for mix in picked.values()) or any(one and one.picked == picked for one in (fits, over)):
            break
        now = _size(mixes, picked, sizes)
        excess = now.total - budget
        if excess > 0:
            over = now if over is None or now.total < over.total else over
        elif fits is None or now.total >= fits.total:
            fits = now
        if fits is not None and (budget - fits.total <= _LEFT * budget or _all_exact(fits)):
            break
        if fits is not None and over is not None:
            if over.total - fits.total <= _NEAR * budget:
                break
            part = (budget - fits.total) / (over.total - fits.total)
            picked = {key: between(mix, over.picked[key], part) for key, mix in fits.picked.items()}
            continue
        wrong = any(mix.exact and now.costs[key] > _FAR * mix_taken(known[key], mix) for key, mix in picked.items())
        known = {key: _corrected(one, picked[key], now.costs[key]) for key, one in known.items()}
        if wrong:
            picked = choose_mixes(known, budget - margin)
            continue
        # Where nothing has fitted yet, the last turn must: better some bytes left than no coding at all.
        margin = max(margin + excess * (2.0 if turn == ROUNDS - 1 and fits is None else 0.25), least)
        picked = choose_again(known, picked, budget - margin)
    if fits is None:
        return {}, 0
    best = fits if over is None else _mixed(mixes, fits, over, budget)
    coded = {key: _choice(mix) for key, mix in best.picked.items() if mix.sized}
    return coded, round(math.fsum(best.costs[key] for key in coded))


def _size(mixes: Mapping[Key, MixCandidate], picked: Mapping[Key, Mix], sizes: Sizes) -> _Round:
    found = sizes({key: _choice(mix) for key, mix in picked.items() if mix.sized})
    costs = {
        key: float(found[key] + mixes[key].entry_bytes) if mix.sized else mix_taken(mixes[key], mix)
        for key, mix in picked.items()
    }
    return _Round(picked, costs)


def _corrected(candidate: MixCandidate, mix: Mix, cost: float) -> MixCandidate:
    return corrected(candidate, mix, round(cost) - candidate.entry_bytes) if mix.sized else candidate


def _all_exact(one: _Round) -> bool:
    return all(mix.keeps_bits for mix in one.picked.values())


def _mixed(mixes: Mapping[Key, MixCandidate], fits: _Round, over: _Round, budget: int) -> _Round:
    """A choice that fits, with the tensors of one that does not as far as bytes are left, most drift a byte first."""
    picked, costs = dict(fits.picked), dict(fits.costs)
    left = budget - fits.total

    def worth(key: Key) -> float:
        saved = mix_drift(mixes[key], fits.picked[key]) - mix_drift(mixes[key], over.picked[key])
        return saved / max(over.costs[key] - fits.costs[key], 1.0)

    ranked = sorted((key for key in picked if over.picked[key] != picked[key]), key=lambda key: (-worth(key), key))
    for key in ranked:
        more = over.costs[key] - fits.costs[key]
        if worth(key) > 0.0 and more <= left:
            picked[key], costs[key], left = over.picked[key], over.costs[key], left - more
    return _Round(picked, costs)


def _choice(mix: Mix) -> Choice:
    if mix.exact:
        return Choice("lossless")
    if mix.peeled:
        return Choice("lora-exact")
    return Choice("banded", sum(mix.bands), bands=mix.bands, rest_step=mix.step)
