"""The result of a measurement: one row for a variant, a path through the family, and a corpus."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mfs_decompose.fidelity.figures import Floats, PairedFigures, TokenFigures

_ROW = (
    "variant", "through", "corpus", "tokens", "ppl_original", "ppl_x", "ppl_base", "ppl_ratio", "ppl_ratio_ci",
    "kl_base", "kl_mean", "kl_p99", "top1", "recovered",
)  # fmt: skip


@dataclass(frozen=True)
class DriftResult:
    """Drift of one variant on one corpus. A figure is None where it does not exist; `notes` then say why.

    Attributes:
        through: `served` or `restored`.
        tokens: tokens scored.
        ppl_original, ppl_x, ppl_base: exp of the mean NLL of the original, of what was measured, of the base.
        ppl_ratio: ppl_x / ppl_original.
        ppl_ratio_ci: None, not computed.
        kl_base, kl_mean: mean KL(original‖base) and KL(original‖x), nats a token.
        kl_p99: the 99th percentile of KL(original‖x), interpolated linearly between order statistics.
        top1: fraction of tokens at which original and x have the same most likely token.
        recovered: 1 - kl_mean / kl_base.
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
    ppl_ratio_ci: tuple[float, float] | None
    kl_base: float | None
    kl_mean: float | None
    kl_p99: float | None
    top1: float | None
    recovered: float | None
    bos: str = "none"
    notes: tuple[str, ...] = ()
    figures: PairedFigures | None = field(default=None, repr=False, compare=False)

    def to_json(self) -> dict[str, Any]:
        """The row that others parse, of plain Python values; `bos` and `notes` go to the settings."""
        row = {name: getattr(self, name) for name in _ROW}
        row["ppl_ratio_ci"] = None if self.ppl_ratio_ci is None else list(self.ppl_ratio_ci)
        return row


def summarise(
    variant: str, through: str, corpus: str, figures: PairedFigures, *, bos: str, notes: tuple[str, ...] = ()
) -> DriftResult:
    """Reduce the tokens' figures to one row; figures that are not finite become None with a note."""
    x, base = figures.x, figures.base
    mean_original, mean_x = float(x.nll_original.mean()), float(x.nll_x.mean())
    kl_mean = _finite(float(x.kl.mean()))
    kl_base = None if base is None else _finite(float(base.kl.mean()))
    return DriftResult(
        variant=variant,
        through=through,
        corpus=corpus,
        tokens=len(x.kl),
        ppl_original=_exp(mean_original),
        ppl_x=_exp(mean_x),
        ppl_base=None if base is None else _exp(float(base.nll_x.mean())),
        ppl_ratio=_exp(mean_x - mean_original),
        ppl_ratio_ci=None,
        kl_base=kl_base,
        kl_mean=kl_mean,
        kl_p99=None if kl_mean is None else _finite(float(np.quantile(x.kl, 0.99))),
        top1=_finite(float(x.top1.mean())),
        recovered=None if kl_mean is None or not kl_base else _finite(1 - kl_mean / kl_base),
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
