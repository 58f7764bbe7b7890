"""What a variant itself answers to a text, and how far anything put in its place is from that."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from mfs_decompose.fidelity.divergence import compare_logits
from mfs_decompose.fidelity.figures import Floats, TokenFigures
from mfs_decompose.fidelity.model import LoadedModel, load_model, predict_windows
from mfs_decompose.fidelity.settings import Attention, EvalSettings
from mfs_decompose.fidelity.statistics import unit_starts
from mfs_decompose.fidelity.text import Corpus
from mfs_decompose.fidelity.tokenizer import load_encoder
from mfs_decompose.fidelity.windows import TokenizedCorpus, Window, tokenize_corpus

ATTENTION: Attention = "sdpa"
"""Three times as fast here as the eager default of `mfs eval`, for all sides alike."""


@dataclass(frozen=True)
class Measured:
    """Means over the tokens, and the sums of KL over runs of 64 tokens that intervals resample."""

    tokens: int
    kl: float
    top1: float
    ppl_ratio: float
    kl_units: list[float]
    token_units: list[int]
    document_units: list[int]


class Judge:
    """A variant's model, whose weights can be replaced, beside its own logits to texts: fp32, kept on disk."""

    def __init__(self, variant: Path, scratch: Path) -> None:
        self._folder, self._scratch = variant, scratch
        self._settings = EvalSettings(attention=ATTENTION)
        self._model: LoadedModel = load_model(variant, "original", self._settings)
        self._parameters = dict(self._model.network.named_parameters())
        self._texts: dict[int, tuple[TokenizedCorpus, list[torch.Tensor]]] = {}
        self._changed = False

    def learn(self, corpus: Corpus, tokens: int) -> None:
        """Let the variant itself answer to the first `tokens` tokens of a text."""
        assert not self._changed, "the weights are no longer the variant's own"
        text = self.cut(corpus, tokens)
        kept = []
        for at, window in enumerate(text.windows):
            (logits,) = predict_windows(self._model, [window])
            path = self._scratch / f"logits-{tokens}-{at}.npy"
            np.save(path, logits.numpy())
            kept.append(torch.from_numpy(np.load(path, mmap_mode="c")))
        self._texts[tokens] = text, kept

    def cut(self, corpus: Corpus, tokens: int, window: int = 512) -> TokenizedCorpus:
        """The windows of the first `tokens` tokens of a text."""
        settings = EvalSettings(attention=ATTENTION, max_tokens=tokens, window=window)
        return tokenize_corpus(corpus, load_encoder(self._folder, settings.bos), settings)

    def grams(self, windows: Sequence[Window], names: Iterable[str]) -> dict[str, torch.Tensor]:
        """X^T X [I, I] of the inputs X of each linear layer, over all windows."""
        assert not self._changed, "the weights are no longer the variant's own"
        modules, hooks = dict(self._model.network.named_modules()), []
        found: dict[str, torch.Tensor] = {}

        def note(name: str, inputs: torch.Tensor) -> None:
            rows = inputs.reshape(-1, inputs.shape[-1])
            found[name] = found[name] + rows.mT @ rows if name in found else rows.mT @ rows

        for name in names:
            module = modules[name.removesuffix(".weight")]
            hooks.append(module.register_forward_pre_hook(lambda _, given, name=name: note(name, given[0])))
        for window in windows:
            predict_windows(self._model, [window])
        for hook in hooks:
            hook.remove()
        return found

    def put(self, weights: Iterator[tuple[str, int, torch.Tensor]]) -> int:
        """Replace every weight; returns the bytes that were counted."""
        self._changed, total, left = True, 0, set(self._parameters)
        with torch.no_grad():
            for name, nbytes, weight in weights:
                total += nbytes
                if name in left:
                    self._parameters[name].copy_(weight)
                    left.remove(name)
        if left:
            raise ValueError(f"expected every parameter of {self._folder.name}, found nothing for {sorted(left)[:3]}")
        return total

    def measure(self, tokens: int) -> Measured:
        """What is in place now, against what the variant itself answered."""
        text, kept = self._texts[tokens]
        parts = []
        for window, original in zip(text.windows, kept, strict=True):
            (logits,) = predict_windows(self._model, [window])
            parts.append(compare_logits(original, logits, torch.tensor(window.targets)))
        documents = np.repeat([w.document for w in text.windows], [len(w.targets) for w in text.windows])
        return summarise(TokenFigures.concatenate(parts), documents.astype(np.int64))


def summarise(figures: TokenFigures, document_T: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Measured:
    starts = unit_starts(document_T)
    sums: Floats = np.add.reduceat(figures.kl, starts)
    return Measured(
        tokens=len(figures.kl),
        kl=float(figures.kl.mean()),
        top1=float(figures.top1.mean()),
        ppl_ratio=float(np.exp((figures.nll_x - figures.nll_original).mean())),
        kl_units=sums.tolist(),
        token_units=np.diff(starts, append=len(document_T)).tolist(),
        document_units=document_T[starts].tolist(),
    )
