"""The noise floor: how far a model drifts from itself when its windows are batched another way.

Matrix products round differently at other batch sizes, in fp32 on a CPU too. What is measured stands beside every
figure of drift, so that nobody reads a drift of that size as one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mfs_decompose.events import ProgressSink
from mfs_decompose.fidelity.divergence import compare_logits
from mfs_decompose.fidelity.figures import TokenFigures
from mfs_decompose.fidelity.model import LoadedModel, predict_windows
from mfs_decompose.fidelity.settings import EvalSettings
from mfs_decompose.fidelity.windows import TokenizedCorpus, Window, batches

# The floor is a mean over tokens that hardly differ in it: the first few thousand tell it.
NOISE_TOKENS = 2048


@dataclass(frozen=True)
class NoiseFloor:
    """Figures of a model against itself at another batch size; None where its logits are not finite.

    Attributes:
        kl: mean KL, nats a token.
        ln_ppl: `|ln ppl ratio|`.
    """

    kl: float | None
    ln_ppl: float | None


def measure_noise(
    model: LoadedModel, text: TokenizedCorpus, settings: EvalSettings, progress: ProgressSink
) -> NoiseFloor:
    """Run the first windows of a text one by one and in batches: of `settings.batch_size`, or of 2 where that is 1."""
    size = max(2, settings.batch_size)
    windows = noise_windows(text)
    filled = (list(windows) * size)[: max(size, len(windows))]
    figures = TokenFigures.concatenate(
        [one for batch in batches(filled, size) for one in _compare_batchings(model, batch, settings, progress)]
    )
    kl, shift = float(figures.kl.mean()), float((figures.nll_x - figures.nll_original).mean())
    return NoiseFloor(kl if math.isfinite(kl) else None, abs(shift) if math.isfinite(shift) else None)


def noise_windows(text: TokenizedCorpus) -> Sequence[Window]:
    """The windows that the floor is measured on: those from the start that score up to 2,048 tokens, at least one."""
    taken, tokens = 0, 0
    for window in text.windows:
        tokens += len(window.targets)
        if taken and tokens > NOISE_TOKENS:
            break
        taken += 1
    return text.windows[:taken]


def _compare_batchings(
    model: LoadedModel, batch: Sequence[Window], settings: EvalSettings, progress: ProgressSink
) -> list[TokenFigures]:
    """Each window as it is measured (by itself, or in this batch) against the other way."""
    together = predict_windows(model, batch)
    found = []
    for window, batched_TV in zip(batch, together, strict=True):
        (alone_TV,) = predict_windows(model, [window])
        measured, other = (alone_TV, batched_TV) if settings.batch_size == 1 else (batched_TV, alone_TV)
        found.append(compare_logits(measured, other, torch.tensor(window.targets, device=measured.device)))
        progress.advance(window.text_bytes)
    return found
