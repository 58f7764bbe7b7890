"""Measure what an artifact holds: restore, and hold it against the variants' own checkpoints."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mfs_decompose.artifact.reader import Family
from mfs_decompose.artifact.records import VariantRecord
from mfs_decompose.errors import SourceIncompatible, SourceNotFound
from mfs_decompose.events import ProgressSink
from mfs_decompose.fidelity.evaluate import measure_drift
from mfs_decompose.fidelity.result import DriftResult
from mfs_decompose.fidelity.settings import EvalSettings
from mfs_decompose.fidelity.text import Corpus
from mfs_decompose.pipeline.restore import RestoreOptions, restore
from mfs_decompose.source.checkpoint import Checkpoint, TensorReader, open_checkpoint, read_sidecar

Through = Literal["served", "restored"]

_MEANING = ("config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model")
"""Side files that change what a checkpoint computes."""

_OPTIONS: Mapping[str, RestoreOptions] = {
    # Served is base plus delta in fp32, which is what a float32 checkpoint of it computes with.
    "served": RestoreOptions(dtype="float32"),
    "restored": RestoreOptions(),
}


@dataclass(frozen=True)
class DriftRequest:
    """What to measure. `variants` are ids, all by default; `originals` and `base` say where checkpoints are now."""

    artifact: Path
    corpora: Sequence[Corpus]
    settings: EvalSettings
    through: Sequence[Through]
    scratch: Path
    variants: Sequence[str] | None = None
    originals: Mapping[str, str] | None = None
    base: str | None = None
    device: str = "cpu"


def measure_artifact(request: DriftRequest, progress: ProgressSink) -> tuple[list[DriftResult], str]:
    """The drift of every variant, and the digest of the artifact that was measured.

    Raises:
        SourceNotFound: an original or a referenced base is not there; says what to pass.
        SourceIncompatible: what is there is not the checkpoint the artifact was made from.
    """
    base_path = None if request.base is None else Path(request.base)
    with Family.open(request.artifact, base=base_path) as family:
        digest, stored = family.artifact_digest, family.manifest.base
        ids = list(request.variants) if request.variants is not None else list(family.variant_ids)
        originals = {id: _find_original(family, id, request.originals or {}) for id in ids}
        for id, original in originals.items():
            _check_original(original, family.variant(id), progress)
    base: Path | None = request.scratch / "base"
    assert base is not None
    restore(request.artifact, ["base"], base, base=base_path, progress=progress)
    if not (base / "config.json").exists():
        progress.note(f"the {stored.mode} base has no config of its own: figures of the base are left out", "warning")
        base = None
    results: list[DriftResult] = []
    for id in ids:
        folder = request.scratch / f"variant-{len(results)}"
        candidates: dict[str, Path] = {kind: folder / kind for kind in request.through}
        for kind, place in candidates.items():
            restore(request.artifact, [id], place, _OPTIONS[kind], base=base_path, progress=progress)
        results += measure_drift(
            originals[id].root, candidates, base, request.corpora, request.settings, id, progress, request.device
        )
        shutil.rmtree(folder)
    return results, digest


def _find_original(family: Family, id: str, given: Mapping[str, str]) -> Checkpoint:
    family.variant(id)  # an unknown id is the first thing to say
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
