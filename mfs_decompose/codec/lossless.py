"""Lossless: the difference of the bit patterns, in byte planes, through zstd.

A float's bits, mapped so that their order as integers is the order of the values, differ little between a fine-tune and
its base: `own - base` modulo the word, zigzag, is a small number, and its upper bytes are nearly all zero. Coded in
chunks of whole rows, each alone, so that a part can be read and chunks can be coded side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mfs_decompose.codec.base import Emit, Fetch, Rows, block_rows
from mfs_decompose.codec.tree import CodecNode, Part
from mfs_decompose.errors import ArtifactInvalid
from mfs_decompose.source.dtypes import is_float, item_size
from mfs_decompose.source.header import TensorSpec

if TYPE_CHECKING:
    import torch

_CHUNK = 1 << 21  # elements; cut by shape alone
_LEVEL = 3

Words = npt.NDArray[np.unsignedinteger[Any]]


class Lossless:
    """The codec `lossless`. `predictor` is `base` or, without a base tensor of the same dtype, `none`."""

    name = "lossless"

    def encode(self, own: Rows, base: Rows | None, spec: TensorSpec, emit: Emit) -> CodecNode:
        import zstandard

        compressor = zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True)
        step = block_rows(spec, _CHUNK)
        sizes: list[int] = []
        for start in range(0, spec.rows, step):
            stop = min(start + step, spec.rows)
            words = _ordered(_words(own(start, stop), spec), spec)
            if base is not None:
                words = _zigzag(words - _ordered(_words(base(start, stop), spec), spec))
            data = compressor.compress(_to_planes(words))
            emit(data)
            sizes.append(len(data))
        parts = (Part("data", "U8", (sum(sizes),), 0, sum(sizes)),)
        predictor = "none" if base is None else "base"
        return CodecNode("lossless", params={"predictor": predictor, "rows": step, "sizes": list(sizes)}, parts=parts)

    def open(self, node: CodecNode, fetch: Fetch, spec: TensorSpec) -> Callable[[int, int, Rows | None], torch.Tensor]:
        step, predictor, sizes = node.integer("rows"), node.params.get("predictor"), node.params.get("sizes")
        part = node.part("data")
        whole = isinstance(sizes, list) and all(type(size) is int and size >= 0 for size in sizes)
        numbers = [size for size in sizes if isinstance(size, int)] if isinstance(sizes, list) else []
        if not whole or step < 1 or len(numbers) != -(-spec.rows // step) or sum(numbers) != part.nbytes:
            raise ArtifactInvalid(f"codec 'lossless' of {spec.name!r}: chunks do not add up to the tensor")
        if predictor not in ("base", "none"):
            raise ArtifactInvalid(f"codec 'lossless' of {spec.name!r}: unknown predictor {predictor!r}")
        offsets = list(accumulate(numbers, initial=part.offset))

        def chunk(at: int, base: Rows | None) -> torch.Tensor:
            start, stop = at * step, min((at + 1) * step, spec.rows)
            words = _from_planes(_decompress(fetch(offsets[at], numbers[at]), (stop - start) * spec.row_bytes), spec)
            if predictor == "base":
                if base is None:
                    raise ArtifactInvalid(f"tensor {spec.name!r} was coded against a base tensor that is not there")
                words = _unzigzag(words) + _ordered(_words(base(start, stop), spec), spec)
            return _from_words(_unordered(words, spec), spec, stop - start)

        def rows(start: int, stop: int, base: Rows | None) -> torch.Tensor:
            import torch

            if not spec.shape:
                return chunk(0, base)
            first, last = start // step, -(-stop // step)
            found = [chunk(at, base) for at in range(first, last)]
            if not found:
                return _from_words(np.empty(0, _word(spec)), spec, 0)
            joined = torch.cat(found) if len(found) > 1 else found[0]
            return joined[start - first * step :][: stop - start]

        return rows


def _decompress(data: bytes, expected: int) -> bytes:
    import zstandard

    try:
        declared = zstandard.frame_content_size(data)
        if declared != expected:
            raise ArtifactInvalid(f"codec 'lossless': expected a chunk of {expected} bytes, found {declared}")
        return zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as error:
        raise ArtifactInvalid(f"codec 'lossless': a chunk does not decompress ({error})") from error


def _word(spec: TensorSpec) -> np.dtype[np.unsignedinteger[Any]]:
    return np.dtype(f"<u{item_size(spec.dtype)}")


def _words(values: torch.Tensor, spec: TensorSpec) -> Words:
    import torch

    flat = values.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().view(_word(spec)) if flat.numel() else np.empty(0, _word(spec))


def _from_words(words: Words, spec: TensorSpec, rows: int) -> torch.Tensor:
    from mfs_decompose.codec.raw import from_bytes

    return from_bytes(words.tobytes(), spec, rows)


def _sign(words: Words) -> np.unsignedinteger:
    one: np.unsignedinteger = words.dtype.type(1 << (8 * words.dtype.itemsize - 1))
    return one


def _ordered(words: Words, spec: TensorSpec) -> Words:
    """Float bits as integers in the order of the values: a bijection, -0.0 just below +0.0; integers as they are."""
    if not is_float(spec.dtype):
        return words
    sign = _sign(words)
    return np.where(words & sign, ~words, words | sign)


def _unordered(words: Words, spec: TensorSpec) -> Words:
    if not is_float(spec.dtype):
        return words
    sign = _sign(words)
    return np.where(words & sign, words & ~sign, ~words)


def _zigzag(difference: Words) -> Words:
    one = difference.dtype.type(1)
    return np.where(difference & _sign(difference), ~(difference << one), difference << one)


def _unzigzag(words: Words) -> Words:
    one = words.dtype.type(1)
    return np.where(words & one, ~(words >> one), words >> one)


def _to_planes(words: Words) -> bytes:
    return np.ascontiguousarray(words.view(np.uint8).reshape(-1, words.dtype.itemsize).T).tobytes()


def _from_planes(data: bytes, spec: TensorSpec) -> Words:
    size = item_size(spec.dtype)
    planes = np.frombuffer(data, np.uint8).reshape(size, -1)
    return np.ascontiguousarray(planes.T).reshape(-1).view(_word(spec))
