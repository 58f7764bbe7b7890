"""ImPart-Qt (Yang et al., ACL 2025): singular vectors thinned out by chance, the strong ones least, then quantised.

Published: the last beta of the directions are dropped; of direction k each entry of u_k and of v_k is dropped with
p_k = gamma * (1 - (s_k / s_1)^C), and what is left divided by 1 - p_k; 8, 3 and 2 bits as Delta-CoMe; beta (0.6 to 0.8)
and C (0.5 or 1) come from a validation set. Here: they are those of least error of the outputs of every tenth layer on
held-in text, and beta may be 0.9 too, or less than any of these where more directions fit whole; gamma follows from the
bytes, and a direction whose p_k reaches 1 is dropped; values are rounded plainly, in groups of 64 of what a direction
keeps. Masks come from a shared seed, as the published sizes assume; singular values, from which p_k follows, are two
bytes each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks.frontier.deltacome import column_bits
from benchmarks.frontier.groups import HEAD_BYTES, round_rows
from benchmarks.frontier.plan import Plan, largest, shares
from benchmarks.frontier.work import Work
from benchmarks.rate_drift_rows import Decoded
from mfs_decompose.linalg.seeds import random_matrix, stream_key
from mfs_decompose.linalg.shapes import GROUP
from mfs_decompose.pipeline.scheduler import one_torch_thread

BETAS, POWERS = (0.6, 0.7, 0.8, 0.9), (0.5, 1.0)
SEED_BYTES, SIGMA_BYTES = 8, 2
_LARGEST_GAMMA, _TURNS = 50.0, 40
_VALIDATED = 10  # every how many layers


@dataclass(frozen=True)
class Thinning:
    """How one layer is thinned: directions kept, and gamma and C of what is dropped of them."""

    rank: int
    gamma: float
    power: float


def impart(work: Work, names: Sequence[str], budget: int) -> Plan:
    """Every layer the same share of its bytes."""
    parts = shares(work, names, budget - SEED_BYTES)
    with one_torch_thread():  # many small steps: threads only wait for each other
        beta, power = _validate(work, names, parts)
    chosen = {name: thinning(work, name, parts[name], beta, power) for name in names}

    def decode() -> Iterator[Decoded]:
        seed = SEED_BYTES
        for name in names:
            with one_torch_thread():
                found = _decode(work, name, chosen[name])
            yield Decoded(name, found.nbytes + seed, found.delta)
            seed = 0

    mean = sum(one.rank for one in chosen.values()) / max(len(names), 1)
    return Plan({"beta": beta, "C": power, "mean_rank": mean}, decode)


def _validate(work: Work, names: Sequence[str], parts: dict[str, int]) -> tuple[float, float]:
    """Beta and C; without a held-in text those that were best on the first real fine-tune."""
    sample = [name for name in names if name in work.grams][::_VALIDATED]
    if not sample:
        return BETAS[-1], POWERS[0]

    def wrong(setting: tuple[float, float]) -> float:
        total = 0.0
        for name in sample:
            delta, gram = work.delta(name), work.grams[name]
            left = delta - _decode(work, name, thinning(work, name, parts[name], *setting)).delta
            total += float((left @ gram * left).sum() / (delta @ gram * delta).sum().clamp(min=1e-30))
        return total

    return min(((beta, power) for beta in BETAS for power in POWERS), key=wrong)


def drop_shares(energy_R: torch.Tensor, gamma: float, power: float) -> torch.Tensor:
    """p_k of the directions that beta leaves."""
    sigma = energy_R.sqrt()
    return (gamma * (1 - (sigma / sigma[0]) ** power)).clamp(max=1.0)


def _counts(shares_R: torch.Tensor, length: int) -> torch.Tensor:
    """How many entries each direction keeps."""
    return ((1 - shares_R) * length).round().to(torch.int64)


def _bytes(work: Work, name: str, how: Thinning) -> int:
    dropped = drop_shares(work.factor(name).energy[: how.rank], how.gamma, how.power)
    bits, total = column_bits(len(dropped)), SIGMA_BYTES * len(dropped)
    for length in work.shape(name):
        counts = _counts(dropped, length)
        total += int(((counts * bits + 7) // 8 + HEAD_BYTES * ((counts + GROUP - 1) // GROUP)).sum())
    return total


def thinning(work: Work, name: str, budget: int, beta: float, power: float) -> Thinning:
    """The directions that beta leaves and the least gamma whose bytes fit; or more of them, whole, where they fit."""
    found = work.factor(name).rank
    rank = max(1, round((1 - beta) * found))
    if _bytes(work, name, Thinning(rank, 0.0, power)) <= budget:
        more = largest(lambda n: _bytes(work, name, Thinning(n, 0.0, power)) <= budget, rank, found)
        return Thinning(more, 0.0, power)
    low, high = 0.0, _LARGEST_GAMMA
    for _ in range(_TURNS):
        middle = (low + high) / 2
        fits = _bytes(work, name, Thinning(rank, middle, power)) <= budget
        low, high = (low, middle) if fits else (middle, high)
    return Thinning(rank, high, power)


def _decode(work: Work, name: str, how: Thinning) -> Decoded:
    found = work.factor(name).head(how.rank)
    dropped = drop_shares(found.energy, how.gamma, how.power)
    sides = []
    for side, directions in (("u", found.left), ("v", found.right)):
        kept = _counts(dropped, directions.shape[1])
        sides.append(_thinned(directions, kept, stream_key(0, "impart " + side, name)))
    return Decoded(name, _bytes(work, name, how), sides[0].mT @ sides[1])


def _thinned(directions_RN: torch.Tensor, counts_R: torch.Tensor, key: int) -> torch.Tensor:
    """Each direction with `counts[r]` entries left by chance, scaled up and rounded."""
    rank, length = directions_RN.shape
    order = random_matrix(key, rank, length).argsort(dim=1)
    found = torch.zeros_like(directions_RN)
    for at, (bits, count) in enumerate(zip(column_bits(rank).tolist(), counts_R.tolist(), strict=True)):
        if count:
            places = order[at, :count].sort().values
            values = directions_RN[at, places] * (length / count)
            found[at, places] = round_rows(values[None], bits)[0]
    return found
