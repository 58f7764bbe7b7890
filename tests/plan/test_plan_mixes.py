"""Ways to store one delta: bytes and predicted drift of each, and one step for the coded rests of many."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mfs_decompose.codec.deadzone import DEAD, dead_zone_point
from mfs_decompose.linalg.bands import ERROR, WIDTHS, Bands, bands_bytes, made_up
from mfs_decompose.linalg.dead_curve import RATIOS, DeadCurve, measure_dead_curve
from mfs_decompose.plan.mixes import (
    MADE_UP,
    NOISY,
    STEEP,
    WHITE,
    Mix,
    MixCandidate,
    corrected,
    energy_lost,
    mix_bytes,
    mix_drift,
    rest_bits,
    rest_error,
    split,
)

SHAPE = (56, 40)
NOTHING: Bands = (0,) * len(WIDTHS)


def curve(seed: int) -> DeadCurve:
    """Of random values, heavier in the tails than normal ones for a higher seed."""
    values = torch.randn(4_000, generator=torch.Generator().manual_seed(seed))
    found = measure_dead_curve(values.sign() * values.abs() ** (1.0 + 0.5 * seed), DEAD)
    assert found is not None
    return found


CURVES = [curve(seed) for seed in range(3)]


@st.composite
def candidates(draw: st.DrawFn) -> MixCandidate:
    explained = sorted(draw(st.lists(st.floats(0.0, 50.0), max_size=12)), reverse=True)
    ranks = draw(st.sampled_from([(), (0,), (0, 12), (0, 5, 12)]))
    return MixCandidate(
        shape=SHAPE,
        energy=math.fsum(explained) + draw(st.floats(0.0, 30.0)),
        explained=explained,
        curves=tuple((rank, CURVES[at]) for at, rank in enumerate(ranks)),
        exact_bytes=draw(st.one_of(st.none(), st.floats(1.0, 5_000.0))),
        entry_bytes=draw(st.sampled_from([0, 96])),
        weight=draw(st.floats(0.01, 40.0)),
    )


@st.composite
def bands_of(draw: st.DrawFn, candidate: MixCandidate) -> Bands:
    counts = [draw(st.integers(0, 3)) for _ in WIDTHS]
    while sum(counts) > len(candidate.explained):
        counts[max(at for at, count in enumerate(counts) if count)] -= 1
    return tuple(counts)


def spectrum(rank: int = 20, weight: float = 1.0) -> MixCandidate:
    explained = [2.0 * 0.7**at for at in range(rank)]
    curves = ((0, CURVES[0]), (rank, CURVES[1]))
    return MixCandidate(SHAPE, math.fsum(explained) + 1.5, explained, curves, 2_900.0, 96, weight)


def rms_left(candidate: MixCandidate, bands: Bands) -> float:
    """The root mean square of a rest: directions left out, and noise of those kept. Direct sums."""
    widths = [bits for count, bits in zip(bands, WIDTHS, strict=True) for _ in range(count)]
    kept = candidate.explained[: len(widths)]
    noise = math.fsum(energy * ERROR[bits] for energy, bits in zip(kept, widths, strict=True))
    return math.sqrt((max(candidate.energy - math.fsum(kept), 0.0) + noise) / (SHAPE[0] * SHAPE[1]))


@given(candidates())
def test_sums_are_direct_sums(candidate: MixCandidate) -> None:
    strongest = max(candidate.explained, default=0.0)
    assert len(candidate.sums) == len(candidate.heavy) == len(candidate.explained) + 1
    for at in range(len(candidate.explained) + 1):
        first = candidate.explained[:at]
        assert candidate.sums[at] == pytest.approx(math.fsum(first), abs=1e-9)
        assert candidate.left(at) == pytest.approx(max(candidate.energy - math.fsum(first), 0.0), abs=1e-9)
        heavy = math.fsum(one * (one / strongest) ** STEEP for one in first) if strongest else 0.0
        assert candidate.heavy[at] == pytest.approx(heavy, rel=1e-9, abs=1e-9)
    assert 0.0 <= candidate.beyond <= candidate.left(len(candidate.explained)) * (1 + 1e-12)
    assert 0.0 <= candidate.mean_steep <= 1.0 + 1e-12


@given(st.data(), candidates())
def test_bytes_and_drift_of_every_way_are_sane(data: st.DataObject, candidate: MixCandidate) -> None:
    bands = data.draw(bands_of(candidate))
    rms = rms_left(candidate, bands)
    for ratio in (0.0, 0.03, RATIOS[0], 0.8, RATIOS[-1], 50.0):
        mix = Mix(bands, ratio * rms)
        nbytes, drift = mix_bytes(candidate, mix), mix_drift(candidate, mix)
        assert bands_bytes(SHAPE, bands) <= nbytes < math.inf
        assert 0.0 <= drift < math.inf
        assert 0.0 < rest_error(candidate, mix) <= 1.0
        if not mix.step or not candidate.curves:
            assert (nbytes, rest_error(candidate, mix)) == (bands_bytes(SHAPE, bands), 1.0)
    if candidate.exact_bytes is not None:
        assert mix_bytes(candidate, Mix(exact=True)) == candidate.exact_bytes
    assert mix_drift(candidate, Mix(exact=True)) == 0.0


@given(st.data(), candidates())
def test_the_drift_of_the_formula_that_the_module_states(data: st.DataObject, candidate: MixCandidate) -> None:
    bands = data.draw(bands_of(candidate))
    mix = Mix(bands, data.draw(st.sampled_from([0.0, 0.3, 1.7])) * rms_left(candidate, bands))
    error = rest_error(candidate, mix)
    strongest = max(candidate.explained, default=0.0) or 1.0
    widths = [bits for count, bits in zip(bands, WIDTHS, strict=True) for _ in range(count)]
    weighed = [energy * (energy / strongest) ** STEEP for energy in candidate.explained]
    out = math.fsum(weighed[len(widths) :]) + candidate.beyond
    noise = math.fsum(one * ERROR[bits] for one, bits in zip(weighed, widths, strict=False))
    rest = rms_left(candidate, bands) ** 2 * candidate.elements
    white = WHITE * error * (1 - error) * rest * candidate.mean_steep
    expected = candidate.weight * (error**2 * (out + NOISY * noise) + white)
    if not mix.step:
        times = made_up(candidate.explained, candidate.energy, SHAPE, len(widths))
        expected *= 1.0 - MADE_UP * (times - 1.0) ** 0.5
        assert 0.7 * candidate.weight * (out + NOISY * noise) <= expected
    assert mix_drift(candidate, mix) == pytest.approx(expected, rel=1e-6, abs=1e-7 * candidate.weight)


@given(candidates(), st.integers(1, 40), st.integers(1, 5_000))
def test_a_peeled_lora_is_served_as_its_directions(candidate: MixCandidate, rank: int, nbytes: int) -> None:
    """What it lacks there, the rounding of the merge, counts like directions that bands leave out."""
    one, mix = replace(candidate, peeled=(nbytes, rank)), Mix(peeled=True)
    beyond = candidate.explained[rank:]
    strongest = max(candidate.explained, default=0.0) or 1.0
    out = math.fsum(energy * (energy / strongest) ** STEEP for energy in beyond) + candidate.beyond
    assert mix_drift(one, mix) == pytest.approx(candidate.weight * out, rel=1e-6, abs=1e-7 * candidate.weight)
    left = math.fsum(beyond) + max(candidate.energy - math.fsum(candidate.explained), 0.0)
    assert energy_lost(one, mix) == pytest.approx(left, rel=1e-6, abs=1e-7)
    assert mix_bytes(one, mix) == nbytes
    assert mix.sized and mix.keeps_bits
    assert corrected(one, mix, nbytes + 5) == one  # its bytes were counted, not foretold


@pytest.mark.parametrize("bands", [NOTHING, (0, 1, 2, 0, 0), (3, 2, 4, 5, 6)])
def test_a_finer_step_takes_more_and_loses_less(bands: Bands) -> None:
    candidate, rms = spectrum(), rms_left(spectrum(), bands)
    ratios = [0.001, 0.01, 0.1, *RATIOS, 20.0]
    bits = [rest_bits(candidate, Mix(bands, ratio * rms)) for ratio in ratios]
    errors = [rest_error(candidate, Mix(bands, ratio * rms)) for ratio in ratios]
    assert bits == sorted(bits, reverse=True)
    assert errors == sorted(errors)
    assert errors[-1] <= 1.0


def test_below_the_ladder_each_halving_of_a_step_costs_a_bit() -> None:
    """Else steps would grow finer for ever at no cost, and what is sized would be far from what was foretold."""
    candidate, rms = spectrum(), rms_left(spectrum(), NOTHING)
    steps = [Mix(step=RATIOS[0] * rms / 2**at) for at in range(5)]
    bits = [rest_bits(candidate, mix) for mix in steps]
    assert [two - one for one, two in pairwise(bits)] == pytest.approx([1.0] * 4)
    errors = [rest_error(candidate, mix) for mix in steps]
    assert [one / two for one, two in pairwise(errors)] == pytest.approx([4.0] * 4)


def test_the_curve_between_two_ranks_lies_between_theirs() -> None:
    candidate = replace(spectrum(rank=10), curves=((0, CURVES[0]), (4, CURVES[1]), (10, CURVES[2])))
    # At one root mean square of what each leaves, so that only the curve differs.
    found = {}
    for rank in (0, 1, 4, 7, 10):
        bands: Bands = (0, 0, rank, 0, 0)
        mix = Mix(bands, rms_left(candidate, bands))
        found[rank] = (rest_bits(candidate, mix), rest_error(candidate, mix))
    assert [found[rank] for rank in (0, 4, 10)] == [pytest.approx(curve.at(1.0)) for curve in CURVES]
    assert found[7] == pytest.approx([(low + high) / 2 for low, high in zip(found[4], found[10], strict=True)])
    assert found[1] == pytest.approx(found[4])  # a delta without one direction is not like the whole


@pytest.mark.parametrize("ratio", [0.2, 0.7, 1.6, 4.0])
def test_foretold_bytes_and_error_are_those_of_the_codec(ratio: float) -> None:
    shape = (120, 90)
    delta = 0.01 * torch.randn(shape, generator=torch.Generator().manual_seed(4))
    found = measure_dead_curve(delta, DEAD)
    assert found is not None
    energy = float(delta.double().square().sum())
    candidate = MixCandidate(shape, energy, [], ((0, found),), None, 96)
    mix = Mix(step=ratio * math.sqrt(energy / delta.numel()))
    nbytes, error = dead_zone_point(lambda start, stop: delta[start:stop], shape, mix.step)
    assert mix_bytes(candidate, mix) == pytest.approx(nbytes, rel=0.05, abs=30)
    assert rest_error(candidate, mix) * energy == pytest.approx(error, rel=0.15)


def test_a_weight_scales_drift_and_no_bytes() -> None:
    mix = Mix((0, 1, 2, 0, 3), 0.01)
    assert mix_drift(spectrum(weight=7.0), mix) == pytest.approx(7.0 * mix_drift(spectrum(), mix))
    assert mix_bytes(spectrum(weight=7.0), mix) == mix_bytes(spectrum(), mix)


def test_a_delta_of_zero_leaves_nothing() -> None:
    candidate = MixCandidate(SHAPE, 0.0, [0.0, 0.0], (), 300.0, 96)
    assert mix_drift(candidate, Mix()) == mix_drift(candidate, Mix((0, 0, 0, 1, 1))) == 0.0
    assert split({("v", "t"): candidate}, {("v", "t"): NOTHING}, 1e6) == {("v", "t"): Mix()}


def test_what_was_sized_corrects_what_is_foretold() -> None:
    mix = Mix((0, 1, 2, 0, 0), 0.01)
    for nbytes in (500, 1_500, 9_000):
        better = corrected(spectrum(), mix, nbytes)
        assert mix_bytes(better, mix) == pytest.approx(nbytes)
        assert mix_bytes(better, Mix(exact=True)) == 2_900.0
        assert mix_drift(better, mix) == mix_drift(spectrum(), mix)
    exact = corrected(spectrum(), Mix(exact=True), 1_234)
    assert exact == replace(spectrum(), exact_bytes=1_234.0)


SPLITS = st.dictionaries(st.integers(0, 9), st.tuples(candidates(), st.booleans()), min_size=1, max_size=5)


@given(SPLITS, st.floats(-100.0, 20_000.0))
def test_a_split_stays_within_its_budget(given_ones: dict[int, tuple[MixCandidate, bool]], budget: float) -> None:
    ones = {("v", str(at)): one for at, (one, _) in given_ones.items()}
    some = {
        ("v", str(at)): (0, 0, 0, 1, 1) for at, (one, kept) in given_ones.items() if kept and len(one.explained) > 1
    }
    bands = {key: some.get(key, NOTHING) for key in ones}
    found = split(ones, bands, budget)
    turned = dict(reversed(ones.items()))
    assert split(turned, bands, budget) == found
    assert {key: mix.bands for key, mix in found.items()} == bands
    fixed = sum(bands_bytes(SHAPE, some[key]) + ones[key].entry_bytes for key in some)
    spent = math.fsum(mix_bytes(ones[key], mix) + ones[key].entry_bytes for key, mix in found.items() if mix != Mix())
    assert spent <= max(budget, fixed) + 1e-6
    for mix in found.values():
        assert not mix.exact and 0.0 <= mix.step < math.inf
        if mix.step:  # of 8 significant bits: what the codec will use
            assert float(torch.tensor(mix.step).to(torch.bfloat16)) == mix.step


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 16.0), (4.0, 1.0, 1.0)])
def test_one_lambda_for_all_rests(weights: tuple[float, ...]) -> None:
    """Steps are finer by the root of the weight; hardly any bytes are left."""
    ones = {("v", str(at)): spectrum(weight=weight) for at, weight in enumerate(weights)}
    budget = 1_000.0 * len(weights)
    found = split(ones, dict.fromkeys(ones, NOTHING), budget)
    spent = math.fsum(mix_bytes(ones[key], mix) + 96 for key, mix in found.items())
    assert 0.99 * budget < spent <= budget
    for key, mix in found.items():
        assert mix.step * math.sqrt(ones[key].weight) == pytest.approx(
            found["v", "0"].step * weights[0] ** 0.5, rel=0.02
        )
