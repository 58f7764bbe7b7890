"""One stored tensor, opened: its rows as served, and as restored.

Served is `W* + delta` in fp32. Restored is the same sum rounded to a checkpoint's dtype. Both start from the exact fp64
delta, so they are the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mfs_decompose.codec.base import Delta, Fetch, Rows, matrix_shape
from mfs_decompose.codec.corrected import open_corrected
from mfs_decompose.codec.registry import COMPOSED, FITTED, LOSSY, check_node, exact_codec, lossy_codec, open_delta
from mfs_decompose.codec.shared import Shared
from mfs_decompose.codec.slices import open_stack
from mfs_decompose.codec.tree import CodecNode, shown
from mfs_decompose.errors import ArtifactInvalid
from mfs_decompose.linalg.rounding import Rounding, round_to, rounding_key
from mfs_decompose.source.dtypes import is_float, torch_dtype
from mfs_decompose.source.header import TensorSpec

ExactRows = Callable[[int, int, "Rows | None"], torch.Tensor]


@dataclass(frozen=True)
class _Segment:
    """Rows start..stop of a tensor, read by one codec that counts from its own first row."""

    start: int
    stop: int
    exact: ExactRows | None
    delta: Delta | None  # with `exact` as well: what is served, where corrections restore all bits
    matrix_rows: int  # rows of the delta's matrix for one row of the tensor


class OpenedTensor:
    """Reads one stored tensor by rows of its first dimension."""

    def __init__(self, node: CodecNode, fetch: Fetch, spec: TensorSpec, shared: Shared | None = None) -> None:
        """Open `node`, whose bytes `fetch` reads, as the tensor `spec` of a variant.

        `shared` is the family's delta of its base tensor, if there is one.

        Raises:
            ArtifactInvalid: the tree cannot be decoded, or does not fit the tensor.
        """
        check_node(node)
        self.spec = spec
        self._key = rounding_key(spec.name)
        self._segments = _open_segments(node, fetch, spec, shared)

    @property
    def exact(self) -> bool:
        """Whether every row has the original's bits."""
        return all(segment.exact is not None for segment in self._segments)

    def restored(
        self,
        start: int,
        stop: int,
        base: Rows | None,
        dtype: torch.dtype | None = None,
        rounding: Rounding = "stochastic",
    ) -> torch.Tensor:
        """Rows start..stop in `dtype` (default: the tensor's own), [stop - start, ...].

        Exact rows keep their bits; in another floating dtype they are converted, and a corrected delta is left without
        its corrections: that is what is served. Tensors that are not floats keep their dtype.
        """
        own = torch_dtype(self.spec.dtype)
        target = own if dtype is None or not own.is_floating_point or own.itemsize == 1 else dtype
        assert 0 <= start <= stop <= self.spec.rows, f"rows {start}..{stop} of {self.spec.rows}"
        if start == stop:
            return torch.empty((0, *self.spec.shape[1:]), dtype=target)
        pieces: list[torch.Tensor] = []
        for segment in self._segments:
            low, high = max(start, segment.start), min(stop, segment.stop)
            if low >= high:
                continue
            if segment.exact is not None and (dtype is None or segment.delta is None):
                pieces.append(_exact(segment, low, high, base).to(target))
            elif base is None:
                raise ArtifactInvalid(f"the delta of {self.spec.name!r} has no base tensor to be added to")
            else:
                known = base(low, high)  # first: a hostile delta is as large as it likes, a base is what it is
                pieces.append(self._round(_delta(segment, low, high), known, low, target, rounding))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def served(self, start: int, stop: int, base: Rows | None) -> torch.Tensor:
        """Rows start..stop in fp32, never rounded to the original's dtype on the way."""
        return self.restored(start, stop, base, torch.float32, "nearest")

    def rounded(self, delta: torch.Tensor, base: torch.Tensor, start: int) -> torch.Tensor:
        """What `restored` gives by default for rows from `start`, where the caller has delta and base at hand."""
        return self._round(delta, base, start, torch_dtype(self.spec.dtype), "stochastic")

    def _round(
        self, delta: torch.Tensor, base: torch.Tensor, start: int, target: torch.dtype, rounding: Rounding
    ) -> torch.Tensor:
        # -0.0 becomes +0.0: which of the two a product gives depends on the kernel, and a base of -0.0 would show it.
        values = base.to(torch.float64) + (delta.reshape(base.shape) + 0.0)
        row_elements = self.spec.numel // self.spec.rows
        return round_to(values, target, rounding, self._key, start * row_elements)

    def delta(self, start: int, stop: int) -> torch.Tensor | None:
        """The exact fp64 delta of rows that lie in one lossy segment; None where their own bits are served."""
        for segment in self._segments:
            if segment.start <= start and stop <= segment.stop:
                return None if segment.delta is None else _delta(segment, start, stop)
        raise AssertionError("rows cross two codecs")


def _open_segments(node: CodecNode, fetch: Fetch, spec: TensorSpec, shared: Shared | None) -> list[_Segment]:
    if node.codec != "rows":
        return [_open_segment(node, fetch, spec, 0, shared)]
    splits = node.params.get("splits")
    if not isinstance(splits, list) or len(splits) != len(node.children) + 1 or not node.children:
        raise ArtifactInvalid(f"codec 'rows' of {spec.name!r}: its splits do not match its nodes")
    edges = [edge for edge in splits if type(edge) is int]
    if len(edges) != len(splits) or edges != sorted(edges) or edges[0] != 0 or edges[-1] != spec.rows:
        found = shown(splits)
        raise ArtifactInvalid(f"codec 'rows' of {spec.name!r}: its splits {found} do not cover {spec.rows} rows")
    return [
        _open_segment(
            child,
            fetch,
            TensorSpec(spec.name, spec.dtype, (stop - start, *spec.shape[1:])),
            start,
            None if start else shared,  # it counts from the tensor's first row
        )
        for child, start, stop in zip(node.children, edges, edges[1:], strict=False)
    ]


def _open_segment(node: CodecNode, fetch: Fetch, spec: TensorSpec, start: int, shared: Shared | None) -> _Segment:
    stop = start + spec.rows
    if node.codec == "corrected":
        return _open_corrected(node, fetch, spec, start, shared)
    if node.codec not in LOSSY:
        if node.codec in COMPOSED:
            raise ArtifactInvalid(f"codec {node.codec!r} of {spec.name!r} cannot stand here")
        return _Segment(start, stop, exact_codec(node.codec).open(node, fetch, spec), None, 1)
    stacked = "slices" in node.params
    shape = matrix_shape((1, *spec.shape[1:]) if stacked else spec.shape)
    if shape is None or not is_float(spec.dtype) or (stacked and node.codec not in FITTED):
        found = f"{spec.dtype} {list(spec.shape)}"
        raise ArtifactInvalid(f"codec {node.codec!r} of {spec.name!r}: expected a matrix of floats, found {found}")
    if stacked:
        return _Segment(start, stop, None, open_stack(node, fetch, lossy_codec(node.codec), spec.rows, shape), shape[0])
    return _Segment(start, stop, None, open_delta(node, fetch, shape, shared), shape[0] // spec.rows)


def _open_corrected(node: CodecNode, fetch: Fetch, spec: TensorSpec, start: int, shared: Shared | None) -> _Segment:
    child = _open_segment(node.children[0], fetch, spec, 0, shared)
    reader = open_corrected(node, fetch, spec)

    def exact(first: int, last: int, base: Rows | None) -> torch.Tensor:
        if base is None:
            raise ArtifactInvalid(f"the delta of {spec.name!r} has no base tensor to be added to")
        return reader(first, last, base, lambda low, high: _delta(child, low, high))

    return _Segment(start, start + spec.rows, exact, child.delta, child.matrix_rows)


def _delta(segment: _Segment, start: int, stop: int) -> torch.Tensor:
    assert segment.delta is not None
    scale = segment.matrix_rows
    return segment.delta.rows((start - segment.start) * scale, (stop - segment.start) * scale)


def _exact(segment: _Segment, start: int, stop: int, base: Rows | None) -> torch.Tensor:
    assert segment.exact is not None
    first = segment.start
    shifted: Rows | None = None
    if base is not None:
        whole = base
        shifted = lambda low, high: whole(low + first, high + first)  # noqa: E731  # a def would hide that it is a window
    return segment.exact(start - first, stop - first, shifted)
