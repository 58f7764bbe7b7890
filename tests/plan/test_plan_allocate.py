"""Allocation against an exhaustive search."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfs_decompose.plan.allocate import Candidate, Key, allocate


def energies(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(sorted(values, reverse=True))


def candidate(name: str, energy: Sequence[float], step_bytes: int = 10, entry_bytes: int = 0) -> Candidate:
    return Candidate(("v", name), energy, step_bytes, entry_bytes)


def cost(one: Candidate, steps: int) -> int:
    return one.entry_bytes + steps * one.step_bytes if steps else 0


def spent(candidates: Sequence[Candidate], steps: dict[Key, int]) -> int:
    return sum(cost(one, steps[one.key]) for one in candidates)


def explained(candidates: Sequence[Candidate], steps: dict[Key, int]) -> float:
    return sum(sum(one.energy[: steps[one.key]]) for one in candidates)


def optimum(candidates: Sequence[Candidate], budget: int) -> float:
    """The most that any choice of steps explains within the budget."""
    choices = itertools.product(*(range(len(one.energy) + 1) for one in candidates))
    found = ({one.key: n for one, n in zip(candidates, choice, strict=True)} for choice in choices)
    return max(explained(candidates, steps) for steps in found if spent(candidates, steps) <= budget)


def lone_segments(one: Candidate) -> list[float]:
    """What each segment of the lower hull explains, by the definition of a hull."""
    points = [(cost(one, n), sum(one.energy[:n])) for n in range(len(one.energy) + 1)]
    at, gains = 0, []
    while at + 1 < len(points):
        slopes = [
            ((points[n][1] - points[at][1]) / (points[n][0] - points[at][0]), n) for n in range(at + 1, len(points))
        ]
        best = max(slope for slope, _ in slopes)
        nearest = min(n for slope, n in slopes if slope >= best * (1 - 1e-12))
        gains.append(points[nearest][1] - points[at][1])
        at = nearest
    return gains


small = st.builds(
    Candidate,
    key=st.just(("v", "t")),
    energy=st.lists(st.integers(1, 40).map(float), max_size=4).map(energies),
    step_bytes=st.integers(1, 12),
    entry_bytes=st.sampled_from([0, 5, 9]),
)


def named(drawn: Sequence[Candidate]) -> list[Candidate]:
    return [Candidate(("v", f"t{at}"), d.energy, d.step_bytes, d.entry_bytes) for at, d in enumerate(drawn)]


@given(st.lists(small, max_size=4), st.integers(0, 120))
def test_never_above_the_budget_and_within_one_segment_of_the_optimum(drawn: list[Candidate], budget: int) -> None:
    candidates = named(drawn)
    steps = allocate(candidates, budget)
    assert set(steps) == {one.key for one in candidates}
    assert all(0 <= steps[one.key] <= len(one.energy) for one in candidates)
    assert spent(candidates, steps) <= budget
    largest = max((gain for one in candidates for gain in lone_segments(one)), default=0.0)
    assert explained(candidates, steps) >= optimum(candidates, budget) - largest - 1e-9


@given(st.lists(small, min_size=1, max_size=4), st.integers(1, 9), st.integers(0, 16), st.integers(0, 8))
def test_steps_of_one_size_are_bought_at_the_optimum(
    drawn: list[Candidate], step_bytes: int, steps: int, rest: int
) -> None:
    candidates = named([Candidate(d.key, d.energy, step_bytes, 0) for d in drawn])
    budget = steps * step_bytes + min(rest, step_bytes - 1)
    strongest = sorted((value for one in candidates for value in one.energy), reverse=True)[:steps]
    found = explained(candidates, allocate(candidates, budget))
    assert found == pytest.approx(sum(strongest)) == pytest.approx(optimum(candidates, budget))


@given(st.lists(small, max_size=5), st.integers(0, 150), st.randoms())
def test_the_order_of_the_candidates_changes_nothing(drawn: list[Candidate], budget: int, dice: random.Random) -> None:
    candidates = named(drawn)
    shuffled = list(candidates)
    dice.shuffle(shuffled)
    assert allocate(candidates, budget) == allocate(shuffled, budget)


@given(st.lists(small, min_size=1, max_size=4), st.integers(0, 150))
def test_nothing_that_would_still_fit_is_left(drawn: list[Candidate], budget: int) -> None:
    candidates = named(drawn)
    steps = allocate(candidates, budget)
    left = budget - spent(candidates, steps)
    for one in candidates:
        if steps[one.key] == 0 and one.energy:
            assert cost(one, 1) > left


def test_ties_go_to_the_name_that_sorts_first() -> None:
    equal = [candidate(name, (4.0, 4.0)) for name in ("b", "a", "c")]
    assert allocate(equal, 25) == {("v", "a"): 2, ("v", "b"): 0, ("v", "c"): 0}
    assert allocate(equal, 39) == {("v", "a"): 2, ("v", "b"): 1, ("v", "c"): 0}


def test_the_steeper_tensor_comes_first() -> None:
    strong, weak = candidate("z", (9.0, 8.0, 1.0)), candidate("a", (5.0, 4.0))
    assert allocate([weak, strong], 20) == {("v", "z"): 2, ("v", "a"): 0}
    assert allocate([weak, strong], 40) == {("v", "z"): 2, ("v", "a"): 2}
    assert allocate([weak, strong], 50) == {("v", "z"): 3, ("v", "a"): 2}


def test_an_entry_makes_the_first_steps_one_segment() -> None:
    dear, cheap = candidate("a", (10.0, 9.0, 8.0), 10, 30), candidate("b", (4.0,), 10)
    # Alone, one step of `a` explains 0.25 a byte, all three 0.45: with the entry they outdo `b` at 0.4.
    assert allocate([dear, cheap], 60) == {("v", "a"): 3, ("v", "b"): 0}
    assert allocate([dear, cheap], 59) == {("v", "a"): 1, ("v", "b"): 1}


def test_the_beginning_of_a_segment_is_better_than_nothing() -> None:
    flat = candidate("a", (5.0,) * 8, 10, 96)
    assert [allocate([flat], budget)["v", "a"] for budget in (105, 106, 115, 116, 175, 176)] == [0, 1, 1, 2, 7, 8]


def test_steps_that_explain_nothing_are_never_bought() -> None:
    assert allocate([candidate("a", (3.0, 0.0, 0.0)), candidate("b", ())], 1000) == {("v", "a"): 1, ("v", "b"): 0}
    assert allocate([], 1000) == {}


def test_a_budget_of_nothing_or_less_buys_nothing() -> None:
    one = candidate("a", (3.0, 2.0))
    assert allocate([one], 0) == allocate([one], -5) == {one.key: 0}


def test_rounding_does_not_let_a_later_step_overtake() -> None:
    """Two steps explain 7 for 120 bytes, the third 0.7 for 12: equal on paper, and not in fp64."""
    values = (5.0, 2.0, 0.7000000000000001, 0.5, 1 / 3)
    assert values[2] / 12 > 7 / 120
    one = candidate("a", values, 12, 96)
    assert [allocate([one], cost(one, steps))[one.key] for steps in range(6)] == [0, 1, 2, 3, 4, 5]


@given(st.data())
def test_a_larger_budget_explains_no_less(data: Any) -> None:
    candidates = named(data.draw(st.lists(small, min_size=1, max_size=3)))
    whole = sum(cost(one, len(one.energy)) for one in candidates)
    assert explained(candidates, allocate(candidates, whole)) == pytest.approx(
        sum(sum(one.energy) for one in candidates)
    )
