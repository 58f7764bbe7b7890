"""Allocation at any cap, as often as is asked: what it chooses, what that takes, and how much drift it leaves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mfs_decompose.linalg.bands import WIDTHS, loss
from mfs_decompose.pipeline.choices import choose_all, mix_candidate
from mfs_decompose.pipeline.choose_coded import Sizes
from mfs_decompose.pipeline.encode import Choice
from mfs_decompose.pipeline.surveyed import Surveyed
from mfs_decompose.plan.allocate import Key
from mfs_decompose.plan.cap import ENTRY_BYTES, shard_overhead
from mfs_decompose.plan.drift import DriftWeights
from mfs_decompose.plan.mixes import Mix, MixCandidate, energy_lost, mix_bytes, mix_drift
from mfs_decompose.plan.model import Item, Plan
from mfs_decompose.source.dtypes import is_float


@dataclass(frozen=True)
class Outlook:
    """What an allocation comes to for one variant.

    `nbytes` are those of its shards, foretold to about a percent where they are entropy-coded. `score` is what
    allocation holds against bytes: weighted energy that is lost, 0 where every bit is kept.
    """

    nbytes: int
    score: float


@dataclass(frozen=True)
class Allocator:
    """Allocates what pass 1 surveyed, under weights of drift for each variant."""

    plan: Plan
    surveyed: Mapping[Key, Surveyed]
    weights: Mapping[str, DriftWeights]
    sizes: Sizes

    def choose(self, caps: Mapping[str, int] | None = None) -> dict[Key, Choice]:
        """Choices for all items under the plan's caps, or these; entropy-coded items are sized.

        Raises:
            UsageError: what must be exact exceeds a cap.
        """
        return choose_all(self._capped(caps), self.surveyed, self.weights, self.sizes)

    def foretell(self, caps: Mapping[str, int]) -> dict[Key, Choice]:
        """As `choose`, by foretold sizes: nothing is encoded, and caps are kept to about a percent.

        Raises:
            UsageError: what must be exact exceeds a cap.
        """
        return choose_all(self._capped(caps), self.surveyed, self.weights, self._foretold)

    def foresee(self, caps: Mapping[str, int]) -> dict[str, Outlook]:
        """What choices under other caps would come to, without sizing anything.

        Raises:
            UsageError: what must be exact exceeds a cap.
        """
        choices = self.foretell(caps)
        return {variant: self.outlook(variant, choices) for variant in caps}

    def outlook(self, variant: str, choices: Mapping[Key, Choice]) -> Outlook:
        """What choices come to for a variant."""
        own = [item for item in self.plan.items() if item.variant == variant]
        sizes = [self._bytes(item, choices[item.key]) for item in own]
        entries = sum(size > 0 for size in sizes)
        nbytes = sum(sizes) + entries * ENTRY_BYTES
        nbytes += shard_overhead(entries, nbytes, self.plan.recipe.output.shard_size)
        return Outlook(nbytes, math.fsum(self.score(item, choices[item.key]) for item in own))

    def of(self, variant: str) -> Allocator:
        """The same for one variant alone."""
        units = [
            replace(unit, items=own)
            for unit in self.plan.units
            if (own := tuple(item for item in unit.items if item.variant == variant))
        ]
        variants = tuple(one for one in self.plan.variants if one.id == variant)
        return replace(self, plan=replace(self.plan, variants=variants, units=tuple(units)))

    def score(self, item: Item, choice: Choice) -> float:
        """The drift an item is predicted to make, in units of weighted energy."""
        facts = self.surveyed[item.key]
        weight = self.weights.get(item.variant, DriftWeights()).of(item.name)
        if item.auto and choice.codec in ("banded", "lora-exact"):
            return mix_drift(self._candidate(item), _mix_of(choice))
        if choice.codec not in ("banded", "lowrank", "sparse") or not is_float(item.spec.dtype):
            return 0.0
        if choice.codec == "banded":
            assert item.matrix is not None
            return weight * _banded_left(facts, item.matrix, choice.bands)
        kept = math.fsum(math.fsum(curve[:taken]) for curve, taken in _cut(facts, choice))
        return weight * max(facts.energy - kept, 0.0)

    def energy_lost(self, item: Item, choice: Choice) -> float:
        """What a choice loses of an open item's ||delta||^2."""
        return energy_lost(self._candidate(item), _mix_of(choice))

    def _bytes(self, item: Item, choice: Choice) -> int:
        if choice.costs_nothing(item) or choice.codec == "adapter":
            return 0
        facts = self.surveyed[item.key]
        if item.auto and choice.codec == "banded":
            return math.ceil(mix_bytes(self._candidate(item), _mix_of(choice))) + item.beside_bytes
        if choice.codec == "identical":
            return item.tail_bytes
        if choice.codec in ("raw", "lossless", "lora-exact") or item.direct:
            if item.auto and facts.open is not None:
                if choice.codec == "lora-exact" and facts.open.peeled is not None:
                    return facts.open.peeled[0] + item.tail_bytes
                return math.ceil(facts.open.exact_bytes) + item.tail_bytes
            return facts.exact_bytes if facts.exact_bytes is not None else item.spec.nbytes
        if choice.codec == "banded":
            return math.ceil(mix_bytes(mix_candidate(item, facts, 1.0), Mix(choice.bands))) + item.beside_bytes
        return choice.steps * item.step_bytes + item.beside_bytes + (facts.exact_bytes or 0)

    def _foretold(self, chosen: Mapping[Key, Choice]) -> dict[Key, int]:
        items = {item.key: item for item in self.plan.items() if item.key in chosen}
        return {key: self._bytes(items[key], choice) - items[key].beside_bytes for key, choice in chosen.items()}

    def _candidate(self, item: Item) -> MixCandidate:
        weight = self.weights.get(item.variant, DriftWeights()).of(item.name)
        return mix_candidate(item, self.surveyed[item.key], weight)

    def _capped(self, caps: Mapping[str, int] | None) -> Plan:
        if caps is None:
            return self.plan
        variants = tuple(replace(one, cap=caps.get(one.id, one.cap)) for one in self.plan.variants)
        return replace(self.plan, variants=variants, total_cap=None)


def _mix_of(choice: Choice) -> Mix:
    return Mix(peeled=True) if choice.codec == "lora-exact" else Mix(choice.bands, choice.rest_step)


def _banded_left(facts: Surveyed, shape: tuple[int, int], bands: tuple[int, ...]) -> float:
    taken, left = 0, facts.energy
    for count, bits in zip(bands, WIDTHS, strict=True):
        left -= (1.0 - loss(shape, bits)) * math.fsum(facts.explained[taken : taken + count])
        taken += count
    return max(left, 0.0)


def _cut(facts: Surveyed, choice: Choice) -> list[tuple[tuple[float, ...], int]]:
    taken = choice.slices or (choice.steps,)
    return list(zip(facts.curves, taken, strict=False))
