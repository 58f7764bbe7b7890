"""Which tensor of a variant is compared with which tensor of the base: every tensor of every source in one group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_high
from typing import Literal

from mfs_decompose.errors import SourceIncompatible
from mfs_decompose.source.checkpoint import Checkpoint
from mfs_decompose.source.dtypes import is_float
from mfs_decompose.source.header import TensorSpec
from mfs_decompose.source.naming import first_few
from mfs_decompose.source.tying import find_tied_partner
from mfs_decompose.units import format_fraction

GroupKind = Literal["same", "resized", "only_in_variant", "missing_in_variant", "tied"]

_LEAST_SHARE = 0.5  # of a variant's bytes; a grown vocabulary or an added tower stays far above it


@dataclass(frozen=True, slots=True)
class Member:
    """One variant's part in a group.

    `common_rows` counts the leading rows that base and variant both have: all of them for `same`, none for
    `only_in_variant` and `missing_in_variant`. `spec` is None only for `missing_in_variant`.
    """

    variant: str
    kind: GroupKind
    spec: TensorSpec | None
    common_rows: int


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """A tensor of the base and what the variants have in its place, members sorted by variant.

    `base` is None where the base has nothing to compare with. For `tied` members the group bears the name of the
    variant's tensor and `base` is another tensor of the base, which the group of that name holds as well: a base with
    tied embeddings stores no head.
    """

    name: str
    base: TensorSpec | None
    members: tuple[Member, ...]

    @property
    def base_name(self) -> str | None:
        """The name in the base of the tensor that is compared with; other than `name` only for tied members."""
        return self.base.name if self.base else None


@dataclass(frozen=True, slots=True)
class Alignment:
    """All groups by name, all variants by id, and what deserves to be said aloud."""

    groups: tuple[TensorGroup, ...]
    variants: tuple[str, ...]
    notes: tuple[str, ...]


def align(
    base_tensors: Mapping[str, TensorSpec], variants: Sequence[Checkpoint], base_config: Mapping[str, object]
) -> Alignment:
    """Put every tensor of the base and of each variant into exactly one group.

    `base_config` is the parsed config.json of the base, empty where there is none: a base that says that its
    embeddings are not tied is believed.

    Raises:
        SourceIncompatible: less than half of a variant's bytes have a counterpart in the base.
    """
    ordered = sorted(variants, key=lambda checkpoint: checkpoint.id)
    assert len({checkpoint.id for checkpoint in ordered}) == len(ordered), "variant ids are unique"
    names = set(base_tensors).union(*(checkpoint.tensors for checkpoint in ordered))
    groups = tuple(_group(name, base_tensors, ordered, base_config) for name in sorted(names))
    for checkpoint in ordered:
        _require_kinship(checkpoint, groups)
    return Alignment(groups, tuple(checkpoint.id for checkpoint in ordered), tuple(_notes(groups)))


def mean_base_tensors(variants: Sequence[Checkpoint]) -> dict[str, TensorSpec]:
    """The tensors of a mean base, by name: what every variant has as a codable float with the same trailing dimensions.

    A tensor has as many rows as its shortest holder, and the type all of them share, else F32.

    Raises:
        SourceIncompatible: a variant shares less than half of its bytes with most of the others.
    """
    first, *others = sorted(variants, key=lambda checkpoint: checkpoint.id)
    common = {}
    for name, info in first.tensors.items():
        specs = [info, *(checkpoint.tensors[name] for checkpoint in others if name in checkpoint.tensors)]
        if len(specs) == len(variants) and all(_averages(info, spec) for spec in specs):
            dtype = info.dtype if len({spec.dtype for spec in specs}) == 1 else "F32"
            rows = min(spec.rows for spec in specs)
            common[name] = TensorSpec(name, dtype, (rows, *info.shape[1:]) if info.shape else ())
    if any(_share(checkpoint, common) < _LEAST_SHARE for checkpoint in variants):
        _name_strangers([first, *others])
    return common


def _averages(one: TensorSpec, other: TensorSpec) -> bool:
    return is_float(one.dtype) and comparable(one, other)


def _share(checkpoint: Checkpoint, tensors: Mapping[str, TensorSpec]) -> float:
    """The share of a checkpoint's bytes that could be averaged with `tensors`."""
    matched = sum(
        min(info.rows, tensors[name].rows) * info.row_bytes
        for name, info in checkpoint.tensors.items()
        if name in tensors and _averages(info, tensors[name])
    )
    return matched / checkpoint.tensor_bytes if checkpoint.tensor_bytes else 1.0


def _name_strangers(variants: Sequence[Checkpoint]) -> None:
    shares = {
        one.id: median_high([_share(one, other.tensors) for other in variants if other is not one] or [0.0])
        for one in variants
    }
    # Where most fit each other and still share too little in all, no single one is to blame: name them all.
    strangers = sorted(id for id, share in shares.items() if share < _LEAST_SHARE) or sorted(shares)
    raise SourceIncompatible(
        f"expected variants of one architecture for a mean base; less than half of the weights of "
        f"{first_few([repr(id) for id in strangers])} can be averaged with the others'",
        hint="Leave it out, or give the base they were made from with --base.",
    )


def comparable(one: TensorSpec, other: TensorSpec) -> bool:
    """Whether a difference of the common rows of two tensors means something, or their bits can be compared."""
    if one.dtype != other.dtype and not (is_float(one.dtype) and is_float(other.dtype)):
        return False
    if one.shape == other.shape:
        return True
    # Vectors of other lengths are other things; matrices of other heights are grown or cut vocabularies.
    matrices = len(one.shape) >= 2 and len(other.shape) >= 2
    return matrices and one.shape[1:] == other.shape[1:] and min(one.rows, other.rows) > 0


def _group(
    name: str,
    base_tensors: Mapping[str, TensorSpec],
    variants: Sequence[Checkpoint],
    base_config: Mapping[str, object],
) -> TensorGroup:
    own = base_tensors.get(name)
    base = own or find_tied_partner(name, base_tensors, base_config)
    members = []
    for checkpoint in variants:
        info = checkpoint.tensors.get(name)
        if info is None:
            if own is not None:
                members.append(Member(checkpoint.id, "missing_in_variant", None, 0))
        elif base is None or not comparable(base, info):
            members.append(Member(checkpoint.id, "only_in_variant", info.spec, 0))
        else:
            kind: GroupKind = "tied" if own is None else "same" if base.shape == info.shape else "resized"
            members.append(Member(checkpoint.id, kind, info.spec, min(base.rows, info.rows)))
    if own is None and not any(member.kind == "tied" for member in members):
        base = None
    return TensorGroup(name, base and TensorSpec(base.name, base.dtype, base.shape), tuple(members))


def _require_kinship(checkpoint: Checkpoint, groups: Sequence[TensorGroup]) -> None:
    matched, matched_bytes, strange = 0, 0, []
    for group in groups:
        for member in group.members:
            if member.variant != checkpoint.id or member.spec is None:
                continue
            if member.kind == "only_in_variant":
                strange.append(_describe(member.spec, group.base))
            else:
                matched += 1
                matched_bytes += member.common_rows * member.spec.row_bytes
    share = matched_bytes / checkpoint.tensor_bytes if checkpoint.tensor_bytes else 1.0
    if share < _LEAST_SHARE:
        raise SourceIncompatible(
            f"variant {checkpoint.id!r} is of another architecture than the base: {matched} of "
            f"{len(checkpoint.tensors)} tensors align, {format_fraction(share)} of its bytes; "
            f"among those that do not: {first_few(strange)}",
            hint=f"Give the base that {checkpoint.id!r} was made from, or leave {checkpoint.id!r} out.",
        )


def _describe(spec: TensorSpec, base: TensorSpec | None) -> str:
    if base is None:
        return f"{spec.name} is not in the base"
    return f"{spec.name} is {spec.dtype} {list(spec.shape)} where the base has {base.dtype} {list(base.shape)}"


def _notes(groups: Sequence[TensorGroup]) -> list[str]:
    """One sentence for each variant and each way in which its tensors differ from the base's."""
    found: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for group in groups:
        for member in group.members:
            if reason := _oddity(member, group.base):
                found[member.variant, reason].append(group.name)
    return [
        f"{variant}: {len(names)} tensor{'s' if len(names) > 1 else ''} {reason}: {first_few(names)}"
        for (variant, reason), names in sorted(found.items())
    ]


def _oddity(member: Member, base: TensorSpec | None) -> str | None:
    if member.kind == "same":
        return None
    if member.kind == "tied":
        return "stored apart where the base ties it to its embeddings, compared with those"
    if member.kind == "missing_in_variant":
        return "of the base left out"
    assert member.spec is not None
    if base is None:
        return "not in the base, stored whole"
    if member.kind == "only_in_variant":
        return "of another shape or type than the base's, stored whole"
    rest = "the new rows stored whole" if member.spec.rows > base.rows else "the other rows left out"
    return f"with {member.spec.rows} rows where the base has {base.rows}, {rest}"
