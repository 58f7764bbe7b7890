"""Before any weight is read: open the sources, align them, plan, and make sure that the run can end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from mfs_decompose.artifact.atomic import require_writable
from mfs_decompose.artifact.layout import MANIFEST, RESERVED_IDS, is_variant_id
from mfs_decompose.errors import OutputBusy, ResourceShortage, UsageError
from mfs_decompose.events import ProgressSink
from mfs_decompose.pipeline.base_choice import GIVEN, choose_base, say_base, settle_plan
from mfs_decompose.pipeline.merged import merged_variants, require_no_adapter, require_whole, resolve_adapters, say_kept
from mfs_decompose.pipeline.planned import PlannedRequest
from mfs_decompose.pipeline.request import DecomposeRequest
from mfs_decompose.plan.build import build_plan
from mfs_decompose.plan.estimate import Estimate, estimate
from mfs_decompose.plan.model import Plan
from mfs_decompose.plan.saved import check_outcome, check_sources
from mfs_decompose.plan.summary import summarise
from mfs_decompose.provenance import available_memory, free_disk, processors
from mfs_decompose.recipe.schema import Recipe
from mfs_decompose.source.adapter import Merge
from mfs_decompose.source.align import Alignment, align, align_mean
from mfs_decompose.source.checkpoint import Checkpoint
from mfs_decompose.source.quantised import describe_quantised
from mfs_decompose.source.rename_weights import open_heads
from mfs_decompose.source.resolve import open_source
from mfs_decompose.units import format_bytes

BASELINE_BYTES = 350_000_000
"""Anonymous memory of the interpreter with its libraries, measured at 0.26 GB, and some room."""


@dataclass(frozen=True)
class Prepared:
    """A run that could begin."""

    base: Checkpoint | None
    variants: tuple[Checkpoint, ...]
    alignment: Alignment
    plan: Plan
    estimate: Estimate
    start: Checkpoint | None
    """Where a refined base may start from."""
    merges: Mapping[str, Merge]
    """Of each variant that is an adapter, what it makes of the base."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Facts that a user would want to know."""
        of_adapters = (f"{id}: {note}" for id, merge in self.merges.items() for note in merge.notes)
        return (*of_adapters, *say_kept(self.plan), *say_base(self.plan))

    @property
    def warnings(self) -> tuple[str, ...]:
        """What may not be what the user meant."""
        of_adapters = (f"{id}: {warning}" for id, merge in self.merges.items() for warning in merge.warnings)
        return (*self.alignment.notes, *of_adapters)


def prepare(request: DecomposeRequest, progress: ProgressSink | None = None, *, headers_only: bool = False) -> Prepared:
    """Open all sources from headers alone and plan the run; nothing is written at `request.out`.

    Models of the Hub are fetched first, or with `headers_only` looked at from afar. A planned request is held against
    its plan.

    Raises:
        MfsError: with the exit code of what is wrong, see errors.py.
    """
    check_ids(request)
    open_one = partial(open_source, offline=request.offline, progress=progress, headers_only=headers_only)
    base = None if request.base is None else open_one(request.base, "base")
    variants = tuple(open_one(request.variants[id], id) for id in sorted(request.variants))
    require_whole(base)
    saved = request.saved if isinstance(request, PlannedRequest) else None
    if saved is not None:
        check_sources(saved, base, variants)
    check_output(request, [*variants, *([base] if base is not None else [])])
    if saved is None:
        mode, store, auto = choose_base(request.recipe, base, variants)
    else:
        mode, store, auto = saved.base_mode, saved.base_store, saved.base_auto
    quantised = tuple(describe_quantised(base if mode in GIVEN else None, variants))
    start = base if mode == "refined" else None
    if base is not None and mode in GIVEN:
        merges = resolve_adapters(variants, base)
        tensors = {name: info.spec for name, info in base.tensors.items()}
        merged = merged_variants(variants, merges)
        alignment = align(tensors, merged, base.config, heads=open_heads(base, merged))
    else:
        require_no_adapter(variants)
        base, merges = None, {}
        tensors, alignment = align_mean(variants, heads=open_heads(None, variants))
    alignment = replace(alignment, notes=(*alignment.notes, *quantised))
    plan = settle_plan(build_plan(request.recipe, alignment, variants, tensors, mode, store, merges), auto=auto)
    estimated = estimate(plan, base, variants, thread_count(request))
    if saved is not None:
        check_outcome(saved, summarise(plan, estimated, base, variants, request.out, start))
    return Prepared(base, variants, alignment, plan, estimated, start, merges)


def check_ids(request: DecomposeRequest) -> None:
    """Refuse variant ids that could not be told apart, or used as a name.

    Raises:
        UsageError: naming the id.
    """
    if not request.variants:
        raise UsageError(
            "expected at least one variant, found none", hint="Name them: --variants math=./math code=./code"
        )
    folded: dict[str, str] = {}
    for id in request.variants:
        if id in RESERVED_IDS or not is_variant_id(id):
            raise UsageError(
                f"expected a variant id of letters, digits, '.', '_' and '-', at most 64 and not 'base' or 'all', "
                f"found {id!r}",
                hint="Name the variant yourself: --variants NAME=FOLDER",
            )
        if id.casefold() in folded:
            raise UsageError(
                f"two variants are called {folded[id.casefold()]!r} and {id!r}", hint="Give each an id of its own."
            )
        folded[id.casefold()] = id
    if request.base is None and len(request.variants) < 2:
        raise UsageError("expected a base or at least two variants, found one variant", hint="Add --base FOLDER.")


def check_output(request: DecomposeRequest, sources: list[Checkpoint]) -> None:
    """Refuse an output that is, holds, or lies in an input, or that something else is.

    Raises:
        OutputBusy: naming what is in the way.
    """
    out = request.out.absolute()
    real = out.resolve()
    for source in sources:
        root = source.root.resolve()
        if real == root or real.is_relative_to(root) or root.is_relative_to(real):
            raise OutputBusy(f"the output {out} overlaps the source {source.root}", hint="Choose another --out.")
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise OutputBusy(
            f"expected {out} to be absent, found something that is no folder", hint="Choose another --out."
        )
    if out.exists() and not (out / MANIFEST).exists() and any(out.iterdir()):
        raise OutputBusy(
            f"expected {out} to be absent or an artifact, found a folder with other files", hint="Choose another --out."
        )
    require_writable(out.parent)


def thread_count(request: DecomposeRequest) -> int:
    """Units worked on side by side."""
    return max(1, request.threads or processors())


def memory_limit(recipe: Recipe, plan: Plan) -> int:
    """Bytes that the units in flight may use together.

    Raises:
        ResourceShortage: not even one unit at a time would fit.
    """
    given = recipe.limits.max_ram
    limit = (int(available_memory() * 0.9) if given is None else given) - BASELINE_BYTES
    largest = max((unit.peak_bytes for unit in plan.units), default=0)
    if largest > limit:
        found = "is free" if given is None else "was allowed"
        raise ResourceShortage(
            f"the run needs {format_bytes(largest + BASELINE_BYTES)} of memory for its largest tensors, and "
            f"{format_bytes(limit + BASELINE_BYTES)} {found}",
            hint=f"Use --max-ram {-(-(largest + BASELINE_BYTES) // 10**6)}MB or more.",
        )
    return limit


def check_disk(request: DecomposeRequest, estimated: Estimate, written: int) -> None:
    """Refuse to begin what the disk cannot hold; `written` bytes of an earlier run are there already.

    Raises:
        ResourceShortage: naming what is needed and what is free.
    """
    free = free_disk(request.out)
    limit = request.recipe.limits.max_disk
    needed = max(estimated.disk_bytes - written, 0)
    if limit is not None and estimated.disk_bytes > limit:
        raise ResourceShortage(
            f"the run needs {format_bytes(estimated.disk_bytes)} of disk, and {format_bytes(limit)} was allowed",
            hint=f"Use --max-disk {-(-estimated.disk_bytes // 10**6)}MB or more, or --base-store reference.",
        )
    if needed > free:
        place = request.out.absolute().parent
        raise ResourceShortage(
            f"the run needs {format_bytes(needed)} of disk at {place}, and {format_bytes(free)} is free",
            hint="Free some space, choose another --out, or use --base-store reference.",
        )
