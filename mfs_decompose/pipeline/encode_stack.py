"""Pass 2 of a stack [E, O, I]: neighbours that are stored the same way are one node."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import BinaryIO

from mfs_decompose.codec.slices import stack_node, stack_ranges, step_bytes
from mfs_decompose.codec.tree import CodecNode, Json
from mfs_decompose.codec.truncate import Range
from mfs_decompose.pipeline.direct import add_correction, reader_at
from mfs_decompose.pipeline.exact import encode_rows
from mfs_decompose.pipeline.reading import Sources
from mfs_decompose.pipeline.surveyed import Surveyed, slice_runs
from mfs_decompose.plan.model import Item


def encode_stack(
    item: Item, surveyed: Surveyed, steps: Sequence[int], sources: Sources, fits: BinaryIO, output: BinaryIO
) -> CodecNode:
    """Write the common rows of a stack with `steps[i]` steps of matrix i; its arrays begin at offset 0."""
    assert surveyed.fit is not None and len(steps) == len(surveyed.slices) == item.matrices
    like = CodecNode.from_json(surveyed.fit)
    fitted = [len(curve) for curve in surveyed.curves]
    nodes: list[CodecNode] = []
    splits: list[Json] = [0]
    written = 0
    for state, start, stop in slice_runs(surveyed.slices):
        if state == "identical":
            node = CodecNode("identical")
        elif state == "exact":
            node = encode_rows(item, start, stop, sources, output)
        else:
            node = stack_node(like, steps[start:stop])
            offset = surveyed.offset + sum(fitted[:start]) * step_bytes(like)
            begin = output.tell()
            copy_ranges(fits, offset, stack_ranges(like, fitted[start:stop], steps[start:stop]), output)
            if item.keep_exact:
                node = add_correction(item, node, (start, stop), sources, reader_at(output, begin), output)
        nodes.append(node.shifted(written))
        splits.append(stop)
        written += node.nbytes
    return nodes[0] if len(nodes) == 1 else CodecNode("rows", params={"splits": splits}, children=tuple(nodes))


def copy_ranges(fits: BinaryIO, offset: int, ranges: Iterable[Range], output: BinaryIO) -> None:
    """Copy ranges of a fit that begins at `offset`."""
    for start, count in ranges:
        fits.seek(offset + start)
        output.write(fits.read(count))
