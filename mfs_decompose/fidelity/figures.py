"""Figures of single tokens, kept in memory for statistics; only their summaries are written down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class TokenFigures:
    """Float64 arrays of one entry a scored token; NaN where a logit was not finite.

    Attributes:
        nll_original, nll_x: negative log-likelihoods in nats.
        kl: KL(original‖x) in nats.
        top1: 1.0 where both models have the same most likely token, else 0.0.
    """

    nll_original: Floats
    nll_x: Floats
    kl: Floats
    top1: Floats

    @classmethod
    def concatenate(cls, parts: Sequence[TokenFigures]) -> TokenFigures:
        return cls(
            **{field.name: np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(cls)}
        )


@dataclass(frozen=True, eq=False)
class PairedFigures:
    """The same tokens scored by the original, by what is measured and, where there is one, by the base.

    `document` holds the index of each token's document; tokens are in the order of the text, so that runs of
    tokens of one document can be resampled.
    """

    document: npt.NDArray[np.int64]
    x: TokenFigures
    base: TokenFigures | None
