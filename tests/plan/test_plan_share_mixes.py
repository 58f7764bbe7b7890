"""One budget over open tensors and those of other kinds: never above it, and split where least drift is predicted."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mfs_decompose.codec.deadzone import DEAD
from mfs_decompose.linalg.bands import WIDTHS, Bands, bands_bytes, direction_bytes
from mfs_decompose.linalg.dead_curve import measure_dead_curve
from mfs_decompose.plan.allocate import Candidate, Key
from mfs_decompose.plan.mixes import Mix, MixCandidate, energy_lost, mix_bytes, mix_drift, split
from mfs_decompose.plan.share import (
    FLATTERED,
    PARTS,
    BandedCandidate,
    as_banded,
    beside_mixes,
    choose_mixes,
    lambda_of_bands,
    share_out,
    sum_of_steps,
)

SHAPE = (64, 96)
CURVE = measure_dead_curve(torch.randn(5_000, generator=torch.Generator().manual_seed(3)), DEAD)
ENERGIES = st.lists(st.floats(0.0, 10.0), min_size=1, max_size=10).map(lambda found: sorted(found, reverse=True))


def open_tensor(
    explained: list[float], beyond: float = 1.0, weight: float = 1.0, exact: float | None = 9_000.0
) -> MixCandidate:
    assert CURVE is not None
    energy = math.fsum(explained) + beyond
    return MixCandidate(SHAPE, energy, explained, ((0, CURVE), (len(explained), CURVE)), exact, 96, weight)


def falling(first: float, rate: float, count: int = 30) -> list[float]:
    return [first * rate**at for at in range(count)]


def nbytes_of(ones: dict[Key, MixCandidate], picked: dict[Key, Mix]) -> float:
    return math.fsum(mix_bytes(ones[key], mix) + 96 for key, mix in picked.items() if mix != Mix())


def drift_of(ones: dict[Key, MixCandidate], picked: dict[Key, Mix]) -> float:
    return math.fsum(mix_drift(ones[key], mix) for key, mix in picked.items())


OPEN = st.lists(st.tuples(ENERGIES, st.floats(0.0, 5.0), st.floats(0.2, 5.0), st.floats(50.0, 9_000.0)), min_size=1,
                max_size=4)  # fmt: skip


@settings(max_examples=30)
@given(OPEN, st.integers(-50, 30_000), st.randoms(use_true_random=False))
def test_what_is_chosen_fits_whatever_the_order(
    opened: list[tuple[list[float], float, float, float]], budget: int, random: Random
) -> None:
    ones: dict[Key, MixCandidate] = {("v", str(at)): open_tensor(*one) for at, one in enumerate(opened)}
    picked = choose_mixes(ones, budget)
    assert picked.keys() == ones.keys()
    assert nbytes_of(ones, picked) <= max(budget, 0) + 1e-6
    keys = list(ones)
    random.shuffle(keys)
    assert choose_mixes({key: ones[key] for key in keys}, budget) == picked


@pytest.mark.parametrize("budget", [300, 900, 2_500, 6_000])
def test_bands_and_rests_get_the_parts_of_least_drift(budget: int) -> None:
    """Among all parts, by direct sums; and hardly worse than any choice of bands for each tensor with one step."""
    ones: dict[Key, MixCandidate] = {
        ("v", "steep"): open_tensor(falling(40.0, 0.6), 0.5, exact=None),
        ("v", "flat"): open_tensor(falling(1.0, 0.97), 20.0, exact=None),
    }
    picked = choose_mixes(ones, budget)
    tried = []
    for part in PARTS:
        _, bands = share_out([], {key: as_banded(one) for key, one in ones.items()}, int(part * budget))
        drift = drift_of(ones, split(ones, bands, budget))
        tried.append((math.exp(FLATTERED * (1 - part)) * drift, drift))
    assert drift_of(ones, picked) == min(tried)[1]
    ladder: list[Bands] = [(0, 0, 0, 0, 0), (0, 0, 0, 1, 1), (0, 0, 2, 2, 0), (0, 2, 2, 2, 2), (2, 4, 4, 4, 6)]
    everything = [
        split(ones, dict(zip(ones, pair, strict=True)), budget)
        for pair in product(ladder, repeat=2)
        if sum(bands_bytes(SHAPE, one) + 96 for one in pair if sum(one)) <= budget
    ]
    assert drift_of(ones, picked) <= 1.4 * min(drift_of(ones, found) for found in everything)


@pytest.mark.parametrize("spare", [0, 1, 5_000])
def test_a_budget_that_holds_all_bits_keeps_them(spare: int) -> None:
    ones: dict[Key, MixCandidate] = {("v", str(at)): open_tensor(falling(3.0, 0.8), exact=500.0) for at in range(3)}
    assert choose_mixes(ones, 3 * 596 + spare) == dict.fromkeys(ones, Mix(exact=True))
    assert choose_mixes(ones, 3 * 596 - 1) != dict.fromkeys(ones, Mix(exact=True))


def test_a_tensor_of_which_all_bits_cost_no_more_leaves_its_bytes_to_the_others() -> None:
    cheap, dear = open_tensor(falling(3.0, 0.8), exact=40.0), open_tensor(falling(3.0, 0.8), exact=None)
    ones: dict[Key, MixCandidate] = {("v", "cheap"): cheap, ("v", "dear"): dear}
    picked = choose_mixes(ones, 4_000)
    assert picked["v", "cheap"] == Mix(exact=True)
    assert 0.97 * 4_000 < nbytes_of(ones, picked) <= 4_000
    apart = choose_mixes({("v", "dear"): dear}, 4_000 - 136)
    assert drift_of(ones, picked) <= 1.1 * mix_drift(dear, apart["v", "dear"])


class TestMergedLoras:
    """Their factors keep all bits, and what is served of them lacks the rounding of the merge alone."""

    def family(self, nbytes: int, beyond: float = 0.01, exact: float | None = 9_000.0) -> dict[Key, MixCandidate]:
        merged = replace(open_tensor(falling(9.0, 0.7, 8), beyond, exact=exact), peeled=(nbytes, 8))
        return {("v", "merged"): merged, ("v", "other"): open_tensor(falling(40.0, 0.6), 0.5, exact=None)}

    def test_factors_that_are_no_dearer_are_kept_and_leave_their_bytes_to_the_others(self) -> None:
        ones = self.family(400)
        picked = choose_mixes(ones, 4_000)
        assert picked["v", "merged"] == Mix(peeled=True)
        assert 0.97 * 4_000 < nbytes_of(ones, picked) <= 4_000

    def test_dearer_ones_are_not(self) -> None:
        ones = self.family(3_900)
        picked = choose_mixes(ones, 4_000)
        assert not picked["v", "merged"].keeps_bits
        assert nbytes_of(ones, picked) <= 4_000

    def test_nor_are_those_that_a_coded_rest_serves_much_better(self) -> None:
        ones = self.family(400, beyond=30.0)
        assert mix_drift(ones["v", "merged"], Mix(peeled=True)) > 0.1
        picked = choose_mixes(ones, 8_000)
        assert not picked["v", "merged"].keeps_bits
        assert drift_of(ones, picked) < 0.1

    def test_nor_are_those_whose_rounding_bands_of_the_same_bytes_hold_as_well(self) -> None:
        """Flat energy in no strong direction counts nothing in the predicted drift, and yet makes the KL."""
        merged = replace(open_tensor([9.0, *[0.05] * 40], 0.1, exact=9_000.0), peeled=(400, 1))
        ones: dict[Key, MixCandidate] = {("v", "merged"): merged}
        picked = choose_mixes(ones, 8_000)["v", "merged"]
        assert mix_drift(merged, Mix(peeled=True)) < 0.01 * energy_lost(merged, Mix(peeled=True))
        assert not picked.keeps_bits and energy_lost(merged, picked) < energy_lost(merged, Mix(peeled=True))

    @pytest.mark.parametrize(("nbytes", "exact", "way"), [(400, 500.0, "peeled"), (500, 400.0, "exact")])
    def test_of_two_ways_the_cheaper_one_keeps_the_bits(self, nbytes: int, exact: float, way: str) -> None:
        picked = choose_mixes(self.family(nbytes, exact=exact), 4_000)
        assert picked["v", "merged"] == (Mix(peeled=True) if way == "peeled" else Mix(exact=True))

    @pytest.mark.parametrize("budget", [600, 1_200, 2_500, 5_000])
    def test_rests_are_not_held_to_be_flattered(self, budget: int) -> None:
        """Of a variant of such tensors alone the part of least predicted drift; beside others they lessen the doubt."""
        steep, flat = falling(40.0, 0.6, 8), falling(1.0, 0.97, 20)
        pair = {("v", "steep"): open_tensor(steep, 3.0, exact=None), ("v", "flat"): open_tensor(flat, 9.0, exact=None)}
        ones: dict[Key, MixCandidate] = {key: replace(one, peeled=(1 << 30, 8)) for key, one in pair.items()}
        for chosen in (ones, {**pair, ("v", "flat"): ones["v", "flat"]}):
            tried = []
            for part in PARTS:
                _, bands = share_out([], {key: as_banded(one) for key, one in chosen.items()}, int(part * budget))
                mixed = split(chosen, bands, budget)
                doubt = math.exp(FLATTERED * (1 - part))
                drifts = [mix_drift(one, mixed[key]) * (1 if one.peeled else doubt) for key, one in chosen.items()]
                tried.append((math.fsum(drifts), mixed))
            assert choose_mixes(chosen, budget) == min(tried, key=lambda one: one[0])[1]

    def test_where_the_budget_holds_all_bits_as_they_are_served_too_it_gets_them(self) -> None:
        ones = {key: replace(one, exact_bytes=900.0) for key, one in self.family(400).items()}
        assert choose_mixes(ones, 2 * 996) == dict.fromkeys(ones, Mix(exact=True))


def test_more_budget_leaves_less_drift() -> None:
    ones: dict[Key, MixCandidate] = {
        ("v", "steep"): open_tensor(falling(40.0, 0.6), 0.5),
        ("v", "flat"): open_tensor(falling(1.0, 0.97), 20.0),
    }
    drifts = [drift_of(ones, choose_mixes(ones, budget)) for budget in range(400, 20_000, 1_400)]
    assert drifts == sorted(drifts, reverse=True)
    assert drifts[-1] == 0.0


@given(
    st.lists(ENERGIES, max_size=3),
    st.lists(ENERGIES, max_size=3),
    st.lists(ENERGIES, min_size=1, max_size=3),
    st.integers(-100, 20_000),
    st.randoms(use_true_random=False),
)
@settings(max_examples=30)
def test_all_kinds_together_stay_within_the_budget(
    steps: list[list[float]], bands: list[list[float]], opened: list[list[float]], budget: int, random: Random
) -> None:
    """As allocation uses them: what is coded is settled first, then steps and bands share what is left."""
    fitted = [Candidate(("v", f"s{at}", 0), energies, 150, 96) for at, energies in enumerate(steps)]
    banded: dict[Key, BandedCandidate] = {
        ("v", f"b{at}"): BandedCandidate(energies, SHAPE, 96) for at, energies in enumerate(bands)
    }
    free: dict[Key, MixCandidate] = {
        ("v", f"o{at}"): open_tensor(energies, weight=1.0 + at) for at, energies in enumerate(opened)
    }
    own = budget - beside_mixes(fitted, banded, free, budget)
    picked = choose_mixes(free, own)
    coded = {key: mix for key, mix in picked.items() if mix.sized}
    spent = nbytes_of(free, coded)
    whole = banded | {key: as_banded(one) for key, one in free.items() if key not in coded}
    left = math.floor(budget - spent)
    taken, given_bands = share_out(fitted, whole, left)
    spent += sum_of_steps(fitted, taken)
    spent += sum(bands_bytes(SHAPE, counts) + (96 if sum(counts) else 0) for counts in given_bands.values())
    assert spent <= max(budget, 0) + 1e-6
    assert all(sum(counts) <= len(whole[key].energy) for key, counts in given_bands.items())
    turned, again = list(whole), list(fitted)
    random.shuffle(turned)
    random.shuffle(again)
    assert share_out(again, {key: whole[key] for key in turned}, left) == (taken, given_bands)
    assert beside_mixes(again, banded, free, budget) == budget - own


def test_what_others_want_is_left_to_them() -> None:
    """An open tensor of the same worth gets about its part of a budget, not all of it."""
    energies = falling(10.0, 0.8, 40)
    banded: dict[Key, BandedCandidate] = {("v", "b"): BandedCandidate(energies, SHAPE, 96)}
    ones: dict[Key, MixCandidate] = {("v", "o"): open_tensor(energies, 0.0, exact=None)}
    alone, beside = (
        nbytes_of(ones, choose_mixes(ones, 3_000 - beside_mixes([], others, ones, 3_000))) for others in ({}, banded)
    )
    assert 2_900 < alone <= 3_000
    assert 0.3 * alone < beside < 0.7 * alone


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 9.0)])
def test_a_weight_draws_bytes(weights: tuple[float, float]) -> None:
    energies = falling(10.0, 0.9, 40)
    free = {("v", str(at)): as_banded(open_tensor(energies, 0.0, weight)) for at, weight in enumerate(weights)}
    _, bands = share_out([], free, 4_000)
    light, heavy = (bands_bytes(SHAPE, bands["v", str(at)]) for at in range(2))
    same = abs(heavy - light) <= direction_bytes(SHAPE, 8)
    assert same if weights[0] == weights[1] else heavy > 1.2 * light


@pytest.mark.parametrize("spare", [0, 1, 60, 400, 1_500])
def test_a_budget_that_does_not_hold_all_headers_buys_directions_for_the_strongest(spare: int) -> None:
    """Thirty headers alone are above it: yet what it holds is spent, on what is worth most."""
    banded: dict[Key, BandedCandidate] = {
        ("v", f"{at:02}"): BandedCandidate([50.0 / (1 + at), 1.0 / (1 + at)], SHAPE, 96) for at in range(30)
    }
    cheapest = 96 + direction_bytes(SHAPE, WIDTHS[-1])
    budget = cheapest + spare
    _, bands = share_out([], banded, budget)
    used = sorted(key for key, counts in bands.items() if sum(counts))
    spent = sum(96 + bands_bytes(SHAPE, bands[key]) for key in used)
    assert used == [("v", f"{at:02}") for at in range(len(used))]
    assert 0 < spent <= budget < 30 * 96
    assert budget - spent < cheapest
    assert share_out([], banded, cheapest - 1)[1] == dict.fromkeys(banded, (0,) * len(WIDTHS))


@given(st.lists(ENERGIES, min_size=1, max_size=3), st.integers(1, 20_000))
def test_the_worth_of_a_byte_falls_with_the_budget(bands: list[list[float]], budget: int) -> None:
    banded = {("v", str(at)): BandedCandidate(energies, SHAPE, 96) for at, energies in enumerate(bands)}
    small, large = (lambda_of_bands([], banded, nbytes) for nbytes in (budget, 2 * budget))
    assert small >= large >= 0.0
    assert lambda_of_bands([], banded, 0) == lambda_of_bands([], banded, -5) == 0.0
