"""What codecs that write a delta directly cost, from shapes alone: a dry run needs no tensor library."""

from __future__ import annotations

from collections.abc import Mapping

from mfs_decompose.codec.sizes import VALUE_BYTES, index_bytes
from mfs_decompose.codec.tree import Json
from mfs_decompose.linalg.shapes import GROUP

TRITS = 5
"""Values of -1, 0 and 1 in a byte: 3^5 = 243."""

ROW_INDEX_BYTES = 4

DIRECT_SIZED = ("sign", "ternary", "kbit", "rowsparse", "significant")
"""The codecs whose size a shape determines."""


def direct_bytes(codec: str, shape: tuple[int, int], params: Mapping[str, Json]) -> int | None:
    """Bytes of an [O, I] delta under one of DIRECT_SIZED; None for a codec whose size depends on the values."""
    rows, columns = shape
    if codec == "sign":
        return rows * -(-columns // 8) + 2 * _scales(shape, params["scale"])
    if codec == "ternary":
        return rows * -(-columns // TRITS) + 2 * _scales(shape, "group")
    if codec == "kbit":
        return rows * -(-columns * _whole(params["bits"]) // 8) + 2 * _scales(shape, "group")
    if codec == "rowsparse":
        return min(_whole(params["rows"]), rows) * (ROW_INDEX_BYTES + 2 + columns)
    if codec == "significant":
        return min(_whole(params["steps"]), columns) * rows * (index_bytes(columns) + VALUE_BYTES["bf16"])
    return None


def _scales(shape: tuple[int, int], per: Json) -> int:
    rows, columns = shape
    return {"tensor": 1, "row": rows, "group": rows * -(-columns // GROUP)}[str(per)]


def _whole(value: Json) -> int:
    assert type(value) is int and value >= 0, f"expected a whole number, found {value!r}"
    return value
