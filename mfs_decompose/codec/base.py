"""What a codec must be able to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from mfs_decompose.codec.tree import CodecNode
from mfs_decompose.source.header import TensorSpec

if TYPE_CHECKING:
    import torch

Fetch = Callable[[int, int], bytes]
"""Reads (offset, count) bytes of one tensor's entry."""

Rows = Callable[[int, int], "torch.Tensor"]
"""Reads rows start..stop of a tensor along its first dimension, in its own dtype."""

Emit = Callable[[bytes], None]
"""Takes the next bytes of a tensor's entry."""


@dataclass(frozen=True)
class Fit:
    """A lossy codec's answer for one delta: `energy[i]` of ||delta||^2 is explained by step i, strongest first.

    `arrays` hold one entry a step along their first dimension, so the first s entries of each are the fit of size s.
    """

    energy: torch.Tensor
    total: float
    arrays: Mapping[str, torch.Tensor]

    @property
    def steps(self) -> int:
        return int(self.energy.numel())


class Delta(Protocol):
    """A stored delta, opened for reading."""

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Matrix rows start..stop, fp64 [stop - start, I], exact: the same on every machine."""


class LossyCodec(Protocol):
    """A codec of a delta seen as a matrix [O, I]."""

    name: str

    def fit(
        self, deltas_BOI: torch.Tensor, steps: int, keys: Sequence[int], params: Mapping[str, str]
    ) -> list[Fit | None]:
        """Fit B finite fp32 deltas of one shape; None where no method worked, to be stored exactly."""

    def fit_blocks(
        self,
        blocks: Callable[[], Iterator[tuple[int, torch.Tensor]]],
        shape: tuple[int, int],
        steps: int,
        key: int,
        params: Mapping[str, str],
        device: str = "cpu",
    ) -> Fit | None:
        """Fit one delta that is read in row blocks, which lie on `device`."""

    def array_names(self, params: Mapping[str, str]) -> tuple[str, ...]:
        """The arrays of a fit in the order they are stored."""

    def open(self, node: CodecNode, fetch: Fetch, shape: tuple[int, int]) -> Delta:
        """Open a stored delta."""


class ExactCodec(Protocol):
    """A codec that gives a tensor's own bits back."""

    name: str

    def encode(self, own: Rows, base: Rows | None, spec: TensorSpec, emit: Emit) -> CodecNode:
        """Write the tensor's bytes through `emit`, in order; `base` where it has a tensor of this dtype and shape."""

    def open(self, node: CodecNode, fetch: Fetch, spec: TensorSpec) -> Callable[[int, int, Rows | None], torch.Tensor]:
        """A reader of rows start..stop in the tensor's own dtype, given the base's rows."""


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int] | None:
    """A tensor as the matrix a lossy codec sees; None where it has fewer than two dimensions or is too thin.

    Three dimensions [E, O, I] are seen as [E * O, I], unless they are stored slice by slice (see `slice_shape`); more
    are a convolution [O, I, ...], seen as [O, I * ...]. Rows along the first dimension stay contiguous in either.
    """
    if len(shape) < 2 or 0 in shape:
        return None
    trailing = shape[1:] if len(shape) != 3 else shape[2:]
    columns = 1
    for size in trailing:
        columns *= size
    rows = shape[0] * shape[1] if len(shape) == 3 else shape[0]
    return (rows, columns) if min(rows, columns) >= _THIN else None


def slice_shape(shape: tuple[int, ...]) -> tuple[int, int] | None:
    """[E, O, I] as a stack of E matrices [O, I], such as the experts of a layer; None where it is none.

    Slices that are too thin, such as those of a convolution [C, 1, K], are no matrices; `matrix_shape` may find one.
    """
    if len(shape) != 3 or shape[0] < 2 or min(shape[1:]) < _THIN:
        return None
    return (shape[1], shape[2])


_THIN = 8  # below this a factorisation saves nothing over the tensor itself


DECODE_ELEMENTS = 1 << 20
"""Elements decoded at a time: 8 MiB in fp64, which the allocator hands out again without asking the kernel."""


def block_rows(spec: TensorSpec, elements: int) -> int:
    """Rows along the first dimension that make a block of about `elements`; at least one, all where they are empty."""
    if not spec.numel:
        return max(spec.rows, elements)
    return max(1, elements // max(spec.numel // max(spec.rows, 1), 1))
