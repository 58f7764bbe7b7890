"""Pass 2: cut each fit to its size, decode it as any reader will, and record what was lost."""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

from mfs_decompose.base_extraction import delta_rows
from mfs_decompose.codec.arrays import tensor_bytes
from mfs_decompose.codec.banded_fit import encode_bands
from mfs_decompose.codec.base import DECODE_ELEMENTS, matrix_shape
from mfs_decompose.codec.opened import OpenedTensor
from mfs_decompose.codec.shared import with_shared
from mfs_decompose.codec.tree import CodecNode
from mfs_decompose.codec.truncate import truncate
from mfs_decompose.errors import SourceIncompatible
from mfs_decompose.linalg.bands import Bands, made_up
from mfs_decompose.linalg.sums import squared_norm
from mfs_decompose.pipeline.deltas import same_bits
from mfs_decompose.pipeline.direct import add_correction, add_residual, emit_to, encode_direct, reader_at
from mfs_decompose.pipeline.encode_stack import copy_ranges, encode_stack
from mfs_decompose.pipeline.exact import CountingSink, encode_exact, join_rows, splits_of
from mfs_decompose.pipeline.merge_items import merge_node, restored_digest
from mfs_decompose.pipeline.reading import Advance, Sources, row_blocks
from mfs_decompose.pipeline.scheduler import Stop
from mfs_decompose.pipeline.surveyed import Surveyed
from mfs_decompose.plan.model import Item, Options

_MOST_ROWS = 4096  # compared at a time


@dataclass(frozen=True, slots=True)
class Choice:
    """What allocation decided for one item: `codec` is identical, alias (of the tensor `of`), lossy or exact.

    Of a stack with fits, `slices` are the steps of each matrix, and `steps` is their sum. Of banded factors, `bands`
    are the directions at each width; `rest_step` is the step of the dead zone that codes what they leave, if any.
    """

    codec: str
    steps: int = 0
    of: str | None = None
    slices: tuple[int, ...] = ()
    bands: Bands = ()
    rest_step: float = 0.0

    def costs_nothing(self, item: Item) -> bool:
        """Whether the item needs no bytes, and need not be read again."""
        return self.codec == "alias" or (self.codec == "identical" and not item.tail_bytes)


@dataclass(frozen=True, slots=True)
class Encoded:
    """One item as it will stand in the artifact: its tree, its bytes in the unit's file, and the measured error."""

    tree: dict[str, Any]
    offset: int
    nbytes: int
    error: float
    restored_sha256: str

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Encoded:
        return cls(**document)


@dataclass(frozen=True)
class Encoder:
    """Encodes items into a unit's file; thread-safe."""

    sources: Sources
    advance: Advance

    def encode(
        self, item: Item, surveyed: Surveyed, choice: Choice, fits: BinaryIO | None, output: BinaryIO, stop: Stop
    ) -> Encoded:
        """Encode one item: `fits` holds the unit's fits, `output` (read and write) takes the bytes.

        Raises:
            SourceIncompatible: the tensor is not what it was in pass 1.
        """
        stop.check()
        if choice.costs_nothing(item):
            params: dict[str, Any] = {} if choice.of is None else {"of": choice.of}
            return Encoded(CodecNode(choice.codec, params=params).to_json(), output.tell(), 0, 0.0, surveyed.sha256)
        offset = output.tell()
        if choice.codec == "adapter":
            restored = restored_digest(item, self.sources, self.advance, stop)
            return Encoded(merge_node(item).to_json(), offset, 0, 0.0, restored)
        node = self.write(item, surveyed, choice, fits, output)
        nbytes = output.tell() - offset
        assert nbytes == node.nbytes, f"{item.key}: wrote {nbytes} bytes, the tree says {node.nbytes}"
        error, restored = self._measure(item, surveyed, node, output, offset, stop)
        output.seek(offset + nbytes)
        return Encoded(node.to_json(), offset, nbytes, error, restored)

    def write(
        self, item: Item, surveyed: Surveyed, choice: Choice, fits: BinaryIO | None, output: BinaryIO
    ) -> CodecNode:
        """Write an item's bytes and say how they are to be read; arrays begin at offset 0."""
        if choice.codec in ("lossless", "raw", "lora-exact"):
            return encode_exact(item, choice.codec, self.sources, output)
        if choice.codec == "identical":
            node = CodecNode("identical")
        else:
            node = self._changed(_as_chosen(item, choice), surveyed, choice, fits, output)
        return join_rows(node, item, self.sources.own(item), output)

    def size(self, item: Item, surveyed: Surveyed, choice: Choice, fits: BinaryIO | None) -> int:
        """Bytes that an item would take beside those it has anyway (`Item.beside_bytes`); nothing is written."""
        if choice.codec == "lora-exact" and surveyed.open is not None and surveyed.open.peeled is not None:
            return surveyed.open.peeled[0]
        if choice.codec == "lossless":
            counted = CountingSink()
            encode_exact(item, "lossless", self.sources, counted)
            return counted.tell() - item.tail_bytes
        bare = replace(_as_chosen(item, choice), keep_exact=False)
        return self._changed(bare, surveyed, choice, fits, io.BytesIO()).nbytes

    def _changed(
        self, item: Item, surveyed: Surveyed, choice: Choice, fits: BinaryIO | None, output: BinaryIO
    ) -> CodecNode:
        """Write the common rows: last rows that equal the base's, such as those of a padded vocabulary, stay so.

        Factors in bands have no zero, so each row of a delta would get a little of every direction.
        """
        same = self._unchanged_at_end(item) if choice.codec == "banded" and item.key not in self.sources.shared else 0
        changed = item.common_rows - same
        if not same or matrix_shape((changed, *item.spec.shape[1:])) is None:
            return self._lossy(item, surveyed, choice, fits, output)
        node = self._lossy(replace(item, common_rows=changed), surveyed, choice, fits, output)
        splits = [0, changed, item.common_rows]
        return CodecNode("rows", params={"splits": [*splits]}, children=(node, CodecNode("identical")))

    def _unchanged_at_end(self, item: Item) -> int:
        """How many of the last common rows have the base's bits."""
        own, base = self.sources.own(item), self.sources.of_base(item)
        if base is None or not item.comparable_bits:
            return 0
        stop, step = item.common_rows, 1
        while stop > 0:
            start = max(stop - step, 0)
            if not same_bits(own(start, stop), base(start, stop)):
                if step == 1:
                    break
                step = 1
                continue
            stop, step = start, min(2 * step, _MOST_ROWS)
        return item.common_rows - stop

    def _lossy(
        self, item: Item, surveyed: Surveyed, choice: Choice, fits: BinaryIO | None, output: BinaryIO
    ) -> CodecNode:
        """Write the common rows under a lossy codec, with what lies above it; arrays begin at offset 0."""
        offset = output.tell()
        fetch = reader_at(output, offset)
        if item.direct:
            node = encode_direct(item, self.sources, output)
        else:
            assert fits is not None and surveyed.fit is not None
            fit = CodecNode.from_json(surveyed.fit)
            if surveyed.slices:
                return encode_stack(item, surveyed, choice.slices, self.sources, fits, output)
            if item.codec == "banded":
                shape = matrix_shape(item.common.shape)
                assert shape is not None, "bands are of a matrix"
                times = 1.0
                if item.residual is None and (surveyed.open is not None or item.key not in self.sources.shared):
                    times = _made_up(surveyed, shape, choice.bands)
                scratch = reader_at(fits, surveyed.offset)
                node = encode_bands(fit, scratch, choice.bands, emit_to(output), shape[0], times)
            else:
                node, ranges = truncate(fit, choice.steps)
                copy_ranges(fits, surveyed.offset, ranges, output)
        if item.residual is not None:
            node = add_residual(item, node, self.sources, fetch, output)
        if item.key in self.sources.shared:
            node = with_shared(node)
        if item.keep_exact:
            node = add_correction(item, node, (0, item.common_rows), self.sources, fetch, output)
        return node

    def _measure(
        self, item: Item, surveyed: Surveyed, node: CodecNode, output: BinaryIO, offset: int, stop: Stop
    ) -> tuple[float, str]:
        """Decode what was written: ||decoded - delta||^2 as served, and the digest of the default restore."""

        opened = OpenedTensor(node, reader_at(output, offset), item.spec, self.sources.shared.get(item.key))
        own_rows, base_rows = self.sources.own(item), self.sources.of_base(item)
        original, restored = hashlib.sha256(), hashlib.sha256()
        errors: list[float] = []
        for start, end in row_blocks(item, DECODE_ELEMENTS, splits_of(node)):
            stop.check()
            own = own_rows(start, end)
            original.update(tensor_bytes(own))
            delta = opened.delta(start, end)
            if delta is None:
                values = opened.restored(start, end, base_rows)
            else:
                assert base_rows is not None
                base = base_rows(start, end)
                errors.append(squared_norm(delta.reshape(own.shape) - delta_rows(own, base)))
                corrected = opened.exact
                values = opened.restored(start, end, base_rows) if corrected else opened.rounded(delta, base, start)
            restored.update(tensor_bytes(values))
            self.advance((end - start) * item.spec.row_bytes)
        if original.hexdigest() != surveyed.sha256:
            raise SourceIncompatible(
                f"tensor {item.name!r} of variant {item.variant!r} changed while it was being read",
                hint="Run the same command again, with --no-resume, once nobody writes to it.",
            )
        assert not opened.exact or original.digest() == restored.digest(), f"{item.key}: not exact"
        return math.fsum(errors), restored.hexdigest()


def _made_up(surveyed: Surveyed, shape: tuple[int, int], bands: Bands) -> float:
    """How many times as large bands are written that nothing is added to.

    Coding what they leave makes up for it already: a dead zone keeps values that agree in sign with the bands more
    often than those that do not (enlarged by what it loses, KL was 4 to 7 % lower, or 8 to 12 % higher). Beside a
    shared delta it is made up for what is left out of the variant's own rest (KL of two variants 8.5 to 5.1e-4 and 2.0
    to 1.9e-4), whose energy is known of open items alone.
    """
    energy = surveyed.energy if surveyed.open is None else surveyed.open.energy
    return made_up(surveyed.explained, energy, shape, sum(bands))


def _as_chosen(item: Item, choice: Choice) -> Item:
    """The item with the dead zone that allocation has put above its bands, or in their place."""
    if not choice.rest_step:
        return item
    options: Options = (("step", choice.rest_step),)
    if not sum(choice.bands):
        return replace(item, codec="deadzone", options=options)
    return replace(item, residual=("deadzone", options))
