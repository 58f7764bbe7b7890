"""Pass 2 of deltas that are written straight from their rows, and of what lies above a lossy delta."""

from __future__ import annotations

from typing import BinaryIO

import torch

from mfs_decompose.codec.base import Emit, Fetch, matrix_shape
from mfs_decompose.codec.corrected import encode_corrected, with_child
from mfs_decompose.codec.direct import Context, DeltaRows
from mfs_decompose.codec.opened import OpenedTensor
from mfs_decompose.codec.registry import direct_codec, open_delta
from mfs_decompose.codec.summed import encode_residual, sum_node
from mfs_decompose.codec.tree import CodecNode
from mfs_decompose.pipeline.exact import CountingSink
from mfs_decompose.pipeline.reading import Sources
from mfs_decompose.plan.model import Item
from mfs_decompose.source.header import TensorSpec


def encode_direct(item: Item, sources: Sources, sink: BinaryIO | CountingSink) -> CodecNode:
    """Write the delta of the common rows to `sink`; the arrays begin at offset 0."""
    shape, delta, context = delta_matrix(item, sources)
    codec = direct_codec(item.codec)
    return codec.encode(delta, shape, dict(item.options), emit_to(sink), context=context)


def add_residual(item: Item, node: CodecNode, sources: Sources, fetch: Fetch, sink: BinaryIO) -> CodecNode:
    """Write what `node`, whose bytes `fetch` reads, leaves of the delta, behind it."""
    assert item.residual is not None
    shape, delta, context = delta_matrix(item, sources)
    name, options = item.residual
    first = open_delta(node, fetch, shape)
    # The shared delta, if any, is out of `delta` already.
    rest = encode_residual(delta, shape, first, direct_codec(name), dict(options), emit_to(sink), context=context)
    return sum_node((node, rest))


def add_correction(
    item: Item, node: CodecNode, rows: tuple[int, int], sources: Sources, fetch: Fetch, sink: BinaryIO
) -> CodecNode:
    """Write what `node` gets wrong of the bits of `rows` (first and end), behind its own bytes."""
    first, end = rows
    own, base = sources.own(item), sources.of_base(item)
    assert base is not None
    spec = TensorSpec(item.name, item.spec.dtype, (end - first, *item.spec.shape[1:]))
    opened = OpenedTensor(node, fetch, spec, sources.shared.get(item.key))

    def delta(start: int, stop: int) -> torch.Tensor:
        found = opened.delta(start, stop)
        assert found is not None, "a lossy delta is below a correction"
        return found

    corrected = encode_corrected(
        lambda start, stop: own(start + first, stop + first),
        lambda start, stop: base(start + first, stop + first),
        delta,
        spec,
        emit_to(sink),
    )
    return with_child(corrected, node)


def delta_matrix(item: Item, sources: Sources) -> tuple[tuple[int, int], DeltaRows, Context]:
    """The delta of the common rows, and their base, as the matrix that a codec sees."""
    shape = matrix_shape(item.common.shape)
    own, base = sources.own(item), sources.of_base(item)
    assert shape is not None and base is not None
    scale, columns = shape[0] // item.common.rows, shape[1]
    rest = sources.delta_of(item)

    def whole(start: int, stop: int) -> tuple[int, int]:
        return start // scale, -(-stop // scale)

    def delta(start: int, stop: int) -> torch.Tensor:
        first, last = whole(start, stop)
        found = rest(first, own(first, last), base(first, last)).reshape(-1, columns)
        return found[start - first * scale : stop - first * scale]

    def below(start: int, stop: int) -> torch.Tensor:
        first, last = whole(start, stop)
        return base(first, last).reshape(-1, columns)[start - first * scale : stop - first * scale]

    return shape, delta, Context(below)


def reader_at(file: BinaryIO, offset: int) -> Fetch:
    """Reads bytes that lie from `offset` on, and leaves the place where the next ones are written as it was."""

    def fetch(start: int, count: int) -> bytes:
        place = file.tell()
        file.seek(offset + start)
        data = file.read(count)
        file.seek(place)
        return data

    return fetch


def emit_to(file: BinaryIO | CountingSink) -> Emit:
    """Writes what a codec emits."""

    def emit(data: bytes) -> None:
        file.write(data)

    return emit
