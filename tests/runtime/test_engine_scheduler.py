"""Who is computed when: budgets, caps, turns, seats, and what gives way. Without a model."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mfs_decompose.errors import UsageError
from mfs_decompose.runtime.batch_plan import BASE
from mfs_decompose.runtime.kv import KvCache, LayerShape
from mfs_decompose.runtime.requests import Request, RunningSequence, VariantInfo
from mfs_decompose.runtime.scheduler import Limits, Scheduled, Scheduler

BLOCK = 4


class Bench:
    """A scheduler whose sequences get made-up tokens; ends those that have `want` answer tokens."""

    def __init__(self, room: int = 65536, **limits: Any) -> None:
        shape = LayerShape(1, 1, 1, None, torch.float32, torch.device("cpu"))
        self.limits = Limits(**{"tokens": 16, "sequences": 32, **limits})
        self.kv = KvCache({0: shape}, tokens=room, block_size=BLOCK, sequences=32, chunk=self.limits.tokens)
        self.scheduler = Scheduler(self.kv, self.limits)
        self.want: dict[RunningSequence, int] = {}
        self.history: list[list[Scheduled]] = []

    def add(self, id: str, prompt: int, want: int = 1000) -> RunningSequence:
        slot = BASE if id == "base" else int(id[1:])
        number = len(self.want)
        request = Request(id, [number * 1000 + at for at in range(prompt)])
        info = VariantInfo(id, slot, id.encode())
        sequence = RunningSequence(number, request, info, 0, self.kv.open(), [*request.prompt], None)
        self.want[sequence] = want
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> dict[RunningSequence, int]:
        scheduled = self.scheduler.schedule()
        self.history.append(scheduled)
        for sequence, count in scheduled:
            ends = count == sequence.remaining
            sequence.computed += count
            self.kv.publish(sequence.kv, sequence.info.digest, sequence.tokens, sequence.computed)
            if ends:
                sequence.tokens.append(7)
                if len(sequence.answer) >= self.want[sequence]:
                    self.scheduler.remove(sequence)
        return dict(scheduled)

    def run(self, steps: int) -> list[dict[RunningSequence, int]]:
        return [self.step() for _ in range(steps)]


def ids(step: dict[RunningSequence, int]) -> set[str]:
    return {sequence.info.id for sequence in step}


def test_growing_answers_come_before_prompts() -> None:
    bench = Bench()
    grown = [bench.add(f"v{at}", 3) for at in range(3)]
    bench.step()
    prompt = bench.add("v1", 40)
    assert bench.step() == {grown[0]: 1, grown[1]: 1, grown[2]: 1, prompt: 13}
    assert bench.step()[prompt] == 13


def test_rows_are_in_order_of_slots() -> None:
    bench = Bench()
    for id in ("v2", "base", "v0", "v2", "base"):
        bench.add(id, 2)
    bench.step()
    assert [sequence.info.slot for sequence, _ in bench.history[0]] == [BASE, BASE, 0, 2, 2]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(-1, 5), st.integers(1, 30), st.integers(1, 6)), min_size=1, max_size=12),
    st.integers(1, 20),
    st.integers(1, 4),
    st.integers(1, 6),
    st.booleans(),
    st.integers(12, 60),
)
def test_no_step_holds_more_than_it_may_and_all_end(
    asked: list[tuple[int, int, int]], tokens: int, variants: int, sequences: int, uniform: bool, blocks: int
) -> None:
    limits = {"variants": variants, "sequences": sequences, "uniform": uniform, "patience": 3}
    bench = Bench(room=blocks * BLOCK, tokens=tokens, **limits)
    for slot, prompt, want in asked:
        bench.add("base" if slot < 0 else f"v{slot}", prompt, want)
    for _ in range(4000):
        step = bench.step()
        if not step:
            break
        assert sum(step.values()) <= tokens
        assert len(ids(step) - {"base"}) <= variants
        assert not uniform or len(ids(step)) == 1
        assert len(bench.scheduler.running) <= sequences
        assert all(count >= 1 for count in step.values())
    assert not bench.scheduler.running and not bench.scheduler.waiting
    assert all(len(sequence.answer) == want for sequence, want in bench.want.items())
    assert bench.kv.groups[0].pool.used == 0


@pytest.mark.parametrize("uniform", [False, True])
def test_variants_take_turns(uniform: bool) -> None:
    """Each gets in once in ceil(variants / cap) steps, whatever the others ask for."""
    bench = Bench(tokens=64, variants=3, uniform=uniform)
    for at in range(20):
        bench.add(f"v{at % 10 if at < 10 else 0}", 5)
    bench.run(5)
    within = 10 if uniform else 4
    steps = [ids(step) for step in bench.run(60)]
    for start in range(60 - within):
        assert set().union(*steps[start : start + within]) == {f"v{at}" for at in range(10)}


def test_the_base_costs_no_turn() -> None:
    bench = Bench(variants=1)
    for id in ("v0", "v1", "base"):
        bench.add(id, 2)
    for step in bench.run(12):
        assert "base" in ids(step) and len(ids(step)) == 2


@pytest.mark.parametrize("budget", [1, 2, 4])
def test_a_prompt_gets_in_though_answers_fill_every_step(budget: int) -> None:
    bench = Bench(tokens=budget, patience=5, variants=16)
    others = [bench.add(f"v{at}", 1) for at in range(8)]
    bench.run(30)
    late = bench.add("v9", 6)
    steps = bench.run(100)
    assert late.answer
    first = next(at for at, step in enumerate(steps) if late in step)
    assert first <= 5 + 1 + len(others) // budget
    waits = {sequence: [at for at, step in enumerate(steps) if sequence in step] for sequence in [*others, late]}
    for turns in waits.values():
        assert max(b - a for a, b in pairwise(turns)) <= 5 + 1 + 9


def test_a_variant_without_a_seat_gets_one() -> None:
    """v0 holds every seat with endless answers: its youngest makes way after `patience` steps, and comes back."""
    bench = Bench(sequences=4, patience=6)
    hogs = [bench.add("v0", 3, want=60) for _ in range(6)]
    bench.run(5)
    guest = bench.add("v1", 3, want=5)
    steps = bench.run(10)
    first = next(at for at, step in enumerate(steps) if guest in step)
    assert first <= 7
    assert bench.scheduler.preemptions == 1
    assert hogs[3] not in bench.scheduler.running and hogs[0] in bench.scheduler.running
    bench.run(200)
    assert [len(sequence.answer) for sequence in [*hogs, guest]] == [60] * 6 + [5]


def test_the_only_seat_is_not_taken_away() -> None:
    """Two variants that take one seat from each other would never end."""
    bench = Bench(sequences=1, patience=2)
    first, second = bench.add("v0", 3, want=30), bench.add("v1", 3, want=30)
    bench.run(70)
    assert bench.scheduler.preemptions == 0
    assert len(first.answer) == len(second.answer) == 30


def test_seats_are_shared_among_variants_then_by_age() -> None:
    bench = Bench(sequences=4, patience=50)
    first = [bench.add("v0", 3) for _ in range(5)]
    other = bench.add("v1", 3)
    bench.step()
    assert set(bench.scheduler.running) == {*first[:3], other}


def test_who_waits_too_long_goes_first_whatever_its_variant_has() -> None:
    """A stream of new variants does not keep an old request out."""
    bench = Bench(sequences=2, patience=8)
    bench.add("v0", 2, want=1000)
    second = bench.add("v0", 2, want=3)
    for at in range(60):
        bench.add(f"v{1 + at}", 2, want=4)
        bench.step()
    assert len(second.answer) == 3


def test_the_youngest_gives_way_where_blocks_run_out() -> None:
    bench = Bench(room=12 * BLOCK)
    old, middle, young = (bench.add(f"v{at}", 12, want=20) for at in range(3))
    while not bench.scheduler.preemptions:
        bench.step()
    assert bench.scheduler.waiting == [young] and young.computed == 0 and young.kv.tables == [[]]
    assert len(young.answer) > 0  # what it has is kept, and computed again
    kept = list(young.tokens)
    bench.run(200)
    assert [len(sequence.answer) for sequence in (old, middle, young)] == [20, 20, 20]
    assert young.tokens[: len(kept)] == kept


def test_the_oldest_never_gives_way() -> None:
    bench = Bench(room=12 * BLOCK)
    oldest = bench.add("v0", 8, want=38)
    for at in range(1, 7):
        bench.add(f"v{at}", 9, want=30)
    while len(oldest.answer) < 38:
        bench.step()
        assert oldest in bench.scheduler.running or len(oldest.answer) == 38
    assert bench.scheduler.preemptions > 0


def test_removing_frees_blocks_wherever_a_sequence_is() -> None:
    bench = Bench(sequences=2)
    sequences = [bench.add("v0", 9) for _ in range(3)]
    bench.step()
    assert bench.kv.groups[0].pool.used > 0
    for sequence in reversed(sequences):
        bench.scheduler.remove(sequence)
    assert bench.kv.groups[0].pool.used == 0
    assert bench.step() == {}


@pytest.mark.parametrize("name", ["tokens", "sequences", "variants", "patience"])
def test_limits_begin_at_one(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name}: expected at least 1, found 0"):
        Limits(**{name: 0})
