"""Open tensors within a budget where sizes are not as foretold: never above it, hardly below."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mfs_decompose.codec.deadzone import DEAD
from mfs_decompose.linalg.dead_curve import measure_dead_curve
from mfs_decompose.pipeline.choose_coded import choose_coded
from mfs_decompose.pipeline.encode import Choice
from mfs_decompose.plan.allocate import Key
from mfs_decompose.plan.mixes import Mix, MixCandidate, between, mix_bytes, mix_drift
from mfs_decompose.plan.share import ROUNDS

SHAPE = (640, 512)
CURVE = measure_dead_curve(torch.randn(20_000, generator=torch.Generator().manual_seed(3)), DEAD)


@pytest.fixture(autouse=True)
def _nothing_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else these deltas, flat beyond a few directions, would be stored as bands alone, and nothing would be coded."""
    monkeypatch.setattr("mfs_decompose.plan.mixes.MADE_UP", 0.0)


def tensors(count: int, exact: float | None = None) -> dict[Key, MixCandidate]:
    """Deltas of like shape and of unlike strength."""
    assert CURVE is not None
    found: dict[Key, MixCandidate] = {}
    for at in range(count):
        explained = [3.0 * 1.02**at * 0.97**step for step in range(20)]
        curves = ((0, CURVE), (20, CURVE))
        found["v", f"t{at:02d}"] = MixCandidate(SHAPE, math.fsum(explained) + 300.0, explained, curves, exact, 96)
    return found


def as_mix(choice: Choice) -> Mix:
    return Mix(choice.bands, choice.rest_step, choice.codec == "lossless")


class Coder:
    """Counts what it is asked for; a tensor takes what is foretold, times what `off` says of it at its step."""

    def __init__(self, mixes: Mapping[Key, MixCandidate], off: Mapping[Key, float], leap: float = 1.0) -> None:
        self.mixes, self.off, self.leap = mixes, off, leap
        self.asked: list[Mapping[Key, Choice]] = []

    def nbytes(self, key: Key, choice: Choice) -> int:
        ratio = self.off.get(key, 1.0)
        if choice.rest_step and math.log2(choice.rest_step) % 0.5 < 0.25:  # a step that crosses a unit of the weights
            ratio *= self.leap
        return round(mix_bytes(self.mixes[key], as_mix(choice)) * ratio)

    def __call__(self, choices: Mapping[Key, Choice]) -> dict[Key, int]:
        self.asked.append(choices)
        return {key: self.nbytes(key, choice) for key, choice in choices.items()}


@given(
    st.integers(1, 12),
    st.integers(0, 400_000),
    st.lists(st.floats(0.5, 2.0), min_size=12, max_size=12),
    st.sampled_from([1.0, 1.1, 1.4]),
)
@settings(max_examples=40, deadline=None)
def test_a_budget_is_kept_whatever_coding_takes(count: int, budget: int, ratios: list[float], leap: float) -> None:
    mixes = tensors(count)
    coder = Coder(mixes, dict(zip(sorted(mixes), ratios, strict=False)), leap)
    chosen, taken = choose_coded(mixes, budget, coder)
    assert taken == sum(coder.nbytes(key, choice) + 96 for key, choice in chosen.items())
    assert taken <= budget
    assert len(coder.asked) <= ROUNDS
    assert all(choice.rest_step > 0 or choice.codec == "lossless" for choice in chosen.values())


@pytest.mark.parametrize("budget", [400_000, 600_000, 900_000])
@pytest.mark.parametrize("leap", [1.0, 1.12, 1.3])
def test_hardly_a_byte_is_left_where_sizes_leap(budget: int, leap: float) -> None:
    mixes = tensors(40)
    coder = Coder(mixes, {key: 0.9 + 0.01 * at for at, key in enumerate(mixes)}, leap)
    chosen, taken = choose_coded(mixes, budget, coder)
    assert len(chosen) == len(mixes)
    assert 0.99 * budget < taken <= budget


def test_what_is_foretold_rightly_is_sized_once() -> None:
    mixes = tensors(30)
    coder = Coder(mixes, {})
    chosen, taken = choose_coded(mixes, 600_000, coder)
    assert len(coder.asked) == 1 and dict(coder.asked[0]) == chosen
    assert 599_000 < taken <= 600_000


def test_tensors_that_keep_all_bits_for_nothing_are_asked_again() -> None:
    """All bits of each looked cheap, and take ten times as much: none keeps them, and the budget is used."""
    mixes = tensors(8, exact=9_000.0)
    coder = Coder(mixes, {})
    coder_nbytes = coder.nbytes
    coder.nbytes = lambda key, choice: 90_000 if choice.codec == "lossless" else coder_nbytes(key, choice)  # type: ignore[method-assign]
    chosen, taken = choose_coded(mixes, 80_000, coder)
    assert any(choice.codec == "lossless" for choice in coder.asked[0].values())
    assert chosen and all(choice.codec == "banded" for choice in chosen.values())
    assert 70_000 < taken <= 80_000


def test_a_budget_that_holds_all_bits_keeps_them_at_once() -> None:
    mixes = tensors(5, exact=9_000.0)
    coder = Coder(mixes, dict.fromkeys(mixes, 0.5))
    chosen, taken = choose_coded(mixes, 500_000, coder)
    assert {choice.codec for choice in chosen.values()} == {"lossless"}
    assert taken == 5 * (4_500 + 96) and len(coder.asked) == 1


def test_nothing_that_would_fit_is_no_choice() -> None:
    mixes = tensors(3)
    assert choose_coded(mixes, 200_000, lambda choices: dict.fromkeys(choices, 10**9)) == ({}, 0)
    assert choose_coded(mixes, 50, lambda choices: pytest.fail("sized")) == ({}, 0)


def test_bytes_that_are_left_go_where_they_save_most() -> None:
    """The mixed choice loses no more than the one that fits by itself."""
    mixes = tensors(40)
    coder = Coder(mixes, {}, 1.3)
    chosen, _ = choose_coded(mixes, 500_000, coder)
    ours = math.fsum(mix_drift(mixes[key], as_mix(choice)) for key, choice in chosen.items())
    for asked in coder.asked:
        if sum(coder.nbytes(key, choice) + 96 for key, choice in asked.items()) <= 500_000:
            assert ours <= math.fsum(mix_drift(mixes[key], as_mix(choice)) for key, choice in asked.items())


def test_between_two_steps() -> None:
    one, two = Mix((0, 0, 0, 1, 2), 0.5), Mix((0, 0, 0, 1, 2), 2.0)
    assert between(one, two, 0.5) == Mix((0, 0, 0, 1, 2), 1.0)
    assert (between(one, two, 0.0), between(one, two, 1.0)) == (one, two)
    for other in (Mix(exact=True), Mix((0, 0, 0, 1, 2)), Mix((0, 0, 0, 1, 3), 2.0)):
        assert between(one, other, 0.5) == one
