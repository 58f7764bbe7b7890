"""Which sequences a step computes: growing answers first, prompts in pieces behind them, few variants, nobody starves.

- A step has a budget of tokens and a cap on distinct variants (the base costs nothing and does not count). Variants
  take turns: the ones served longest ago come first, so each gets in once in ceil(variants / cap) steps.
- Where deltas have limited room, variants that are on the device come first, until another has waited `patience` steps.
- Seats go to the variant with the fewest, then to the oldest request; who waited too long goes first. A variant
  without a seat that waited `patience` steps takes one from the variant that has most, if that has two; once a request.
- Where blocks run out the youngest sequence gives its own back and is computed again later. The oldest never does, so
  something always ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from mfs_decompose.errors import UsageError
from mfs_decompose.runtime.batch_plan import BASE
from mfs_decompose.runtime.kv import KvCache
from mfs_decompose.runtime.requests import RunningSequence


@dataclass(frozen=True)
class Limits:
    """What one step may hold.

    Attributes:
        tokens: rows of a step.
        sequences: seats: sequences that have keys and values at a time.
        variants: distinct variants of a step.
        uniform: one variant, or the base, a step.
        patience: steps after which waiting is too long.
    """

    tokens: int = 512
    sequences: int = 64
    variants: int = 8
    uniform: bool = False
    patience: int = 16

    def __post_init__(self) -> None:
        for name in ("tokens", "sequences", "variants", "patience"):
            if getattr(self, name) < 1:
                raise UsageError(
                    f"{name}: expected at least 1, found {getattr(self, name)}", hint=f"give the engine more {name}"
                )


class Residency(Protocol):
    """Which variants can answer at once; the base always can."""

    def is_resident(self, id: str) -> bool: ...

    def bring(self, ids: Sequence[str]) -> list[str]:
        """Make ready what there is room for, the first ones first; those that are ready, until the next call."""


class Scheduled(NamedTuple):
    """The next `rows` tokens of a sequence."""

    sequence: RunningSequence
    rows: int


@dataclass
class _Step:
    """What is planned so far, in the order it was planned."""

    budget: int
    counts: dict[RunningSequence, int] = field(default_factory=dict)

    def left(self) -> int:
        return self.budget - sum(self.counts.values())


class Scheduler:
    """Holds the sequences that wait and those that have a seat."""

    def __init__(self, kv: KvCache, limits: Limits, residency: Residency | None = None) -> None:
        self._kv = kv
        self._limits = limits
        self._residency = residency
        self._turn: dict[str, int] = {}
        self.waiting: list[RunningSequence] = []
        self.running: list[RunningSequence] = []
        self.clock = 0
        self.preemptions = 0

    def add(self, sequence: RunningSequence) -> None:
        sequence.queued = self.clock
        self.waiting.append(sequence)

    def remove(self, sequence: RunningSequence) -> None:
        """Forget a sequence, wherever it is, and give its blocks back."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._kv.close(sequence.kv)
        else:
            self.waiting.remove(sequence)

    def schedule(self) -> list[Scheduled]:
        """The next step, in order of slot, then of arrival; empty where nothing is left to do.

        Raises what `residency.bring` does; nothing is planned then, and the call may be repeated.
        """
        self.clock += 1
        self._admit()
        chosen = self._choose()
        step = _Step(self._limits.tokens)
        for sequence, most in self._order(s for s in self.running if s.info.id in chosen):
            if sequence not in self.running:
                continue  # gave way to one before it
            count = min(sequence.remaining, most, step.left())
            if count > 0 and self._make_room(sequence, sequence.computed + count, step):
                step.counts[sequence] = count
        for sequence in step.counts:
            sequence.served = self.clock
            self._turn[sequence.info.id] = self.clock
        ordered = sorted(step.counts, key=lambda sequence: (sequence.info.slot, sequence.number))
        return [Scheduled(sequence, step.counts[sequence]) for sequence in ordered]

    def _order(self, ready: Iterable[RunningSequence]) -> list[tuple[RunningSequence, int]]:
        """Who comes first, each with the most tokens it may take; who was left out for too long before all others."""
        limits = self._limits
        late: list[RunningSequence] = []
        growing: list[RunningSequence] = []
        prompts: list[RunningSequence] = []
        for sequence in ready:
            if self.clock - sequence.served > limits.patience:
                late.append(sequence)
            else:
                (growing if sequence.remaining == 1 else prompts).append(sequence)
        late.sort(key=lambda sequence: (sequence.served, sequence.number))
        growing.sort(key=lambda sequence: (sequence.served, sequence.number))
        prompts.sort(key=lambda sequence: sequence.number)
        share = max(1, limits.tokens // 2)
        return [(s, share) for s in late] + [(s, limits.tokens) for s in growing + prompts]

    def _choose(self) -> set[str]:
        """The variants of this step."""
        oldest: dict[str, RunningSequence] = {}
        for sequence in self.running:
            if sequence.info.id not in oldest or sequence.number < oldest[sequence.info.id].number:
                oldest[sequence.info.id] = sequence
        self._turn = {id: self._turn.get(id, self.clock - 1) for id in oldest}
        turns = sorted(oldest, key=lambda id: (self._is_put_off(id), self._turn[id], oldest[id].number))
        if self._limits.uniform:
            bases = [id for id in turns[:1] if oldest[id].info.slot == BASE]
            return set(bases or self._ready(turns[:1]))
        variants = [id for id in turns if oldest[id].info.slot != BASE]
        return set(self._ready(variants[: self._limits.variants])) | (set(turns) - set(variants))

    def _is_put_off(self, id: str) -> bool:
        """Whether a variant would have to be brought to the device, and has not waited too long for that."""
        resident = self._residency is None or self._residency.is_resident(id)
        return not resident and self.clock - self._turn[id] <= self._limits.patience

    def _ready(self, ids: Sequence[str]) -> Sequence[str]:
        return ids if self._residency is None or not ids else self._residency.bring(ids)

    def _admit(self) -> None:
        """Give seats, and blocks that others of the variant left, to as many as fit."""
        while self.waiting:
            seats = Counter(sequence.info.id for sequence in self.running)
            late = self.clock - self._limits.patience
            self.waiting.sort(key=lambda s: (0, 0, s.number) if s.queued < late else (1, seats[s.info.id], s.number))
            first = self.waiting[0]
            if len(self.running) < self._limits.sequences and self._seat(first):
                continue
            starving = [s for s in self.waiting if s.queued < late and not seats[s.info.id]]
            if not starving or not self._make_way(seats):
                return
            if not self._seat(starving[0]):
                return

    def _seat(self, sequence: RunningSequence) -> bool:
        """Let a waiting sequence in where the blocks of all it has so far are there."""
        kv = self._kv
        cached = kv.adopt(sequence.kv, sequence.info.digest, sequence.tokens)
        if self.running and kv.missing(sequence.kv, len(sequence.tokens)) > 0:
            kv.close(sequence.kv)
            return False
        sequence.computed = cached
        sequence.cached += cached
        sequence.served = self.clock - 1
        self.waiting.remove(sequence)
        self.running.append(sequence)
        return True

    def _make_way(self, seats: Counter[str]) -> bool:
        """Unseat the youngest of the variant with most seats; False where none can lose one.

        A sequence makes way once: an endless stream of other variants does not keep it from ending.
        """
        yielding = [s for s in self.running if seats[s.info.id] > 1 and not s.made_way]
        if not yielding:
            return False
        victim = max(yielding, key=lambda s: (seats[s.info.id], s.number))
        victim.made_way = True
        self._preempt(victim)
        return True

    def _make_room(self, sequence: RunningSequence, tokens: int, step: _Step) -> bool:
        """Reserve blocks, the youngest sequences giving way; False where `sequence` itself was the youngest."""
        while not self._kv.reserve(sequence.kv, tokens):
            victim = max(self.running, key=lambda other: other.number)
            self._preempt(victim)
            step.counts.pop(victim, None)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: RunningSequence) -> None:
        self.running.remove(sequence)
        self._kv.close(sequence.kv)
        sequence.computed = 0
        self.preemptions += 1
        self.add(sequence)
