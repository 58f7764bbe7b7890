"""How embeddings, heads and norms are treated beside a codec of the linear layers: alike, or as each peer ships."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from benchmarks.frontier.deltacome import delta_come
from benchmarks.frontier.direct import dead_zone, lossless, own_bits, plain_bits, sign_row, ternary
from benchmarks.frontier.impart import impart
from benchmarks.frontier.lowrank import banded, bf16_low_rank, int4_low_rank
from benchmarks.frontier.plan import Codec, Plan
from benchmarks.frontier.signs import bit_delta, bit_delta_fitted
from benchmarks.frontier.sparse import dare, magnitude
from benchmarks.frontier.work import Work
from benchmarks.rate_drift_rows import Decoded

Ships = Literal["kept", "copied", "coded"]
"""What a peer does with embeddings and heads: the fine-tune's own at 16 bits; the same, head and embedding each even
where they are tied, as an adapter of mergekit; the same codec as for everything else."""

AUTO = "mfs auto"
BASE = "base, no delta"


@dataclass(frozen=True)
class Row:
    """A line of the tables. `own` is ours, not a peer; `ships` is None for what only table one shows."""

    codec: Codec
    own: bool = False
    ships: Ships | None = None


ROWS: Mapping[str, Row] = {
    "low rank bf16": Row(bf16_low_rank, ships="copied"),
    "BitDelta sign": Row(bit_delta, ships="kept"),
    "BitDelta sign, fitted scales": Row(bit_delta_fitted, ships="kept"),
    "Delta-CoMe": Row(delta_come, ships="kept"),
    "ImPart-Qt": Row(impart, ships="kept"),
    "DARE, 4 bits": Row(dare, ships="coded"),
    "magnitude sparse": Row(magnitude, ships="coded"),
    "k-bit groups, plain": Row(plain_bits, ships="coded"),
    "mfs lowrank int4": Row(int4_low_rank, own=True, ships="coded"),
    "mfs banded": Row(banded, own=True, ships="coded"),
    "mfs deadzone": Row(dead_zone, own=True),
    "mfs kbit": Row(own_bits, own=True),
    "mfs sign, a scale a row": Row(sign_row, own=True),
    "mfs ternary": Row(ternary, own=True),
    "mfs lossless": Row(lossless, own=True),
}


@dataclass(frozen=True)
class Served:
    """What a cell stores: `weights` once through, every tensor [...] in fp32 with its bytes."""

    knobs: Mapping[str, Any]
    weights: Iterator[tuple[str, int, torch.Tensor]]
    extra_bytes: int = 0


def table_one(work: Work, row: Row, budget: int, embedding_share: float) -> Served | None:
    """Embeddings and heads banded for a share of the budget, norms as they are; the rest is free.

    None: the codec leaves this size out.
    """
    tables = tables_alike(work, budget, embedding_share)
    spent = work.stored_bytes(work.rest) + sum(one.nbytes for one in tables)
    plan = row.codec(work, work.linears, budget - spent)
    if plan is None:
        return None
    return Served(plan.knobs, _serve(work, [plan, Plan({}, lambda: iter(tables))]))


def tables_alike(work: Work, budget: int, embedding_share: float) -> list[Decoded]:
    """Embeddings and heads as every codec of table one has them."""
    return list(banded(work, work.tables, int(embedding_share * budget)).decode())


def with_tables(work: Work, tables: list[Decoded], served: Served) -> Served:
    """What is served of a variant without a delta of embeddings and heads, with theirs."""
    deltas = {one.name: one for one in tables}

    def weights() -> Iterator[tuple[str, int, torch.Tensor]]:
        for name, nbytes, weight in served.weights:
            one = deltas.get(name)
            yield (name, nbytes, weight) if one is None else (name, nbytes + one.nbytes, _add(work.base[name], one))

    return Served(served.knobs, weights(), served.extra_bytes)


def table_two(work: Work, row: Row, budget: int) -> Served | None:
    """As the peer ships: those that keep embeddings and heads do not count them, and spend the budget on the rest."""
    assert row.ships is not None
    names = [*work.linears, *work.tables] if row.ships == "coded" else work.linears
    plan = row.codec(work, names, budget - (work.stored_bytes(work.rest) if row.ships == "coded" else 0))
    if plan is None:
        return None
    extra = 0
    if row.ships == "copied" and work.adapter:
        extra = work.adapter_rest - work.stored_bytes([*work.tables, *work.rest])
    elif row.ships == "copied" and len(work.tables) == 1:  # tied: mergekit writes both
        extra = work.stored_bytes(work.tables)
    return Served(plan.knobs, _serve(work, [plan]), extra)


def base_alone(work: Work) -> Served:
    """The base in the variant's place."""
    return Served({}, ((name, 0, tensor.to(torch.float32)) for name, tensor in work.base.items()))


def _serve(work: Work, plans: list[Plan]) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Base plus delta of what is planned, and the variant's own tensors, whole, of what is not."""
    left = dict(work.variant)
    for plan in plans:
        for one in plan.decode():
            del left[one.name]
            yield one.name, one.nbytes, _add(work.base[one.name], one)
    for name, tensor in left.items():
        yield name, tensor.numel() * tensor.itemsize, tensor.to(torch.float32)


def _add(base: torch.Tensor, one: Decoded) -> torch.Tensor:
    return (base.to(torch.float64) + one.delta).to(torch.float32)
