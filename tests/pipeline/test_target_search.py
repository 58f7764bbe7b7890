"""The search for a target on made curves: no model, only sizes, scores and drifts."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mfs_decompose.pipeline.gauge import Drift
from mfs_decompose.pipeline.target_search import CLOSE, MOST, Road, Size, Trial, search, smallest_held
from mfs_decompose.recipe.values import Target

LOW, HIGH = 10_000, 4_000_000
TOKENS = 4_000


@dataclass
class Variant:
    """Scores and drifts by bytes; `grid` is the ratio between two sizes next to each other."""

    score: Callable[[float], float]
    kl: Callable[[float], float]
    exact: bool = True
    grid: float = 1.0005
    ln_ppl: Callable[[float], float] | None = None
    measured: list[int] = field(default_factory=list)

    def look(self, cap: int) -> Size:
        if cap >= HIGH:
            return Size(HIGH, HIGH, 0.0 if self.exact else self.score(HIGH))
        steps = math.floor(math.log(max(cap, LOW) / LOW) / math.log(self.grid) + 1e-9)
        nbytes = int(LOW * self.grid**steps)
        return Size(cap, nbytes, self.score(nbytes))

    def measure(self, size: Size) -> Drift:
        self.measured.append(size.nbytes)
        assert size.nbytes < HIGH or not self.exact, "all bits need no measurement"
        ln_ppl = None if self.ln_ppl is None else self.ln_ppl(size.nbytes)
        return Drift(self.kl(size.nbytes), ln_ppl, TOKENS)

    def search(self, target: Target) -> list[Trial]:
        low, high = self.look(LOW), self.look(HIGH)
        road = Road(low, high, self.exact, self.look, lambda score: 0.1 * score / low.score)
        trials = search(target, road, TOKENS, self.measure)
        assert len(trials) == len(self.measured) <= MOST
        assert len(set(self.measured)) == len(self.measured), "nothing is measured twice"
        return trials


def power(slope: float, at_low: float) -> Callable[[float], float]:
    return lambda nbytes: at_low * (nbytes / LOW) ** -slope


def held(target: Target, trials: list[Trial]) -> Trial:
    best = smallest_held(target, trials)
    assert best is not None
    return best


@settings(max_examples=300, deadline=None)
@given(
    foretold=st.floats(0.4, 6.0),
    warp=st.floats(0.5, 2.0),
    at_low=st.floats(1e-3, 3.0),
    part=st.floats(0.03, 0.97),
    wave=st.floats(0.0, 0.15),
)
def test_it_ends_near_the_limit_and_never_above(
    foretold: float, warp: float, at_low: float, part: float, wave: float
) -> None:
    """Whatever power of the score the KL is, steep or flat in bytes, and with waves that no outlook knows of.

    Five evaluations do not always reach (0.7 X, X] then; that is asked for below, where KL is no steeper than bytes^-4.
    """

    def kl(nbytes: float) -> float:
        along = math.log(nbytes / LOW)
        return at_low * math.exp(-warp * foretold * along + wave * math.sin(3 * along))

    limit = math.exp(part * math.log(kl(HIGH)) + (1 - part) * math.log(kl(LOW)))
    assume(limit > 1e-9)  # what is far below is rounding
    target = Target("kl", limit)
    variant = Variant(power(foretold, 50.0), kl)
    best = held(target, variant.search(target))
    assert best.drift.kl <= limit


@pytest.mark.parametrize("foretold", [0.5, 1.0, 2.0, 3.5])
@pytest.mark.parametrize("part", [0.1, 0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("warp", [0.8, 1.0, 1.25])
def test_it_ends_inside_the_window(foretold: float, part: float, warp: float) -> None:
    def kl(nbytes: float) -> float:
        return 0.4 * math.exp(-warp * foretold * math.log(nbytes / LOW))

    limit = math.exp(part * math.log(kl(HIGH)) + (1 - part) * math.log(kl(LOW)))
    target = Target("kl", limit)
    assert CLOSE * limit < held(target, Variant(power(foretold, 50.0), kl).search(target)).drift.kl <= limit


def rough(generator: random.Random, slopes: list[float], noise: float) -> tuple[Callable[[float], float], Variant]:
    """Pieces of these slopes of log KL over log bytes, rough by `noise` between sizes 3 % apart, and its variant.

    The outlook is bent as well: a power of the KL, in waves, up to ten times too high or too low.
    """
    span = math.log(HIGH / LOW) / len(slopes)
    knots = [generator.gauss(0.0, noise) for _ in range(300)]
    scale, power = math.exp(generator.uniform(-2.3, 2.3)), generator.uniform(0.6, 1.5)
    wave, phase = generator.uniform(0.0, 0.15), generator.uniform(0.0, 6.0)

    def fallen(along: float) -> float:
        return sum(slope * min(max(along - number * span, 0.0), span) for number, slope in enumerate(slopes))

    def kl(nbytes: float) -> float:
        along = math.log(nbytes / LOW)
        knot, part = divmod(along / 0.03, 1.0)
        jolt = knots[int(knot)] * (1 - part) + knots[int(knot) + 1] * part
        return scale * math.exp(-fallen(along) + jolt)

    def score(nbytes: float) -> float:
        along = math.log(nbytes / LOW)
        return 50 * math.exp(-power * fallen(along) + wave * math.sin(1.3 * along + phase))

    return kl, Variant(score, kl)


def smallest_possible(kl: Callable[[float], float], limit: float) -> float:
    """The smallest of sizes 1 % apart that holds: a dip of the noise counts, though no search would find it."""
    sizes = (LOW * 1.01**step for step in range(round(math.log(HIGH / LOW) / math.log(1.01))))
    return next(nbytes for nbytes in sizes if kl(nbytes) <= limit)


@pytest.mark.parametrize(
    ("least", "most", "noise", "share"),
    [
        (1.0, 1.0, 0.0, 1.0),
        (1.0, 1.0, 0.02, 0.98),
        (1.0, 4.0, 0.0, 1.0),
        (1.0, 4.0, 0.02, 0.99),
        (1.0, 4.0, 0.04, 0.94),
        (0.5, 4.0, 0.02, 0.95),
        (0.7, 0.7, 0.02, 0.92),
        (0.5, 0.5, 0.0, 0.97),
        (0.5, 0.5, 0.02, 0.8),
    ],
)
def test_so_many_answers_are_within_a_tenth_of_the_smallest(
    least: float, most: float, noise: float, share: float
) -> None:
    """Of 200 curves between two slopes. At bytes^-0.5 a KL that is 2 % off is worth 4 % of the bytes: some are not."""
    near = 0
    for seed in range(200):
        generator = random.Random(seed)
        slopes = [math.exp(generator.uniform(math.log(least), math.log(most))) for _ in range(6)]
        kl, variant = rough(generator, slopes, noise)
        limit = kl(LOW * (HIGH / LOW) ** generator.uniform(0.1, 0.9))
        best = held(Target("kl", limit), variant.search(Target("kl", limit)))
        near += best.size.nbytes <= 1.1 * smallest_possible(kl, limit)
    assert near >= share * 200


@pytest.mark.parametrize("power", [0.7, 0.9, 1.1, 1.3, 1.5, 1.7])
def test_a_flat_stretch_is_followed_to_its_end(power: float) -> None:
    """As measured on a fine-tune: 0.84 X is no answer where a tenth of the bytes is worth 13 % of the KL."""
    sizes = [455_769, 2_839_113, 3_163_996, 3_543_311, 4_609_548]
    drifts = [1.69e-2, 1.147e-3, 9.52e-4, 8.41e-4, 6.33e-4]

    def kl(nbytes: float) -> float:
        number = min(max(sum(size < nbytes for size in sizes), 1), len(sizes) - 1)
        low, high = sizes[number - 1], sizes[number]
        part = math.log(nbytes / low) / math.log(high / low)
        return drifts[number - 1] ** (1 - part) * drifts[number] ** part

    variant = Variant(lambda nbytes: 5 * (nbytes / LOW) ** -power, kl)
    best = held(Target("kl", 1e-3), variant.search(Target("kl", 1e-3)))
    assert kl(best.size.nbytes / 1.1) > 1e-3 >= best.drift.kl


@settings(max_examples=300, deadline=None)
@given(slopes=st.lists(st.floats(0.5, 4.0), min_size=1, max_size=6), seed=st.integers(0, 1 << 20))
def test_the_window_is_left_open_by_no_early_stop(slopes: list[float], seed: int) -> None:
    """Who stops before the last measurement is inside the window, or at the smallest size there is."""
    generator = random.Random(seed)
    kl, variant = rough(generator, slopes, 0.01)
    limit = kl(LOW * (HIGH / LOW) ** generator.uniform(0.05, 0.95))
    assume(limit > 1e-8)
    trials = variant.search(Target("kl", limit))
    best = held(Target("kl", limit), trials)
    if len(trials) < MOST:
        assert CLOSE * limit < best.drift.kl or best.size.nbytes <= 1.03 * smallest_possible(kl, limit)


@settings(max_examples=300, deadline=None)
@given(
    knees=st.lists(st.tuples(st.floats(0.0, 6.0), st.floats(0.02, 9.0)), min_size=1, max_size=5),
    foretold=st.floats(0.3, 4.0),
    limit=st.floats(-16.0, 0.0),
    exact=st.booleans(),
    grid=st.floats(1.0005, 1.5),
)
def test_any_falling_curve(
    knees: list[tuple[float, float]], foretold: float, limit: float, exact: bool, grid: float
) -> None:
    """Broken lines, sizes far apart, an outlook that knows nothing: the answer holds, or there is none."""

    def kl(nbytes: float) -> float:
        along = math.log(nbytes / LOW)
        return 0.5 * math.exp(-sum(slope * max(along - start, 0.0) for start, slope in knees))

    target = Target("kl", math.exp(limit))
    variant = Variant(power(foretold, 7.0), kl, exact=exact, grid=grid)
    trials = variant.search(target)
    best = smallest_held(target, trials)
    if best is not None:
        assert best.drift.kl <= target.limit
        assert all(trial.size.nbytes >= best.size.nbytes for trial in trials if trial.drift.kl <= target.limit)
    elif not exact:
        assert kl(HIGH) > target.limit, "it could have been reached"
        assert trials[-1].size.nbytes == HIGH


@pytest.mark.parametrize("exact", [True, False])
def test_the_smallest_possible_is_an_answer(exact: bool) -> None:
    target = Target("kl", 0.2)
    variant = Variant(power(1.0, 3.0), power(1.0, 0.15), exact=exact)
    assert held(target, variant.search(target)).size.nbytes == LOW
    assert len(variant.measured) <= 2


def test_out_of_reach_is_known_from_the_upper_end() -> None:
    target = Target("kl", 1e-6)
    variant = Variant(power(1.0, 3.0), lambda nbytes: 0.01 + power(1.0, 1.0)(nbytes), exact=False)
    trials = variant.search(target)
    assert smallest_held(target, trials) is None
    assert variant.measured[-1] == HIGH


def test_below_all_that_is_coded_every_bit_is_left() -> None:
    """The KL of anything lossy stays above the limit: the upper end is the answer, and is not measured."""
    target = Target("kl", 1e-9)
    variant = Variant(power(1.0, 3.0), lambda nbytes: 1e-4 + power(1.0, 1.0)(nbytes))
    assert smallest_held(target, variant.search(target)) is None
    assert HIGH not in variant.measured


def test_a_good_prior_needs_one_measurement() -> None:
    target = Target("kl", 1e-3)
    variant = Variant(power(1.5, 5.0), power(1.5, 0.092))
    held(target, variant.search(target))
    assert len(variant.measured) <= 2


@settings(max_examples=200, deadline=None)
@given(slope=st.floats(0.6, 4.0), factor=st.floats(0.3, 4.0), limit=st.floats(-8.5, -4.5))
def test_perplexity_moves_along_the_kl(slope: float, factor: float, limit: float) -> None:
    kl = power(slope, 0.4)
    target = Target("ppl", math.exp(limit))

    def ln_ppl(nbytes: float) -> float:
        return factor * (2 * math.sqrt(2 * kl(nbytes) / TOKENS) + kl(nbytes))

    variant = Variant(power(slope, 50.0), kl, ln_ppl=ln_ppl)
    trials = variant.search(target)
    best = smallest_held(target, trials)
    if ln_ppl(HIGH) < 0.8 * target.limit < target.limit < ln_ppl(LOW):
        assert best is not None and CLOSE * target.limit < best.value("ppl") <= target.limit


def test_perplexity_that_is_not_monotone() -> None:
    """A dip far below, as where the drift changes its sign: what is returned was measured and holds."""
    kl = power(1.5, 0.4)

    def ln_ppl(nbytes: float) -> float:
        dip = 0.2 if 60_000 < nbytes < 90_000 else 1.0
        return dip * 3 * math.sqrt(kl(nbytes) / TOKENS)

    target = Target("ppl", 1e-3)
    variant = Variant(power(1.5, 50.0), kl, ln_ppl=ln_ppl)
    best = held(target, variant.search(target))
    assert ln_ppl(best.size.nbytes) <= target.limit


def test_a_drift_that_is_no_number_does_not_hold() -> None:
    variant = Variant(power(1.0, 3.0), lambda _: 1e6)
    target = Target("kl", 1e-3)
    assert smallest_held(target, variant.search(target)) is None


def test_no_drift_at_all_leads_down_to_the_smallest() -> None:
    target = Target("kl", 1e-5)
    variant = Variant(power(1.0, 3.0), lambda _: 0.0)
    assert held(target, variant.search(target)).size.nbytes == LOW
    assert len(variant.measured) == 2
