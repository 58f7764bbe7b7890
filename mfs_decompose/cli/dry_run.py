"""`mfs decompose --dry-run`: the plan, for people, as JSON, and as a file."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mfs_decompose.cli.out import Output
from mfs_decompose.cli.plan_file import save_plan, shown_origins
from mfs_decompose.cli.progress import make_sink
from mfs_decompose.errors import ResourceShortage

if TYPE_CHECKING:
    from mfs_decompose.pipeline.prepare import Prepared
    from mfs_decompose.pipeline.request import DecomposeRequest


def dry_run(output: Output, request: DecomposeRequest, origins: Mapping[str, str], plan_file: Path | None) -> None:
    """Plan the request and show the plan; it is also written where `plan_file` names a file.

    Raises:
        MfsError: as pipeline/prepare.py does.
    """
    from mfs_decompose.pipeline.prepare import BASELINE_BYTES, prepare, thread_count
    from mfs_decompose.plan.duration import estimate_duration
    from mfs_decompose.plan.summary import summarise

    prepared = prepare(request, make_sink(output), headers_only=True)
    document = summarise(prepared.plan, prepared.estimate, prepared.base, prepared.variants, request.out)
    document["recipe_origins"] = dict(origins)
    document["peak_ram"] = min(document["peak_ram"] + BASELINE_BYTES, request.recipe.limits.max_ram or 2**63)
    if plan_file is not None:
        save_plan(plan_file, document)
    duration = estimate_duration(prepared.plan, prepared.estimate.base_bytes, thread_count(request))
    document["seconds_estimated"], document["hashing_measured"] = duration.seconds, duration.hashing
    shortage = _shortage(request, prepared)
    if shortage is not None and output.json_mode:
        raise shortage
    output.document(document)
    if output.verbosity > 0:
        output.table(("key", "value", "from"), shown_origins(request.recipe, origins))
        output.line()
    _show_plan(output, document, (*prepared.notes, *prepared.warnings))
    if shortage is not None:
        raise shortage
    if plan_file is None:
        output.say("dry run: nothing was read but headers, and nothing was written")
        return
    output.say(f"dry run: nothing was read but headers, and only the plan was written: {plan_file}")
    output.say(f"next: {shlex.join(['mfs', 'decompose', '--plan', str(plan_file), '--out', str(request.out)])}")


def _shortage(request: DecomposeRequest, prepared: Prepared) -> ResourceShortage | None:
    """What the run would be refused for, in the same words."""
    from mfs_decompose.pipeline.prepare import check_disk, memory_limit

    try:
        memory_limit(request.recipe, prepared.plan)
        check_disk(request, prepared.estimate, 0)
    except ResourceShortage as shortage:
        return shortage
    return None


def _show_plan(output: Output, document: Mapping[str, Any], notes: Iterable[str]) -> None:
    from mfs_decompose.units import format_bytes, format_duration, format_fraction

    rows = [
        (v["id"], format_bytes(v["checkpoint_bytes"]), f"<= {format_bytes(v['max_bytes'])}",
         format_fraction(v["max_footprint"]), ", ".join(f"{codec} x {count}" for codec, count in v["codecs"].items()))
        for v in document["variants"]
    ]  # fmt: skip
    output.table(
        ("variant", "checkpoint", "bytes", "footprint", "tensors"), rows, right=("checkpoint", "bytes", "footprint")
    )
    target = document["recipe"].get("objective", {}).get("target")
    if target is not None:
        output.line(
            f"target {target}: sizes are unknown before weights are read and drift is measured; the bytes above are "
            "what all bits may take"
        )
    for note in notes:
        output.line(f"note: {note}")
    output.line(
        f"base: {document['base']['mode']}, {document['base']['store']}, {format_bytes(document['base']['bytes'])}; "
        f"coverage {document['coverage']['planned']} of {document['coverage']['tensors']} tensors in "
        f"{document['coverage']['groups']} groups; lineage: not checked"
    )
    output.line(
        f"disk: {format_bytes(document['disk_bytes'])} needed at most, {format_bytes(document['disk_free'])} free; "
        f"memory: {format_bytes(document['peak_ram'])}, read: {format_bytes(document['read_bytes'])}, each at most"
    )
    output.line(
        f"time: about {format_duration(document['seconds_estimated'])}, an estimate from this plan's work and from "
        f"{format_bytes(int(document['hashing_measured']))}/s of hashing measured now"
    )
