"""Whole deltas as small integers: plain rounding in groups, and our own codecs that write deltas from their rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from benchmarks.frontier.plan import Codec, Plan
from benchmarks.frontier.work import Work
from benchmarks.rate_drift_rows import Decoded, _reader, _round_plainly, _write_direct
from mfs_decompose.codec.deadzone import DeadZone, dead_zone_point
from mfs_decompose.codec.direct import DirectCodec, Params
from mfs_decompose.codec.direct_sizes import direct_bytes
from mfs_decompose.codec.kbit import KBit, Ternary
from mfs_decompose.codec.lossless import Lossless
from mfs_decompose.codec.sign import Sign
from mfs_decompose.linalg.shapes import GROUP
from mfs_decompose.source.header import TensorSpec

WIDTHS = (2, 3, 4)
_DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
_REFINED = 3  # halvings of the last tenth of a step
_SAMPLE = 8  # every how many rows a step is searched on


def plain_bits(work: Work, names: Sequence[str], budget: int) -> Plan:
    """k-bit groups of 64 rounded to nearest, scales in fp32: 16-bit ones break ties all in one sense."""
    bits = nearest(partial(_plain_bytes, work, names), budget)

    def decode() -> Iterator[Decoded]:
        for name in names:
            values, nbytes = _round_plainly(work.delta(name), bits, torch.float32)
            yield Decoded(name, nbytes, values)

    return Plan({"bits": bits}, decode)


def _plain_bytes(work: Work, names: Sequence[str], bits: int) -> int:
    shapes = [work.shape(name) for name in names]
    return sum(rows * (-(-columns * bits // 8) + 4 * -(-columns // GROUP)) for rows, columns in shapes)


def nearest(nbytes: Callable[[int], int], budget: int) -> int:
    """The largest of the widths that fits, else the smallest."""
    return max((bits for bits in WIDTHS if nbytes(bits) <= budget), default=WIDTHS[0])


def own_bits(work: Work, names: Sequence[str], budget: int) -> Plan:
    """Ours, `kbit`: scales of least squared error."""

    def nbytes(bits: int) -> int:
        return sum(direct_bytes("kbit", work.shape(name), {"bits": bits}) or 0 for name in names)

    bits = nearest(nbytes, budget)
    return Plan({"bits": bits}, partial(_written, work, names, KBit(), {"bits": bits, "fit": "mse"}))


def _fixed(codec: DirectCodec, params: Params) -> Codec:
    def plan(work: Work, names: Sequence[str], budget: int) -> Plan:
        del budget
        return Plan(dict(params), partial(_written, work, names, codec, params))

    return plan


sign_row = _fixed(Sign(), {"scale": "row"})
ternary = _fixed(Ternary(), {"fit": "mse"})


def dead_zone(work: Work, names: Sequence[str], budget: int) -> Plan:
    """Ours, `deadzone`: one step for all layers, searched on every 8th row and then on all.

    Deltas of bf16 weights lie on few values, so sizes fall in cliffs, and what fits may be far below the budget.
    """
    low = high = _find_step(work, names, budget)
    while _point(work, names, high, every=1) > budget:
        low, high = high, 1.1 * high
    for _ in range(_REFINED if low < high else 0):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if _point(work, names, middle, every=1) > budget else (low, middle)
    return Plan({"step": high}, partial(_written, work, names, DeadZone(), {"step": high}))


def _find_step(work: Work, names: Sequence[str], budget: int) -> float:
    share = budget / sum(work.delta(name).numel() for name in names)
    sampled = sum(work.delta(name)[::_SAMPLE].numel() for name in names)
    energy = sum(float(work.delta(name).square().sum()) for name in names)
    middle = math.log(math.sqrt(energy / sum(work.delta(name).numel() for name in names)) + 1e-30)
    low, high = middle - 3.0, middle + 4.0
    for _ in range(11):
        middle = (low + high) / 2
        over = _point(work, names, math.exp(middle), _SAMPLE) > share * sampled
        low, high = (middle, high) if over else (low, middle)
    return math.exp(high)


def _point(work: Work, names: Sequence[str], step: float, every: int) -> float:
    """About how many bytes a step takes."""
    total = 0.0
    for name in names:
        rows = work.delta(name)[::every].contiguous()
        total += dead_zone_point(_reader(rows), (rows.shape[0], rows.shape[1]), step)[0]
    return total


def lossless(work: Work, names: Sequence[str], budget: int) -> Plan | None:
    """Ours, `lossless`, where it fits."""
    sizes: dict[str, int] = {}
    for name in names:
        own, base = work.variant[name], work.base[name]
        pieces: list[bytes] = []
        spec = TensorSpec(name, _DTYPES[own.dtype], tuple(own.shape))
        Lossless().encode(_reader(own), _reader(base), spec, pieces.append)
        sizes[name] = sum(len(piece) for piece in pieces)
        if sum(sizes.values()) > budget:
            return None
    return Plan({}, lambda: (Decoded(name, sizes[name], work.delta(name)) for name in names))


def _written(work: Work, names: Sequence[str], codec: DirectCodec, params: Params) -> Iterator[Decoded]:
    for name in names:
        nbytes, opened = _write_direct(work, name, codec, params)
        yield Decoded(name, nbytes, opened.rows(0, work.shape(name)[0]))
