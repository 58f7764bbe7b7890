"""Lossless: the difference of the bit patterns, entropy-coded given the exponent of the base's weight.

Coded in chunks of whole rows, each alone, so that a part can be read and chunks can be coded side by side; their bytes
are the same whatever the number of threads. What is written is version 2; version 1 is still read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from mfs_decompose.codec.base import DECODE_ELEMENTS, Emit, Fetch, Rows, block_rows
from mfs_decompose.codec.lossless_chunk import Layout, decode_chunk, encode_chunk
from mfs_decompose.codec.lossless_v1 import decode_chunk_v1
from mfs_decompose.codec.predictor import can_predict, layout_of, predicted_words, tensor_of, words_of
from mfs_decompose.codec.tree import CodecNode, Json, Part, shown
from mfs_decompose.errors import ArtifactInvalid
from mfs_decompose.linalg.words import Words, word_type
from mfs_decompose.source.header import TensorSpec

if TYPE_CHECKING:
    import torch

_CHUNK = DECODE_ELEMENTS  # cut by shape alone, as the blocks are that readers ask for
_MAX_CHUNK = 1 << 21  # what version 1 wrote

Decode = Callable[[bytes, int, "Words | None", Layout], Words]
Given = TypeVar("Given")
Made = TypeVar("Made")


class Lossless:
    """The codec `lossless`. `predictor` is `base` or, without a base tensor that predicts this one, `none`.

    A base of another float dtype predicts what it converts to, unless it is F64 and the tensor narrower.
    """

    name = "lossless"

    def __init__(self, threads: int = 1) -> None:
        """Code and decode up to `threads` chunks of a tensor at a time; reading stays with the caller's thread."""
        self._threads = threads

    def encode(self, own: Rows, base: Rows | None, spec: TensorSpec, emit: Emit) -> CodecNode:
        step, layout = block_rows(spec, _CHUNK), layout_of(spec.dtype)
        if base is not None and (not spec.numel or not can_predict(base(0, 1), spec)):
            base = None if spec.numel else base

        def chunks() -> Iterator[tuple[Words, Words | None]]:
            for start in range(0, spec.rows, step):
                stop = min(start + step, spec.rows)
                yield words_of(own(start, stop)), None if base is None else predicted_words(base(start, stop), spec)

        sizes: list[int] = []
        for data in _side_by_side(self._threads, lambda pair: encode_chunk(*pair, layout), chunks()):
            emit(data)
            sizes.append(len(data))
        parts = (Part("data", "U8", (sum(sizes),), 0, sum(sizes)),)
        predictor = "none" if base is None else "base"
        params: dict[str, Json] = {"predictor": predictor, "rows": step, "sizes": list(sizes)}
        return CodecNode("lossless", version=2, params=params, parts=parts)

    def open(self, node: CodecNode, fetch: Fetch, spec: TensorSpec) -> Callable[[int, int, Rows | None], torch.Tensor]:
        step, against_base, edges = _chunk_edges(node, spec)
        decode: Decode = decode_chunk_v1 if node.version == 1 else decode_chunk
        layout = layout_of(spec.dtype)

        def read(at: int, base: Rows | None) -> tuple[bytes, int, Words | None, Layout]:
            start, stop = at * step, min((at + 1) * step, spec.rows)
            known: Words | None = None
            if against_base:
                if base is None:
                    raise ArtifactInvalid(f"tensor {spec.name!r} was coded against a base tensor that is not there")
                known = predicted_words(base(start, stop), spec)
            data = fetch(edges[at], edges[at + 1] - edges[at])
            return data, (stop - start) * spec.numel // spec.rows, known, layout

        def rows(start: int, stop: int, base: Rows | None) -> torch.Tensor:
            first, last = start // step, -(-stop // step) if start < stop else start // step
            taken = (read(at, base) for at in range(first, last))
            found = list(_side_by_side(self._threads, lambda chunk: decode(*chunk), taken))
            joined = found[0] if len(found) == 1 else np.concatenate([np.empty(0, word_type(layout.size)), *found])
            width = spec.numel // max(spec.rows, 1)
            skipped = (start - first * step) * width
            return tensor_of(joined[skipped : skipped + (stop - start) * width], spec, stop - start)

        return rows


def _chunk_edges(node: CodecNode, spec: TensorSpec) -> tuple[int, bool, list[int]]:
    """Rows of a chunk, whether it is a difference, and where each begins in the entry, with the end of the last."""
    step, predictor, sizes = node.integer("rows"), node.params.get("predictor"), node.params.get("sizes")
    part = node.part("data")
    numbers = [size for size in sizes if type(size) is int and size >= 0] if isinstance(sizes, list) else None
    whole = numbers is not None and isinstance(sizes, list) and len(numbers) == len(sizes)
    if numbers is None or not whole or step < 1 or len(numbers) != -(-spec.rows // step) or sum(numbers) != part.nbytes:
        raise ArtifactInvalid(f"codec 'lossless' of {spec.name!r}: chunks do not add up to the tensor")
    if spec.numel and step > block_rows(spec, _MAX_CHUNK):
        raise ArtifactInvalid(f"codec 'lossless' of {spec.name!r}: chunks of {step} rows are too large")
    if predictor not in ("base", "none"):
        raise ArtifactInvalid(f"codec 'lossless' of {spec.name!r}: unknown predictor {shown(predictor)}")
    return step, predictor == "base", list(accumulate(numbers, initial=part.offset))


def _side_by_side(threads: int, work: Callable[[Given], Made], given: Iterable[Given]) -> Iterator[Made]:
    """`map` in order with up to `threads` at work, and no more than one further item taken from `given`."""
    if threads == 1:
        yield from map(work, given)
        return
    waiting: deque[Future[Made]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for item in given:
            waiting.append(pool.submit(work, item))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
