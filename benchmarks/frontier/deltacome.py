"""Delta-CoMe (Ping et al., NeurIPS 2024): singular vectors at 8, 3 and 2 bits by their place in the spectrum.

Published: the first 2 directions at 8 bits, the next 32 at 3, the rest at 2, as many as the ratio allows; V rounded by
GPTQ against the inputs, then U against what V makes of them. Here: groups of 64 along a direction for both factors
(published: 128, and of U across directions, whose scales they do not count), for both the rank follows from the bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from benchmarks.frontier.groups import group_bytes, round_rows, round_with_feedback
from benchmarks.frontier.plan import Plan, largest, shares
from benchmarks.frontier.work import Work
from benchmarks.rate_drift_rows import Decoded
from mfs_decompose.pipeline.scheduler import one_torch_thread

FIRST, SECOND = 2, 34


def column_bits(rank: int) -> torch.Tensor:
    """Bits of each direction [R]."""
    places = torch.arange(rank)
    return torch.where(places < FIRST, 8, torch.where(places < SECOND, 3, 2))


def delta_come(work: Work, names: Sequence[str], budget: int) -> Plan:
    """Every layer the same share of its bytes."""
    parts = shares(work, names, budget)
    ranks = {name: _rank(work.shape(name), parts[name]) for name in names}

    def decode() -> Iterator[Decoded]:
        for name in names:
            with one_torch_thread():  # many small steps: threads only wait for each other
                found = _decode(work, name, ranks[name])
            yield found

    how = "error feedback" if work.grams else "plain rounding"
    return Plan({"mean_rank": sum(ranks.values()) / max(len(ranks), 1), "rounding": how}, decode)


def _bytes(shape: tuple[int, int], rank: int) -> int:
    counts = (min(rank, FIRST), min(max(rank - FIRST, 0), SECOND - FIRST), max(rank - SECOND, 0))
    rows = [sum(group_bytes(length, bits) for length in shape) for bits in (8, 3, 2)]
    return sum(count * row for count, row in zip(counts, rows, strict=True))


def _rank(shape: tuple[int, int], budget: int) -> int:
    return largest(lambda rank: _bytes(shape, rank) <= budget, 1, min(shape))


def _decode(work: Work, name: str, rank: int) -> Decoded:
    found = work.factor(name).head(rank)
    sizes = found.right.norm(dim=1, keepdim=True)
    right, left = found.right / sizes, found.left * sizes  # V of length 1, U times sigma
    bits = column_bits(found.rank)
    gram = work.grams.get(name)
    if gram is None:
        v, u = (_round_plainly(side, bits) for side in (right, left))
    else:
        v = round_with_feedback(right, gram, bits)
        u = _round_left(left, v @ gram @ v.mT, bits)
    return Decoded(name, _bytes(work.shape(name), found.rank), u.mT @ v)


def _round_plainly(directions: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    pieces = [round_rows(directions[bits == width], width) for width in (8, 3, 2)]
    return torch.cat(pieces)  # bits fall along the spectrum


def _round_left(left_RO: torch.Tensor, hessian_RR: torch.Tensor, bits_R: torch.Tensor) -> torch.Tensor:
    """U direction by direction, strongest first; the error of one is taken up by those after it."""
    damped = hessian_RR.double()
    damped.diagonal().add_(0.01 * float(damped.diagonal().mean()) + 1e-30)
    upper = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True).float()
    rest, done = left_RO.clone(), torch.empty_like(left_RO)
    for at, bits in enumerate(bits_R.tolist()):
        done[at] = round_rows(rest[at : at + 1], bits)[0]
        error = (rest[at] - done[at]) / upper[at, at]
        rest[at + 1 :] -= upper[at, at + 1 :, None] * error
    return done
