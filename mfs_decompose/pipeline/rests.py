"""What pass 1 finds out about an open item beside its fit: how its delta, and what the fit leaves, would be coded.

Some rows stand for all: allocation needs the shape of a curve, and what is chosen is sized before it is written.
"""

from __future__ import annotations

import torch

from mfs_decompose.codec.base import Fit
from mfs_decompose.codec.deadzone import DEAD
from mfs_decompose.linalg.dead_curve import DeadCurve, measure_dead_curve
from mfs_decompose.pipeline.direct import delta_matrix
from mfs_decompose.pipeline.exact import CountingSink, encode_rows, peel
from mfs_decompose.pipeline.looks_merged import looks_merged
from mfs_decompose.pipeline.reading import Sources
from mfs_decompose.pipeline.surveyed import OpenFacts
from mfs_decompose.plan.mixes import SAMPLED
from mfs_decompose.plan.model import Item

_RANKS = (16, 4, 1)
"""Parts of a fit that curves are measured beyond. A delta of a few units of bf16 is cheap to code while no direction is
taken from it: its zeros are zeros."""

_PIECES = 16  # that it is taken in, evenly spaced


def survey_open(item: Item, fit: Fit, sources: Sources) -> OpenFacts:
    """Curves of the delta itself and of what its fit leaves, and about how many bytes all bits would take.

    No curves beside a shared delta: a coded rest would hold what that leaves of the common delta once a variant.
    """
    shape, delta, _ = delta_matrix(item, sources)
    places = _places(shape)
    rows = torch.cat([delta(start, stop) for start, stop in places])
    curves: list[tuple[int, DeadCurve]] = []
    ranks = () if item.key in sources.shared else (0, *(max(fit.steps // part, 1) for part in _RANKS))
    for rank in sorted(set(ranks)):
        rest = rows if rank == 0 else rows - _fitted(fit, rank, places)
        curve = measure_dead_curve(rest, DEAD)
        if curve is not None:
            curves.append((rank, curve))
    return OpenFacts(fit.total, tuple(curves), _exact_bytes(item, sources), _peeled(item, fit, sources, places))


def _places(shape: tuple[int, int]) -> list[tuple[int, int]]:
    """Row ranges of the sample: all rows of a small matrix."""
    wanted = max(1, SAMPLED // shape[1])
    if wanted >= shape[0]:
        return [(0, shape[0])]
    pieces = min(_PIECES, wanted)
    length = wanted // pieces
    return [(at * shape[0] // pieces, at * shape[0] // pieces + length) for at in range(pieces)]


def _fitted(fit: Fit, rank: int, places: list[tuple[int, int]]) -> torch.Tensor:
    """The sampled rows of what the leading directions store."""
    left = fit.arrays["u"][:rank].to(torch.float32) * fit.arrays["us"][:rank]
    right = fit.arrays["v"][:rank].to(torch.float32) * fit.arrays["vs"][:rank]
    return torch.cat([left[:, start:stop] for start, stop in places], dim=1).mT @ right


def _peeled(item: Item, fit: Fit, sources: Sources, places: list[tuple[int, int]]) -> tuple[int, int] | None:
    """Bytes and rank of the merged LoRA that this is, if it is one."""
    sink = CountingSink()
    node = peel(item, sources, sink) if looks_merged(item, fit, sources, places) else None
    if node is None:
        return None
    while node.children:  # below new rows and the correction
        node = node.children[0]
    rank = node.params["rank"]
    assert isinstance(rank, int)
    return sink.tell() - item.tail_bytes, rank


def _exact_bytes(item: Item, sources: Sources) -> float:
    """About what the lossless codec takes for the whole tensor, from rows in its middle, new rows raw."""
    common = item.common
    count = min(common.rows, max(1, SAMPLED * common.rows // common.numel))
    first = (common.rows - count) // 2
    sink = CountingSink()
    encode_rows(item, first, first + count, sources, sink)
    return sink.tell() * common.rows / count
