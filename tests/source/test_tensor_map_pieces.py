"""Pieces followed through operations without data, against the same operations on numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mfs_decompose.errors import SourceIncompatible
from mfs_decompose.source import pieces as boxes
from mfs_decompose.source.piece_trace import PieceTrace
from mfs_decompose.source.pieces import Piece
from mfs_decompose.source.tensor_map import Parameter, Part, assemble

Step = Callable[[list[torch.Tensor]], torch.Tensor]


def numbered(shape: tuple[int, ...], first: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return torch.arange(first, first + count).reshape(shape)


def follow(sources: dict[str, torch.Tensor], program: Callable[[list[torch.Tensor]], torch.Tensor]) -> Parameter | None:
    """The result of a program as a parameter made of pieces of its sources, from their shapes alone."""
    trace = PieceTrace()
    shadows = {name: torch.empty(source.shape, device="meta") for name, source in sources.items()}
    for name, shadow in shadows.items():
        trace.watch(shadow, name)
    with trace:
        result = program(list(shadows.values()))
    pieces = trace.pieces_of(result)
    return None if pieces is None else Parameter("result", tuple(result.shape), pieces)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """One operation on whatever is there, its arguments taken from the shapes that it finds."""
    kind = draw(st.sampled_from(sorted(OPERATIONS)))
    a, b, c = (draw(st.integers(0, 5)) for _ in range(3))
    return lambda tensors: OPERATIONS[kind](tensors, a, b, c)


def _cat(tensors: list[torch.Tensor], a: int, b: int, _: int) -> torch.Tensor:
    one = tensors[a % len(tensors)]
    like = [other for other in tensors if other.shape == one.shape and other.dim()]
    return torch.cat([one, like[b % len(like)]], dim=b % one.dim()) if like else one


def _stack(tensors: list[torch.Tensor], a: int, b: int, _: int) -> torch.Tensor:
    one = tensors[a % len(tensors)]
    return torch.stack([other for other in tensors if other.shape == one.shape], dim=b % (one.dim() + 1))


def _on_one(apply: Callable[[torch.Tensor, int, int], torch.Tensor]) -> Callable[..., torch.Tensor]:
    def run(tensors: list[torch.Tensor], a: int, b: int, c: int) -> torch.Tensor:
        one = tensors[a % len(tensors)]
        return apply(one, b % one.dim(), c) if one.dim() and one.numel() else one

    return run


OPERATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "cat": _cat,
    "stack": _stack,
    "chunk": _on_one(lambda t, dim, n: torch.chunk(t, 1 + n % 3, dim)[-1]),
    "split": _on_one(lambda t, dim, n: torch.split(t, [n % t.shape[dim], t.shape[dim] - n % t.shape[dim]], dim)[1]),
    "select": _on_one(lambda t, dim, n: t.select(dim, n % t.shape[dim] - t.shape[dim])),
    "slice": _on_one(lambda t, dim, n: t.narrow(dim, n % t.shape[dim], 1)),
    "unbind": _on_one(lambda t, dim, n: t.unbind(dim)[n % t.shape[dim]]),
    "transpose": _on_one(lambda t, dim, n: t.transpose(dim, n % t.dim()).contiguous()),
    "permute": _on_one(lambda t, dim, n: t.permute([(i + dim) % t.dim() - t.dim() for i in range(t.dim())])),
    "squeeze": _on_one(lambda t, dim, n: t.squeeze(dim)),
    "unsqueeze": _on_one(lambda t, dim, n: t.unsqueeze(dim - 1)),
    "stepped": _on_one(lambda t, dim, n: t[:: 1 + n]),
    "wider": _on_one(lambda t, dim, n: t.to(torch.float64).clone()),
    # What is not followed must not be taken for what is.
    "flip": _on_one(lambda t, dim, n: t.flip(dim)),
    "flatten": _on_one(lambda t, dim, n: t.flatten()),
    "rolled": _on_one(lambda t, dim, n: t.roll(n, dim)),
    "expand": _on_one(lambda t, dim, n: t.unsqueeze(0).expand(1 + n % 2, *t.shape)),
    "scaled": _on_one(lambda t, dim, n: t * 2),
}


@given(program=st.lists(steps(), min_size=1, max_size=6), sizes=st.tuples(*[st.integers(1, 4)] * 3))
def test_what_is_followed_is_what_happens(program: list[Step], sizes: tuple[int, int, int]) -> None:
    sources = {"one": numbered(sizes, 0), "two": numbered(sizes, 1000), "flat": numbered(sizes[:2], 2000)}

    def run(tensors: list[torch.Tensor]) -> torch.Tensor:
        for step in program:
            tensors = [*tensors, step(tensors)]
        return tensors[-1]

    truth = run(list(sources.values()))
    found = follow(sources, run)
    if found is not None:
        assert found.shape == tuple(truth.shape)
        assert sum(piece.numel for piece in found.pieces) == truth.numel()
        if found.pieces:
            assert torch.equal(assemble(found, sources.__getitem__), truth.to(torch.int64))


def test_cutting_and_joining_is_followed_through() -> None:
    """The property test would pass on a trace that follows nothing."""
    sources = {f"expert {i}": numbered((3, 4), 100 * i) for i in range(4)}

    def fuse(tensors: list[torch.Tensor]) -> torch.Tensor:
        gates, ups = torch.stack(tensors[:2]), torch.stack(tensors[2:])
        return torch.cat([gates, ups], dim=1).transpose(1, 2).contiguous()

    found = follow(sources, fuse)
    assert found is not None
    assert len(found.pieces) == 4
    assert torch.equal(assemble(found, sources.__getitem__), fuse(list(sources.values())))


@pytest.mark.parametrize(
    "program",
    [
        lambda tensors: tensors[0].reshape(4, 3),
        lambda tensors: tensors[0].view(12),
        lambda tensors: tensors[0].flip(0),
        lambda tensors: tensors[0] + 0,
        lambda tensors: tensors[0][::2],
        lambda tensors: tensors[0][[1, 0]],
        lambda tensors: torch.cat([tensors[0], torch.zeros(1, 4, device=tensors[0].device)]),
    ],
)
def test_what_is_no_cutting_and_joining_has_no_pieces(program: Any) -> None:
    assert follow({"one": numbered((3, 4), 0)}, program) is None


def test_after_a_write_in_place_nothing_has_pieces() -> None:
    def program(tensors: list[torch.Tensor]) -> torch.Tensor:
        copy = tensors[0].clone()
        copy[0].zero_()
        return copy

    assert follow({"one": numbered((3, 4), 0)}, program) is None


def test_parts_say_expert_rows_and_transposition() -> None:
    sources = {"gate": numbered((3, 5), 0), "up": numbered((4, 5), 50)}
    side = follow(sources, lambda tensors: torch.cat(tensors))
    assert side is not None
    assert side.parts() == (Part("gate", None, (0, 3), False), Part("up", None, (3, 7), False))
    assert side.tensors == ("gate", "up")

    stacked = follow({"a": numbered((3, 5), 0), "b": numbered((3, 5), 50)}, lambda t: torch.stack(t).transpose(1, 2))
    assert stacked is not None
    assert stacked.parts() == (Part("a", 0, None, True), Part("b", 1, None, True))

    alone = follow({"a": numbered((3, 5), 0)}, lambda tensors: tensors[0].T)
    assert alone is not None
    assert alone.parts() == (Part("a", None, None, True),)

    scalar = Parameter("s", (), boxes.whole("s", ()))
    assert scalar.parts() == (Part("s", None, None, False),)
    assert assemble(scalar, {"s": torch.tensor(7)}.__getitem__).item() == 7


@pytest.mark.parametrize(
    "program",
    [
        lambda tensors: tensors[0][:2],  # a part of a tensor
        lambda tensors: torch.cat(tensors, dim=1),  # side by side, not one below the other
        lambda tensors: torch.stack(tensors, dim=1),  # experts in the middle
    ],
)
def test_what_parts_cannot_say_is_refused_and_pieces_still_know(program: Any) -> None:
    sources = {"one": numbered((3, 4), 0), "two": numbered((3, 4), 50)}
    found = follow(sources, program)
    assert found is not None
    with pytest.raises(SourceIncompatible, match="made of whole checkpoint tensors, found it made of parts of one"):
        found.parts()
    assert torch.equal(assemble(found, sources.__getitem__), program(list(sources.values())))


def test_nothing_and_arithmetic_cannot_be_assembled() -> None:
    with pytest.raises(SourceIncompatible, match="found it filled by nothing"):
        assemble(Parameter("empty", (3,)), lambda name: pytest.fail(name))
    with pytest.raises(SourceIncompatible, match="found it computed from one, two"):
        assemble(Parameter("sum", (3,), (), ("one", "two")), lambda name: pytest.fail(name))
    with pytest.raises(SourceIncompatible, match="made of nothing"):
        Parameter("empty", (3,)).parts()


def test_a_box_of_a_tensor_keeps_its_place_in_it() -> None:
    (piece,) = boxes.narrow(boxes.narrow(boxes.whole("one", (9, 4)), 0, 2, 8), 0, 1, 4)
    assert piece == Piece("one", (9, 4), ((3, 6), (0, 4)), ((0, 3), (0, 4)), (0, 1))
    assert not piece.takes_all
    assert boxes.narrow((piece,), 0, 3, 9) == ()
    (row,) = boxes.select((piece,), 0, 1)
    assert row == Piece("one", (9, 4), ((4, 5), (0, 4)), ((0, 4),), (1,))
