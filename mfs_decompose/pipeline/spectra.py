"""What a variant changed, tensor by tensor: how many weights, how much, along how many directions, above what noise.

Spectra are taken at one thread, tensors side by side: figures do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from mfs_decompose.artifact.reader import Family
from mfs_decompose.artifact.records import VariantRecord
from mfs_decompose.errors import UsageError
from mfs_decompose.events import ProgressSink
from mfs_decompose.pipeline.device import choose_device
from mfs_decompose.pipeline.scheduler import Stop, one_torch_thread, run_units
from mfs_decompose.pipeline.spectra_sides import AnotherOriginal, Of, Pair, open_original, pair_up
from mfs_decompose.pipeline.spectra_tensor import Measured, measure_pair, peak_bytes
from mfs_decompose.provenance import available_memory, processors
from mfs_decompose.source.checkpoint import TensorReader


@dataclass(frozen=True)
class VariantSpectra:
    """All matrices of one variant, by tensor and slice; `of` is `original` if every delta is the original's."""

    id: str
    of: Of
    matrices: tuple[Measured, ...]


@dataclass(frozen=True)
class SpectraRequest:
    """What to look at: `variants` by id, all where None; `tensors` a pattern of whole names, such as `*.q_proj.*`.

    `originals` and `base` say where checkpoints are now.
    """

    artifact: Path
    variants: tuple[str, ...] | None = None
    tensors: str | None = None
    originals: Mapping[str, str] | None = None
    base: str | None = None
    offline: bool = False
    device: str = "cpu"
    threads: int | None = None


@dataclass(frozen=True)
class _Unit:
    """One tensor to be looked at, and the memory that takes at most."""

    pair: Pair
    peak_bytes: int


def measure_spectra(request: SpectraRequest, progress: ProgressSink) -> tuple[str, list[VariantSpectra]]:
    """The artifact's digest, and the spectra of its variants: of the originals' deltas where they are to be had.

    Raises:
        UsageError: no such variant or device, or no tensor has such a name.
        SourceNotFound, SourceIncompatible: a checkpoint that is given or referred to is not there, or another one.
        ArtifactInvalid: the artifact is damaged.
    """
    device = choose_device(request.device)
    with Family.open(request.artifact, base=request.base) as family:
        given = request.originals or {}
        ids = request.variants if request.variants is not None else family.variant_ids
        for id in given:
            if family.variant(id).id not in ids:
                raise UsageError(f"expected --originals of {', '.join(ids)}, found one of {id!r}", hint="Leave it out.")
        chosen = {id: _chosen(family.variant(id), request.tensors) for id in ids}
        if request.tensors is not None and not any(chosen.values()):
            raise UsageError(
                f"expected --tensors to match names of tensors, found none like {request.tensors!r}",
                hint="a pattern covers a whole name, such as '*.q_proj.*'; mfs inspect ART --variant ID lists names",
            )
        found = []
        for id, names in chosen.items():
            record = family.variant(id)
            original = open_original(family, record, given.get(id), request.offline, progress)
            try:
                found.append(_measure(family, record, names, original, request.threads, device, progress))
            except AnotherOriginal as error:
                if id in given:
                    raise
                progress.note(f"{error.message}: looking at what is stored of it instead", "warning")
                found.append(_measure(family, record, names, None, request.threads, device, progress))
        return family.artifact_digest, found


def _chosen(record: VariantRecord, pattern: str | None) -> list[str]:
    return [name for name in record.tensors if pattern is None or fnmatchcase(name, pattern)]


def _measure(
    family: Family,
    record: VariantRecord,
    names: list[str],
    original: TensorReader | None,
    threads: int | None,
    device: str,
    progress: ProgressSink,
) -> VariantSpectra:
    units = [_Unit(pair, peak_bytes(pair)) for pair in (pair_up(family, record, n, original) for n in names)]
    results: dict[str, list[Measured]] = {}
    progress.start(f"spectra of {record.id}", sum(unit.pair.spec.nbytes for unit in units))

    def work(unit: _Unit, stop: Stop) -> list[Measured]:
        return measure_pair(unit.pair, record.id, original, device, stop.check)

    def done(unit: _Unit, measured: list[Measured]) -> None:
        results[unit.pair.name] = measured
        progress.advance(unit.pair.spec.nbytes)

    with one_torch_thread():
        largest_first = sorted(units, key=lambda unit: -unit.peak_bytes)
        run_units(largest_first, work, done, threads or processors(), available_memory() // 2)
    progress.finish()
    stored = any(unit.pair.of == "stored" for unit in units if unit.pair.comparable)
    matrices = tuple(one for name in names for one in results[name])
    return VariantSpectra(record.id, "stored" if stored else "original", matrices)
