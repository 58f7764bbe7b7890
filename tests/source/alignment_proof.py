"""The proof that an alignment lost nothing, from the sources alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from mfs_decompose.source.align import Alignment, Member, TensorGroup
from mfs_decompose.source.checkpoint import Checkpoint
from mfs_decompose.source.header import TensorSpec


def prove_coverage(found: Alignment, base: Mapping[str, TensorSpec], variants: list[Checkpoint]) -> None:
    """Every tensor of every source in exactly one group."""
    keys = [(group.name, group.base_name or "") for group in found.groups]
    assert keys == sorted(set(keys))
    assert found.variants == tuple(sorted(checkpoint.id for checkpoint in variants))
    assert {group.base_name for group in found.groups} - {None} == set(base)
    assert all(group.members or group.base_name == group.name for group in found.groups) or not variants
    for checkpoint in variants:
        held = [
            (group.name, member.spec)
            for group in found.groups
            for member in group.members
            if member.variant == checkpoint.id and member.spec
        ]
        assert Counter(name for name, _ in held) == Counter(list(checkpoint.tensors))
        assert dict(held) == {name: info.spec for name, info in checkpoint.tensors.items()}
        prove_partners(found, base, checkpoint)
    for group in found.groups:
        ids = [member.variant for member in group.members]
        assert ids == sorted(set(ids))
        for member in group.members:
            check_member(group, member)


def prove_partners(found: Alignment, base: Mapping[str, TensorSpec], checkpoint: Checkpoint) -> None:
    """Each tensor of the base is the partner of one tensor at most, or missing; renames follow the rules."""
    own = [(group, member) for group in found.groups for member in group.members if member.variant == checkpoint.id]
    partners = Counter(group.base_name for group, member in own if member.kind in ("same", "resized"))
    assert not partners or max(partners.values()) == 1
    missing = {group.name for group, member in own if member.kind == "missing_in_variant"}
    assert missing == base.keys() - checkpoint.tensors.keys() - partners.keys()
    rules = found.renames.get(checkpoint.id, ())
    renamed = [(group.base_name, group.name) for group, member in own if member.kind in ("same", "resized")]
    renamed = [(old, new) for old, new in renamed if old != new]
    for old, new in renamed:
        assert old is not None
        assert any(old.startswith(one) and new == other + old[len(one) :] for one, other in rules)
    assert bool(rules) == bool(renamed)


def check_member(group: TensorGroup, member: Member) -> None:
    if member.kind == "missing_in_variant":
        assert (member.spec, member.common_rows, group.base_name) == (None, 0, group.name)
        return
    assert member.spec is not None
    if member.kind == "only_in_variant":
        assert member.common_rows == 0
        return
    assert group.base is not None
    assert member.common_rows == min(group.base.rows, member.spec.rows)
    assert member.spec.name == group.name
    assert member.kind == "tied" or (member.kind == "same") == (group.base.shape == member.spec.shape)
    assert member.kind != "tied" or group.base_name != group.name
