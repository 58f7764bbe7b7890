"""The result of a measurement: one row for a variant, a path through the family, and a corpus."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mfs_decompose.fidelity.figures import Floats, PairedFigures, TokenFigures
from mfs_decompose.fidelity.noise import NoiseFloor
from mfs_decompose.fidelity.statistics import LEAST_UNITS, RUN_TOKENS, Interval, estimate_intervals, tokens_needed

_ROW = (
    "variant", "through", "corpus", "tokens", "units", "ppl_original", "ppl_x", "ppl_base", "ppl_ratio",
    "ppl_ratio_ci", "kl_base", "kl_mean", "kl_ci", "kl_p99", "top1", "top1_ci", "recovered", "noise_kl",
    "noise_ln_ppl",
)  # fmt: skip
_INTERVALS = ("ppl_ratio_ci", "kl_ci", "top1_ci")


@dataclass(frozen=True)
class DriftResult:
    """Drift of one variant on one corpus. A figure is None where it does not exist; `remarks` then say why.

    Attributes:
        through: `served` or `restored`.
        tokens: tokens scored.
        units: runs of up to 64 scored tokens of one document, which intervals resample.
        ppl_original, ppl_x, ppl_base: exp of the mean NLL of the original, of what was measured, of the base.
        ppl_ratio: ppl_x / ppl_original.
        ppl_ratio_ci, kl_ci, top1_ci: 95 % intervals of `ppl_ratio`, `kl_mean`, `top1`; None from fewer than 50 units.
        kl_base, kl_mean: mean KL(original‖base) and KL(original‖x), nats a token.
        kl_p99: the 99th percentile of KL(original‖x), interpolated linearly between order statistics.
        top1: fraction of tokens at which original and x have the same most likely token.
        recovered: 1 - kl_mean / kl_base.
        noise_kl, noise_ln_ppl: mean KL and |ln perplexity ratio| of the original against itself at another batch size.
        engine: what answered: `runtime`, or `transformers` on a restored checkpoint.
        text: digest and sizes of the text, and how many of its tokens could be taken.
        bos: what stood before every window, as text, or `none`.
        figures: the tokens' own figures; None on a result that was read back.
    """

    variant: str
    through: str
    corpus: str
    tokens: int
    ppl_original: float | None
    ppl_x: float | None
    ppl_base: float | None
    ppl_ratio: float | None
    ppl_ratio_ci: Interval | None
    kl_base: float | None
    kl_mean: float | None
    kl_p99: float | None
    top1: float | None
    recovered: float | None
    kl_ci: Interval | None = None
    top1_ci: Interval | None = None
    units: int = 0
    noise_kl: float | None = None
    noise_ln_ppl: float | None = None
    engine: str = "transformers"
    text: Mapping[str, Any] = field(default_factory=dict)
    bos: str = "none"
    notes: tuple[str, ...] = ()
    figures: PairedFigures | None = field(default=None, repr=False, compare=False)

    @property
    def remarks(self) -> tuple[str, ...]:
        """The notes, and what is undecided for want of text."""
        if self.units >= LEAST_UNITS:
            return self.notes
        needed = tokens_needed(self.tokens, self.units)
        return (
            *self.notes,
            f"no intervals, undecided: {LEAST_UNITS} runs of up to {RUN_TOKENS} scored tokens of one document are "
            f"needed, and there are {self.units}; about {needed:,} tokens of text like this are enough",
        )

    def to_json(self) -> dict[str, Any]:
        """The row that others parse, of plain Python values; `text`, `bos`, `engine`, remarks go to the settings."""
        row = {name: getattr(self, name) for name in _ROW}
        return row | {name: None if row[name] is None else list(row[name]) for name in _INTERVALS}

    def record(self) -> dict[str, Any]:
        """Everything but the tokens' figures, as plain JSON that `from_record` reads back."""
        beside = {"text": dict(self.text), "bos": self.bos, "engine": self.engine, "notes": list(self.notes)}
        return self.to_json() | beside

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> DriftResult:
        """The result that `record` wrote."""
        pairs = {name: None if record[name] is None else tuple(record[name]) for name in _INTERVALS}
        return cls(**{**record, **pairs, "notes": tuple(record["notes"])})


def summarise(
    variant: str,
    through: str,
    corpus: str,
    figures: PairedFigures,
    *,
    bos: str,
    notes: tuple[str, ...] = (),
    noise: NoiseFloor | None = None,
    engine: str = "transformers",
    text: Mapping[str, Any] | None = None,
) -> DriftResult:
    """Reduce the tokens' figures to one row; figures that are not finite become None with a note."""
    x, base = figures.x, figures.base
    mean_original, mean_x = float(x.nll_original.mean()), float(x.nll_x.mean())
    kl_mean = _finite(float(x.kl.mean()))
    kl_base = None if base is None else _finite(float(base.kl.mean()))
    intervals = estimate_intervals(figures)
    return DriftResult(
        variant=variant,
        through=through,
        corpus=corpus,
        tokens=len(x.kl),
        ppl_original=_exp(mean_original),
        ppl_x=_exp(mean_x),
        ppl_base=None if base is None else _exp(float(base.nll_x.mean())),
        ppl_ratio=_exp(mean_x - mean_original),
        ppl_ratio_ci=intervals.ppl_ratio,
        kl_base=kl_base,
        kl_mean=kl_mean,
        kl_p99=None if kl_mean is None else _finite(float(np.quantile(x.kl, 0.99))),
        top1=_finite(float(x.top1.mean())),
        recovered=None if kl_mean is None or not kl_base else _finite(1 - kl_mean / kl_base),
        kl_ci=intervals.kl,
        top1_ci=intervals.top1,
        units=intervals.units,
        noise_kl=None if noise is None else noise.kl,
        noise_ln_ppl=None if noise is None else noise.ln_ppl,
        engine=engine,
        text=dict(text or {}),
        bos=bos,
        notes=(*notes, *_explain_gaps(through, x, base)),
        figures=figures,
    )


def _explain_gaps(through: str, x: TokenFigures, base: TokenFigures | None) -> list[str]:
    columns: list[tuple[str, Floats]] = [("the original", x.nll_original), (through, x.nll_x)]
    if base is not None:
        columns.append(("the base", base.nll_x))
    notes = [
        f"{name} has logits that are not finite at {broken} of {len(nll)} tokens"
        for name, nll in columns
        if (broken := int(np.isnan(nll).sum()))
    ]
    for name, nll in columns:
        mean = float(nll.mean())
        if not math.isnan(mean) and _exp(mean) is None:
            notes.append(f"the perplexity of {name} is beyond float64 (mean NLL {mean:.4g} nats)")
    if base is not None and not base.kl.any():
        notes.append("nothing to recover: the base answers exactly as the original does")
    return notes


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _exp(nats: float) -> float | None:
    try:
        return _finite(math.exp(nats))
    except OverflowError:
        return None
