"""A stack of matrices in one node: the arrays of a lossy codec, the steps of one matrix behind those of another.

A model may have tens of thousands of experts. A node for each would be half a kilobyte of JSON; here it is one number,
in the parameter `slices`: the steps of each matrix. It works for codecs whose arrays hold steps along the first
dimension, which is what truncate.py needs as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

from mfs_decompose.codec.base import Delta, Fetch, LossyCodec
from mfs_decompose.codec.tree import CodecNode, Json, Part, shown
from mfs_decompose.codec.truncate import Range
from mfs_decompose.errors import ArtifactInvalid
from mfs_decompose.source.dtypes import is_known, item_size

if TYPE_CHECKING:
    import torch


def stack_node(like: CodecNode, steps: Sequence[int]) -> CodecNode:
    """The node of matrices of `steps[i]` steps each, stored as `like` stores one; bytes from offset 0 on."""
    parts: list[Part] = []
    offset = 0
    for part in like.parts:
        nbytes = _step_bytes(part) * sum(steps)
        parts.append(Part(part.name, part.dtype, (sum(steps), *part.shape[1:]), offset, nbytes))
        offset += nbytes
    params: dict[str, Json] = {**like.params, "steps": sum(steps), "slices": [*steps]}
    return replace(like, params=params, parts=tuple(parts))


def stack_ranges(like: CodecNode, fitted: Sequence[int], steps: Sequence[int]) -> list[Range]:
    """What `stack_node(like, steps)` holds, in order, out of fits of `fitted[i]` steps that lie one behind another."""
    starts = list(accumulate((fit * step_bytes(like) for fit in fitted), initial=0))
    ranges: list[Range] = []
    before = 0  # bytes a step of the arrays that lie before this one in a fit
    for part in like.parts:
        own = _step_bytes(part)
        for start, fit, kept in zip(starts, fitted, steps, strict=False):
            assert 0 <= kept <= fit, f"{kept} steps of {fit}"
            ranges.append((start + before * fit, own * kept))
        before += own
    return ranges


def step_bytes(node: CodecNode) -> int:
    """Bytes of one step in all arrays."""
    return sum(_step_bytes(part) for part in node.parts)


def open_stack(node: CodecNode, fetch: Fetch, codec: LossyCodec, matrices: int, shape: tuple[int, int]) -> Delta:
    """Open `matrices` deltas of one shape [O, I], one below the other; each is read when its rows are.

    Raises:
        ArtifactInvalid: the steps are not those of so many matrices, or not those of the arrays.
    """
    given = node.params.get("slices")
    steps = [count for count in given if type(count) is int and count >= 0] if isinstance(given, list) else []
    total = sum(steps)
    if not isinstance(given, list) or len(steps) != len(given) or len(steps) != matrices:
        raise ArtifactInvalid(f"codec {node.codec!r}: expected steps of {matrices} slices, found {shown(given)}")
    for part in node.parts:
        if not is_known(part.dtype) or part.shape[:1] != (total,) or part.nbytes != _step_bytes(part) * total:
            raise ArtifactInvalid(
                f"array {part.name!r} of codec {node.codec!r}: expected the {total} steps of its slices, "
                f"found {part.dtype} {list(part.shape)} in {part.nbytes} bytes"
            )
    if node.params.get("steps") != total:
        raise ArtifactInvalid(f"codec {node.codec!r}: expected {total} steps, found {shown(node.params.get('steps'))}")
    return _Stack(node, fetch, codec, steps, shape)


class _Stack:
    def __init__(
        self, node: CodecNode, fetch: Fetch, codec: LossyCodec, steps: Sequence[int], shape: tuple[int, int]
    ) -> None:
        self._node, self._fetch, self._codec, self._shape = node, fetch, codec, shape
        self._edges = list(accumulate(steps, initial=0))

    def rows(self, start: int, stop: int) -> torch.Tensor:
        import torch

        height = self._shape[0]
        pieces: list[torch.Tensor] = []
        for at in range(start // height, -(-stop // height)):
            delta = self._codec.open(self._slice(at), self._fetch, self._shape)
            pieces.append(delta.rows(max(start - at * height, 0), min(stop - at * height, height)))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _slice(self, at: int) -> CodecNode:
        first, steps = self._edges[at], self._edges[at + 1] - self._edges[at]
        parts = tuple(
            Part(
                part.name,
                part.dtype,
                (steps, *part.shape[1:]),
                part.offset + first * _step_bytes(part),
                steps * _step_bytes(part),
            )
            for part in self._node.parts
        )
        params = {key: value for key, value in self._node.params.items() if key != "slices"}
        return replace(self._node, params={**params, "steps": steps}, parts=parts)


def _step_bytes(part: Part) -> int:
    return math.prod(part.shape[1:]) * item_size(part.dtype)
