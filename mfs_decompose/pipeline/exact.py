"""Tensors that are stored with all their bits."""

from __future__ import annotations

import io
from typing import BinaryIO

from mfs_decompose.codec.base import Rows
from mfs_decompose.codec.corrected import is_correctable
from mfs_decompose.codec.lora_exact import MAX_ELEMENTS, encode_lora_exact, fit_lora_exact
from mfs_decompose.codec.registry import exact_codec
from mfs_decompose.codec.tree import CodecNode
from mfs_decompose.linalg.seeds import stream_key
from mfs_decompose.pipeline.reading import Sources
from mfs_decompose.plan.model import Item
from mfs_decompose.source.header import TensorSpec


class CountingSink(io.RawIOBase):
    """A file that only knows how long it is."""

    def __init__(self) -> None:
        super().__init__()
        self._length = 0

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]  # bytes are all we write
        self._length += len(data)
        return len(data)

    def tell(self) -> int:
        return self._length

    def truncate(self, size: int | None = None) -> int:
        self._length = self._length if size is None else size
        return self._length

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        assert whence == io.SEEK_SET
        self._length = offset
        return offset


def encode_exact(item: Item, codec: str, sources: Sources, sink: BinaryIO | CountingSink) -> CodecNode:
    """Write all bits of a tensor to `sink` and say how; raw where the lossless codec would be larger.

    `lora-exact` is lossless where no LoRA can be peeled off, or where that is smaller.

    Rows that the base has as well are coded against it, where the dtype is the same; the others stand alone.
    """
    start = sink.tell()
    if codec == "lora-exact":
        node = peel(item, sources, sink)
        if node is not None:
            return node
    if codec in ("lossless", "lora-exact"):
        node = _lossless(item, sources, sink)
        if sink.tell() - start < item.spec.nbytes:
            return node
        sink.seek(start)
        sink.truncate(start)
    return exact_codec("raw").encode(sources.own(item), None, item.spec, lambda data: _emit(sink, data))


def encode_rows(item: Item, start: int, stop: int, sources: Sources, sink: BinaryIO | CountingSink) -> CodecNode:
    """Write all bits of some of the common rows to `sink`, alone, and say how; the arrays begin at offset 0."""
    rows, base = sources.own(item), sources.of_base(item)
    spec = TensorSpec(item.name, item.spec.dtype, (stop - start, *item.spec.shape[1:]))
    partner = None if base is None else _from(base, start)
    begin = sink.tell()
    node = exact_codec("lossless").encode(_from(rows, start), partner, spec, lambda data: _emit(sink, data))
    if sink.tell() - begin < spec.nbytes:
        return node
    sink.seek(begin)
    sink.truncate(begin)
    return exact_codec("raw").encode(_from(rows, start), None, spec, lambda data: _emit(sink, data))


def peel(item: Item, sources: Sources, sink: BinaryIO | CountingSink) -> CodecNode | None:
    """Write a merged LoRA and its correction, where there is one in the tensor and that is smaller than lossless."""
    own, base = sources.own(item), sources.of_base(item)
    spec = item.common
    if base is None or item.base is None or len(spec.shape) != 2 or not is_correctable(spec):
        return None
    if item.base.dtype != spec.dtype or not 0 < spec.numel <= MAX_ELEMENTS:
        return None
    fit = fit_lora_exact(own(0, spec.rows), base(0, spec.rows), stream_key(0, "peel", item.name))
    if fit is None:
        return None
    limit = CountingSink()
    exact_codec("lossless").encode(own, base, spec, lambda data: _emit(limit, data))
    peeled = io.BytesIO()
    node = encode_lora_exact(fit, own, base, spec, lambda data: _emit(peeled, data))
    if peeled.tell() >= limit.tell():
        return None
    _emit(sink, peeled.getvalue())
    return join_rows(node, item, own, sink)


def _lossless(item: Item, sources: Sources, sink: BinaryIO | CountingSink) -> CodecNode:
    codec, own = exact_codec("lossless"), sources.own(item)
    base = sources.of_base(item)
    if base is None or item.common_rows == 0:
        return codec.encode(own, None, item.spec, lambda data: _emit(sink, data))
    head = codec.encode(own, base, item.common, lambda data: _emit(sink, data))
    return join_rows(head, item, own, sink)


def join_rows(head: CodecNode, item: Item, own: Rows, sink: BinaryIO | CountingSink) -> CodecNode:
    """`head` for the common rows, from offset 0 on, and, where the variant has more, the others raw behind it."""
    common, rows = item.common_rows, item.spec.rows
    if common == rows:
        return head
    tail = TensorSpec(item.name, item.spec.dtype, (rows - common, *item.spec.shape[1:]))
    node = exact_codec("raw").encode(_from(own, common), None, tail, lambda data: _emit(sink, data))
    splits, nodes = ([0, common], (head,)) if head.codec != "rows" else (splits_of(head), head.children)
    return CodecNode("rows", params={"splits": [*splits, rows]}, children=(*nodes, node.shifted(head.nbytes)))


def splits_of(node: CodecNode) -> list[int]:
    """Where the nodes below a `rows` that was made here begin and end; nothing for any other codec."""
    splits = node.params.get("splits", []) if node.codec == "rows" else []
    assert isinstance(splits, list)
    return [edge for edge in splits if isinstance(edge, int)]


def _from(rows: Rows, first: int) -> Rows:
    """The rows from `first` on, counted from there."""
    return lambda start, stop: rows(start + first, stop + first)


def _emit(sink: BinaryIO | CountingSink, data: bytes) -> None:
    sink.write(data)
