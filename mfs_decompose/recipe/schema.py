"""The recipe `mfs.recipe/1`: what to decompose into what, strict and frozen.

A recipe says how, never what: the checkpoints are arguments. Every key has a default, so an empty recipe is the
default behaviour (each tensor as allocation finds best, 5 % of each variant's checkpoint).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    StrictBool,
    StrictInt,
    model_validator,
)
from pydantic_core import PydanticCustomError

from mfs_decompose.recipe.strict_yaml import Path
from mfs_decompose.recipe.values import Budget, Target, read_budget, read_bytes, read_share, read_target, shown

SCHEMA: Literal["mfs.recipe/1"] = "mfs.recipe/1"

BaseMode = Literal["default", "known", "mean", "refined", "shared", "auto"]
BaseStore = Literal["auto", "copy", "reference", "hardlink"]
CodecName = Literal[
    "auto", "lowrank", "sparse", "sign", "ternary", "kbit", "deadzone", "rowsparse", "lossless", "lora-exact", "raw"
]
FactorType = Literal["int4", "int8", "bf16", "banded"]
ValueType = Literal["bf16", "int8"]
Selection = Literal["size", "effect"]
ScaleType = Literal["tensor", "row", "group"]
ObjectiveKind = Literal["budget", "budget_total", "rank", "density", "target"]

LOSSY: frozenset[str] = frozenset({"auto", "lowrank", "sparse"})
DEFAULT_BUDGET = Budget(share=0.05)

_CODEC_OF = {"rank": "lowrank", "density": "sparse"}
"""The one codec that an objective fits."""

Bytes = Annotated[int, BeforeValidator(read_bytes)]
Share = Annotated[float, BeforeValidator(read_share)]
Rank = Annotated[StrictInt, Field(ge=1)]
Bits = Annotated[StrictInt, Field(ge=2, le=8)]
Step = Annotated[float, Field(gt=0, lt=1e6, allow_inf_nan=False)]
Cap = Annotated[Budget, PlainValidator(read_budget), PlainSerializer(Budget.plain)]
Goal = Annotated[Target, PlainValidator(read_target), PlainSerializer(Target.plain)]


def _globs(value: object) -> object:
    globs = [value] if isinstance(value, str) else value
    if not isinstance(globs, list | tuple) or not globs or not all(isinstance(g, str) and g for g in globs):
        raise ValueError(f"expected a glob or a list of globs, found {shown(value)}")
    return tuple(globs)


def _about(value: object) -> object:
    if not isinstance(value, str | dict):
        raise ValueError(f"expected text or a mapping, found {shown(value)}")
    return value


Globs = Annotated[tuple[str, ...], BeforeValidator(_globs)]
About = Annotated[Any, PlainValidator(_about)]


def conflict(message: str, *key: str | int) -> PydanticCustomError:
    """A check across several values; `key` says, from the model that checks, which value to blame."""
    return PydanticCustomError("conflict", "{text}", {"text": message, "key": key})


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    def _settle(self, **values: object) -> None:
        """Fill in defaults that depend on other fields, while the model is being made."""
        for name, value in values.items():
            object.__setattr__(self, name, value)


class Base(_Model):
    """Where the shared weights come from, and whether the artifact holds them.

    The default mode is known where a base is given, else mean; auto weighs what the weights would take (plan/weigh.py).
    """

    mode: BaseMode = "default"
    store: BaseStore = "auto"


class Objective(_Model):
    """How much each variant, or with `budget_total` all of them, may cost, or drift: at most one of them is set."""

    budget: Cap | None = None
    budget_total: Cap | None = None
    rank: Rank | None = None
    density: Share | None = None
    target: Goal | None = None

    @property
    def kind(self) -> ObjectiveKind | None:
        """Which objective is set; None where nothing lossy needs one."""
        return next((kind for kind in get_args(ObjectiveKind) if getattr(self, kind) is not None), None)

    @property
    def capped(self) -> bool:
        """Whether allocation cuts fits to a size: that of a budget, or one at which a target holds."""
        return self.kind in ("budget", "budget_total", "target")

    @model_validator(mode="after")
    def _at_most_one(self) -> Objective:
        given = [name for name in get_args(ObjectiveKind) if getattr(self, name) is not None]
        if len(given) > 1:
            raise conflict(f"expected one objective, found {' and '.join(given)}", given[1])
        return self


class Residual(_Model):
    """What is added to a low rank delta: the rest of it under a codec whose size the shape determines."""

    codec: Literal["sign", "ternary", "kbit"]
    scale: ScaleType | None = None
    bits: Bits | None = None

    @model_validator(mode="after")
    def _own_options_only(self) -> Residual:
        _settle_options(self, self.codec)
        return self


OPTIONS: Mapping[str, tuple[str, object]] = {
    "factors": ("lowrank", "int4"),
    "residual": ("lowrank", None),
    "values": ("sparse", "bf16"),
    "select": ("sparse", None),
    "scale": ("sign", "row"),
    "bits": ("kbit", 4),
    "step": ("deadzone", None),
    "rows": ("rowsparse", None),
}
"""The codec that each option belongs to, and its default; the last two have none and must be given.

`select` without a value is by size.
"""


class Delta(_Model):
    """How a delta is stored. `auto` compares them all and takes no option; each option belongs to one codec, which it
    stands for where none is named:

    `factors` (int4) and `residual` to lowrank, `values` (bf16) and `select` (size) to sparse, `scale` (row) to sign,
    `bits` (4) to kbit, `step` (in units of the weights) to deadzone, `rows` to rowsparse.
    """

    codec: CodecName = "auto"
    factors: FactorType | None = None
    residual: Residual | None = None
    values: ValueType | None = None
    select: Selection | None = None
    scale: ScaleType | None = None
    bits: Bits | None = None
    step: Step | None = None
    rows: Rank | None = None

    @model_validator(mode="before")
    @classmethod
    def _codec_of_its_options(cls, data: object) -> object:
        if not isinstance(data, dict) or "codec" in data:
            return data
        owner = next((OPTIONS[key][0] for key in OPTIONS if data.get(key) is not None), None)
        return data if owner is None else {**data, "codec": owner}

    @model_validator(mode="after")
    def _own_options_only(self) -> Delta:
        _settle_options(self, self.codec)
        if self.select == "effect" and self.values != "bf16":
            raise conflict("select: effect keeps bf16 values", "values")
        if self.residual is not None and self.factors == "banded":
            raise conflict("a residual goes with factors of one width, not with banded ones", "residual")
        return self


def _settle_options(model: _Model, codec: str) -> None:
    """Refuse options of other codecs, and fill in the defaults of this one.

    Raises:
        PydanticCustomError: naming the option.
    """
    for option, (owner, default) in OPTIONS.items():
        if option not in type(model).model_fields:
            continue
        given = getattr(model, option)
        if given is not None and owner != codec:
            raise conflict(f"{option} is an option of {owner}, and the codec is {codec}", option)
        if given is None and owner == codec:
            if option in ("step", "rows"):
                raise conflict(f"the codec {codec} needs {option}", "codec")
            model._settle(**{option: default})


class DeltaRule(Delta):
    """A codec for the tensors whose name fits one of the globs; `rank` fixes the rank of a lowrank rule."""

    match: Globs
    codec: CodecName
    rank: Rank | None = None

    @model_validator(mode="after")
    def _rank_needs_lowrank(self) -> DeltaRule:
        if self.rank is not None and self.codec != "lowrank":
            raise conflict(f"rank is an option of lowrank, and the codec is {self.codec}", "rank")
        if self.rank is not None and self.factors == "banded":
            raise conflict("banded factors have no rank of their own: a budget is spent on them", "rank")
        return self

    @property
    def needs_objective(self) -> bool:
        return self.codec in LOSSY and self.rank is None


class Deltas(_Model):
    """The default codec and the exceptions to it; the first rule that fits a name holds.

    With `keep_exact` what a lossy codec gets wrong is stored as well, beside any budget: all bits come back.
    """

    default: Delta = Delta()
    rules: tuple[DeltaRule, ...] = ()
    keep_exact: StrictBool = False

    def fallback(self) -> DeltaRule:
        """The default as the rule that fits every name."""
        return DeltaRule(match=("*",), **self.default.model_dump())


class Output(_Model):
    """How files are cut; `shard_size` in bytes."""

    shard_size: Bytes = 2_000_000_000


class Limits(_Model):
    """Bytes of memory and disk to stay under; None asks the machine. They never change the bytes written."""

    max_ram: Bytes | None = None
    max_disk: Bytes | None = None


class Recipe(_Model):
    """An effective recipe: defaults filled in, cross checks passed."""

    schema_: Annotated[Literal["mfs.recipe/1"], Field(alias="schema")] = SCHEMA
    about: About | None = None
    base: Base = Base()
    objective: Objective = Objective()
    deltas: Deltas = Deltas()
    output: Output = Output()
    limits: Limits = Limits()
    seed: Annotated[StrictInt, Field(ge=0, lt=2**63)] = 0

    @model_validator(mode="before")
    @classmethod
    def _codec_of_its_objective(cls, data: object) -> object:
        """A rank asks for low rank and a density for sparse, where no codec is named."""
        found = data if isinstance(data, dict) else {}
        objective, deltas = found.get("objective"), found.get("deltas", {})
        default = deltas.get("default", {}) if isinstance(deltas, dict) else None
        if not isinstance(objective, dict) or not isinstance(default, dict) or default.keys() & {"codec", *OPTIONS}:
            return data
        codec = next((codec for key, codec in _CODEC_OF.items() if objective.get(key) is not None), None)
        return data if codec is None else {**found, "deltas": {**deltas, "default": {**default, "codec": codec}}}

    @model_validator(mode="after")
    def _objective_fits_codecs(self) -> Recipe:
        rules: list[tuple[DeltaRule, Path]] = [
            (rule, ("deltas", "rules", i, "codec")) for i, rule in enumerate(self.deltas.rules)
        ]
        rules.append((self.deltas.fallback(), ("deltas", "default", "codec")))
        users = [(rule, path) for rule, path in rules if rule.needs_objective]
        kind = self.objective.kind
        if kind is None and not users:
            return self
        if kind is None:
            kind = "budget"
            self._settle(objective=Objective(budget=DEFAULT_BUDGET))
        if not users:
            codec = self.deltas.default.codec
            raise conflict(
                f"the codec {codec} takes no objective, found {kind}: its size follows by itself", "objective", kind
            )
        wanted = _CODEC_OF.get(kind)
        for rule, path in users:
            if wanted is not None and rule.codec != wanted:
                raise conflict(f"the objective {kind} needs the codec {wanted}, found {rule.codec}", *path)
            if kind == "rank" and rule.factors == "banded":
                raise conflict("banded factors have no one rank: give a budget", *path[:-1], "factors")
            if kind != "density" and rule.select == "effect":
                raise conflict(f"select: effect needs the objective density, found {kind}", *path[:-1], "select")
        return self

    def canonical(self) -> dict[str, Any]:
        """The effective recipe as plain JSON, for the manifest and the fingerprint.

        Without `limits`, which must not change the bytes written, and without `about`, which is prose.
        """
        document = self.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"limits", "about"})
        if not self.deltas.keep_exact:
            del document["deltas"]["keep_exact"]
        return document
