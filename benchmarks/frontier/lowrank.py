"""Low rank: bf16 factors of one rank as mergekit extracts them, and our own int4 and banded factors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from benchmarks.frontier.plan import Plan, largest
from benchmarks.frontier.work import Work
from benchmarks.rate_drift_rows import Decoded, write_banded
from mfs_decompose.linalg.bands import allocate_bands
from mfs_decompose.linalg.quantise import dequantise, quantise
from mfs_decompose.linalg.shapes import GROUP


def bf16_low_rank(work: Work, names: Sequence[str], budget: int) -> Plan:
    """One rank for all layers, sqrt(sigma) in either factor, both rounded to bf16: mergekit-extract-lora.

    Where mergekit itself was run, its own factors are taken: its smaller ranks are the first directions of larger ones.
    """

    def nbytes(rank: int) -> int:
        return sum(2 * min(rank, *work.shape(name)) * sum(work.shape(name)) for name in names)

    ranks = [b.shape[1] for b, _ in work.adapter.values()] or [max(min(work.shape(name)) for name in names)]
    rank = largest(lambda rank: nbytes(rank) <= budget, 1, max(ranks))

    def decode() -> Iterator[Decoded]:
        for name in names:
            left, right = _factors(work, name, rank)
            yield Decoded(name, 2 * (left.numel() + right.numel()), left.float() @ right.float())

    return Plan({"rank": rank, "from": "mergekit" if work.adapter else "its published rule"}, decode)


def _factors(work: Work, name: str, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """B [O, R] and A [R, I] in bf16."""
    if name in work.adapter:
        b, a = work.adapter[name]
        return b[:, :rank], a[:rank]
    found = work.factor(name).head(rank)
    return found.left.mT.to(torch.bfloat16), found.right.to(torch.bfloat16)


def int4_low_rank(work: Work, names: Sequence[str], budget: int) -> Plan:
    """Ours, `lowrank` with int4 factors: the directions of most energy a byte, over all layers."""
    offers = [
        (float(energy) / int4_bytes(work.shape(name)), at)
        for at, name in enumerate(names)
        for energy in work.factor(name).energy
    ]
    ranks, left = [0] * len(names), budget
    for _, at in sorted(offers, reverse=True):
        cost = int4_bytes(work.shape(names[at]))
        if cost <= left:
            ranks[at] += 1
            left -= cost

    def decode() -> Iterator[Decoded]:
        for name, rank in zip(names, ranks, strict=True):
            yield int4_delta(work, name, rank)

    return Plan({"mean_rank": sum(ranks) / max(len(ranks), 1)}, decode)


def int4_bytes(shape: tuple[int, int]) -> int:
    """Of one direction: codes, and a bf16 scale for 64 of them."""
    return sum(-(-length // 2) + 2 * -(-length // GROUP) for length in shape)


def int4_delta(work: Work, name: str, rank: int) -> Decoded:
    """The leading directions with int4 factors."""
    found = work.factor(name).head(rank)
    left, right = (dequantise(quantise(side, "int4")) for side in (found.left, found.right))
    return Decoded(name, found.rank * int4_bytes(work.shape(name)), left.mT @ right)


def banded(work: Work, names: Sequence[str], budget: int) -> Plan:
    """Ours, `banded`: directions of 8 to 2 bits, all from one lambda."""
    found = allocate_bands([(work.factor(name).energy.tolist(), work.shape(name)) for name in names], budget)

    def decode() -> Iterator[Decoded]:
        for name, bands in zip(names, found, strict=True):
            nbytes, opened = write_banded(work, name, bands)
            yield Decoded(name, nbytes, opened.rows(0, work.shape(name)[0]))

    return Plan({"directions": [sum(counts) for counts in zip(*found, strict=True)]}, decode)
