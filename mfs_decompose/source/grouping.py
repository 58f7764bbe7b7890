"""Every tensor of every source in one group: what lies together once it is known what is called how."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from mfs_decompose.source.checkpoint import Checkpoint
from mfs_decompose.source.comparable import comparable
from mfs_decompose.source.header import TensorSpec
from mfs_decompose.source.rename import Renaming
from mfs_decompose.source.tying import find_tied_partner

GroupKind = Literal["same", "resized", "only_in_variant", "missing_in_variant", "tied"]


@dataclass(frozen=True, slots=True)
class Member:
    """One variant's part in a group.

    `common_rows` counts the leading rows that base and variant both have: all of them for `same`, none for
    `only_in_variant` and `missing_in_variant`. `spec` is None only for `missing_in_variant`; else it is the variant's
    tensor under the variant's own name, which is the name of the group.
    """

    variant: str
    kind: GroupKind
    spec: TensorSpec | None
    common_rows: int


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """A tensor of the base and what the variants have in its place, members sorted by variant.

    `base` is None where the base has nothing to compare with. Where `base` has another name than the group, its
    members are `tied` (a base with tied embeddings stores no head) or renamed (`same` and `resized`); variants that
    use the base's own name are in the group of that name. A tensor of the base that all variants have under other
    names has no group of its own.
    """

    name: str
    base: TensorSpec | None
    members: tuple[Member, ...]

    @property
    def base_name(self) -> str | None:
        """The name in the base of the tensor that is compared with."""
        return self.base.name if self.base else None


@dataclass(frozen=True, slots=True)
class Alignment:
    """All groups by name, all variants by id, and what deserves to be said aloud.

    `renames` holds for each variant that calls tensors otherwise than the base the prefixes (base, variant) that
    explain it, the longest first. Two groups have one name only where two variants mean different tensors of the base
    by it.
    """

    groups: tuple[TensorGroup, ...]
    variants: tuple[str, ...]
    notes: tuple[str, ...]
    renames: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)


def group_tensors(
    base_tensors: Mapping[str, TensorSpec],
    variants: Sequence[Checkpoint],
    base_config: Mapping[str, object],
    renamings: Mapping[str, Renaming],
) -> tuple[TensorGroup, ...]:
    """The groups, sorted by name; `variants` are sorted by id, and `renamings` has one entry for each."""
    found: defaultdict[tuple[str, str | None], list[Member]] = defaultdict(list)
    found.update({(name, name): [] for name in base_tensors})
    for checkpoint in variants:
        for name, base, member in _members(checkpoint, base_tensors, base_config, renamings[checkpoint.id]):
            found[name, base].append(member)
    _join_unpaired(found)
    elsewhere = {base for (name, base), members in found.items() if base != name and members}
    groups = []
    for (name, base), members in sorted(found.items(), key=lambda item: (item[0][0], item[0][1] or "")):
        if members or base not in elsewhere:
            spec = None if base is None else base_tensors[base]
            plain = None if spec is None else TensorSpec(spec.name, spec.dtype, spec.shape)
            groups.append(TensorGroup(name, plain, tuple(sorted(members, key=lambda member: member.variant))))
    return tuple(groups)


def _members(
    checkpoint: Checkpoint,
    base_tensors: Mapping[str, TensorSpec],
    base_config: Mapping[str, object],
    renaming: Renaming,
) -> Iterator[tuple[str, str | None, Member]]:
    """(name of the group, name of its base tensor, member) for all that a variant has, and all of the base it lacks."""
    old_names = {new: old for old, new in renaming.pairs.items()}
    for name, info in checkpoint.tensors.items():
        base = base_tensors.get(old_names.get(name, name))
        tied = base is None
        if base is None:
            base = find_tied_partner(name, base_tensors, base_config)
        if base is None or not comparable(base, info):
            yield name, None if tied or base is None else base.name, _unpaired(checkpoint, info.spec)
            continue
        kind: GroupKind = "tied" if tied else "same" if base.shape == info.shape else "resized"
        yield name, base.name, Member(checkpoint.id, kind, info.spec, min(base.rows, info.rows))
    for name in base_tensors:
        if name not in checkpoint.tensors and name not in renaming.pairs:
            yield name, name, Member(checkpoint.id, "missing_in_variant", None, 0)


def _unpaired(checkpoint: Checkpoint, spec: TensorSpec) -> Member:
    return Member(checkpoint.id, "only_in_variant", spec, 0)


def _join_unpaired(found: dict[tuple[str, str | None], list[Member]]) -> None:
    """Put what only some variants compare with the base into one group with the others of its name."""
    paired: dict[str, str] = {}
    for name, base in found:
        if base is not None and base <= paired.get(name, base):
            paired[name] = base
    for name in [name for name, base in found if base is None and name in paired]:
        found[name, paired[name]].extend(found.pop((name, None)))
