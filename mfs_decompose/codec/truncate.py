"""A smaller fit out of a larger one: arrays hold their steps along the first dimension, so every prefix is a fit."""

from __future__ import annotations

from dataclasses import replace

from mfs_decompose.codec.tree import CodecNode, Part

Range = tuple[int, int]
"""Offset and count of bytes."""


def truncate(node: CodecNode, steps: int) -> tuple[CodecNode, tuple[Range, ...]]:
    """The node of the first `steps` steps, and which bytes of the larger fit it keeps, in order."""
    parts: list[Part] = []
    ranges: list[Range] = []
    offset = 0
    for part in node.parts:
        whole = part.shape[0]
        assert 0 <= steps <= whole, f"{steps} steps of {whole}"
        nbytes = part.nbytes // whole * steps if whole else 0
        parts.append(Part(part.name, part.dtype, (steps, *part.shape[1:]), offset, nbytes))
        ranges.append((part.offset, nbytes))
        offset += nbytes
    return replace(node, params={**node.params, "steps": steps}, parts=tuple(parts)), tuple(ranges)
