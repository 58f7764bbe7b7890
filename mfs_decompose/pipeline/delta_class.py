"""What kind of change a delta is, decided on measured numbers, which go with the verdict.

    identical      the base's tensor, bit for bit
    lora           r directions, far fewer than there are, explain all but rounding noise
    sparse         few weights changed, in many directions
    concentrated   few directions, above the noise, hold a good share of the energy
    flat           anything else, and every changed vector

Small merges show no gap in their spectrum: rounding noise fills it. So a rank is looked for twice: where the energy
beyond r directions is no more than the predicted noise, and, for 16-bit weights, where r directions meet the rounding
boxes (`linalg/peel.py`). The first alone would believe in many light full fine-tunes, the second in some tensors of
which hardly anything changed; both together were right for 209 of 210 matrices of a full fine-tune and all of a merge.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

DeltaClass = Literal["identical", "lora", "sparse", "concentrated", "flat"]
Energies = npt.NDArray[np.float64]

CLASSES: tuple[DeltaClass, ...] = ("identical", "lora", "sparse", "concentrated", "flat")

LORA_SHARE = 0.25
"""Of the directions, at most, for `lora`: from there on factors are no smaller than half the matrix."""
TAIL_TOLERANCE = 1.05
"""Energy beyond r over predicted noise, at most: the prediction exceeds the truth by 0 to 20 % on real merges."""
BOX_TOLERANCE = 1.5
"""The same at a rank at which the boxes are met: weak merges reach 1.3 (noise hides half of their directions), a full
fine-tune whose boxes are met by chance 1.7."""
ABOVE_CHANCE = 3.0
"""Energy of the r directions of a `lora` over what independent entries would put there, at least: sub-ulp updates of
full rank reach 2.0, the weakest merges that were measured 4.0."""
SPARSE_CHANGED = 0.30
"""Share of changed weights, at most, for `sparse`: RL fine-tunes change 5 to 30 % (arXiv 2505.11711)."""
FEW_DIRECTIONS = 1 / 16
"""Of the directions count as few: about what low rank buys with a budget of 5 to 10 % of the bytes."""
CONCENTRATED_SHARE = 0.30
"""Of the energy in those few, at least, for `concentrated`; independent entries put .21 (square) or less there."""


@dataclass(frozen=True)
class Facts:
    """What was measured of one matrix.

    `unchanged` of `elements` equal the base's; `energies` are all squared singular values [K], largest first, None for
    what is no matrix; `noise` is the predicted squared norm of the rounding noise, `energy` the delta's; `resolution`
    is the squared singular value that cannot be told from zero.
    """

    shape: tuple[int, int] | None
    elements: int
    unchanged: int
    energy: float
    noise: float
    energies: Energies | None = None
    resolution: float = 0.0

    @property
    def changed_share(self) -> float:
        return 1.0 - self.unchanged / self.elements if self.elements else 0.0

    @property
    def noise_edge(self) -> float:
        """The largest squared singular value that noise alone would have (Marchenko and Pastur 1967)."""
        if self.shape is None:
            return 0.0
        rows, columns = self.shape
        edge = self.noise / (rows * columns) * (math.sqrt(rows) + math.sqrt(columns)) ** 2
        return max(edge, self.resolution)

    def tail_ratio(self, rank: int) -> float:
        """Energy beyond the strongest `rank` directions over the predicted noise there; 0 where nothing is left.

        The `rank` directions take their part of the noise along, on both sides.
        """
        assert self.energies is not None and self.shape is not None
        tail = float(self.energies[rank:].sum())
        free = (1 - rank / self.shape[0]) * (1 - rank / self.shape[1])
        floor = max(self.noise * free, self.resolution * max(0, self.energies.size - rank))
        return tail / floor if floor > 0.0 else math.inf if tail > 0.0 else 0.0


@dataclass(frozen=True)
class Verdict:
    """A class and the numbers it was decided on.

    `rank` is that of a lora, `tail` its tail ratio; `standing_out` counts the directions above the noise, `head` is the
    share of energy in those of them among the few strongest. None where there is no spectrum, or no lora.
    """

    kind: DeltaClass
    why: str
    rank: int | None = None
    tail: float | None = None
    standing_out: int | None = None
    head: float | None = None


def classify(facts: Facts, meets_boxes: Callable[[int], int | None] | None = None) -> Verdict:
    """The class of one delta.

    `meets_boxes` finds the rank that meets the rounding boxes, given a first guess; None where weights have no boxes to
    be seen, and the tail alone decides.
    """
    if facts.unchanged == facts.elements:
        return Verdict("identical", "every weight has the base's bits")
    changed = facts.changed_share
    if facts.energies is None or facts.shape is None:
        if changed <= SPARSE_CHANGED:
            return Verdict("sparse", f"{changed:.3g} of the weights changed")
        return Verdict("flat", f"{changed:.3g} of the weights changed, and there is no matrix to have directions")
    above = facts.energies > facts.noise_edge
    few = max(1, int(facts.energies.size * FEW_DIRECTIONS))
    head = float(facts.energies[:few][above[:few]].sum() / facts.energy) if facts.energy else 0.0
    standing_out = int(above.sum())
    rank = _find_rank(facts, meets_boxes)
    if rank is not None:
        tail = facts.tail_ratio(rank)
        why = f"{rank} of {facts.energies.size} directions leave {tail:.2f} times the predicted rounding noise"
        return Verdict("lora", why, rank, tail, standing_out, head)
    concentrated = head >= CONCENTRATED_SHARE
    if changed <= SPARSE_CHANGED and not concentrated:
        why = f"{changed:.3g} of the weights changed, and the {few} strongest directions hold {head:.2f} of the energy"
        return Verdict("sparse", why, None, None, standing_out, head)
    why = (
        f"{few} of {facts.energies.size} directions, as far as they are above the noise, hold {head:.2f} of the energy"
    )
    return Verdict("concentrated" if concentrated else "flat", why, None, None, standing_out, head)


def most_energy(found: Iterable[tuple[DeltaClass, float]]) -> tuple[DeltaClass | None, dict[str, int]]:
    """The class that holds most of the energy, and how many tensors each class has; None where there is nothing.

    Identical tensors have no energy: the whole is identical only where all are.
    """
    items = list(found)
    counts = Counter(kind for kind, _ in items)
    energies = {kind: math.fsum(energy for other, energy in items if other == kind) for kind in counts}
    ordered = sorted(counts, key=lambda kind: (energies[kind], counts[kind], -CLASSES.index(kind)), reverse=True)
    changed = [kind for kind in ordered if kind != "identical"]
    return (changed or ordered or [None])[0], {kind: counts[kind] for kind in CLASSES if counts[kind]}


def directions_for(energies: Energies, share: float) -> int:
    """How many of the strongest directions it takes to hold a share of the energy."""
    total = float(energies.sum())
    if total <= 0.0:
        return 0
    return min(energies.size, 1 + int(np.searchsorted(np.cumsum(energies), share * total)))


def effective_rank(energies: Energies) -> float:
    """exp of the entropy of the energies' shares: K for K equal ones (Roy and Vetterli 2007, with energies)."""
    total = float(energies.sum())
    if total <= 0.0:
        return 0.0
    shares = energies / total
    shares = shares[shares > 0.0]
    return float(np.exp(-(shares * np.log(shares)).sum()))


def _find_rank(facts: Facts, meets_boxes: Callable[[int], int | None] | None) -> int | None:
    """The rank of a lora, if it is one."""
    assert facts.energies is not None
    if facts.energy <= 0.0:  # zeros that changed their sign
        return None
    limit = int(facts.energies.size * LORA_SHARE)
    rank = next((rank for rank in range(1, limit + 1) if facts.tail_ratio(rank) <= TAIL_TOLERANCE), None)
    if rank is None or not _above_chance(facts, rank):
        return None
    if meets_boxes is None:
        return rank
    found = meets_boxes(rank)
    if found is None or found > limit or facts.tail_ratio(found) > BOX_TOLERANCE or not _above_chance(facts, found):
        return None
    return found


def _above_chance(facts: Facts, rank: int) -> bool:
    """Whether the strongest directions hold clearly more than independent entries of the same energy would there."""
    assert facts.energies is not None and facts.shape is not None
    rows, columns = facts.shape
    chance = rank * (math.sqrt(rows) + math.sqrt(columns)) ** 2 / (rows * columns)
    # Where chance holds a good part of it all, halfway from there to all is asked for.
    wanted = min(ABOVE_CHANCE * chance, (1 + chance) / 2, 1 - 1e-6)
    return float(facts.energies[:rank].sum()) >= wanted * facts.energy
