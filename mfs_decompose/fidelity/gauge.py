"""One variant in memory whose weights are exchanged, and its drift after each exchange.

The figures are those of `mfs eval --through served` on the same text under the same settings: the same windows, the
same answers of the original, the same arithmetic.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mfs_decompose.errors import SourceIncompatible
from mfs_decompose.events import NullSink, ProgressSink
from mfs_decompose.fidelity.divergence import compare_logits
from mfs_decompose.fidelity.figures import PairedFigures, TokenFigures
from mfs_decompose.fidelity.model import LoadedModel, load_model, predict_windows
from mfs_decompose.fidelity.reference import StoredReference, write_reference
from mfs_decompose.fidelity.settings import EvalSettings
from mfs_decompose.fidelity.statistics import LEAST_UNITS, estimate_intervals, tokens_needed, unit_starts
from mfs_decompose.fidelity.text import Corpus
from mfs_decompose.fidelity.tokenizer import load_encoder
from mfs_decompose.fidelity.windows import TokenizedCorpus, batches, token_limit, tokenize_corpus
from mfs_decompose.pipeline.gauge import Drift, Gauge, Gauges, TextAmount
from mfs_decompose.source.checkpoint import Checkpoint
from mfs_decompose.source.naming import first_few
from mfs_decompose.source.pieces import Piece
from mfs_decompose.source.tensor_map import load_tensor_map

if TYPE_CHECKING:
    import torch


TARGET_TOKENS = 4096
"""Of each text that a target is measured on, by default."""


def make_gauges(corpora: Sequence[Corpus], settings: EvalSettings, device: str, scratch: Path | None = None) -> Gauges:
    """Gauges on texts. What an original answers is kept on disk below `scratch` while its gauge is open."""
    texts = {corpus.name: {**corpus.identity(), "limit": token_limit(corpus, settings)} for corpus in corpora}
    identity = {
        "texts": texts,
        "window": settings.window,
        "stride": settings.step,
        "bos": settings.bos,
        "dtype": settings.dtype,
        "attention": settings.attention,
        "batch_size": settings.batch_size,
    }
    tokens = sum(token_limit(corpus, settings) for corpus in corpora)
    about = f"{', '.join(texts)}, at most {tokens} tokens"

    @contextmanager
    def open_gauge(checkpoint: Checkpoint) -> Iterator[Gauge]:
        with tempfile.TemporaryDirectory(prefix="mfs-gauge-", dir=scratch) as folder:
            yield _ModelGauge(checkpoint, corpora, settings, device, Path(folder) / "answers.safetensors", NullSink())

    def count(checkpoint: Checkpoint) -> TextAmount:
        encoder = load_encoder(checkpoint.root, settings.bos)
        documents = _documents([tokenize_corpus(corpus, encoder, settings) for corpus in corpora])
        units = len(unit_starts(documents))
        tokens = len(documents)
        return TextAmount(tokens, tokens if units >= LEAST_UNITS else tokens_needed(tokens, units))

    return Gauges(open_gauge, identity, about, count)


class _ModelGauge:
    def __init__(
        self,
        checkpoint: Checkpoint,
        corpora: Sequence[Corpus],
        settings: EvalSettings,
        device: str,
        path: Path,
        progress: ProgressSink,
    ) -> None:
        encoder = load_encoder(checkpoint.root, settings.bos)
        self._texts = [tokenize_corpus(corpus, encoder, settings) for corpus in corpora]
        self._settings, self._device = settings, device
        self._model = load_model(checkpoint.root, "original", settings, device)
        write_reference(path, self._model, self._texts, settings, {}, progress)
        self._answers = StoredReference.open(path)
        self._places = _places(checkpoint, self._model)
        self._state: Mapping[str, torch.Tensor] = self._model.network.state_dict(keep_vars=False)

    def put(self, name: str, values: torch.Tensor) -> None:
        for parameter, piece in self._places[name]:
            target = self._state[parameter][tuple(slice(*span) for span in piece.place)]
            box = values[tuple(slice(*span) for span in piece.origin)]
            kept = [axis for axis in piece.axes if axis is not None]
            lost = [axis for axis in range(box.dim()) if axis not in kept]
            target.copy_(box.permute([*kept, *lost]).reshape(target.shape))

    def measure(self) -> Drift:
        parts = [self._measure(text) for text in self._texts]
        whole = PairedFigures(_documents(self._texts), TokenFigures.concatenate(parts), None)
        interval = estimate_intervals(whole).abs_ln_ppl_ratio
        return Drift(float(whole.x.kl.mean()), None if interval is None else interval[1], len(whole.document))

    def _measure(self, text: TokenizedCorpus) -> TokenFigures:
        import torch

        batched = list(batches(text.windows, self._settings.batch_size))
        found = []
        answers = self._answers.answers(text.name, batched, self._device)
        for batch, expected in zip(batched, answers, strict=True):
            for window, original_TV, other_TV in zip(batch, expected, predict_windows(self._model, batch), strict=True):
                targets = torch.tensor(window.targets, device=original_TV.device)
                found.append(compare_logits(original_TV, other_TV, targets))
        return TokenFigures.concatenate(found)


def _documents(texts: Sequence[TokenizedCorpus]) -> npt.NDArray[np.int64]:
    """The document of each scored token: those of a text are none of the next."""
    documents: list[npt.NDArray[np.int64]] = []
    for text in texts:
        offset = 1 + (int(documents[-1][-1]) if documents else -1)
        own = [np.full(len(window.targets), window.document + offset) for window in text.windows]
        documents.append(np.concatenate(own).astype(np.int64))
    return np.concatenate(documents)


def _places(checkpoint: Checkpoint, model: LoadedModel) -> Mapping[str, tuple[tuple[str, Piece], ...]]:
    """Where each checkpoint tensor lies in the model in memory.

    Raises:
        SourceIncompatible: a parameter is computed from tensors, so that none can be exchanged.
    """
    found = load_tensor_map(checkpoint, type(model.network))
    computed = sorted({name for parameter in found.parameters.values() for name in parameter.computed_from})
    if computed:
        raise SourceIncompatible(
            f"drift of {checkpoint.id!r} cannot be measured tensor by tensor: transformers computes weights from "
            f"{first_few(computed)}",
            hint="Leave --calibrate and --target out, and measure the artifact with mfs eval.",
        )
    nowhere = dict.fromkeys(checkpoint.tensors, ())
    return {**nowhere, **found.places}
