"""Bootstrap intervals: by slow oracles, and by how often they cover the truth.

`token_figures.npz` holds a real run: the demo's code variant at a 5 % budget, served, on 80 documents of 50 to 767
tokens of eval/corpora/python.jsonl (window 256, 17,891 tokens scored).
"""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from mfs_decompose.fidelity import statistics
from mfs_decompose.fidelity.figures import PairedFigures, TokenFigures
from mfs_decompose.fidelity.statistics import (
    LEAST_UNITS,
    RUN_TOKENS,
    Intervals,
    estimate_intervals,
    tokens_needed,
    unit_starts,
)

NAMES = ("ln_ppl_ratio", "abs_ln_ppl_ratio", "kl", "top1")


def paired(document: Any, nll_original: Any, nll_x: Any, kl: Any, top1: Any) -> PairedFigures:
    columns = (np.asarray(column, dtype=np.float64) for column in (nll_original, nll_x, kl, top1))
    return PairedFigures(np.asarray(document, dtype=np.int64), TokenFigures(*columns), None)


def drawn(lengths: list[int], seed: int = 0) -> PairedFigures:
    """Independent tokens, so that documents do not matter."""
    generator = np.random.default_rng(seed)
    tokens = sum(lengths)
    nll = generator.exponential(2.0, tokens)
    return paired(
        np.repeat(np.arange(len(lengths)), lengths),
        nll,
        nll + 0.1 * generator.standard_normal(tokens) + 0.01,
        generator.exponential(0.02, tokens),
        generator.random(tokens) < 0.9,
    )


# Units.


@given(st.lists(st.integers(1, 200), min_size=1, max_size=6))
def test_units_are_runs_of_one_document(lengths: list[int]) -> None:
    expected, at = [], 0
    for length in lengths:
        expected += list(range(at, at + length, RUN_TOKENS))
        at += length
    assert unit_starts(np.repeat(np.arange(len(lengths)), lengths)).tolist() == expected


def test_documents_that_scored_nothing_leave_no_unit() -> None:
    assert unit_starts(np.array([0] * 65 + [3] * 2 + [7])).tolist() == [0, 64, 65, 67]


def test_fewer_than_50_units_are_undecided() -> None:
    assert (RUN_TOKENS, LEAST_UNITS) == (64, 50)
    assert estimate_intervals(drawn([64 * 49])) == Intervals(49)
    assert estimate_intervals(drawn([5] * 49)) == Intervals(49)
    for lengths in ([64 * 49 + 1], [5] * 50, [64 * 30, 64 * 19 + 3]):
        found = estimate_intervals(drawn(lengths), resamples=100)
        assert found.units == 50
        assert None not in (found.kl, found.top1, found.ppl_ratio)


@pytest.mark.parametrize(
    ("tokens", "units", "expected"), [(64 * 49, 49, 3200), (640, 10, 3200), (500, 10, 2500), (7, 1, 400)]
)
def test_tokens_needed_are_those_of_text_cut_alike(tokens: int, units: int, expected: int) -> None:
    assert tokens_needed(tokens, units) == expected
    assert tokens_needed(tokens, units) * units >= LEAST_UNITS * tokens


# Against slow oracles.


def slow_ends(figures: PairedFigures, column: Any, resamples: int) -> tuple[float, float]:
    """The same percentiles by drawing indices one sample at a time, with loops over units."""
    starts = [*unit_starts(figures.document).tolist(), len(figures.document)]
    runs = [column[a:b] for a, b in pairwise(starts)]
    generator = np.random.default_rng(5)
    found = []
    for _ in range(resamples):
        picked = [runs[i] for i in generator.integers(len(runs), size=len(runs))]
        found.append(sum(float(run.sum()) for run in picked) / sum(len(run) for run in picked))
    tail = stats.norm.cdf(math.sqrt(len(runs) / (len(runs) - 1)) * stats.t.ppf(0.025, len(runs) - 1))
    return float(np.quantile(found, tail)), float(np.quantile(found, 1 - tail))


def test_one_document_agrees_with_a_loop_over_samples() -> None:
    figures = drawn([64 * 60 + 11])
    found = estimate_intervals(figures, resamples=20_000)
    x = figures.x
    for interval, column in ((found.ln_ppl_ratio, x.nll_x - x.nll_original), (found.kl, x.kl), (found.top1, x.top1)):
        assert interval is not None
        width = interval[1] - interval[0]
        np.testing.assert_allclose(interval, slow_ends(figures, column, 4000), atol=0.06 * width)


def test_one_document_agrees_with_scipy_once_percentiles_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "_expanded_tail", lambda units: 0.025)
    figures = drawn([64 * 70])
    starts = unit_starts(figures.document)
    sums, tokens = np.add.reduceat(figures.x.kl, starts), np.full(70, 64.0)
    expected = stats.bootstrap(
        (sums, tokens),
        lambda s, t, axis: s.sum(axis=axis) / t.sum(axis=axis),
        paired=True,
        vectorized=True,
        n_resamples=20_000,
        method="percentile",
        rng=np.random.default_rng(3),
    ).confidence_interval
    found = estimate_intervals(figures, resamples=20_000).kl
    assert found is not None
    np.testing.assert_allclose(found, expected, atol=0.03 * (expected.high - expected.low))


def test_widening_is_the_design_effect_of_documents_by_hand() -> None:
    # Six documents of two runs; one figure differs between documents, the other only within.
    residual = np.array([[sign, side] for sign in (1.0, 1.0, 1.0, -1.0, -1.0, -1.0) for side in (0.5, -0.5)])
    document, tokens = np.repeat([0, 4, 5, 6, 7, 9], 2), np.full(12, 64.0)
    of_runs, of_documents = 12 * 12 / 11, 6 * 4 / (1 - 1 / 6)
    student = stats.t.ppf(0.975, 5) / stats.norm.ppf(0.975)
    expected = [student * math.sqrt(of_documents / of_runs), 1.0]
    np.testing.assert_allclose(statistics._widening(residual, tokens, document), expected)


def test_large_documents_count_for_fewer() -> None:
    generator = np.random.default_rng(8)
    document = np.repeat(np.arange(7), [9, 2, 2, 2, 2, 2, 2])
    tokens = np.full(21, 64.0)
    residual = np.repeat(generator.standard_normal((7, 1)), [9, 2, 2, 2, 2, 2, 2], axis=0)
    share = np.array([9, 2, 2, 2, 2, 2, 2]) / 21
    effective = 1 / (share**2).sum()
    assert effective < statistics.LEAST_DOCUMENTS
    assert statistics._widening(residual, tokens, document).tolist() == [1.0]


def test_few_documents_are_taken_as_all_there_are() -> None:
    alike = np.repeat([[1.0], [-1.0], [2.0], [-2.0]], 20, axis=0)
    tokens = np.full(80, 64.0)
    assert statistics._widening(alike, tokens, np.repeat(np.arange(4), 20)).tolist() == [1.0]
    assert statistics._widening(alike, tokens, np.zeros(80, dtype=np.int64)).tolist() == [1.0]
    assert statistics._widening(alike, tokens, np.repeat(np.arange(8), 10))[0] > 3


def test_independent_runs_are_hardly_widened_and_alike_ones_are() -> None:
    generator = np.random.default_rng(1)
    document, tokens = np.repeat(np.arange(60), 5), generator.integers(30, 64, 300).astype(np.float64)
    independent = generator.standard_normal((300, 1))
    alike = independent + 2 * generator.standard_normal(60)[document][:, None]
    assert statistics._widening(independent, tokens, document)[0] < 1.25
    assert 1.8 < statistics._widening(alike, tokens, document)[0] < math.sqrt(5) * 1.1


def test_blocks_of_samples_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = drawn([64 * 51, 30, 100])
    whole = estimate_intervals(figures, resamples=300)
    monkeypatch.setattr(statistics, "_BLOCK_COUNTS", 54 * 7)
    blocks = estimate_intervals(figures, resamples=300)
    for name in NAMES:
        np.testing.assert_allclose(getattr(blocks, name), getattr(whole, name), rtol=1e-12)


def test_the_same_figures_give_the_same_intervals_and_another_seed_others() -> None:
    figures = drawn([200] * 20)
    assert estimate_intervals(figures) == estimate_intervals(figures)
    assert estimate_intervals(figures, seed=1) != estimate_intervals(figures)


def test_more_text_narrows_by_the_root() -> None:
    few, many = (estimate_intervals(drawn([64] * units, seed=4)).kl for units in (100, 1600))
    assert few is not None and many is not None
    assert 3.2 < (few[1] - few[0]) / (many[1] - many[0]) < 4.8


# Corners.


def test_equal_models_have_intervals_of_no_width() -> None:
    nll = np.linspace(0, 5, 64 * 55)
    found = estimate_intervals(paired(np.zeros(64 * 55), nll, nll, np.zeros(64 * 55), np.ones(64 * 55)))
    assert (found.ln_ppl_ratio, found.abs_ln_ppl_ratio, found.ppl_ratio) == ((0, 0), (0, 0), (1, 1))
    assert (found.kl, found.top1) == ((0, 0), (1, 1))


def test_figures_that_are_not_finite_have_no_interval_and_do_not_spoil_the_others() -> None:
    figures = drawn([64 * 60])
    figures.x.kl[7] = np.nan
    found, whole = estimate_intervals(figures, resamples=200), estimate_intervals(drawn([64 * 60]), resamples=200)
    assert (found.kl, found.ln_ppl_ratio, found.top1) == (None, whole.ln_ppl_ratio, whole.top1)
    figures.x.nll_x[9] = np.nan
    found = estimate_intervals(figures, resamples=200)
    assert (found.ln_ppl_ratio, found.ppl_ratio, found.abs_ln_ppl_ratio) == (None, None, None)


def test_ends_stay_where_the_figure_can_be() -> None:
    # One document of six holds all the drift: widened symmetrically, KL would go below 0 and top-1 above 1.
    lengths = [64 * 10] * 6
    document = np.repeat(np.arange(6), lengths)
    kl = np.where(document == 2, 0.5, 1e-4)
    found = estimate_intervals(paired(document, kl, kl, kl, document != 2))
    assert found.kl is not None and found.top1 is not None
    assert found.kl[0] == 0 and found.top1[1] == 1


@pytest.mark.parametrize(
    ("signed", "absolute"),
    [((0.1, 0.3), (0.1, 0.3)), ((-0.3, -0.1), (0.1, 0.3)), ((-0.3, 0.1), (0, 0.3)), ((-0.1, 0.3), (0, 0.3))],
)
def test_the_absolute_interval_begins_at_0_where_the_sign_is_open(
    signed: tuple[float, float], absolute: tuple[float, float]
) -> None:
    assert Intervals(60, ln_ppl_ratio=signed).abs_ln_ppl_ratio == absolute


def test_a_ratio_beyond_float64_has_no_interval() -> None:
    assert Intervals(60, ln_ppl_ratio=(1.0, 800.0)).ppl_ratio is None
    assert Intervals(60, ln_ppl_ratio=(math.log(0.5), math.log(2))).ppl_ratio == pytest.approx((0.5, 2))


# Coverage.


@cache
def population() -> tuple[PairedFigures, ...]:
    """The documents of a real run."""
    with np.load(Path(__file__).with_name("token_figures.npz")) as file:
        columns = {name: file[name] for name in file.files}
    document = columns.pop("document")
    return tuple(
        paired(document[document == d], **{name: column[document == d] for name, column in columns.items()})
        for d in np.unique(document)
    )


def joined(parts: list[PairedFigures]) -> PairedFigures:
    document = np.repeat(np.arange(len(parts)), [len(part.document) for part in parts])
    return PairedFigures(document, TokenFigures.concatenate([part.x for part in parts]), None)


def truth_of(whole: PairedFigures) -> dict[str, float]:
    """What the ratio of sums tends to with ever more documents."""
    shift = float((whole.x.nll_x - whole.x.nll_original).mean())
    return dict(zip(NAMES, (shift, abs(shift), whole.x.kl.mean(), whole.x.top1.mean()), strict=True))


def coverage(repetitions: int, documents: int, seed: int, resamples: int = 1000) -> dict[str, float]:
    """How often the intervals of that many documents, drawn with replacement, hold the truth."""
    everything = population()
    truth = truth_of(joined(list(everything)))
    generator = np.random.default_rng(seed)
    hits = dict.fromkeys(NAMES, 0)
    for _ in range(repetitions):
        sample = joined([everything[i] for i in generator.integers(len(everything), size=documents)])
        found = estimate_intervals(sample, resamples=resamples)
        for name in NAMES:
            low, high = getattr(found, name)
            hits[name] += low <= truth[name] <= high
    return {name: count / repetitions for name, count in hits.items()}


def test_the_population_is_a_real_run_of_documents_of_unlike_length() -> None:
    lengths = [len(part.document) for part in population()]
    assert (len(lengths), min(lengths), max(lengths), sum(lengths)) == (80, 50, 767, 17_891)
    truth = truth_of(joined(list(population())))
    assert 0.01 < truth["kl"] < 0.02 and 0.05 < truth["ln_ppl_ratio"] < 0.08 and 0.89 < truth["top1"] < 0.91


def test_intervals_cover_in_a_short_simulation() -> None:
    # 3 standard errors of 300 repetitions around the band of the long one.
    for name, share in coverage(300, documents=32, seed=11, resamples=400).items():
        assert 0.893 <= share <= 0.995, (name, share)


@pytest.mark.slow
@pytest.mark.parametrize("documents", [20, 40, 80])
def test_95_percent_intervals_cover_between_93_and_97_percent(documents: int) -> None:
    for name, share in coverage(2000, documents=documents, seed=documents).items():
        assert 0.93 <= share <= 0.97, (name, share)


@pytest.mark.slow
def test_runs_alone_do_not_cover(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why documents widen the intervals: without that the simulation fails."""
    monkeypatch.setattr(statistics, "_widening", lambda residual, tokens, document: np.ones(residual.shape[1]))
    assert min(coverage(1000, documents=40, seed=2).values()) < 0.93
