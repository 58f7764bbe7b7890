"""The rows of rate_drift.py: ways to store the deltas of all linear layers, their bytes and what they decode to."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

from mfs_decompose.codec.arrays import head_parts
from mfs_decompose.codec.banded import Banded
from mfs_decompose.codec.base import Delta
from mfs_decompose.codec.deadzone import DeadZone, dead_zone_point
from mfs_decompose.codec.direct import Context, DirectCodec, Params
from mfs_decompose.codec.kbit import KBit, Ternary
from mfs_decompose.codec.lowrank import LowRank
from mfs_decompose.codec.sign import Sign
from mfs_decompose.codec.significant import Significant
from mfs_decompose.codec.sparse import Sparse
from mfs_decompose.codec.summed import Summed, encode_residual
from mfs_decompose.codec.tree import CodecNode
from mfs_decompose.linalg.bands import Bands, allocate_bands, made_up
from mfs_decompose.linalg.seeds import stream_key
from mfs_decompose.linalg.shapes import GROUP
from mfs_decompose.linalg.svd import Truncation, truncated_svd

MAX_RANK = 256


@dataclass
class Pair:
    """The linear layers of a base and a variant: bf16 or fp32 [O, I] each, and what is computed of them once."""

    base: Mapping[str, torch.Tensor]
    variant: Mapping[str, torch.Tensor]
    factors: dict[str, Truncation] = field(default_factory=dict)

    def delta(self, name: str) -> torch.Tensor:
        return self.variant[name].to(torch.float32) - self.base[name].to(torch.float32)

    def factor(self, name: str) -> Truncation:
        if name not in self.factors:
            found = truncated_svd(self.delta(name)[None], MAX_RANK, [stream_key(0, "rate", name)])[0]
            assert found is not None
            self.factors[name] = found
        return self.factors[name]

    @property
    def nbytes(self) -> int:
        return sum(2 * tensor.numel() for tensor in self.base.values())


@dataclass(frozen=True)
class Decoded:
    """One tensor as it would be read back: bytes stored, and the delta [O, I]."""

    name: str
    nbytes: int
    delta: torch.Tensor


Row = Callable[[Pair], Iterator[Decoded]]


def rows() -> dict[str, Row]:
    """The table of the codecs that came first, in its order, and after it the others."""
    table: dict[str, Row] = {"nothing": _nothing}
    for rank in (8, 16, 32, 64, 128):
        table[f"low rank bf16 r {rank}"] = partial(_low_rank, rank=rank, factors="bf16")
    table["low rank int8 r 32"] = partial(_low_rank, rank=32, factors="int8")
    for rank in (64, 128):
        table[f"low rank int4 r {rank}"] = partial(_low_rank, rank=rank, factors="int4")
    for bits, rank in ((3, 64), (3, 128), (2, 128)):
        table[f"low rank int{bits} r {rank}, plain rounding"] = partial(_plain_low_rank, rank=rank, bits=bits)
    for percent in (1, 2, 5):
        table[f"sparse {percent} % by magnitude"] = partial(_sparse, density=percent / 100)
    for percent in (1, 2, 5):
        table[f"sparse {percent} % by magnitude, ties dropped"] = partial(_above, density=percent / 100)
    for scale in ("tensor", "row"):
        table[f"sign, scale a {scale}"] = partial(_direct, codec=Sign(), params={"scale": scale})
    for bits in (2, 3, 4, 8):
        table[f"plain int{bits} g64, fp32 scales"] = partial(_plain_bits, bits=bits)

    for percent in (2, 3, 5, 10):
        table[f"banded at {percent} %"] = partial(_banded, share=percent / 100)
    table["sign, scale a group"] = partial(_direct, codec=Sign(), params={"scale": "group"})
    for fit in ("absmax", "mse"):
        table[f"ternary, {fit}"] = partial(_direct, codec=Ternary(), params={"fit": fit})
    for bits, fit in ((3, "absmax"), (4, "absmax"), (3, "mse"), (4, "mse")):
        table[f"int{bits} g64, {fit}"] = partial(_direct, codec=KBit(), params={"bits": bits, "fit": fit})
    for percent in (5, 10):
        table[f"dead zone at {percent} %"] = partial(_dead_zone, share=percent / 100)
    for first, rest in ((0.025, 0.025), (0.05, 0.05)):
        table[f"banded + dead zone at {first + rest:.0%}"] = partial(_residual, share=first, rest=rest)
    table["banded at 5 % + ternary"] = partial(_residual, share=0.05, rest=None)
    for percent in (1, 5):
        table[f"sparse {percent} % by effect"] = partial(_significant, density=percent / 100)
    return table


class _Written:
    """A codec's output, to be read back."""

    def __init__(self) -> None:
        self._data = bytearray()

    def emit(self, data: bytes) -> None:
        self._data += data

    def fetch(self, offset: int, count: int) -> bytes:
        return bytes(self._data[offset : offset + count])

    def check(self, node: CodecNode) -> int:
        assert node.nbytes == len(self._data), f"{node.codec}: {node.nbytes} bytes declared, {len(self._data)} written"
        return node.nbytes


def _nothing(pair: Pair) -> Iterator[Decoded]:
    for name, tensor in pair.base.items():
        yield Decoded(name, 0, torch.zeros(tensor.shape))


def _low_rank(pair: Pair, rank: int, factors: str) -> Iterator[Decoded]:
    codec, params = LowRank(), {"factors": factors}
    for name, tensor in pair.base.items():
        (fit,) = codec.fit(pair.delta(name)[None], rank, [stream_key(0, "rate", name)], params)
        assert fit is not None
        parts, data = head_parts(fit.arrays, codec.array_names(params), rank)
        node = CodecNode("lowrank", params={**params, "group": GROUP, "steps": rank}, parts=parts)
        opened = codec.open(node, _fetcher(data), _shape(tensor))
        yield Decoded(name, len(data), opened.rows(0, tensor.shape[0]))


def _plain_low_rank(pair: Pair, rank: int, bits: int) -> Iterator[Decoded]:
    """Scales that clip nothing, 16 bits for 64 values: what a first attempt would write."""
    for name in pair.base:
        found = pair.factor(name)
        left, right = (_round_plainly(side[:rank], bits, torch.bfloat16) for side in (found.left, found.right))
        yield Decoded(name, left[1] + right[1], left[0].mT @ right[0])


def _plain_bits(pair: Pair, bits: int) -> Iterator[Decoded]:
    """The whole delta. Scales are not rounded: with bf16 or fp16 ones KL doubles at 4 bits, since differences of bf16
    weights are full of ties between two codes, and a rounded scale breaks those of a group all in one sense."""
    for name in pair.base:
        values, nbytes = _round_plainly(pair.delta(name), bits, torch.float32)
        yield Decoded(name, nbytes, values)


def _round_plainly(matrix: torch.Tensor, bits: int, scales: torch.dtype) -> tuple[torch.Tensor, int]:
    levels = (1 << (bits - 1)) - 1
    groups = torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % GROUP)).view(matrix.shape[0], -1, GROUP)
    step = (groups.abs().amax(dim=2, keepdim=True) / levels).to(scales).to(torch.float32)
    codes = torch.where(step > 0, groups / step, 0.0).round().clamp(-levels, levels)
    nbytes = matrix.shape[0] * (-(-matrix.shape[1] * bits // 8) + scales.itemsize * groups.shape[1])
    return (codes * step).view(matrix.shape[0], -1)[:, : matrix.shape[1]], nbytes


def _sparse(pair: Pair, density: float) -> Iterator[Decoded]:
    codec, params = Sparse(), {"values": "bf16"}
    for name, tensor in pair.base.items():
        steps = round(density * tensor.shape[1])
        (fit,) = codec.fit(pair.delta(name)[None], steps, [0], params)
        assert fit is not None
        parts, data = head_parts(fit.arrays, codec.array_names(params), steps)
        node = CodecNode("sparse", params={**params, "steps": steps}, parts=parts)
        yield Decoded(name, len(data), codec.open(node, _fetcher(data), _shape(tensor)).rows(0, tensor.shape[0]))


def _above(pair: Pair, density: float) -> Iterator[Decoded]:
    """Entries above the magnitude of the last one wanted: all its ties go with it, and bf16 deltas are full of ties."""
    for name, tensor in pair.base.items():
        delta = pair.delta(name)
        wanted = max(1, round(density * tensor.numel()))
        edge = delta.abs().reshape(-1).kthvalue(tensor.numel() - wanted + 1).values
        kept = torch.where(delta.abs() > edge, delta, 0.0)
        yield Decoded(name, 4 * int(kept.count_nonzero()), kept.to(torch.bfloat16).to(torch.float64))


def _direct(pair: Pair, codec: DirectCodec, params: Params) -> Iterator[Decoded]:
    for name in pair.base:
        nbytes, opened = _write_direct(pair, name, codec, params)
        yield Decoded(name, nbytes, opened.rows(0, pair.base[name].shape[0]))


def _significant(pair: Pair, density: float) -> Iterator[Decoded]:
    for name, tensor in pair.base.items():
        nbytes, opened = _write_direct(pair, name, Significant(), {"steps": round(density * tensor.shape[1])})
        yield Decoded(name, nbytes, opened.rows(0, tensor.shape[0]))


def _write_direct(pair: Pair, name: str, codec: DirectCodec, params: Params) -> tuple[int, Delta]:
    delta, base, written = pair.delta(name), pair.base[name], _Written()
    context = Context(lambda start, stop: base[start:stop])
    node = codec.encode(lambda a, b: delta[a:b], _shape(delta), params, written.emit, context=context)
    return written.check(node), codec.open(node, written.fetch, _shape(delta))


def choose(pair: Pair, share: float) -> dict[str, Bands]:
    """Bands of every tensor at one lambda, for a share of the bytes of the linear layers."""
    tensors = [(pair.factor(name).energy.tolist(), _shape(tensor)) for name, tensor in pair.base.items()]
    return dict(zip(pair.base, allocate_bands(tensors, int(share * pair.nbytes)), strict=True))


def write_banded(pair: Pair, name: str, bands: Bands, *, alone: bool = True) -> tuple[int, Delta]:
    """Bytes, and what was written; `alone`, it makes up for what is left out."""
    written, found, shape = _Written(), pair.factor(name), _shape(pair.base[name])
    times = made_up(found.energy.tolist(), found.total, shape, sum(bands)) if alone else 1.0
    node = Banded().encode(found.left, found.right, bands, written.emit, times)
    return written.check(node), Banded().open(node, written.fetch, shape)


def _banded(pair: Pair, share: float) -> Iterator[Decoded]:
    for name, bands in choose(pair, share).items():
        nbytes, opened = write_banded(pair, name, bands)
        yield Decoded(name, nbytes, opened.rows(0, pair.base[name].shape[0]))


def _dead_zone(pair: Pair, share: float) -> Iterator[Decoded]:
    step = find_step(pair.delta, pair, share)
    yield from _direct(pair, DeadZone(), {"step": step})


def find_step(remainder: Callable[[str], torch.Tensor], pair: Pair, share: float) -> float:
    """The one step at which every 8th row of all layers takes that share of its bytes."""
    matrices = [remainder(name)[::8].clone() for name in pair.base]
    budget = share * sum(2 * matrix.numel() for matrix in matrices)
    low, high = (math.log(float(matrices[0].square().mean().sqrt())) + side for side in (-3.0, 4.0))
    for _ in range(10):
        middle = (low + high) / 2
        over = sum(dead_zone_point(_reader(m), _shape(m), math.exp(middle))[0] for m in matrices) > budget
        low, high = (middle, high) if over else (low, middle)
    return math.exp(high)


def _residual(pair: Pair, share: float, rest: float | None) -> Iterator[Decoded]:
    """Banded low rank, and what it leaves by a dead zone of `rest` of the bytes, or by ternary."""
    chosen = choose(pair, share)

    def remainder(name: str) -> torch.Tensor:
        first = write_banded(pair, name, chosen[name], alone=False)[1]
        return pair.delta(name) - first.rows(0, pair.base[name].shape[0]).to(torch.float32)

    codec: DirectCodec = Ternary() if rest is None else DeadZone()
    params: Params = {"fit": "absmax"} if rest is None else {"step": find_step(remainder, pair, rest)}
    for name, tensor in pair.base.items():
        nbytes, first = write_banded(pair, name, chosen[name], alone=False)
        written, shape = _Written(), _shape(tensor)
        node = encode_residual(_reader(pair.delta(name)), shape, first, codec, params, written.emit)
        whole = Summed([first, codec.open(node, written.fetch, shape)])
        yield Decoded(name, nbytes + written.check(node), whole.rows(0, shape[0]))


def _reader(matrix: torch.Tensor) -> Callable[[int, int], torch.Tensor]:
    return lambda start, stop: matrix[start:stop]


def _fetcher(data: bytes) -> Callable[[int, int], bytes]:
    return lambda offset, count: data[offset : offset + count]


def _shape(matrix: torch.Tensor) -> tuple[int, int]:
    return matrix.shape[0], matrix.shape[1]
