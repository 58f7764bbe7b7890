"""How sure a prediction of stored weights is: the distance from an exact sum to the edge of its rounding box.

A variant's weight is `round(W0 + L)`, or `round(W0 + round(L))` where an adapter was merged in the checkpoint's own
precision. With L known up to a small error only weights whose sum lies near an edge can come out wrong, and then almost
always as the number on the other side of it. All of it is single IEEE operations on fp64: every machine agrees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mfs_decompose.linalg.grid import (
    Doubles,
    Grid,
    Longs,
    Words,
    is_even,
    nearest,
    neighbours,
    ordered,
    powers,
    to_words,
    unit_exponents,
)

Merge = Literal["once", "twice"]
"""How base and delta were added: in a wide type and rounded once, or with the delta rounded before."""

Classes = npt.NDArray[np.unsignedinteger[Any]]
DISTANCES = 64
_POSITIONS = 8
_EXPONENTS = 16
POSITIONED = _POSITIONS * _EXPONENTS
_ENOUGH = 512  # members of a class that pay for a model of its own


@dataclass(frozen=True)
class Prediction:
    """Predicted weights, flat.

    `words` are ordered integers; `up` says that the nearer edge lies above; `distance` is how far delta is from it;
    `units` are the exponents of the unit in the last place, biased as in fp64.
    """

    words: Words
    up: npt.NDArray[np.bool_]
    distance: Doubles
    units: Longs


def predict(base: Doubles, delta: Doubles, grid: Grid, merge: Merge) -> Prediction:
    """Predict weights from the base's values and an exact delta, both flat fp64; what is not finite counts as 0."""
    base, delta = (np.where(np.isfinite(values), values, 0.0) for values in (base, delta))
    delta = delta + 0.0  # -0.0 becomes +0.0: which of the two a product gives depends on the kernel
    total = base + (nearest(delta, grid) if merge == "twice" else delta)
    total = np.clip(total, -2.0 * grid.largest, 2.0 * grid.largest)
    rounded = nearest(total, grid)
    low, high = box(rounded, base, grid, merge)
    down, up = delta - low, high - delta
    distance = np.maximum(np.minimum(down, up), 0.0)
    return Prediction(ordered(to_words(rounded, grid)), up < down, distance, unit_exponents(rounded, grid))


def box(own: Doubles, base: Doubles, grid: Grid, merge: Merge) -> tuple[Doubles, Doubles]:
    """The least and the largest delta that give the finite numbers `own`; whether they themselves do is left open."""
    below, above = neighbours(own, grid)
    low, high = (below + own) / 2 - base, (own + above) / 2 - base
    if merge == "once":
        return low, high
    even = is_even(own, grid)
    return _inner_edge(low, even, grid), -_inner_edge(-high, even, grid)


def _inner_edge(low: Doubles, closed: npt.NDArray[np.bool_], grid: Grid) -> Doubles:
    """Halfway under the least number of the format above `low`, `low` itself among them where the box is closed.

    Two numbers of a format often add up to a tie, so it matters to whom a tie goes: the even number.
    """
    least = nearest(low, grid)
    outside = (least < low) | ((least == low) & ~closed)
    least = np.where(outside, neighbours(least, grid)[1], least)
    edge: Doubles = (neighbours(least, grid)[0] + least) / 2
    return edge


def distance_classes(prediction: Prediction, top: int) -> Classes:
    """Weights by the half octave of their distance, the farthest class at `top`: right where the error is small."""
    classes: Classes = np.clip(_half_octaves(prediction.distance) - top + DISTANCES - 1, 0, DISTANCES - 1)
    return classes.astype(np.uint8)


def farthest(prediction: Prediction) -> int:
    """The half octave of the largest distance."""
    return int(_half_octaves(prediction.distance).max(initial=0))


def positioned_classes(prediction: Prediction, top: int) -> Classes:
    """Weights by their unit's exponent, the largest at `top`, and by the octave of their distance in units.

    Right where the error spans several units.
    """
    exponents = np.clip(prediction.units - top + _EXPONENTS - 1, 0, _EXPONENTS - 1)
    share = np.maximum(prediction.distance * powers(2046 - prediction.units), 2.0 ** -(_POSITIONS + 1))
    octaves = np.clip(1022 - (share.view(np.int64) >> 52), 1, _POSITIONS) - 1
    classes: Classes = exponents * _POSITIONS + octaves
    return classes.astype(np.uint8)


def coarsest(prediction: Prediction) -> int:
    """The largest exponent of a unit."""
    return int(prediction.units.max(initial=0))


def pool_small(classes: Classes, count: int) -> tuple[Classes, int]:
    """Join neighbouring classes until each has members enough to pay for its model; both sides know the members."""
    sizes = np.bincount(classes, minlength=count)
    pooled, number, members = np.zeros(count, np.uint8), 0, 0
    for at in range(count):
        pooled[at] = number
        members += int(sizes[at])
        if members >= _ENOUGH:
            number, members = number + 1, 0
    if members < _ENOUGH and number:  # what is left over joins the last
        pooled[pooled == number] = number - 1
        number -= 1
    return pooled[classes], number + 1


def _half_octaves(distance: Doubles) -> Longs:
    return distance.view(np.int64) >> 51
