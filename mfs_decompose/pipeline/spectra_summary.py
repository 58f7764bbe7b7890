"""Spectra summed up for people: by variant, and by family of tensors, such as every layer's q_proj."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from mfs_decompose.pipeline.delta_class import DeltaClass, Facts, directions_for, effective_rank, most_energy
from mfs_decompose.pipeline.spectra import VariantSpectra
from mfs_decompose.pipeline.spectra_sides import Of
from mfs_decompose.pipeline.spectra_tensor import Measured

SHARES = (0.5, 0.9, 0.99)
_POINTS = 200


@dataclass(frozen=True)
class Curve:
    """Spectra of a family of tensors, as plotted: at some directions, counted from 1.

    `cumulative` is the share of the family's energy in so many directions of each; `singular_value` is the root mean
    square over its matrices, `noise_level` that of the largest singular value which rounding noise alone would have.
    """

    direction: tuple[int, ...]
    cumulative: tuple[float, ...]
    singular_value: tuple[float, ...]
    noise_level: float


@dataclass(frozen=True)
class FamilySummary:
    """The matrices of one family: `kind` by most energy, `classes` counts.

    Directions and effective rank are medians over the changed matrices, `rank` is the most frequent rank of the loras
    among them; shares are pooled. None where there is no spectrum.
    """

    family: str
    kind: DeltaClass | None
    classes: dict[str, int]
    matrices: int
    energy: float
    unchanged: float | None
    noise_share: float | None
    effective_rank: float | None
    rank: int | None
    directions: tuple[float | None, ...]
    curve: Curve | None


@dataclass(frozen=True)
class VariantSummary:
    """One variant; `cells` are (layer or None, family, effective rank) of its changed matrices, a mean for stacks."""

    id: str
    of: Of
    kind: DeltaClass | None
    classes: dict[str, int]
    unclassified: int
    energy: float
    families: tuple[FamilySummary, ...]
    cells: tuple[tuple[int | None, str, float], ...]


def summarise(spectra: VariantSpectra) -> VariantSummary:
    """Sum up one variant."""
    labels = name_families({one.tensor for one in spectra.matrices})
    grouped: defaultdict[str, list[Measured]] = defaultdict(list)
    for one in spectra.matrices:
        grouped[labels[one.tensor]].append(one)
    kind, classes = most_energy(_kinds(spectra.matrices))
    return VariantSummary(
        id=spectra.id,
        of=spectra.of,
        kind=kind,
        classes=classes,
        unclassified=sum(one.verdict is None for one in spectra.matrices),
        energy=math.fsum(one.facts.energy for one in spectra.matrices if one.facts is not None),
        families=tuple(_family(name, found) for name, found in grouped.items()),
        cells=_cells(spectra.matrices, labels),
    )


def name_families(names: Iterable[str]) -> dict[str, str]:
    """The family of each tensor: the shortest end of its name, numbers and `.weight` left out, that no other one has.

    `model.layers.3.self_attn.q_proj.weight` is of `q_proj`; where both attention and MLP have a `c_proj`, they are
    `attn.c_proj` and `mlp.c_proj`.
    """
    paths = {
        name: tuple(word for word in name.removesuffix(".weight").split(".") if not word.isdigit()) for name in names
    }
    known = set(paths.values())

    def label(path: tuple[str, ...]) -> str:
        for length in range(1, len(path) + 1):
            if sum(other[-length:] == path[-length:] for other in known) == 1:
                return ".".join(path[-length:])
        return ".".join(path)

    short = {path: label(path) for path in known}
    return {name: short[path] or name for name, path in paths.items()}


def layer_of(name: str) -> int | None:
    """The first number in a tensor's name."""
    return next((int(word) for word in name.split(".") if word.isdigit()), None)


def _kinds(matrices: Iterable[Measured]) -> list[tuple[DeltaClass, float]]:
    return [
        (one.verdict.kind, one.facts.energy) for one in matrices if one.verdict is not None and one.facts is not None
    ]


def _family(name: str, matrices: Sequence[Measured]) -> FamilySummary:
    facts = [one.facts for one in matrices if one.facts is not None]
    kind, classes = most_energy(_kinds(matrices))
    ranks = [one.verdict.rank for one in matrices if one.verdict is not None and one.verdict.rank is not None]
    spectra = [one.energies for one in facts if one.energies is not None]
    energy, elements = math.fsum(one.energy for one in facts), sum(one.elements for one in facts)
    directions = tuple(
        statistics.median(directions_for(one, share) for one in spectra) if spectra else None for share in SHARES
    )
    return FamilySummary(
        family=name,
        kind=kind,
        classes=classes,
        matrices=len(matrices),
        energy=energy,
        unchanged=sum(one.unchanged for one in facts) / elements if elements else None,
        noise_share=min(1.0, math.fsum(one.noise for one in facts) / energy) if energy > 0.0 else None,
        effective_rank=statistics.median(effective_rank(one) for one in spectra) if spectra else None,
        rank=statistics.mode(sorted(ranks)) if ranks else None,
        directions=directions,
        curve=_curve([one for one in facts if one.energies is not None]),
    )


def _curve(facts: Sequence[Facts]) -> Curve | None:
    longest = max((one.energies.size for one in facts if one.energies is not None), default=0)
    total = math.fsum(one.energy for one in facts)
    if not longest or total <= 0.0:
        return None
    summed = np.zeros(longest)
    for one in facts:
        assert one.energies is not None
        summed[: one.energies.size] += one.energies
    at = np.unique(np.rint(np.geomspace(1, longest, _POINTS)).astype(np.int64))
    return Curve(
        direction=tuple(at.tolist()),
        cumulative=tuple(np.minimum(np.cumsum(summed) / total, 1.0)[at - 1].tolist()),
        singular_value=tuple(np.sqrt(summed / len(facts))[at - 1].tolist()),
        noise_level=math.sqrt(math.fsum(one.noise_edge for one in facts) / len(facts)),
    )


def _cells(matrices: Sequence[Measured], labels: dict[str, str]) -> tuple[tuple[int | None, str, float], ...]:
    found: defaultdict[tuple[int | None, str], list[float]] = defaultdict(list)
    for one in matrices:
        if one.facts is not None and one.facts.energies is not None:
            found[layer_of(one.tensor), labels[one.tensor]].append(effective_rank(one.facts.energies))
    return tuple((layer, family, statistics.fmean(values)) for (layer, family), values in found.items())
