"""Deltas, and stored entries of them, that the tests of direct codecs share."""

from __future__ import annotations

from typing import NamedTuple

import torch
from codec_entries import Stored, generator

from mfs_decompose.codec.deadzone import DeadZone
from mfs_decompose.codec.direct import Context, DirectCodec, Params
from mfs_decompose.codec.kbit import KBit, Ternary
from mfs_decompose.codec.rowsparse import RowSparse
from mfs_decompose.codec.sign import Sign
from mfs_decompose.codec.significant import Significant


class Case(NamedTuple):
    """A codec with parameters."""

    codec: DirectCodec
    params: Params

    def __str__(self) -> str:
        return ".".join([self.codec.name, *(str(value) for value in self.params.values())])


CASES = [
    *(Case(Sign(), {"scale": scale}) for scale in ("tensor", "row", "group")),
    *(Case(Ternary(), {"fit": fit}) for fit in ("mse", "absmax")),
    *(Case(KBit(), {"bits": bits, "fit": fit}) for bits in (2, 3, 5, 8) for fit in ("mse", "absmax")),
    *(Case(DeadZone(), {"step": step}) for step in (3e-3, 2e-4)),
    Case(RowSparse(), {"rows": 11}),
    Case(Significant(), {"steps": 5}),
]
"""Every direct codec with every format it has."""

SHAPES = [(65, 33), (40, 131), (8, 8), (19, 64)]


def delta_of(shape: tuple[int, int], seed: int, scale: float = 1e-3) -> torch.Tensor:
    """An fp32 delta, half of it zero, with a negative zero, a subnormal, one large value, and a row that is still."""
    draw = generator(seed)
    values = torch.randn(shape, generator=draw) * scale
    values = torch.where(torch.rand(shape, generator=draw) < 0.5, 0.0, values)
    values[0, :2] = torch.tensor([-0.0, 1e-41])
    values[1 % shape[0], 3] = 40 * scale
    values[2 % shape[0]] = 0.0
    return values


def base_of(shape: tuple[int, int], seed: int) -> torch.Tensor:
    values = (torch.randn(shape, generator=generator(seed)) * 0.02).to(torch.bfloat16)
    values[0, :3] = torch.tensor([0.0, -0.0, 1e-39])
    return values


def store_direct(case: Case, delta: torch.Tensor, base: torch.Tensor | None = None) -> Stored:
    """Encode, reading no more than the rows asked for."""
    base = base_of(shape_of(delta), 99) if base is None else base
    whole = base
    pieces: list[bytes] = []

    def rows(start: int, stop: int) -> torch.Tensor:
        assert 0 <= start <= stop <= delta.shape[0]
        return delta[start:stop].clone()

    context = Context(lambda start, stop: whole[start:stop])
    node = case.codec.encode(rows, shape_of(delta), case.params, pieces.append, context=context)
    return Stored(node, b"".join(pieces))


def decode_direct(case: Case, stored: Stored, shape: tuple[int, int]) -> torch.Tensor:
    return case.codec.open(stored.node, stored.fetch, shape).rows(0, shape[0])


def shape_of(delta: torch.Tensor) -> tuple[int, int]:
    return delta.shape[0], delta.shape[1]
