"""How far the figures of a text may lie from those of all text like it: paired bootstrap intervals.

What is resampled are runs of 64 scored tokens of one document; the last run of a document may be shorter, so every
figure is a ratio of sums, `sum over runs / tokens in them`. Original and measured model are resampled together.

Runs of one document resemble each other: resampled as if they did not, intervals meant to hold the truth 95 times of
100 hold it 73 to 89 times (docs/decisions/0005-intervals.md). So the interval of the runs is widened by the design
effect that the documents show (Kish, Survey Sampling, 1965): the variance of their sums over that of as many
independent runs. Percentiles are expanded for few units (Hesterberg, What Teachers Should Know About the Bootstrap,
2015).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mfs_decompose.fidelity.figures import Floats, PairedFigures

RUN_TOKENS = 64
LEAST_UNITS = 50
# Below this nothing is known of how documents differ: intervals are then of text of these documents alone.
LEAST_DOCUMENTS = 5
LEVEL = 0.95
RESAMPLES = 4000
SEED = 0x6D6673

# Counts drawn at once: 32 MB. A constant, so that a result does not depend on the machine's memory.
_BLOCK_COUNTS = 4 * 2**20

Interval = tuple[float, float]


@dataclass(frozen=True)
class Intervals:
    """95 % intervals of the paired figures; None where there are too few units or figures that are not finite.

    Attributes:
        units: runs that were resampled.
        ln_ppl_ratio: of `ln(ppl_x / ppl_original)`, with its sign.
        kl: of the mean KL(original‖x), nats a token.
        top1: of the fraction of tokens with the same most likely token.
    """

    units: int
    ln_ppl_ratio: Interval | None = None
    kl: Interval | None = None
    top1: Interval | None = None

    @property
    def ppl_ratio(self) -> Interval | None:
        """Of `ppl_x / ppl_original`."""
        if self.ln_ppl_ratio is None or self.ln_ppl_ratio[1] > math.log(np.finfo(np.float64).max):
            return None
        return math.exp(self.ln_ppl_ratio[0]), math.exp(self.ln_ppl_ratio[1])

    @property
    def abs_ln_ppl_ratio(self) -> Interval | None:
        """Of `|ln(ppl_x / ppl_original)|`: from 0 where the sign is not known."""
        if self.ln_ppl_ratio is None:
            return None
        low, high = self.ln_ppl_ratio
        near, far = sorted((abs(low), abs(high)))
        return (0.0 if low <= 0 <= high else near), far


def estimate_intervals(figures: PairedFigures, *, resamples: int = RESAMPLES, seed: int = SEED) -> Intervals:
    """The intervals of one text. The same figures give the same intervals.

    Args:
        figures: tokens in the order of the text.
        resamples: bootstrap samples.
        seed: of the generator, one stream for all figures.
    """
    starts = unit_starts(figures.document)
    units = len(starts)
    if units < LEAST_UNITS:
        return Intervals(units)
    x = figures.x
    columns_TF = np.stack([x.nll_x - x.nll_original, x.kl, x.top1], axis=1)
    sums_UF = np.add.reduceat(columns_TF, starts)
    tokens_U = np.diff(starts, append=len(figures.document)).astype(np.float64)
    finite = [bool(np.isfinite(column_U).all()) for column_U in sums_UF.T]
    low_F, high_F = _bootstrap(np.where(finite, sums_UF, 0.0), tokens_U, figures.document[starts], resamples, seed)
    # Widening about the estimate can leave the range of a figure.
    floor_F, ceiling_F = np.array([-np.inf, 0.0, 0.0]), np.array([np.inf, np.inf, 1.0])
    low_F, high_F = np.maximum(low_F, floor_F), np.minimum(high_F, ceiling_F)
    ln_ppl_ratio, kl, top1 = (
        (float(low), float(high)) if known else None for low, high, known in zip(low_F, high_F, finite, strict=True)
    )
    return Intervals(units, ln_ppl_ratio, kl, top1)


def unit_starts(document_T: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Index of the first token of every run: cut at each new document, and every 64 tokens within one."""
    edges = np.flatnonzero(np.diff(document_T)) + 1
    firsts = np.concatenate([[0], edges])
    lengths = np.diff(firsts, append=len(document_T))
    return np.concatenate(
        [np.arange(first, first + length, RUN_TOKENS) for first, length in zip(firsts, lengths, strict=True)]
    ).astype(np.int64)


def tokens_needed(tokens: int, units: int) -> int:
    """How many scored tokens of a text cut like this one make enough units, rounded up to hundreds."""
    return math.ceil(tokens * LEAST_UNITS / units / 100) * 100


def _bootstrap(
    sums_UF: Floats, tokens_U: Floats, document_U: npt.NDArray[np.int64], resamples: int, seed: int
) -> tuple[Floats, Floats]:
    """Lower and upper end of each figure F, a ratio of sums over units U."""
    units = len(tokens_U)
    ratio_F = sums_UF.sum(axis=0) / tokens_U.sum()
    resampled_BF = _resample(sums_UF, tokens_U, resamples, seed)
    tail = _expanded_tail(units)
    ends_2F = np.quantile(resampled_BF, [tail, 1 - tail], axis=0)
    widening_F = _widening(sums_UF - ratio_F * tokens_U[:, None], tokens_U, document_U)
    low_F, high_F = ratio_F + widening_F * (ends_2F - ratio_F)
    return low_F, high_F


def _resample(sums_UF: Floats, tokens_U: Floats, resamples: int, seed: int) -> Floats:
    """[B, F]: the figures of B samples of as many units, drawn with replacement."""
    generator = np.random.Generator(np.random.PCG64(seed))
    units = len(tokens_U)
    even_U = np.full(units, 1 / units)
    step = max(1, _BLOCK_COUNTS // units)
    parts = []
    for start in range(0, resamples, step):
        # How often each unit is drawn, which is all that sums need to know.
        counts_BU = generator.multinomial(units, even_U, size=min(step, resamples - start)).astype(np.float64)
        parts.append((counts_BU @ sums_UF) / (counts_BU @ tokens_U)[:, None])
    return np.concatenate(parts)


def _expanded_tail(units: int) -> float:
    """The percentile whose normal quantile, with the variance of a sample of this size, is Student's."""
    from scipy.special import ndtr, stdtrit

    tail = (1 - LEVEL) / 2
    return float(ndtr(math.sqrt(units / (units - 1)) * stdtrit(units - 1, tail)))


def _widening(residual_UF: Floats, tokens_U: Floats, document_U: npt.NDArray[np.int64]) -> Floats:
    """How much wider than that of independent runs each figure's interval is: the root of the design effect, or 1.

    The documents' variance is Bell and McCaffrey's (Survey Methodology, 2002), which is unbiased where runs are
    independent; Student's factor is for as many documents of equal length as would tell as much.
    """
    from scipy.special import ndtri, stdtrit

    units = len(document_U)
    firsts = np.flatnonzero(np.diff(document_U, prepend=-1))
    share_D = np.add.reduceat(tokens_U, firsts) / tokens_U.sum()
    effective = 1 / float(np.square(share_D).sum())
    if effective < LEAST_DOCUMENTS:
        return np.ones(residual_UF.shape[1])
    of_documents_F = (np.square(np.add.reduceat(residual_UF, firsts)) / (1 - share_D)[:, None]).sum(axis=0)
    of_runs_F = np.square(residual_UF).sum(axis=0) * units / (units - 1)
    effect_F = np.divide(of_documents_F, of_runs_F, out=np.ones_like(of_runs_F), where=of_runs_F > 0)
    tail = (1 - LEVEL) / 2
    student = float(stdtrit(effective - 1, tail) / ndtri(tail))
    return np.where(effect_F > 1, student * np.sqrt(effect_F), 1.0)
