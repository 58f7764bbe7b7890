"""A plan in a file, bound to its sources: `--save-plan` writes the document of the dry run, `--plan` runs it.

The document is what plan/summary.py makes. What binds it is the size and the header of every shard: those decide a
plan, weights do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError

from mfs_decompose import __version__
from mfs_decompose.errors import RecipeError, SourceIncompatible
from mfs_decompose.plan.model import BaseMode, BaseStore
from mfs_decompose.recipe.schema import Recipe
from mfs_decompose.source.checkpoint import Checkpoint
from mfs_decompose.source.strict_json import parse_strict_object

PLAN_SCHEMA: Literal["mfs.plan/1"] = "mfs.plan/1"
MAX_PLAN_BYTES = 64 * 2**20
BASE_ID = "base"

_Natural = Annotated[StrictInt, Field(ge=0)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SavedShard(_Strict):
    """One file of weights: its size, and the digest of its header."""

    file: str
    bytes: _Natural
    header_sha256: str


class SavedSource(_Strict):
    """One checkpoint; `ref` is where it was: an absolute path, or a pinned model of the Hub."""

    id: str
    ref: str
    shards: tuple[SavedShard, ...]


class SavedBase(BaseModel):
    """How the base is made and kept."""

    mode: BaseMode
    store: BaseStore
    auto: bool = False


class _Document(BaseModel):
    """Of the plan document, what a run needs; the rest is for readers, or compared as it stands."""

    schema_: Annotated[Literal["mfs.plan/1"], Field(alias="schema")]
    version: str
    recipe: Recipe
    base: SavedBase
    sources: tuple[SavedSource, ...]
    variants: Annotated[tuple[dict[str, Any], ...], Field(min_length=1)]
    coverage: dict[str, Any]


@dataclass(frozen=True, slots=True)
class SavedPlan:
    """A plan read back from `path`. `variants` holds the sources by id; `base` is None where none was used.

    `outcome` is what the same sources must come to again, see `outcome_of`.
    """

    path: Path
    version: str
    recipe: Recipe
    base_mode: BaseMode
    base_store: BaseStore
    base_auto: bool
    base: SavedSource | None
    variants: Mapping[str, SavedSource]
    outcome: Mapping[str, Any]


def describe_sources(base: Checkpoint | None, variants: Sequence[Checkpoint]) -> list[dict[str, Any]]:
    """The sources as the document names them, the base first."""
    return [_describe(source).model_dump() for source in (*([] if base is None else [base]), *variants)]


def outcome_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """What follows from recipe, headers and version alone, on any machine."""
    return {key: document[key] for key in ("variants", "coverage")}


def read_plan(path: Path) -> SavedPlan:
    """Read a plan document back.

    Raises:
        RecipeError: it is not there, or no plan of this format.
    """
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_PLAN_BYTES + 1)
    except OSError as error:
        raise RecipeError(f"cannot read the plan {path}: {error.strerror}", hint=_AGAIN) from None
    if len(raw) > MAX_PLAN_BYTES:
        raise _no_plan(path, f"expected at most {MAX_PLAN_BYTES:,} bytes, found more")
    try:
        found = parse_strict_object(raw)
        if found.get("schema") != PLAN_SCHEMA:
            raise ValueError(f"expected the schema {PLAN_SCHEMA}, found {str(found.get('schema'))[:60]!r}")
        document = _Document.model_validate(found)
        sources = {source.id: source for source in document.sources}
        ids = [str(variant.get("id")) for variant in document.variants]
        given = document.base.mode in ("known", "shared") or (document.base.mode == "refined" and BASE_ID in sources)
        with_base = [BASE_ID] if given else []
        if len(sources) != len(document.sources) or list(sources) != [*with_base, *ids]:
            raise ValueError(f"its sources are {', '.join(sources)}, and its variants {', '.join(ids)}")
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in detail["loc"])
        raise _no_plan(path, f"{where}: {detail['msg'][:1].lower()}{detail['msg'][1:]}") from None
    except ValueError as error:
        raise _no_plan(path, str(error)) from None
    base = sources.pop(BASE_ID, None)
    return SavedPlan(
        path, document.version, document.recipe, document.base.mode, document.base.store, document.base.auto, base,
        sources, outcome_of(found),
    )  # fmt: skip


def check_sources(saved: SavedPlan, base: Checkpoint | None, variants: Sequence[Checkpoint]) -> None:
    """Refuse sources whose files are not those that were planned.

    Raises:
        SourceIncompatible: naming the sources, and the file where the first of them differs.
    """
    assert (base is None) == (saved.base is None)
    pairs = [(saved.variants[variant.id], variant) for variant in variants]
    if base is not None and saved.base is not None:
        pairs.insert(0, (saved.base, base))
    differing = [(planned, now) for planned, now in pairs if planned.shards != _describe(now).shards]
    if not differing:
        return
    names = [BASE_ID if planned is saved.base else repr(planned.id) for planned, _ in differing]
    planned, now = differing[0]
    raise SourceIncompatible(
        f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} not what {saved.path} was made for: "
        f"{now.root / _first_difference(planned, now)} differs in size or header",
        hint=_AGAIN,
    )


def check_outcome(saved: SavedPlan, document: Mapping[str, Any]) -> None:
    """Refuse a plan that comes out otherwise, although recipe and headers are the same.

    Raises:
        RecipeError: the file was edited, or another version planned it.
    """
    if outcome_of(document) == saved.outcome:
        return
    why = "it was edited, or a config.json changed"
    if saved.version != __version__:
        why = f"it is of version {saved.version}, and this is {__version__}"
    raise RecipeError(f"the plan {saved.path} would come out otherwise now: {why}", hint=_AGAIN)


_AGAIN = "Make the plan again: mfs decompose ... --dry-run --save-plan FILE"


def _describe(source: Checkpoint) -> SavedSource:
    shards = (SavedShard(file=one.file, bytes=one.size, header_sha256=one.sha256) for one in source.shards)
    return SavedSource(id=source.id, ref=source.pinned, shards=tuple(shards))


def _first_difference(planned: SavedSource, now: Checkpoint) -> str:
    before, after = ({shard.file: shard for shard in one.shards} for one in (planned, _describe(now)))
    return next(file for file in sorted(before | after) if before.get(file) != after.get(file))


def _no_plan(path: Path, why: str) -> RecipeError:
    return RecipeError(f"{path} is no plan of mfs: {why}", hint=_AGAIN)
