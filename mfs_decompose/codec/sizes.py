"""What a lossy codec costs, from shapes alone: a dry run needs no tensor library."""

from __future__ import annotations

from collections.abc import Mapping

from mfs_decompose.linalg import bands
from mfs_decompose.linalg.shapes import GROUP, passes

VALUE_BYTES = {"bf16": 2, "int8": 1}
SHORT_INDEX = 1 << 16
"""Columns up to which a 16-bit index will do."""

_PLANNED_BITS = 3

Params = Mapping[str, str]


def step_bytes(codec: str, shape: tuple[int, int], params: Params) -> int:
    """Bytes of one step of an [O, I] delta: a direction of `lowrank`, one entry in every row of `sparse`.

    Directions of `banded` cost what their bits do: that of a narrow one is what a plan counts with.
    """
    if codec == "banded":
        return bands.direction_bytes(shape, _PLANNED_BITS)
    if codec == "lowrank":
        return sum(direction_bytes(length, params["factors"]) for length in shape)
    rows = shape[0]
    scales = 2 * -(-rows // GROUP) if params["values"] == "int8" else 0
    return rows * (index_bytes(shape[1]) + VALUE_BYTES[params["values"]]) + scales


def max_steps(codec: str, shape: tuple[int, int]) -> int:
    """Steps after which nothing of the delta is left to store."""
    return shape[1] if codec == "sparse" else min(shape)


def read_passes(codec: str, shape: tuple[int, int], steps: int) -> int:
    """How often a fit in row blocks reads the delta."""
    return 1 if codec == "sparse" else passes(shape, steps)


def fit_bytes(codec: str, shape: tuple[int, int], params: Params) -> int:
    """Bytes of one step in scratch, between the passes."""
    return 2 * sum(shape) + 8 if codec == "banded" else step_bytes(codec, shape, params)


def direction_bytes(length: int, factors: str) -> int:
    """Bytes of one direction of `length` values, scales included."""
    if factors == "bf16":
        return 2 * length
    codes = length if factors == "int8" else -(-length // 2)
    return codes + 2 * -(-length // GROUP)


def index_bytes(columns: int) -> int:
    """Bytes of one column index."""
    return 2 if columns <= SHORT_INDEX else 4
