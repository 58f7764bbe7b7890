"""Dead zone: a uniform quantiser with a wide zero, its codes entropy-coded (ECSQ).

For a delta without structure this is close to what rate-distortion theory allows. One step for all tensors of a variant
spends bytes where they lower the squared error most, so a budget is met by the step alone.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from mfs_decompose.codec.base import Delta, Emit, Fetch
from mfs_decompose.codec.direct import Context, DeltaRows, Params, positive, row_blocks
from mfs_decompose.codec.tree import CodecNode, Json, Part
from mfs_decompose.errors import ArtifactInvalid
from mfs_decompose.linalg.integer_coder import coded_bits, decode_integers, encode_integers, to_buckets

DEAD = 0.2  # of a step, by which a value must exceed half a step (and each level its edge) before it is coded
_FINE = 256  # reconstruction points lie on this part of a step
_LARGEST = (1 << 24) - 1

Codes = npt.NDArray[np.int64]


class DeadZone:
    """The codec `deadzone`; parameter `step`, in units of the weights."""

    name = "deadzone"

    def nbytes(self, shape: tuple[int, int], params: Params) -> int | None:
        return None

    def encode(
        self, rows: DeltaRows, shape: tuple[int, int], params: Params, emit: Emit, *, context: Context | None = None
    ) -> CodecNode:
        step = _step(params["step"])
        points = _points(rows, shape, step)
        sizes: list[int] = []
        for block in row_blocks(shape):
            codes = quantise_dead(rows(*block), step).numpy().reshape(-1)
            data = encode_integers(_zigzag(codes), np.zeros(codes.size, np.uint8), 1)
            emit(data)
            sizes.append(len(data))
        kept: dict[str, Json] = {"shape": [*shape], "step": step, "points": [*points], "sizes": [*sizes]}
        return CodecNode("deadzone", params=kept, parts=(Part("data", "U8", (sum(sizes),), 0, sum(sizes)),))

    def open(self, node: CodecNode, fetch: Fetch, shape: tuple[int, int]) -> Delta:
        step, points, sizes = positive(node, "step"), node.params.get("points"), node.params.get("sizes")
        if _step(step) != step or not isinstance(points, list) or not isinstance(sizes, list):
            raise ArtifactInvalid("codec 'deadzone': expected a bf16 step, two points and sizes")
        offsets = [at for at in points if type(at) is int and -_FINE < at < _FINE]
        lengths = [size for size in sizes if type(size) is int and size >= 0]
        part = node.part("data")
        if len(offsets) != 2 or len(points) != 2 or len(lengths) != len(sizes):
            raise ArtifactInvalid("codec 'deadzone': expected a bf16 step, two points and sizes")
        whole = (part.dtype, part.shape, part.nbytes) == ("U8", (sum(lengths),), sum(lengths))
        if node.params.get("shape") != list(shape) or len(sizes) != len(row_blocks(shape)) or not whole:
            raise ArtifactInvalid("codec 'deadzone': blocks do not add up to the tensor")
        return _Blocks(fetch, shape, step, (offsets[0], offsets[1]), part.offset, lengths)


class _Blocks:
    """Codes times a step of 8 significant bits: below 2^40 units of a value, exact in fp64."""

    def __init__(
        self, fetch: Fetch, shape: tuple[int, int], step: float, points: tuple[int, int], offset: int, sizes: list[int]
    ) -> None:
        self._fetch, self._shape, self._step, self._points = fetch, shape, step, points
        self._blocks: list[tuple[int, int, int, int]] = []
        for (start, stop), size in zip(row_blocks(shape), sizes, strict=True):
            self._blocks.append((start, stop, offset, size))
            offset += size

    def rows(self, start: int, stop: int) -> torch.Tensor:
        pieces = [torch.zeros(0, self._shape[1], dtype=torch.float64)]
        for first, last, offset, size in self._blocks:
            low, high = max(start, first), min(stop, last)
            if low < high:
                pieces.append(self._decode(first, last, offset, size)[low - first : high - first])
        return torch.cat(pieces)

    def _decode(self, first: int, last: int, offset: int, size: int) -> torch.Tensor:
        count = (last - first) * self._shape[1]
        words = decode_integers(self._fetch(offset, size), np.zeros(count, np.uint8), 1)
        if words.size and int(words.max()) > 2 * _LARGEST:
            raise ArtifactInvalid("codec 'deadzone': a code is too large")
        codes = _unzigzag(words)
        return reconstruct(torch.from_numpy(codes).view(last - first, -1), self._step, self._points)


def quantise_dead(values: torch.Tensor, step: float) -> torch.Tensor:
    """int64 codes of finite fp32 values: the sign times `floor(|v| / step + 1/2 - dead)`."""
    size = (values.to(torch.float64).abs() / step + (0.5 - DEAD)).floor().clamp(max=_LARGEST).to(torch.int64)
    return torch.where(values < 0, -size, size)


def reconstruct(codes: torch.Tensor, step: float, points: tuple[int, int]) -> torch.Tensor:
    """fp64 values of codes: one of size 1 stands for `(1 + points[0] / 256) * step`, a larger one has `points[1]`."""
    size = codes.abs()
    fine = size * _FINE + torch.where(size == 1, points[0], points[1])
    return torch.where(codes < 0, -fine, fine).masked_fill(size == 0, 0).to(torch.float64) * (step / _FINE)


def dead_zone_point(rows: DeltaRows, shape: tuple[int, int], step: float) -> tuple[float, float]:
    """About how many bytes a step takes, and exactly what squared error it makes."""
    step, bits, errors = _step(step), 0.0, []
    points = _points(rows, shape, step)
    for block in row_blocks(shape):
        values = rows(*block)
        codes = quantise_dead(values, step)
        buckets = to_buckets(_zigzag(codes.numpy().reshape(-1)))
        bits += coded_bits(buckets, np.zeros(buckets.size, np.uint8), 1)
        errors.append(float((reconstruct(codes, step, points) - values).square().sum()))
    return bits / 8, math.fsum(errors)


def _step(value: Json) -> float:
    """A positive step as a normal number of bf16."""
    assert isinstance(value, (int, float)) and value > 0, f"step {value!r}"
    limits = torch.finfo(torch.bfloat16)
    inside = min(max(float(value), limits.tiny), limits.max)
    return float(torch.tensor(inside, dtype=torch.float64).to(torch.bfloat16))


def _points(rows: DeltaRows, shape: tuple[int, int], step: float) -> tuple[int, int]:
    """Where codes of size 1, and larger ones, are put: at the mean of what they stand for."""
    counts, sums = [0, 0], [0.0, 0.0]
    for block in row_blocks(shape):
        values = rows(*block)
        size = quantise_dead(values, step).abs()
        over = values.to(torch.float64).abs() / step - size
        for at, chosen in enumerate((size == 1, size > 1)):
            counts[at] += int(chosen.sum())
            sums[at] += float(over[chosen].sum())
    means = [total / max(count, 1) for count, total in zip(counts, sums, strict=True)]
    near = [max(1 - _FINE, min(_FINE - 1, round(mean * _FINE))) for mean in means]
    return near[0], near[1]


def _zigzag(codes: Codes) -> npt.NDArray[np.uint64]:
    return ((codes << 1) ^ (codes >> 63)).view(np.uint64)


def _unzigzag(words: npt.NDArray[np.uint64]) -> Codes:
    return (words >> np.uint64(1)).view(np.int64) ^ -(words & np.uint64(1)).view(np.int64)
