"""Which tensor of a variant is compared with which tensor of the base: every tensor of every source in one group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mfs_decompose.errors import SourceIncompatible
from mfs_decompose.source.align_notes import count, describe_alignment
from mfs_decompose.source.checkpoint import Checkpoint
from mfs_decompose.source.comparable import comparable
from mfs_decompose.source.grouping import Alignment, GroupKind, Member, TensorGroup, group_tensors
from mfs_decompose.source.header import TensorSpec
from mfs_decompose.source.mean_tensors import mean_tensors
from mfs_decompose.source.naming import first_few
from mfs_decompose.source.rename import Renaming, find_renames
from mfs_decompose.source.rename_pieces import find_other_pieces
from mfs_decompose.source.rename_weights import BASE, Heads, cosine_of
from mfs_decompose.source.rope_notes import describe_rope_differences
from mfs_decompose.units import format_fraction

__all__ = ["Alignment", "GroupKind", "Member", "TensorGroup", "align", "align_mean", "comparable", "mean_base_tensors"]

_LEAST_SHARE = 0.5  # of a variant's bytes; a grown vocabulary or an added tower stays far above it


def align(
    base_tensors: Mapping[str, TensorSpec],
    variants: Sequence[Checkpoint],
    base_config: Mapping[str, object],
    *,
    heads: Heads | None = None,
) -> Alignment:
    """Put every tensor of the base and of each variant into exactly one group.

    `base_config` is the parsed config.json of the base, empty where there is none: a base that says that its
    embeddings are not tied is believed. `heads` reads the beginnings of weights where names and shapes leave it open
    what was renamed to what; it is not called where all names agree.

    Raises:
        SourceIncompatible: nothing of a variant has a counterpart in the base, or less than half of its bytes; or
            which of two trees a variant's is cannot be told.
    """
    renamings = {}
    for checkpoint in variants:
        cosine = None if heads is None else cosine_of(heads, BASE, checkpoint.id)
        renamings[checkpoint.id] = find_renames(base_tensors, checkpoint.tensors, cosine)
    return _align(base_tensors, variants, base_config, renamings)


def align_mean(
    variants: Sequence[Checkpoint], *, heads: Heads | None = None
) -> tuple[dict[str, TensorSpec], Alignment]:
    """The tensors of a mean base, under the names that the first variant by id uses, and the alignment with them.

    Variants that are called otherwise are averaged after their renames: of variant `v` the base's tensor `b` is the
    tensor of the group whose base is `b` and which has a `same` or `resized` member of `v`.

    Raises:
        SourceIncompatible: as align and mean_base_tensors.
    """
    tensors, renamings = _mean(variants, heads)
    return tensors, _align(tensors, variants, {}, renamings, tuple(describe_rope_differences(variants)))


def mean_base_tensors(variants: Sequence[Checkpoint], *, heads: Heads | None = None) -> dict[str, TensorSpec]:
    """The tensors of a mean base, by name: what every variant has as a codable float with the same trailing dimensions.

    A tensor has as many rows as its shortest holder, and the type all of them share, else F32.

    Raises:
        SourceIncompatible: a variant shares less than half of its bytes with most of the others, or which of two trees
            its own is cannot be told.
    """
    return _mean(variants, heads)[0]


def _mean(variants: Sequence[Checkpoint], heads: Heads | None) -> tuple[dict[str, TensorSpec], dict[str, Renaming]]:
    first, *others = sorted(variants, key=lambda checkpoint: checkpoint.id)
    renamings = {first.id: Renaming()}
    for other in others:
        cosine = None if heads is None else cosine_of(heads, first.id, other.id)
        renamings[other.id] = find_renames(first.tensors, other.tensors, cosine)
        _require_decided(other, renamings[other.id])
    return mean_tensors(first, others, renamings)


def _align(
    base_tensors: Mapping[str, TensorSpec],
    variants: Sequence[Checkpoint],
    base_config: Mapping[str, object],
    renamings: Mapping[str, Renaming],
    notes: tuple[str, ...] = (),
) -> Alignment:
    ordered = sorted(variants, key=lambda checkpoint: checkpoint.id)
    assert len({checkpoint.id for checkpoint in ordered}) == len(ordered), "variant ids are unique"
    groups = group_tensors(base_tensors, ordered, base_config, renamings)
    pieces: dict[str, frozenset[str]] = {}
    for checkpoint in ordered:
        renaming = renamings[checkpoint.id]
        _require_decided(checkpoint, renaming)
        pieces[checkpoint.id] = find_other_pieces(base_tensors, checkpoint.tensors, renaming.pairs, renaming.rules)
    _require_kinship(ordered, groups, renamings, pieces)
    return Alignment(
        groups=groups,
        variants=tuple(checkpoint.id for checkpoint in ordered),
        notes=(*describe_alignment(groups, renamings, pieces), *notes),
        renames={id: renaming.rules for id, renaming in sorted(renamings.items()) if renaming.rules},
    )


def _require_decided(checkpoint: Checkpoint, renaming: Renaming) -> None:
    if renaming.refusal is not None:
        raise SourceIncompatible(
            f"which tree of the base variant {checkpoint.id!r} holds cannot be told: {renaming.refusal}",
            hint="Save one of the two under the other's names; a dry run from afar reads no weights, a run does.",
        )


def _require_kinship(
    variants: Sequence[Checkpoint],
    groups: Sequence[TensorGroup],
    renamings: Mapping[str, Renaming],
    pieces: Mapping[str, frozenset[str]],
) -> None:
    matched: dict[str, list[int]] = {checkpoint.id: [] for checkpoint in variants}  # bytes, tensor by tensor
    strange: dict[str, list[str]] = {checkpoint.id: [] for checkpoint in variants}
    for group in groups:
        for member in group.members:
            if member.kind == "only_in_variant" and member.spec is not None:
                strange[member.variant].append(_describe(member.spec, group.base))
            elif member.spec is not None:
                matched[member.variant].append(member.common_rows * member.spec.row_bytes)
    for checkpoint in variants:
        found, total = matched[checkpoint.id], checkpoint.tensor_bytes
        share = sum(found) / total if total else float(bool(found))
        if share < _LEAST_SHARE or not found:
            raise _foreign(checkpoint.id, len(found), share, strange[checkpoint.id], renamings, pieces)


def _foreign(
    id: str,
    matched: int,
    share: float,
    strange: Sequence[str],
    renamings: Mapping[str, Renaming],
    pieces: Mapping[str, frozenset[str]],
) -> SourceIncompatible:
    reasons = [f"{len(strange)} do not, among them {first_few(strange)}", *renamings[id].doubts[:1]]
    hint = f"Give the base that {id!r} was made from, or leave {id!r} out."
    if pieces[id]:
        reasons.append(f"{count(list(pieces[id]))} in other pieces than the base's (fused or split)")
        if 2 * len(pieces[id]) >= len(strange):
            hint = "Save both in one layout, fused or split: load and save them with the same version of one library."
    return SourceIncompatible(
        f"variant {id!r} is of another architecture than the base: {matched} of {matched + len(strange)} tensors "
        f"align, {format_fraction(share)} of its bytes; {'; '.join(reasons)}",
        hint=hint,
    )


def _describe(spec: TensorSpec, base: TensorSpec | None) -> str:
    if base is None or base.name != spec.name:
        return f"{spec.name} is not in the base"
    return f"{spec.name} is {spec.dtype} {list(spec.shape)} where the base has {base.dtype} {list(base.shape)}"
