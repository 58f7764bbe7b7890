"""Measure what an artifact holds: restore, and hold it against the variants' own checkpoints."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mfs_decompose import __version__
from mfs_decompose.artifact.canonical import digest_of
from mfs_decompose.artifact.reader import Family
from mfs_decompose.artifact.records import VariantRecord, source_digests
from mfs_decompose.errors import SourceIncompatible, SourceNotFound, UsageError
from mfs_decompose.events import ProgressSink
from mfs_decompose.fidelity.comparable import comparable
from mfs_decompose.fidelity.document import describe_settings
from mfs_decompose.fidelity.evaluate import measure_drift, save_reference
from mfs_decompose.fidelity.reference import StoredReference
from mfs_decompose.fidelity.result import DriftResult
from mfs_decompose.fidelity.result_log import ResultLog, open_result_log
from mfs_decompose.fidelity.served_runtime import ServedCandidate, load_served
from mfs_decompose.fidelity.settings import EvalSettings
from mfs_decompose.fidelity.text import Corpus
from mfs_decompose.pipeline.merge_folder import write_merge
from mfs_decompose.pipeline.restore import RestoreOptions, restore
from mfs_decompose.source.checkpoint import Checkpoint, TensorReader, open_checkpoint, read_sidecar
from mfs_decompose.source.resolve import open_source

if TYPE_CHECKING:
    from mfs_decompose.runtime.loaded import LoadedFamily

Through = Literal["served", "restored"]
Engine = Literal["auto", "runtime", "restore"]

_MEANING = ("config.json", "adapter_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model")
"""Side files that change what a checkpoint computes."""

SERVED = RestoreOptions(dtype="float32")
"""Base plus delta in fp32, which is what a float32 checkpoint of a variant computes with."""

_OPTIONS: Mapping[str, RestoreOptions] = {"served": SERVED, "restored": RestoreOptions()}


@dataclass(frozen=True)
class DriftRequest:
    """What to measure. `variants` are ids, all by default; `originals` and `base` say where checkpoints are now.

    `out` is the file that the caller will write the results to: those of each variant are kept beside it as they are
    measured, and a later run with the same artifact, texts and settings goes on from there. `reference` is a saved
    one, which stands for the original of its variant; only that one is measured then. `engine` is what answers as
    served: the runtime, transformers on a restored fp32 checkpoint (`restore`), or that only for a variant which the
    runtime refuses (`auto`).
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
    reference: Path | None = None
    engine: Engine = "auto"


def measure_artifact(request: DriftRequest, progress: ProgressSink) -> tuple[list[DriftResult], str]:
    """The drift of every variant, and the digest of the artifact that was measured.

    Raises:
        SourceNotFound: an original or a referenced base is not there; says what to pass.
        SourceIncompatible: what is there is not the checkpoint the artifact was made from.
    """
    with contextlib.ExitStack() as held:
        with Family.open(request.artifact, base=request.base) as family:
            digest, stored = family.artifact_digest, family.manifest.base
            ids = list(request.variants) if request.variants is not None else list(family.variant_ids)
            originals: dict[str, Path | StoredReference] = {}
            adapters: dict[str, Checkpoint] = {}
            if request.reference is not None:
                id, stand_in = open_reference(family, request)
                ids, originals = [id], {id: stand_in}
            for id in ids:
                family.variant(id)  # an unknown id is the first thing to say
            log, results = _go_on(request, digest, ids, held, progress)
            pending = [id for id in ids if id not in results]
            found = {
                id: _find_original(family, id, request.originals or {}, progress)
                for id in pending
                if id not in originals
            }
            for id, original in found.items():
                _check_original(original, family.variant(id), progress)
                if original.adapter is None:
                    originals[id] = original.root
                else:
                    adapters[id] = original
        base: Path | None = None
        if pending:
            base = request.scratch / "base"
            restore(request.artifact, ["base"], base, base=request.base, progress=progress)
            if not (base / "config.json").exists():
                note = f"the {stored.mode} base has no config of its own: figures of the base are left out"
                progress.note(note, "warning")
                base = None
        for number, id in enumerate(pending):
            folder = request.scratch / f"variant-{number}"
            if id in adapters:
                originals[id] = merged = folder / "original"
                write_merge(adapters[id], open_checkpoint(request.scratch / "base", "base"), merged, progress)
            candidates: dict[str, Path | ServedCandidate] = {}
            for kind in request.through:
                loaded = _load_served(request, id, progress) if kind == "served" else None
                if loaded is not None:
                    candidates[kind] = ServedCandidate.of(loaded, id, folder / kind)
                    continue
                candidates[kind] = place = folder / kind
                restore(request.artifact, [id], place, _OPTIONS[kind], base=request.base, progress=progress)
            results[id] = measure_drift(
                originals[id], candidates, base, request.corpora, request.settings, id, progress, request.device
            )
            candidates.clear()
            shutil.rmtree(folder)
            if log is not None:
                log.add(id, results[id])
    return [result for id in ids for result in results[id]], digest


def _load_served(request: DriftRequest, id: str, progress: ProgressSink) -> LoadedFamily | None:
    """The family with one variant, so that memory does not grow with how many there are; None: a restore answers."""
    if request.engine == "restore":
        return None
    try:
        return load_served(request.artifact, [id], request.base, request.settings, request.device)
    except SourceIncompatible as error:
        if request.engine == "runtime":
            raise
        progress.note(f"{id}: the runtime does not serve it ({error.message}), an fp32 restore answers", "warning")
        return None


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
        "engine": request.engine,
    }


def save_artifact_reference(request: DriftRequest, path: Path, progress: ProgressSink) -> int:
    """Keep what the original of the request's one variant answers to its texts; returns the file's bytes.

    Raises:
        UsageError: the request is for several variants.
        SourceNotFound, SourceIncompatible, ResourceShortage: as `measure_artifact`.
    """
    with Family.open(request.artifact, base=request.base) as family:
        ids = list(request.variants) if request.variants is not None else list(family.variant_ids)
        if len(ids) != 1:
            raise UsageError(
                f"expected one variant to save a reference of, found {', '.join(ids)}", hint=f"--variant {ids[0]}"
            )
        record = family.variant(ids[0])
        original = find_original(family, ids[0], request, progress)
    about = {
        "variant": ids[0],
        "original": _original_digest(record),
        "settings": describe_settings(request.settings, (), request.device),
    }
    return save_reference(original, request.corpora, request.settings, path, about, progress, request.device)


def open_reference(family: Family, request: DriftRequest) -> tuple[str, StoredReference]:
    """The saved reference of a request, and the variant it is of.

    Raises:
        SourceNotFound, ArtifactInvalid: it is not there, or no whole reference.
        UsageError: it is of another variant than asked for, or was saved under other settings.
        SourceIncompatible: the artifact's variant was made from another original.
    """
    assert request.reference is not None
    reference = StoredReference.open(request.reference)
    id, saved = str(reference.about["variant"]), reference.about["settings"]
    if request.variants is not None and list(request.variants) != [id]:
        raise UsageError(
            f"expected a reference of {', '.join(request.variants)}, found one of {id} in {request.reference}",
            hint=f"--variant {id}",
        )
    if reference.about["original"] != _original_digest(family.variant(id)):
        raise SourceIncompatible(f"{request.reference} is of another original than variant {id!r} was made from")
    alike = comparable(saved, describe_settings(request.settings, (), request.device))
    if not alike:
        raise UsageError(
            f"{request.reference} was saved under other settings than asked for: {'; '.join(alike.differences)}",
            hint="measure under the settings it was saved with",
        )
    return id, reference


def _original_digest(record: VariantRecord) -> str:
    """sha256 over what a variant's original computes with, whatever artifact holds the variant."""
    return digest_of(
        {
            "tensors": {name: [t.dtype, list(t.shape), t.original_sha256] for name, t in record.tensors.items()},
            "files": {name: digest for name, digest in record.source.files.items() if name in _MEANING},
        }
    )


def find_original(family: Family, id: str, request: DriftRequest, progress: ProgressSink) -> Path:
    """The folder of a variant's own checkpoint, every tensor of it checked; an adapter's merge is made in scratch.

    Raises:
        SourceNotFound, SourceIncompatible: as `measure_artifact`.
    """
    checkpoint = _find_original(family, id, request.originals or {}, progress)
    _check_original(checkpoint, family.variant(id), progress)
    if checkpoint.adapter is None:
        return checkpoint.root
    folder = Path(tempfile.mkdtemp(prefix="merge-", dir=request.scratch))
    restore(request.artifact, ["base"], folder / "base", base=request.base, progress=progress)
    write_merge(checkpoint, open_checkpoint(folder / "base", "base"), folder / "original", progress)
    return folder / "original"


def _find_original(family: Family, id: str, given: Mapping[str, str], progress: ProgressSink) -> Checkpoint:
    place = given.get(id) or family.original_ref(id)
    hint = f"Say where it is: --originals {id}=FOLDER"
    if place is None:
        raise SourceNotFound(f"the artifact does not say where the original of variant {id!r} is", hint=hint)
    try:
        return open_source(place, id, progress=progress)
    except SourceNotFound as error:
        raise SourceNotFound(f"the original of variant {id!r} is not to be had: {error.message}", hint=hint) from None


def _check_original(checkpoint: Checkpoint, record: VariantRecord, progress: ProgressSink) -> None:
    """Drift is against the variant's own original or it means nothing: every tensor is digested."""
    hint = f"Give the checkpoint that was decomposed: --originals {record.id}=FOLDER"
    progress.start(f"check the original of {record.id}", checkpoint.tensor_bytes)
    with TensorReader(checkpoint) as reader:
        for name, expected in source_digests(record).items():
            info = checkpoint.tensors.get(name)
            if info is None or hashlib.sha256(reader.raw(name).numpy().data).hexdigest() != expected:
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
