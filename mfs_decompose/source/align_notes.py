"""What deserves to be said aloud of an alignment, in sentences."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from mfs_decompose.source.grouping import TensorGroup
from mfs_decompose.source.header import TensorSpec
from mfs_decompose.source.naming import first_few
from mfs_decompose.source.rename import Renaming
from mfs_decompose.source.rename_claims import Rule, describe_rule

Pieces = Mapping[str, frozenset[str]]
"""By variant, its tensors that hold in other pieces what the base holds, see rename_pieces.py."""


def describe_alignment(
    groups: Sequence[TensorGroup], renamings: Mapping[str, Renaming], pieces: Pieces
) -> tuple[str, ...]:
    """Renames first, then one sentence for each variant and each way in which its tensors differ from the base's."""
    found: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for group in groups:
        for variant, reason in _oddities(group, pieces):
            found[variant, reason].append(group.name)
    odd = [
        f"{variant}: {count(names)} {reason}: {first_few(names)}" for (variant, reason), names in sorted(found.items())
    ]
    return (*_renames(groups, renamings), *odd)


def count(names: Sequence[object]) -> str:
    return f"{len(names)} tensor{'' if len(names) == 1 else 's'}"


def _renames(groups: Sequence[TensorGroup], renamings: Mapping[str, Renaming]) -> Iterator[str]:
    kinds = Counter((member.variant, member.kind) for group in groups for member in group.members)
    for variant, renaming in sorted(renamings.items()):
        if renaming.pairs:
            matched = sum(kinds[variant, kind] for kind in ("same", "resized", "tied"))
            yield (
                f"{variant}: {count(list(renaming.pairs))} renamed: {_rules(renaming.rules)}; {matched} matched, "
                f"{kinds[variant, 'only_in_variant']} only in the variant, "
                f"{kinds[variant, 'missing_in_variant']} of the base left out"
            )
        if renaming.unconfirmed:
            yield f"{variant}: judged by name and shape alone, no weights were compared: {_rules(renaming.unconfirmed)}"
        yield from (f"{variant}: {doubt}" for doubt in renaming.doubts)


def _rules(rules: Sequence[Rule]) -> str:
    return first_few([describe_rule(rule) for rule in rules])


def _oddities(group: TensorGroup, pieces: Pieces) -> Iterator[tuple[str, str]]:
    for member in group.members:
        base = group.base
        if member.kind == "same":
            continue
        if member.kind == "tied":
            yield member.variant, "stored apart where the base ties it to its embeddings, compared with those"
        elif member.kind == "missing_in_variant":
            yield member.variant, "of the base left out"
        elif member.kind == "only_in_variant" and group.name in pieces.get(member.variant, ()):
            reason = "in other pieces than the base's (fused or split), which is no rename, stored whole"
            yield member.variant, reason
        elif member.kind == "only_in_variant":
            same_name = base is not None and base.name == group.name
            other = "of another shape or type than the base's" if same_name else "not in the base"
            yield member.variant, f"{other}, stored whole"
        else:
            assert base is not None
            assert member.spec is not None
            yield member.variant, _resized(member.spec, base)


def _resized(spec: TensorSpec, base: TensorSpec) -> str:
    rest = "the new rows stored whole" if spec.rows > base.rows else "the other rows left out"
    return f"with {spec.rows} rows where the base has {base.rows}, {rest}"
