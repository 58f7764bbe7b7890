"""What an adapter does to each tensor of its base, gathered piece by piece."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mfs_decompose.source.adapter_keys import Factors
from mfs_decompose.source.adapter_names import Location
from mfs_decompose.source.header import TensorSpec
from mfs_decompose.source.pieces import Piece

Json = str | int | float | bool | None | list["Json"] | dict[str, "Json"]


@dataclass
class Change:
    """Applied in this order: `replace` takes the base's place, `factors` and `add` are added, each output is scaled to
    `magnitude`, the rows `tokens` are replaced.

    `direct` says that `replace` stands in the tensor itself, so that whatever is tied to it changes too; otherwise it
    is a copy of its module's own.
    """

    replace: TensorSpec | None = None
    direct: bool = False
    factors: list[dict[str, Json]] = field(default_factory=list)
    add: list[dict[str, Json]] = field(default_factory=list)
    magnitude: TensorSpec | None = None
    tokens: tuple[TensorSpec, tuple[int, ...]] | None = None

    @property
    def is_empty(self) -> bool:
        return not (self.replace or self.factors or self.add or self.tokens)

    def params(self) -> dict[str, Json]:
        """Plain JSON: parameters of the codec `adapter`, see codec/adapter.py."""
        found: dict[str, Json] = {}
        if self.replace is not None:
            found["replace"] = self.replace.name
        if self.factors:
            found["factors"] = [dict(entry) for entry in self.factors]
        if self.add:
            found["add"] = [dict(entry) for entry in self.add]
        if self.magnitude is not None:
            found["magnitude"] = self.magnitude.name
        if self.tokens is not None:
            found["tokens"] = {"tensor": self.tokens[0].name, "rows": list(self.tokens[1])}
        return found


@dataclass
class Draft:
    """Changes by the name of the checkpoint tensor, and what those tensors start from."""

    base: Mapping[str, TensorSpec]
    changes: dict[str, Change] = field(default_factory=dict)
    starts: dict[str, TensorSpec | None] = field(default_factory=dict)

    def change(self, name: str, start: TensorSpec | None) -> Change:
        """The change of a tensor; `start` is what it starts from."""
        self.starts.setdefault(name, start)
        return self.changes.setdefault(name, Change())

    def shape(self, name: str, location: Location) -> tuple[int, ...]:
        """The shape of a parameter after what replaces it."""
        change = self.changes.get(location.whole or "")
        return change.replace.shape if change is not None and change.replace is not None else location.shape


def factor_entries(
    factors: Factors, scale: float, orientation: str, experts: int | None, location: Location
) -> list[tuple[Piece, dict[str, Json]]] | None:
    """The product of two factors as it lies in each checkpoint tensor of a parameter; None where it cannot be said.

    `orientation` is that of the parameter: `out_in` [..., O, I] or `in_out` [..., I, O].
    """
    assert factors.a is not None
    assert factors.b is not None
    entry: dict[str, Json] = {"a": factors.a.name, "b": factors.b.name, "scale": scale}
    if experts is not None:
        entry["experts"] = experts
    if location.whole is not None:
        return [(location.pieces[0], {**entry, "orientation": orientation})]
    found = []
    for piece in location.pieces:
        placed = _placed(piece, orientation, len(location.shape))
        if placed is None:
            return None
        found.append((piece, {**entry, **placed}))
    return found


def _placed(piece: Piece, orientation: str, dims: int) -> dict[str, Json] | None:
    out, into = (dims - 2, dims - 1) if orientation == "out_in" else (dims - 1, dims - 2)
    out_axis, in_axis = piece.axes[out], piece.axes[into]
    matrix = {len(piece.shape) - 2, len(piece.shape) - 1}
    if {out_axis, in_axis} != matrix or len(piece.shape) not in (2, 3) or dims not in (2, 3):
        return None
    assert out_axis is not None
    assert in_axis is not None
    if len(piece.shape) == 3 and dims == 3 and piece.axes[0] != 0:
        return None
    found: dict[str, Json] = {
        "orientation": "out_in" if out_axis < in_axis else "in_out",
        "out": list(piece.place[out]),
        "in": list(piece.place[into]),
        "at": [list(span) for span in piece.origin],
    }
    if dims == 3:
        found["of"] = list(piece.place[0])
    return found
