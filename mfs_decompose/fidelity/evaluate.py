"""Measure drift: the same windows through the original, every candidate and the base, paired token by token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mfs_decompose.errors import ArtifactInvalid, SourceIncompatible, UsageError
from mfs_decompose.events import ProgressSink
from mfs_decompose.fidelity.divergence import compare_logits
from mfs_decompose.fidelity.figures import PairedFigures, TokenFigures
from mfs_decompose.fidelity.model import LoadedModel, load_model, predict_windows
from mfs_decompose.fidelity.noise import NoiseFloor, measure_noise, noise_windows
from mfs_decompose.fidelity.reference import StoredReference, write_reference
from mfs_decompose.fidelity.residency import ModelSize, available_memory, group_rivals, measure_model
from mfs_decompose.fidelity.result import DriftResult, summarise
from mfs_decompose.fidelity.served_runtime import ServedCandidate
from mfs_decompose.fidelity.settings import EvalSettings
from mfs_decompose.fidelity.text import Corpus
from mfs_decompose.fidelity.tokenizer import load_encoder
from mfs_decompose.fidelity.windows import TokenizedCorpus, Window, batches, token_limit, tokenize_corpus

_BASE = "base"
_ORIGINAL = "original"
# (role, corpus) -> figures of that role against the original; no entry for a base that lacks a token of the corpus.
_Figures = dict[tuple[str, str], TokenFigures]


def measure_drift(
    original: Path | StoredReference,
    candidates: Mapping[str, Path | ServedCandidate],
    base: Path | None,
    corpora: Sequence[Corpus],
    settings: EvalSettings,
    variant: str,
    progress: ProgressSink,
    device: str = "cpu",
    *,
    noise: bool = True,
) -> list[DriftResult]:
    """Measure checkpoint folders against the folder they stand for, with the original's own tokenizer.

    For each batch of windows the original runs once beside all models in memory; where they do not all fit, they
    take turns and the original runs again. The figures are the same either way.

    Args:
        original: the variant's own checkpoint, or what it answered to the same texts under the same settings.
        candidates: `served` and `restored` checkpoints to measure; `served` may be a variant of a loaded family.
        base: the base's checkpoint, for `ppl_base`, `kl_base` and `recovered`.
        corpora: text, under unlike names.
        variant: the id that the results carry.
        device: `cpu`, `cuda` or `cuda:i`.
        noise: measure the noise floor too.

    Returns:
        A result for each corpus and candidate, corpora outermost.

    Raises:
        UsageError: nothing to measure, two corpora of one name, text too short, windows longer than the model allows.
        SourceNotFound, SourceIncompatible, ArtifactInvalid: a checkpoint that is not there or does not load whole, or
            a reference that is damaged or of other texts.
        ResourceShortage: the original and one other model do not fit in memory.
    """
    _check_request(candidates, corpora)
    # Without the original, a candidate's tokenizer is the same: what was saved is of exactly these windows, or refused.
    own = _folder_of(next(iter(candidates.values()))) if isinstance(original, StoredReference) else original
    encoder = load_encoder(own, settings.bos)
    texts = [tokenize_corpus(corpus, encoder, settings) for corpus in corpora]
    rivals: dict[str, Path | ServedCandidate] = {**candidates, **({} if base is None else {_BASE: base})}
    groups = group_rivals(
        _size_of(original, settings),
        {role: _size_of(rival, settings) for role, rival in rivals.items()},
        settings,
        available_memory(device),
    )
    figures: _Figures = {}
    notes: dict[str, list[str]] = {text.name: [] for text in texts}
    if isinstance(original, StoredReference):
        reference: LoadedModel | StoredReference = original
    else:
        reference = _load(original, _ORIGINAL, settings, device, progress)
    _check_reference(own, reference, texts)
    # Before any other model is in memory: it holds the logits of one batch more than a comparison does.
    floors = _measure_floors(reference, texts, settings, variant, progress) if noise else {}
    for group in groups:
        models = [_load(rivals[role], role, settings, device, progress) for role in group]
        progress.start(f"measure {variant}", len(models) * sum(text.text_bytes for text in texts))
        for text in texts:
            figures.update(_measure_text(reference, models, text, settings, notes[text.name], device, progress))
        progress.finish()
        del models
    results = [
        summarise(
            variant,
            role,
            text.name,
            PairedFigures(_document_of(text), figures[role, text.name], figures.get((_BASE, text.name))),
            bos=encoder.bos,
            notes=tuple(notes[text.name]),
            noise=floors.get(text.name),
            engine="runtime" if isinstance(candidate, ServedCandidate) else "transformers",
            text={**corpus.identity(), "max_tokens": token_limit(corpus, settings)},
        )
        for text, corpus in zip(texts, corpora, strict=True)
        for role, candidate in candidates.items()
    ]
    for said in dict.fromkeys(f"{result.corpus}: {note}" for result in results for note in result.notes):
        progress.note(f"{variant}, {said}", "warning")
    return results


def save_reference(
    original: Path,
    corpora: Sequence[Corpus],
    settings: EvalSettings,
    path: Path,
    about: Mapping[str, Any],
    progress: ProgressSink,
    device: str = "cpu",
) -> int:
    """Keep what an original answers to texts, for `measure_drift` to use in its place; returns the file's bytes.

    Raises:
        UsageError, SourceNotFound, SourceIncompatible, ResourceShortage: as `measure_drift`; also for want of disk.
    """
    _check_request({"original": original}, corpora)
    encoder = load_encoder(original, settings.bos)
    texts = [tokenize_corpus(corpus, encoder, settings) for corpus in corpora]
    model = _load(original, _ORIGINAL, settings, device, progress)
    _check_reference(original, model, texts)
    return write_reference(path, model, texts, settings, about, progress)


def _check_request(candidates: Mapping[str, object], corpora: Sequence[Corpus]) -> None:
    if not candidates or not corpora:
        raise UsageError(
            "expected a checkpoint to measure and a text to measure it on, found none", hint="pass --text FILE"
        )
    assert _BASE not in candidates, "a reserved role"
    names = [corpus.name for corpus in corpora]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(
            f"expected texts with unlike file names, found two named {twice!r}", hint="rename one of the files"
        )


def _folder_of(candidate: Path | ServedCandidate) -> Path:
    return candidate.folder if isinstance(candidate, ServedCandidate) else candidate


def _load(
    folder: Path | ServedCandidate, role: str, settings: EvalSettings, device: str, progress: ProgressSink
) -> LoadedModel:
    if isinstance(folder, ServedCandidate):
        return folder.model(role, settings)
    nbytes = measure_model(folder, settings.itemsize).weight_bytes
    progress.start(f"load {role}", nbytes)
    model = load_model(folder, role, settings, device)
    progress.advance(nbytes)
    progress.finish()
    return model


def _size_of(original: Path | StoredReference | ServedCandidate, settings: EvalSettings) -> ModelSize:
    if isinstance(original, StoredReference | ServedCandidate):  # in memory already, or not at all
        return ModelSize(0, original.vocabulary)
    return measure_model(original, settings.itemsize)


def _check_reference(folder: Path, reference: LoadedModel | StoredReference, texts: Sequence[TokenizedCorpus]) -> None:
    if isinstance(reference, StoredReference):
        foreign = next((text.name for text in texts if reference.lacks(text)), None)
        if foreign is not None:
            raise SourceIncompatible(
                f"expected {reference.path} to hold answers to the windows of {foreign}, found others",
                hint="measure the texts it was saved with, under the same settings",
            )
    highest = max(text.highest_id for text in texts)
    if highest >= reference.vocabulary:
        raise SourceIncompatible(
            f"expected token ids below {reference.vocabulary} from the tokenizer of {folder}, found {highest}",
            hint="the folder's tokenizer belongs to another checkpoint",
        )
    longest = max(text.longest_input for text in texts)
    if reference.max_positions is not None and longest > reference.max_positions:
        raise UsageError(
            f"expected windows of at most the model's {reference.max_positions} positions, found {longest} tokens",
            hint=f"choose a smaller one: --window {reference.max_positions}",
        )


def _measure_floors(
    reference: LoadedModel | StoredReference,
    texts: Sequence[TokenizedCorpus],
    settings: EvalSettings,
    variant: str,
    progress: ProgressSink,
) -> dict[str, NoiseFloor]:
    if isinstance(reference, StoredReference):
        return {text.name: reference.noise(text.name) for text in texts}
    progress.start(
        f"noise floor of {variant}", sum(window.text_bytes for text in texts for window in noise_windows(text))
    )
    floors = {text.name: measure_noise(reference, text, settings, progress) for text in texts}
    progress.finish()
    return floors


def _measure_text(
    reference: LoadedModel | StoredReference,
    models: Sequence[LoadedModel],
    text: TokenizedCorpus,
    settings: EvalSettings,
    notes: list[str],
    device: str,
    progress: ProgressSink,
) -> _Figures:
    active = []
    for model in models:
        if model.role == _BASE and text.highest_id >= model.vocabulary:
            notes.append(
                f"no figures of the base: it has {model.vocabulary} tokens, and the text holds token {text.highest_id}"
            )
            progress.advance(text.text_bytes)
        else:
            notes += _compare_vocabularies(reference, model)
            active.append(model)
    parts: dict[str, list[TokenFigures]] = {model.role: [] for model in active}
    if active:
        for batch, expected in _original_answers(reference, text, settings, device):
            for model in active:
                parts[model.role] += _compare_batch(model, batch, expected)
                progress.advance(sum(window.text_bytes for window in batch))
    return {(role, text.name): TokenFigures.concatenate(found) for role, found in parts.items()}


def _original_answers(
    reference: LoadedModel | StoredReference, text: TokenizedCorpus, settings: EvalSettings, device: str
) -> Iterator[tuple[Sequence[Window], Sequence[torch.Tensor]]]:
    """Every batch of a text with the original's logits, computed or read."""
    batched = list(batches(text.windows, settings.batch_size))
    if isinstance(reference, StoredReference):
        # strict: the reader is asked once more at the end, which is when it checks what it has read.
        yield from zip(batched, reference.answers(text.name, batched, device), strict=True)
        return
    for batch in batched:
        yield batch, predict_windows(reference, batch)


def _compare_batch(model: LoadedModel, batch: Sequence[Window], expected: Sequence[torch.Tensor]) -> list[TokenFigures]:
    # A function of its own so that these logits are gone before the next model's: they can weigh a gigabyte.
    return [
        compare_logits(original_TV, other_TV, torch.tensor(window.targets, device=original_TV.device))
        for window, original_TV, other_TV in zip(batch, expected, predict_windows(model, batch), strict=True)
    ]


def _compare_vocabularies(reference: LoadedModel | StoredReference, model: LoadedModel) -> list[str]:
    """What to say about a base of another vocabulary; a candidate must have the original's."""
    if model.vocabulary == reference.vocabulary:
        return []
    if model.role != _BASE:
        raise ArtifactInvalid(
            f"expected {reference.vocabulary} tokens in the {model.role} checkpoint as in the original, "
            f"found {model.vocabulary}",
            hint="run mfs verify on the artifact",
        )
    return [
        f"figures of the base are over the {min(reference.vocabulary, model.vocabulary)} leading tokens that both "
        f"have, renormalised (the original has {reference.vocabulary}, the base {model.vocabulary})"
    ]


def _document_of(text: TokenizedCorpus) -> npt.NDArray[np.int64]:
    return np.repeat(
        np.array([window.document for window in text.windows], dtype=np.int64),
        [len(window.targets) for window in text.windows],
    )
