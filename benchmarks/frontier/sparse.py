"""Sparse deltas: DARE with quantised values, and the largest magnitudes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from benchmarks.frontier.groups import group_bytes, round_rows
from benchmarks.frontier.plan import Plan
from benchmarks.frontier.work import Work
from benchmarks.rate_drift_rows import Decoded
from mfs_decompose.linalg.seeds import random_bits16, stream_key
from mfs_decompose.linalg.shapes import GROUP

DARE_BITS = 4
SEED_BYTES = 8
_LEAVES = 1 << 16


def dare(work: Work, names: Sequence[str], budget: int) -> Plan:
    """DARE (Yu et al. 2024) with quantised values: entries dropped by chance, what is left divided by the share kept.

    Values have 4 bits in groups of 64 in their order; the mask follows from a shared seed.
    """
    numel = sum(work.base[name].numel() for name in names)
    density = (budget - SEED_BYTES) / (numel * group_bytes(GROUP, DARE_BITS) / GROUP)
    # What chance keeps beyond its mean, and groups that are not full, must still fit.
    density -= 4 * math.sqrt(max(density, 0.0) / numel) + len(names) * 64 / numel
    kept = max(1, min(_LEAVES, math.floor(density * _LEAVES)))

    def decode() -> Iterator[Decoded]:
        seed = SEED_BYTES
        for name in names:
            delta = work.delta(name)
            noise = random_bits16(stream_key(0, "dare", name), 0, delta.numel())
            mask = (noise < kept).view_as(delta)
            values = delta[mask] * (_LEAVES / kept)
            nbytes = group_bytes(values.numel(), DARE_BITS) + seed
            padded = torch.nn.functional.pad(values, (0, -values.numel() % GROUP)).view(-1, GROUP)
            delta = torch.zeros_like(delta)
            delta[mask] = round_rows(padded, DARE_BITS).view(-1)[: values.numel()]
            yield Decoded(name, nbytes, delta)
            seed = 0

    return Plan({"density": kept / _LEAVES, "bits": DARE_BITS}, decode)


def magnitude(work: Work, names: Sequence[str], budget: int) -> Plan:
    """The largest entries of each tensor as bf16 values, with their place in the row (16 bits) and counts a row."""
    heads = sum(2 * work.shape(name)[0] for name in names)
    density = max(0.0, (budget - heads) / 4 / sum(work.base[name].numel() for name in names))

    def decode() -> Iterator[Decoded]:
        for name in names:
            delta = work.delta(name)
            count = min(delta.numel(), int(density * delta.numel()))
            places = delta.abs().view(-1).topk(count, sorted=False).indices
            found = torch.zeros_like(delta)
            found.view(-1)[places] = delta.view(-1)[places].to(torch.bfloat16).to(torch.float32)
            yield Decoded(name, 4 * count + 2 * delta.shape[0], found)

    return Plan({"density": density}, decode)
