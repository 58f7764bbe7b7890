"""Where an artifact's bytes went, and what other sizes would leave: the first from its manifest, the second by reading
the sources again where they are at hand.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from mfs_decompose.artifact.reader import Family
from mfs_decompose.artifact.records import TensorRecord, VariantRecord, relative_error
from mfs_decompose.codec.tree import CodecNode
from mfs_decompose.errors import MfsError, SourceIncompatible, SourceNotFound
from mfs_decompose.events import ProgressSink
from mfs_decompose.pipeline.forecast import Forecast, forecast
from mfs_decompose.pipeline.forecast_ladder import VariantForecast
from mfs_decompose.pipeline.request import DecomposeRequest
from mfs_decompose.plan.layers import LAYER_TYPES, depth_of, layer_number, layer_type
from mfs_decompose.recipe.schema import Recipe

DEPTH_NAMES = ("first third", "middle third", "last third")
OUTSIDE = "outside layers"


@dataclass(frozen=True)
class FrontierRequest:
    """What to look at: `variants` by id, all where None. `originals` and `base` say where checkpoints are now."""

    artifact: Path
    variants: tuple[str, ...] | None = None
    originals: Mapping[str, str] | None = None
    base: str | None = None
    offline: bool = False
    device: str = "auto"
    threads: int | None = None


@dataclass(frozen=True)
class Spent:
    """A part of a variant: its tensors, their bytes without headers, and the error of what is served of them."""

    name: str
    tensors: int
    nbytes: int
    energy: float
    error: float

    @property
    def rel_error(self) -> float:
        return relative_error(self.energy, self.error)


@dataclass(frozen=True)
class VariantFrontier:
    """A variant as stored, and its ladder of other sizes, None where there is none."""

    id: str
    nbytes: int
    shared_bytes: int
    checkpoint_bytes: int
    footprint: float
    rel_error: float
    codecs: tuple[Spent, ...]
    layers: tuple[Spent, ...]
    depths: tuple[Spent, ...]
    ladder: VariantForecast | None


def measure_frontier(
    request: FrontierRequest, progress: ProgressSink
) -> tuple[str, tuple[VariantFrontier, ...], str | None]:
    """The artifact's digest, its variants, and why there are no ladders, None where there are.

    Raises:
        UsageError: no such variant or device.
        SourceNotFound, SourceIncompatible: a checkpoint that is given is not there, or another one.
        ArtifactInvalid: the artifact is damaged.
    """
    with Family.open(request.artifact) as family:
        ids = request.variants if request.variants is not None else family.variant_ids
        records = [family.variant(id) for id in ids]
        found, why = _survey_again(family, request, ids)(progress)
    ladders = {} if found is None else {one.id: one for one in found.variants}
    return family.artifact_digest, tuple(_variant(record, ladders.get(record.id)) for record in records), why


def _variant(record: VariantRecord, ladder: VariantForecast | None) -> VariantFrontier:
    layers = 1 + max((number for name in record.tensors if (number := layer_number(name)) is not None), default=-1)

    def depth(name: str) -> str:
        number = layer_number(name)
        return OUTSIDE if number is None else DEPTH_NAMES[depth_of(number, layers)]

    return VariantFrontier(
        id=record.id,
        nbytes=record.bytes,
        shared_bytes=record.shared_bytes,
        checkpoint_bytes=record.checkpoint_bytes,
        footprint=record.footprint,
        rel_error=record.rel_error,
        codecs=_spent(record, lambda name, tensor: CodecNode.from_json(tensor.tree).text(), ()),
        layers=_spent(record, lambda name, _: layer_type(name), LAYER_TYPES),
        depths=_spent(record, lambda name, _: depth(name), (*DEPTH_NAMES, OUTSIDE)),
        ladder=ladder,
    )


def _spent(
    record: VariantRecord, part_of: Callable[[str, TensorRecord], str], order: tuple[str, ...]
) -> tuple[Spent, ...]:
    """The parts in this order; without one, the largest first. Tensors of an adapter count where they belong."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0.0, 0.0])
    for name, tensor in record.tensors.items():
        one = sums[part_of(name, tensor)]
        one[0] += 1
        one[1] += tensor.blob.nbytes if tensor.blob is not None else 0
        one[2] += tensor.energy
        one[3] += tensor.error
    for name, kept in (record.adapter.tensors if record.adapter is not None else {}).items():
        part = "adapter" if not order else (layer_type(name) if order is LAYER_TYPES else OUTSIDE)
        sums[part][1] += kept.blob.nbytes if kept.blob is not None else 0
    rows = [Spent(name, int(n), int(size), energy, error) for name, (n, size, energy, error) in sums.items()]
    if order:
        return tuple(sorted(rows, key=lambda row: order.index(row.name)))
    return tuple(sorted(rows, key=lambda row: (-row.nbytes, row.name)))


_Answer = tuple[Forecast | None, str | None]


def _survey_again(family: Family, request: FrontierRequest, ids: tuple[str, ...]) -> Callable[[ProgressSink], _Answer]:
    """What reads the sources again and foresees, or says why it cannot."""
    manifest = family.manifest
    given = dict(request.originals or {})
    for id in given:
        family.variant(id)
    try:
        recipe = Recipe.model_validate(manifest.recipe)
    except ValidationError:
        return _why("its recipe is one that this version does not read")
    if recipe.objective.kind in (None, "rank", "density"):
        return _why("its recipe fixes every size: mfs decompose --dry-run --spectra foresees others")
    mode = manifest.base.mode
    needed = ids if mode == "known" else family.variant_ids
    refs = {id: given.get(id) or family.original_ref(id) for id in needed}
    base = (request.base or family.original_ref("base")) if mode in ("known", "shared") else None
    away = [id for id, ref in refs.items() if ref is None] + ["base"] * (base is None and mode in ("known", "shared"))
    if away:
        return _why(f"nobody knows where {', '.join(away)} is: give --originals ID=REF and --base REF")
    # What this artifact may refer to is enough here, and saves a copy of the base.
    store = "reference" if mode in ("known", "shared") else "copy"
    settled = recipe.model_copy(update={"base": recipe.base.model_copy(update={"mode": mode, "store": store})})
    explicit = bool(given or request.base)

    def survey(progress: ProgressSink) -> _Answer:
        try:
            with tempfile.TemporaryDirectory(prefix="mfs-frontier-") as folder:
                asked = DecomposeRequest(
                    variants={id: ref for id, ref in refs.items() if ref is not None},
                    out=Path(folder) / "again",
                    recipe=settled,
                    base=base,
                    device=request.device,
                    offline=request.offline or not explicit,  # a hint fetches nothing from the Hub
                    threads=request.threads,
                )
                found = forecast(asked, progress)
            _check(family, found)
        except (SourceNotFound, SourceIncompatible) as error:
            if explicit:
                raise
            return None, f"the sources are not at hand: {error.message}"
        return found, None

    return survey


def _why(reason: str) -> Callable[[ProgressSink], _Answer]:
    return lambda _: (None, reason)


def _check(family: Family, found: Forecast) -> None:
    """Hold what was read against the digests on record.

    Raises:
        SourceIncompatible: a source is another one.
    """
    for (id, name), digest in found.digests.items():
        tensor = family.variant(id).tensors.get(name)
        if tensor is None or tensor.original_sha256 != digest:
            raise _stranger(f"variant {id!r}", name, f"--originals {id}=FOLDER")
    for name, digest in found.base_digests.items():
        kept = family.manifest.base.tensors.get(name)
        if kept is None or kept.sha256 != digest:
            raise _stranger("the base", name, "--base FOLDER")


def _stranger(what: str, name: str, option: str) -> MfsError:
    return SourceIncompatible(
        f"what was read for {what} is not what the artifact was made from: tensor {name[:200]!r} differs",
        hint=f"Give the checkpoint that was decomposed: {option}",
    )
