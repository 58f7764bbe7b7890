"""Boxes of tensors, followed through the operations that put checkpoint tensors together to parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

T = TypeVar("T")
Box = tuple[tuple[int, int], ...]
"""A (start, stop) for each dimension."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of one checkpoint tensor that is, element by element, a box of a parameter.

    Attributes:
        tensor: the checkpoint tensor.
        shape: of that tensor, whole.
        origin: the box of it.
        place: the box of the parameter.
        axes: for each dimension of the parameter the dimension of the tensor that runs along it; None where the
            parameter has one that the tensor lacks, and the piece one index of it (experts in a stack).
    """

    tensor: str
    shape: tuple[int, ...]
    origin: Box
    place: Box
    axes: tuple[int | None, ...]

    @property
    def takes_all(self) -> bool:
        """Whether nothing of the checkpoint tensor is left out."""
        return self.origin == tuple((0, size) for size in self.shape)

    @property
    def numel(self) -> int:
        return math.prod(stop - start for start, stop in self.place)


Pieces = tuple[Piece, ...]


def whole(tensor: str, shape: Sequence[int]) -> Pieces:
    """A tensor as the only piece of itself."""
    box = tuple((0, size) for size in shape)
    return (Piece(tensor, tuple(shape), box, box, tuple(range(len(box)))),)


def narrow(pieces: Iterable[Piece], dim: int, start: int, stop: int) -> Pieces:
    """Indices `start` to `stop` of a dimension, counted anew from 0."""
    found = []
    for piece in pieces:
        first, last = piece.place[dim]
        low, high = max(first, start), min(last, stop)
        if low >= high:
            continue
        origin, axis = piece.origin, piece.axes[dim]
        if axis is not None:
            offset = origin[axis][0] - first
            origin = _put(origin, axis, (low + offset, high + offset))
        place = _put(piece.place, dim, (low - start, high - start))
        found.append(replace(piece, origin=origin, place=place))
    return tuple(found)


def select(pieces: Iterable[Piece], dim: int, index: int) -> Pieces:
    """One index of a dimension, which is gone then."""
    return tuple(
        replace(piece, place=_cut(piece.place, dim), axes=_cut(piece.axes, dim))
        for piece in narrow(pieces, dim, index, index + 1)
    )


def insert(pieces: Iterable[Piece], dim: int) -> Pieces:
    """A new dimension of length 1 before dimension `dim`."""
    return tuple(
        replace(
            piece,
            place=(*piece.place[:dim], (0, 1), *piece.place[dim:]),
            axes=(*piece.axes[:dim], None, *piece.axes[dim:]),
        )
        for piece in pieces
    )


def permute(pieces: Iterable[Piece], order: Sequence[int]) -> Pieces:
    """Dimension `order[i]` becomes dimension i."""
    return tuple(
        replace(piece, place=tuple(piece.place[i] for i in order), axes=tuple(piece.axes[i] for i in order))
        for piece in pieces
    )


def concatenate(parts: Iterable[tuple[Pieces, int]], dim: int) -> Pieces:
    """Parts, each with its length along `dim`, one after another."""
    found: list[Piece] = []
    offset = 0
    for pieces, length in parts:
        for piece in pieces:
            start, stop = piece.place[dim]
            found.append(replace(piece, place=_put(piece.place, dim, (start + offset, stop + offset))))
        offset += length
    return tuple(found)


def reshape_units(pieces: Pieces, shape: Sequence[int], wanted: Sequence[int]) -> Pieces | None:
    """A reshape that only drops or adds dimensions of length 1; None for any other."""
    if [size for size in shape if size != 1] != [size for size in wanted if size != 1]:
        return None
    for dim in reversed(range(len(shape))):
        if shape[dim] == 1:
            pieces = select(pieces, dim, 0)
    for dim, size in enumerate(wanted):
        if size == 1:
            pieces = insert(pieces, dim)
    return pieces


def _put(box: Box, dim: int, span: tuple[int, int]) -> Box:
    return (*box[:dim], span, *box[dim + 1 :])


def _cut(values: tuple[T, ...], dim: int) -> tuple[T, ...]:
    return (*values[:dim], *values[dim + 1 :])
