"""Corrected: what a lossy delta gets wrong of a tensor's own bits, so that it is restored exactly.

The node's child predicts the weights: base plus its exact delta, rounded. Coded is the difference of the bit patterns
as ordered integers, counted towards the nearer edge of the prediction's rounding box and given how near that edge is:
a weight far from it is next to never wrong and costs next to nothing. In chunks of whole rows, each by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from mfs_decompose.codec.base import Emit, Fetch, Rows, block_rows
from mfs_decompose.codec.tree import CodecNode, Part, shown
from mfs_decompose.errors import ArtifactInvalid
from mfs_decompose.linalg.grid import GRIDS, Grid, Words, ordered, unordered
from mfs_decompose.linalg.integer_coder import coded_bits, decode_integers, encode_integers, to_buckets
from mfs_decompose.linalg.margins import (
    DISTANCES,
    POSITIONED,
    Classes,
    Merge,
    Prediction,
    coarsest,
    distance_classes,
    farthest,
    pool_small,
    positioned_classes,
    predict,
)
from mfs_decompose.source.header import TensorSpec

if TYPE_CHECKING:
    import torch

DeltaRows = Callable[[int, int], "torch.Tensor"]
"""The exact fp64 delta of rows start..stop along the tensor's first dimension; its shape may be the matrix's."""

_CHUNK = 1 << 20  # elements; cut by shape alone
_HEAD = 3  # bytes: which classes, and where they begin
_WAYS: tuple[tuple[Callable[[Prediction], int], Callable[[Prediction, int], Classes], int], ...] = (
    (farthest, distance_classes, DISTANCES),
    (coarsest, positioned_classes, POSITIONED),
)


def is_correctable(spec: TensorSpec) -> bool:
    """Whether tensors of this dtype can be stored as a correction."""
    return spec.dtype in GRIDS


def encode_corrected(
    own: Rows, base: Rows, delta: DeltaRows, spec: TensorSpec, emit: Emit, merge: Merge = "once"
) -> CodecNode:
    """Write what `base + delta` gets wrong of `own`; `with_child` puts the node above the delta's.

    Holds one chunk. All bit patterns come back: NaN, Inf, -0.0.
    """
    assert is_correctable(spec) and spec.shape, f"no correction of {spec.dtype} {list(spec.shape)}"
    grid = GRIDS[spec.dtype]
    step = block_rows(spec, _CHUNK)
    sizes: list[int] = []
    for start in range(0, spec.rows, step):
        stop = min(start + step, spec.rows)
        prediction = _predict(base(start, stop), delta(start, stop), grid, merge)
        data = _encode_chunk(ordered(_words(own(start, stop), grid)), prediction)
        emit(data)
        sizes.append(len(data))
    parts = (Part("residual", "U8", (sum(sizes),), 0, sum(sizes)),)
    return CodecNode("corrected", params={"merge": merge, "rows": step, "sizes": list(sizes)}, parts=parts)


def with_child(corrected: CodecNode, child: CodecNode) -> CodecNode:
    """The tree of a correction whose bytes follow those of the delta that it corrects."""
    shifted = corrected.shifted(child.nbytes)
    return CodecNode("corrected", params=shifted.params, parts=shifted.parts, children=(child,))


def open_corrected(
    node: CodecNode, fetch: Fetch, spec: TensorSpec
) -> Callable[[int, int, Rows, DeltaRows], torch.Tensor]:
    """A reader of rows start..stop in the tensor's own dtype, given the base's rows and the child's delta.

    Raises:
        ArtifactInvalid: the node does not fit the tensor; when reading, a chunk is damaged.
    """
    step, sizes, merge = node.integer("rows"), node.params.get("sizes"), node.params.get("merge")
    part = node.part("residual")
    numbers = [size for size in sizes if type(size) is int and size >= 0] if isinstance(sizes, list) else []
    whole = isinstance(sizes, list) and len(numbers) == len(sizes) and step >= 1
    if not whole or len(numbers) != -(-spec.rows // step) or sum(numbers) != part.nbytes:
        raise ArtifactInvalid(f"codec 'corrected' of {spec.name!r}: chunks do not add up to the tensor")
    if not is_correctable(spec) or not spec.shape or merge not in ("once", "twice"):
        found = f"{spec.dtype} {list(spec.shape)}"
        raise ArtifactInvalid(f"codec 'corrected' of {spec.name!r}: found merge {shown(merge)} of {found}")
    # Larger ones would fill the memory; for each smaller one a delta's whole block may have to be decoded again.
    if step != block_rows(spec, _CHUNK):
        raise ArtifactInvalid(
            f"codec 'corrected' of {spec.name!r}: expected chunks of {block_rows(spec, _CHUNK)} rows, found {step}"
        )
    offsets, grid, how = list(accumulate(numbers, initial=part.offset)), GRIDS[spec.dtype], cast(Merge, merge)

    def chunk(at: int, base: Rows, delta: DeltaRows) -> torch.Tensor:
        start, stop = at * step, min((at + 1) * step, spec.rows)
        prediction = _predict(base(start, stop), delta(start, stop), grid, how)
        words = unordered(_decode_chunk(fetch(offsets[at], numbers[at]), prediction))
        return _from_words(words, spec, stop - start)

    def rows(start: int, stop: int, base: Rows, delta: DeltaRows) -> torch.Tensor:
        import torch

        assert 0 <= start <= stop <= spec.rows, f"rows {start}..{stop} of {spec.rows}"
        first = start // step
        found = [chunk(at, base, delta) for at in range(first, -(-stop // step))] if start < stop else []
        if not found:
            return _from_words(np.empty(0, grid.word), spec, 0)
        joined = torch.cat(found) if len(found) > 1 else found[0]
        return joined[start - first * step :][: stop - start]

    return rows


def _predict(base: torch.Tensor, delta: torch.Tensor, grid: Grid, merge: Merge) -> Prediction:
    import torch

    assert base.numel() == delta.numel(), f"base {list(base.shape)} and delta {list(delta.shape)}"
    wide = base.to(torch.float64).contiguous().reshape(-1).numpy()
    return predict(wide, delta.contiguous().reshape(-1).numpy(), grid, merge)


def _encode_chunk(own: Words, prediction: Prediction) -> bytes:
    values = _towards_edge(own, prediction)
    buckets = to_buckets(values)
    tops = [find_top(prediction) for find_top, _, _ in _WAYS]
    ways = [_classify(prediction, way, top) for way, top in enumerate(tops)]
    way = int(np.argmin([coded_bits(buckets, classes, count) for classes, count in ways]))
    head = bytes([way]) + tops[way].to_bytes(_HEAD - 1, "little")
    return head + encode_integers(values, *ways[way])


def _decode_chunk(data: bytes, prediction: Prediction) -> Words:
    if len(data) < _HEAD or data[0] >= len(_WAYS):
        raise ArtifactInvalid("codec 'corrected': a chunk has no head")
    classes, count = _classify(prediction, data[0], int.from_bytes(data[1:_HEAD], "little"))
    return _from_edge(decode_integers(data[_HEAD:], classes, count), prediction)


def _classify(prediction: Prediction, way: int, top: int) -> tuple[Classes, int]:
    _, classify, count = _WAYS[way]
    return pool_small(classify(prediction, top), count)


def _towards_edge(own: Words, prediction: Prediction) -> npt.NDArray[np.uint64]:
    """0 where right, 1 for the number across the nearer edge, 2 for the one on the other side, and so on."""
    off = own.astype(np.int64) - prediction.words.astype(np.int64)
    off = np.where(prediction.up, off, -off)
    return np.where(off > 0, 2 * off - 1, -2 * off).astype(np.uint64)


def _from_edge(values: npt.NDArray[np.uint64], prediction: Prediction) -> Words:
    if values.size and int(values.max()) >> 33:
        raise ArtifactInvalid("codec 'corrected': a correction is larger than a word")
    off = ((values + np.uint64(1)) >> np.uint64(1)).astype(np.int64)
    off = np.where((values & np.uint64(1)) != 0, off, -off)
    own = prediction.words.astype(np.int64) + np.where(prediction.up, off, -off)
    return own.astype(prediction.words.dtype)  # a hostile one wraps; digests find it


def _words(values: torch.Tensor, grid: Grid) -> Words:
    import torch

    flat = values.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().view(grid.word) if flat.numel() else np.empty(0, grid.word)


def _from_words(words: Words, spec: TensorSpec, rows: int) -> torch.Tensor:
    from mfs_decompose.codec.raw import from_bytes

    return from_bytes(words.tobytes(), spec, rows)
