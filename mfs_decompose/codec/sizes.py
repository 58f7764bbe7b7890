"""What a lossy codec costs, from shapes alone: a dry run needs no tensor library."""

from __future__ import annotations

from collections.abc import Mapping

from mfs_decompose.linalg.shapes import GROUP, passes

VALUE_BYTES = {"bf16": 2, "int8": 1}
SHORT_INDEX = 1 << 16
"""Columns up to which a 16-bit index will do."""

Params = Mapping[str, str]


def step_bytes(codec: str, shape: tuple[int, int], params: Params) -> int:
    """Bytes of one step of an [O, I] delta: a direction of `lowrank`, one entry in every row of `sparse`."""
    if codec == "lowrank":
        return sum(direction_bytes(length, params["factors"]) for length in shape)
    rows = shape[0]
    scales = 2 * -(-rows // GROUP) if params["values"] == "int8" else 0
    return rows * (index_bytes(shape[1]) + VALUE_BYTES[params["values"]]) + scales


def max_steps(codec: str, shape: tuple[int, int]) -> int:
    """Steps after which nothing of the delta is left to store."""
    return min(shape) if codec == "lowrank" else shape[1]


def read_passes(codec: str, shape: tuple[int, int], steps: int) -> int:
    """How often a fit in row blocks reads the delta."""
    return passes(shape, steps) if codec == "lowrank" else 1


def direction_bytes(length: int, factors: str) -> int:
    """Bytes of one direction of `length` values, scales included."""
    if factors == "bf16":
        return 2 * length
    codes = length if factors == "int8" else -(-length // 2)
    return codes + 2 * -(-length // GROUP)


def index_bytes(columns: int) -> int:
    """Bytes of one column index."""
    return 2 if columns <= SHORT_INDEX else 4
