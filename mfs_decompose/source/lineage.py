"""Do these weights descend from each other? A cheap look at a few matrices, before anything is averaged or subtracted.

Two models that were trained apart, or drawn apart, are as good as orthogonal, matrix by matrix; a fine-tune stays
within a few per cent of its base. Cosines between are not seen in practice, so the limit need not be fine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, median_high
from typing import TYPE_CHECKING

from mfs_decompose.errors import SourceIncompatible
from mfs_decompose.source.align import Alignment
from mfs_decompose.source.checkpoint import TensorReader
from mfs_decompose.source.dtypes import is_float
from mfs_decompose.source.naming import first_few

if TYPE_CHECKING:
    import torch

_LEAST_COSINE = 0.5
_SAMPLED_TENSORS = 8
_SAMPLED_ELEMENTS = 2**18
_ELEMENTS_AT_ONCE = 2**22  # over all variants: many of them get smaller samples, not more memory


@dataclass(frozen=True, slots=True)
class Lineage:
    """How near a variant is to its base, over the sampled tensors.

    `cosine` is the median over tensors of the cosine between the variant's weights and the base's (for a mean base:
    the median over the other variants, of the medians over tensors); 1 where nothing could be compared.
    `relative_distance` is ||W_k - W*|| / ||W*|| over all sampled tensors together; infinite where only W* is zero.
    """

    variant: str
    cosine: float
    relative_distance: float


def check_lineage(
    base: TensorReader | None, variants: Sequence[TensorReader], alignment: Alignment
) -> tuple[Lineage, ...]:
    """Measure at most 8 matrices, at most 2^18 elements of each; one entry a variant, sorted by id.

    `base` None stands for a mean base: the variants are compared with each other. Samples that hold NaN or Inf in
    either of two sources are skipped.

    Raises:
        SourceIncompatible: a variant's cosine is below 0.5.
    """
    ordered = sorted(variants, key=lambda reader: reader.checkpoint.id)
    return _against_each_other(ordered, alignment) if base is None else _against_base(base, ordered, alignment)


def _against_base(base: TensorReader, variants: Sequence[TensorReader], alignment: Alignment) -> tuple[Lineage, ...]:
    names = _matrices(alignment)
    samples: dict[str, torch.Tensor] = {}
    found = []
    for reader in variants:
        tally = _Tally()
        own_names = names[reader.checkpoint.id]
        for name in _spread(list(own_names)):
            if name not in samples:
                samples[name] = base.head(name, _SAMPLED_ELEMENTS).double()
            variant = reader.head(own_names[name], _SAMPLED_ELEMENTS).double()
            common = min(variant.numel(), samples[name].numel())  # of a resized tensor the common rows come first
            tally.add(samples[name][:common], variant[:common])
        found.append(Lineage(reader.checkpoint.id, tally.cosine, tally.relative_distance))
    _refuse_strangers(
        found,
        "expected fine-tunes of this base",
        "its",
        "Give the base they were made from with --base, or leave them out of --variants.",
    )
    return tuple(found)


def _against_each_other(variants: Sequence[TensorReader], alignment: Alignment) -> tuple[Lineage, ...]:
    names = _matrices(alignment)
    shared = sorted(set.intersection(*(set(names[reader.checkpoint.id]) for reader in variants)))
    elements = min(_SAMPLED_ELEMENTS, _ELEMENTS_AT_ONCE // len(variants))
    pairs = [[_Tally() for _ in variants] for _ in variants]
    to_mean = [_Tally() for _ in variants]
    for name in _spread(shared):
        samples = [reader.head(names[reader.checkpoint.id][name], elements).double() for reader in variants]
        common = min(sample.numel() for sample in samples)
        samples = [sample[:common] for sample in samples]
        finite = [sample for sample in samples if sample.isfinite().all()]
        if not finite:
            continue
        mean = sum(finite[1:], start=finite[0].clone()) / len(finite)
        for one, sample in enumerate(samples):
            to_mean[one].add(mean, sample)
            for other in range(one):
                pairs[one][other].add(samples[other], sample)
    found = []
    for one, reader in enumerate(variants):
        cosines = [pairs[max(one, other)][min(one, other)].cosine for other in range(len(variants)) if other != one]
        cosine = median_high(cosines) if cosines else 1.0  # high: of three, the two that agree are no strangers
        found.append(Lineage(reader.checkpoint.id, cosine, to_mean[one].relative_distance))
    _refuse_strangers(
        found,
        "expected fine-tunes of one base",
        "the others'",
        "Leave the stranger out of --variants, or give the base with --base.",
    )
    return tuple(found)


class _Tally:
    """Cosines tensor by tensor, distances over all of them together."""

    def __init__(self) -> None:
        self._cosines: list[float] = []
        self._moved = 0.0
        self._size = 0.0

    def add(self, reference: torch.Tensor, other: torch.Tensor) -> None:
        """Count two flat fp64 samples; what is not finite is skipped, and a zero sample has no direction."""
        size, product, length = (float(x @ y) for x, y in ((reference, reference), (reference, other), (other, other)))
        if not math.isfinite(size + length):
            return
        gap = other - reference
        self._moved += float(gap @ gap)
        self._size += size
        if size > 0 and length > 0:
            self._cosines.append(min(1.0, max(-1.0, product / (math.sqrt(size) * math.sqrt(length)))))

    @property
    def cosine(self) -> float:
        return median(self._cosines) if self._cosines else 1.0

    @property
    def relative_distance(self) -> float:
        if self._size == 0:
            return math.inf if self._moved else 0.0
        return math.sqrt(self._moved / self._size)


def _matrices(alignment: Alignment) -> dict[str, dict[str, str]]:
    """For each variant its aligned matrices, by their names in the base, sorted: the variant's own names.

    Vectors say little, and norms are ones anyway.
    """
    found: dict[str, dict[str, str]] = {variant: {} for variant in alignment.variants}
    for group in sorted(alignment.groups, key=lambda group: group.base_name or ""):
        for member in group.members:
            spec = member.spec
            if spec is None or member.kind not in ("same", "resized") or not is_float(spec.dtype):
                continue
            if len(spec.shape) >= 2 and spec.numel and group.base_name is not None:
                found[member.variant][group.base_name] = spec.name
    return found


def _spread(names: Sequence[str]) -> list[str]:
    """At most 8 names at equal distances, so that all layers have their say."""
    count = min(_SAMPLED_TENSORS, len(names))
    return [names[index * len(names) // count] for index in range(count)]


def _refuse_strangers(found: Sequence[Lineage], expected: str, whose: str, hint: str) -> None:
    strangers = [one for one in found if one.cosine < _LEAST_COSINE]
    if strangers:
        named = first_few([f"{one.variant!r} (cosine to {whose} weights {one.cosine:.3f})" for one in strangers])
        raise SourceIncompatible(f"{expected}, at least cosine {_LEAST_COSINE}; found {named}", hint=hint)
