"""What variants have in common, so that it can be averaged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_high

from mfs_decompose.errors import SourceIncompatible
from mfs_decompose.source.checkpoint import Checkpoint
from mfs_decompose.source.comparable import comparable
from mfs_decompose.source.dtypes import is_float
from mfs_decompose.source.header import TensorSpec
from mfs_decompose.source.naming import first_few
from mfs_decompose.source.rename import Renaming

_LEAST_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class _Own:
    """What a variant has of the first variant's tensors, by the first's names, and the bytes of all that it has."""

    tensors: Mapping[str, TensorSpec]
    nbytes: int


def mean_tensors(
    first: Checkpoint, others: Sequence[Checkpoint], renamings: Mapping[str, Renaming]
) -> tuple[dict[str, TensorSpec], dict[str, Renaming]]:
    """The tensors that all variants have, by the names of `first`, and what of the renames is left of them.

    `renamings` are from the names of `first` to those of each variant.

    Raises:
        SourceIncompatible: a variant shares less than half of its bytes with most of the others.
    """
    variants = [first, *others]
    owners = {one.id: _by_first_names(one, renamings[one.id]) for one in variants}
    common = {}
    for name, info in first.tensors.items():
        specs = [own.tensors[name] for own in owners.values() if name in own.tensors]
        if len(specs) == len(variants) and all(_averages(info, spec) for spec in specs):
            dtype = info.dtype if len({spec.dtype for spec in specs}) == 1 else "F32"
            rows = min(spec.rows for spec in specs)
            common[name] = TensorSpec(name, dtype, (rows, *info.shape[1:]) if info.shape else ())
    if any(_share(own, common) < _LEAST_SHARE for own in owners.values()):
        _name_strangers(owners)
    return common, {id: _within(renaming, common) for id, renaming in renamings.items()}


def _by_first_names(checkpoint: Checkpoint, renaming: Renaming) -> _Own:
    taken = {*renaming.pairs.keys(), *renaming.pairs.values()}
    found: dict[str, TensorSpec] = {name: info for name, info in checkpoint.tensors.items() if name not in taken}
    found |= {old: checkpoint.tensors[new] for old, new in renaming.pairs.items()}
    return _Own(found, checkpoint.tensor_bytes)


def _within(renaming: Renaming, common: Mapping[str, TensorSpec]) -> Renaming:
    """A renaming as far as it concerns tensors that are averaged."""
    pairs = {old: new for old, new in renaming.pairs.items() if old in common}
    used = tuple(
        (old, new)
        for old, new in renaming.rules
        if any(name.startswith(old) and pairs[name] == new + name[len(old) :] for name in pairs)
    )
    return replace(renaming, pairs=pairs, rules=used)


def _averages(one: TensorSpec, other: TensorSpec) -> bool:
    return is_float(one.dtype) and comparable(one, other)


def _share(own: _Own, tensors: Mapping[str, TensorSpec]) -> float:
    """The share of a checkpoint's bytes that could be averaged with `tensors`."""
    matched = sum(
        min(spec.rows, tensors[name].rows) * spec.row_bytes
        for name, spec in own.tensors.items()
        if name in tensors and _averages(spec, tensors[name])
    )
    return matched / own.nbytes if own.nbytes else 1.0


def _name_strangers(owners: Mapping[str, _Own]) -> None:
    shares = {
        id: median_high([_share(own, other.tensors) for other in owners.values() if other is not own] or [0.0])
        for id, own in owners.items()
    }
    # Where most fit each other and still share too little in all, no single one is to blame: name them all.
    strangers = sorted(id for id, share in shares.items() if share < _LEAST_SHARE) or sorted(shares)
    raise SourceIncompatible(
        f"expected variants of one architecture for a mean base; less than half of the weights of "
        f"{first_few([repr(id) for id in strangers])} can be averaged with the others'",
        hint="Leave it out, or give the base they were made from with --base.",
    )
