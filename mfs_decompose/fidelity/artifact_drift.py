"""Measure what an artifact holds: restore, and hold it against the variants' own checkpoints."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mfs_decompose import __version__
from mfs_decompose.artifact.reader import Family
from mfs_decompose.artifact.records import VariantRecord
from mfs_decompose.errors import SourceIncompatible, SourceNotFound
from mfs_decompose.events import ProgressSink
from mfs_decompose.fidelity.document import describe_settings
from mfs_decompose.fidelity.evaluate import measure_drift
from mfs_decompose.fidelity.result import DriftResult
from mfs_decompose.fidelity.result_log import ResultLog, open_result_log
from mfs_decompose.fidelity.settings import EvalSettings
from mfs_decompose.fidelity.text import Corpus
from mfs_decompose.pipeline.restore import RestoreOptions, restore
from mfs_decompose.source.checkpoint import Checkpoint, TensorReader, open_checkpoint, read_sidecar

Through = Literal["served", "restored"]

_MEANING = ("config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model")
"""Side files that change what a checkpoint computes."""

SERVED = RestoreOptions(dtype="float32")
"""Base plus delta in fp32, which is what a float32 checkpoint of a variant computes with."""

_OPTIONS: Mapping[str, RestoreOptions] = {"served": SERVED, "restored": RestoreOptions()}


@dataclass(frozen=True)
class DriftRequest:
    """What to measure. `variants` are ids, all by default; `originals` and `base` say where checkpoints are now.

    `out` is the file that the caller will write the results to: those of each variant are kept beside it as they are
    measured, and a later run with the same artifact, texts and settings goes on from there.
    """

    artifact: Path
    corpora: Sequence[Corpus]
    settings: EvalSettings
    through: Sequence[Through]
    scratch: Path
    variants: Sequence[str] | None = None
    originals: Mapping[str, str] | None = None
    base: str | None = None
    device: str = "cpu"
    out: Path | None = None


def measure_artifact(request: DriftRequest, progress: ProgressSink) -> tuple[list[DriftResult], str]:
    """The drift of every variant, and the digest of the artifact that was measured.

    Raises:
        SourceNotFound: an original or a referenced base is not there; says what to pass.
        SourceIncompatible: what is there is not the checkpoint the artifact was made from.
    """
    base_path = None if request.base is None else Path(request.base)
    with contextlib.ExitStack() as held:
        with Family.open(request.artifact, base=base_path) as family:
            digest, stored = family.artifact_digest, family.manifest.base
            ids = list(request.variants) if request.variants is not None else list(family.variant_ids)
            for id in ids:
                family.variant(id)  # an unknown id is the first thing to say
            log, results = _go_on(request, digest, ids, held, progress)
            originals = {id: _find_original(family, id, request.originals or {}) for id in ids if id not in results}
            for id, original in originals.items():
                _check_original(original, family.variant(id), progress)
        base: Path | None = None
        if originals:
            base = request.scratch / "base"
            restore(request.artifact, ["base"], base, base=base_path, progress=progress)
            if not (base / "config.json").exists():
                note = f"the {stored.mode} base has no config of its own: figures of the base are left out"
                progress.note(note, "warning")
                base = None
        for number, (id, original) in enumerate(originals.items()):
            folder = request.scratch / f"variant-{number}"
            candidates: dict[str, Path] = {kind: folder / kind for kind in request.through}
            for kind, place in candidates.items():
                restore(request.artifact, [id], place, _OPTIONS[kind], base=base_path, progress=progress)
            results[id] = measure_drift(
                original.root, candidates, base, request.corpora, request.settings, id, progress, request.device
            )
            shutil.rmtree(folder)
            if log is not None:
                log.add(id, results[id])
    return [result for id in ids for result in results[id]], digest


def _go_on(
    request: DriftRequest, digest: str, ids: Sequence[str], held: contextlib.ExitStack, progress: ProgressSink
) -> tuple[ResultLog | None, dict[str, list[DriftResult]]]:
    """The log of this measurement, held open, and what an earlier run has put into it."""
    if request.out is None:
        return None, {}
    log = held.enter_context(open_result_log(request.out, _binding(request, digest), progress))
    done = {id: results for id, results in log.finished().items() if id in ids}
    if done:
        progress.note(f"going on: {len(done)} of {len(ids)} variants were measured before ({', '.join(sorted(done))})")
    return log, done


def _binding(request: DriftRequest, digest: str) -> dict[str, Any]:
    """All that results depend on, by names that a reader understands."""
    settings = describe_settings(request.settings, (), request.device)
    return {
        **{name: settings[name] for name in settings.keys() - {"suite", "threads", "notes", "bos"}},
        "artifact": digest,
        "texts": {corpus.name: {**corpus.identity(), "limit": corpus.max_tokens} for corpus in request.corpora},
        "through": list(request.through),
        "version of mfs": __version__,
    }


def find_original(family: Family, id: str, given: Mapping[str, str], progress: ProgressSink) -> Path:
    """The folder of a variant's own checkpoint, every tensor of it checked.

    Raises:
        SourceNotFound, SourceIncompatible: as `measure_artifact`.
    """
    checkpoint = _find_original(family, id, given)
    _check_original(checkpoint, family.variant(id), progress)
    return checkpoint.root


def _find_original(family: Family, id: str, given: Mapping[str, str]) -> Checkpoint:
    place = given.get(id) or family.original_path(id)
    hint = f"Say where it is: --originals {id}=FOLDER"
    if place is None:
        raise SourceNotFound(f"the artifact does not say where the original of variant {id!r} is", hint=hint)
    try:
        return open_checkpoint(place, id)
    except SourceNotFound as error:
        raise SourceNotFound(f"the original of variant {id!r} is not to be had: {error.message}", hint=hint) from None


def _check_original(checkpoint: Checkpoint, record: VariantRecord, progress: ProgressSink) -> None:
    """Drift is against the variant's own original or it means nothing: every tensor is digested."""
    hint = f"Give the checkpoint that was decomposed: --originals {record.id}=FOLDER"
    progress.start(f"check the original of {record.id}", checkpoint.tensor_bytes)
    with TensorReader(checkpoint) as reader:
        for name, tensor in record.tensors.items():
            info = checkpoint.tensors.get(name)
            if info is None or hashlib.sha256(reader.raw(name).numpy().data).hexdigest() != tensor.original_sha256:
                raise SourceIncompatible(
                    f"{checkpoint.root} is not the original of variant {record.id!r}: tensor {name!r} differs",
                    hint=hint,
                )
            progress.advance(info.nbytes)
    progress.finish()
    for sidecar in checkpoint.sidecars:
        recorded = record.source.files.get(sidecar.name)
        digest = hashlib.sha256(read_sidecar(checkpoint, sidecar)).hexdigest()
        if sidecar.name in _MEANING and recorded != digest:
            raise SourceIncompatible(
                f"{checkpoint.root} is not the original of variant {record.id!r}: {sidecar.name} differs", hint=hint
            )
