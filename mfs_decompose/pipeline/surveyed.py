"""What pass 1 finds out about a tensor, as the journal keeps it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from mfs_decompose.codec.arrays import head_parts
from mfs_decompose.codec.base import Fit
from mfs_decompose.codec.registry import lossy_codec
from mfs_decompose.codec.tree import CodecNode
from mfs_decompose.linalg.dead_curve import DeadCurve
from mfs_decompose.linalg.shapes import GROUP
from mfs_decompose.plan.model import Item

SliceState = Literal["identical", "exact", "fitted"]
Slice = Literal["identical", "exact"] | tuple[float, ...]
"""A slice of a stack: the base's bits, to be stored exactly, or fitted: what each step explains."""


@dataclass(frozen=True, slots=True)
class OpenFacts:
    """Of an item whose codec allocation chooses: `energy` of the delta that was fitted, (rank, curve of the rest beyond
    that many directions), about how many bytes all bits would take, and of a merged LoRA the bytes of the common rows
    as `lora-exact` stores them, with its rank.
    """

    energy: float
    curves: tuple[tuple[int, DeadCurve], ...]
    exact_bytes: float
    peeled: tuple[int, int] | None = None

    def to_json(self) -> list[Any]:
        return [self.energy, self.exact_bytes, [[rank, c.bits, c.error] for rank, c in self.curves], self.peeled]

    @classmethod
    def from_json(cls, document: Sequence[Any]) -> OpenFacts:
        energy, exact, curves, peeled = document
        found = tuple((rank, DeadCurve(*map(tuple, ladders))) for rank, *ladders in curves)
        return cls(energy, found, exact, None if peeled is None else (peeled[0], peeled[1]))


@dataclass(frozen=True, slots=True)
class Surveyed:
    """What pass 1 found out about one item.

    `identical` says that the rows which have a counterpart in the base have its bits. `energy` is ||delta||^2 over
    those rows, `explained[i]` the part of it that step i explains. `exact_bytes` are those of the lossless codec, where
    allocation must know them: it was chosen beside a budget, or no lossy codec could be used. `fit` and `offset` say
    what lies in the unit's scratch file, and where.

    Of a stack with fits, `slices` are its matrices, and their fits lie one behind another in the scratch file; `fit`
    describes the first of them. `exact_bytes` are those of its exact slices.

    A delta that is not `finite` is stored exactly. `exact_bytes` of a direct codec are its own.
    """

    sha256: str
    identical: bool
    nonfinite: int
    energy: float
    explained: tuple[float, ...] = ()
    exact_bytes: int | None = None
    fit: dict[str, Any] | None = None
    offset: int = 0
    slices: tuple[Slice, ...] = ()
    finite: bool = True
    open: OpenFacts | None = None

    @property
    def curves(self) -> tuple[tuple[float, ...], ...]:
        """What each step explains, for every matrix of the item; nothing for a slice without a fit."""
        if not self.slices:
            return (self.explained,)
        return tuple(() if isinstance(found, str) else found for found in self.slices)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON; not `asdict`, which would copy every step of every tensor twice."""
        document = {name: getattr(self, name) for name in self.__slots__} | {"explained": list(self.explained)}
        del document["slices"], document["finite"], document["open"]
        if self.open is not None:
            document["open"] = self.open.to_json()
        if not self.finite:
            document["finite"] = False
        if self.slices:
            document["slices"] = [found if isinstance(found, str) else list(found) for found in self.slices]
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Surveyed:
        slices = tuple(found if isinstance(found, str) else tuple(found) for found in document.get("slices", ()))
        facts = OpenFacts.from_json(document["open"]) if "open" in document else None
        return cls(**{**document, "explained": tuple(document["explained"]), "slices": slices, "open": facts})


def slice_runs(slices: Sequence[Slice]) -> list[tuple[SliceState, int, int]]:
    """Neighbours that are stored the same way: (how, first, end)."""
    runs: list[tuple[SliceState, int, int]] = []
    start = 0
    for state, run in groupby(slices, key=_state):
        stop = start + len(list(run))
        runs.append((state, start, stop))
        start = stop
    return runs


def _state(found: Slice) -> SliceState:
    return "fitted" if isinstance(found, tuple) else found


def fit_bytes(item: Item, fit: Fit) -> tuple[CodecNode, bytes]:
    """A fit at its full size: the node, and the bytes it speaks of."""
    parts, blob = head_parts(fit.arrays, lossy_codec(item.codec).array_names(item.params), fit.steps)
    params: dict[str, Any] = {"steps": fit.steps, **item.params}
    if item.codec == "lowrank":
        params["group"] = GROUP
    return CodecNode(item.codec, params=params, parts=parts), blob
