"""What to expect of a run before anything is encoded: its first half, and allocation at other sizes.

What is read and fitted stays in the run's workspace, so the run itself goes on from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mfs_decompose.artifact.layout import MANIFEST
from mfs_decompose.errors import OutputBusy
from mfs_decompose.events import NullSink, ProgressSink
from mfs_decompose.pipeline.begin import Begun, Clock, begin
from mfs_decompose.pipeline.device import choose_device, platform_facts
from mfs_decompose.pipeline.forecast_ladder import VariantForecast, foresee_variant
from mfs_decompose.pipeline.prepare import Prepared, prepare
from mfs_decompose.pipeline.request import DecomposeRequest
from mfs_decompose.pipeline.workspace import partial_folder
from mfs_decompose.plan.allocate import Key
from mfs_decompose.plan.forecast import DriftCurve
from mfs_decompose.provenance import tool_versions


@dataclass(frozen=True)
class Forecast:
    """What to expect of every variant. `work` holds what was read and fitted; `digests` are those of all tensors as
    they were read, and of the base's as stored.
    """

    variants: tuple[VariantForecast, ...]
    recipe: Mapping[str, Any]
    base_mode: str
    base_store: str
    base_bytes: int
    shared_bytes: int
    keep_exact: bool
    work: Path
    bytes_read: int
    resumed_units: int
    digests: Mapping[Key, str]
    base_digests: Mapping[str, str]


def forecast(
    request: DecomposeRequest,
    progress: ProgressSink | None = None,
    curves: Mapping[str, DriftCurve] | None = None,
) -> Forecast:
    """Read and fit as the run would, and foresee sizes; no artifact is written and nothing encoded.

    `curves` say what scores of variants come to in drift; those that the request calibrates come on top.

    Raises:
        OutputBusy: the artifact is finished already.
        MfsError: as `decompose` does.
    """
    sink = progress or NullSink()
    if request.out.name in ("", ".."):
        request = replace(request, out=request.out.resolve())
    prepared = prepare(request, sink)
    for note in prepared.notes:
        sink.note(note)
    for warning in prepared.warnings:
        sink.note(warning, "warning")
    if (request.out / MANIFEST).exists() and not request.overwrite:
        raise OutputBusy(
            f"{request.out} is a finished artifact: there is no run left to foresee",
            hint=f"mfs inspect {request.out} --frontier shows other sizes; or choose another --out.",
        )
    device = choose_device(request.device)
    with begin(request, prepared, device, platform_facts(device), tool_versions(), Clock(), sink) as begun:
        return _foresee(request, prepared, begun, curves or {}, sink)


def _foresee(
    request: DecomposeRequest,
    prepared: Prepared,
    begun: Begun,
    curves: Mapping[str, DriftCurve],
    sink: ProgressSink,
) -> Forecast:
    fitted = {id: one.curve for id, one in begun.calibrations.items() if one.curve is not None}
    known = {**curves, **fitted}
    variants: list[VariantForecast] = []
    sink.start("allocate at other sizes", None)
    for variant in begun.plan.variants:
        share = begun.shared.shares.get(variant.id, 0)
        variants.append(foresee_variant(begun.allocator, variant.id, share, known.get(variant.id)))
    sink.finish()
    workspace = begun.job.workspace
    return Forecast(
        variants=tuple(variants),
        recipe=begun.plan.recipe.canonical(),
        base_mode=begun.plan.base_mode,
        base_store=begun.plan.base_store,
        base_bytes=sum(record.size for record in begun.base_files),
        shared_bytes=0 if begun.shared.record is None else begun.shared.record.bytes,
        keep_exact=request.recipe.deltas.keep_exact,
        work=partial_folder(request.out),
        bytes_read=begun.job.sources.bytes_read,
        resumed_units=begun.resumed,
        digests={key: facts.sha256 for key, facts in begun.surveyed.items()},
        base_digests=dict(workspace.done.base_digests),
    )
