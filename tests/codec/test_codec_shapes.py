"""Shapes as codecs see them, what a step costs, and prefixes of stored fits."""

from __future__ import annotations

import math

import pytest
from codec_entries import LOSSY_FORMATS, Stored, decaying, fit_one, store_fit
from hypothesis import given
from hypothesis import strategies as st

from mfs_decompose.codec import sizes
from mfs_decompose.codec.base import block_rows, matrix_shape
from mfs_decompose.codec.registry import lossy_codec
from mfs_decompose.codec.tree import CodecNode
from mfs_decompose.codec.truncate import truncate
from mfs_decompose.source.header import TensorSpec

_ODD_SHAPES = [(9, 8), (65, 33), (64, 129), (130, 64), (8, 191)]


@pytest.mark.parametrize(
    ("shape", "matrix"),
    [
        ((), None),
        ((900,), None),
        ((8, 9), (8, 9)),
        ((7, 900), None),
        ((900, 7), None),
        ((4, 30, 20), (120, 20)),
        ((4, 2, 20), (8, 20)),
        ((4, 30, 7), None),
        ((16, 3, 5, 5), (16, 75)),
        ((16, 2, 2, 1), None),
        ((9, 2, 2, 2, 2), (9, 16)),
        ((0, 20), None),
        ((20, 0), None),
        ((4, 0, 20), None),
    ],
)
def test_a_tensor_as_a_matrix(shape: tuple[int, ...], matrix: tuple[int, int] | None) -> None:
    assert matrix_shape(shape) == matrix
    if matrix is not None:
        assert math.prod(matrix) == math.prod(shape)
        assert matrix[0] % shape[0] == 0  # a row of the tensor is whole rows of the matrix


@given(st.lists(st.integers(0, 50), max_size=4), st.integers(1, 5000))
def test_blocks_hold_about_as_many_elements_as_asked_for(shape: list[int], elements: int) -> None:
    spec = TensorSpec("w", "F32", tuple(shape))
    rows = block_rows(spec, elements)
    row = spec.numel // max(spec.rows, 1)
    assert rows >= 1
    assert rows == 1 or rows * row <= elements
    assert (rows + 1) * max(row, 1) > elements


@pytest.mark.parametrize("shape", _ODD_SHAPES)
@pytest.mark.parametrize(("codec", "params"), LOSSY_FORMATS)
def test_bytes_are_steps_times_the_bytes_of_one(codec: str, params: dict[str, str], shape: tuple[int, int]) -> None:
    delta = decaying(*shape, seed=1)
    most = sizes.max_steps(codec, shape)
    fit = fit_one(codec, delta, most + 5, params)
    assert fit.steps <= most
    for steps in (0, 1, 3, fit.steps):
        stored = store_fit(codec, fit, steps, params)
        assert len(stored.data) == stored.node.nbytes == steps * sizes.step_bytes(codec, shape, params)


def test_costs_by_hand() -> None:
    # 65 rows: 33 bytes of int4 codes and 2 scales; 33 columns: 17 bytes and 1 scale.
    assert sizes.step_bytes("lowrank", (65, 33), {"factors": "int4"}) == 33 + 4 + 17 + 2
    assert sizes.step_bytes("lowrank", (65, 33), {"factors": "int8"}) == 65 + 4 + 33 + 2
    assert sizes.step_bytes("lowrank", (65, 33), {"factors": "bf16"}) == 2 * (65 + 33)
    assert sizes.step_bytes("sparse", (65, 33), {"values": "bf16"}) == 65 * (2 + 2)
    assert sizes.step_bytes("sparse", (65, 33), {"values": "int8"}) == 65 * (2 + 1) + 2 * 2
    assert sizes.step_bytes("sparse", (65, 65_536), {"values": "int8"}) == 65 * (2 + 1) + 2 * 2
    assert sizes.step_bytes("sparse", (65, 65_537), {"values": "int8"}) == 65 * (4 + 1) + 2 * 2


def test_the_most_steps_there_can_be() -> None:
    assert sizes.max_steps("lowrank", (65, 33)) == 33
    assert sizes.max_steps("sparse", (65, 33)) == 33
    assert sizes.max_steps("sparse", (33, 65)) == 65


@pytest.mark.parametrize(("codec", "params"), LOSSY_FORMATS)
@pytest.mark.parametrize("shape", [(65, 33), (33, 65)])
def test_blocks_are_read_as_often_as_announced(codec: str, params: dict[str, str], shape: tuple[int, int]) -> None:
    delta = decaying(*shape, seed=2)
    reads = 0

    def blocks():  # type: ignore[no-untyped-def]
        nonlocal reads
        reads += 1
        yield 0, delta[:20]
        yield 20, delta[20:]

    for steps in (2, 30):
        reads = 0
        assert lossy_codec(codec).fit_blocks(blocks, shape, steps, 1, params) is not None
        assert reads == sizes.read_passes(codec, shape, steps)


@pytest.mark.parametrize(("codec", "params"), LOSSY_FORMATS)
def test_a_truncated_entry_is_the_entry_of_the_smaller_fit(codec: str, params: dict[str, str]) -> None:
    fit = fit_one(codec, decaying(40, 70, seed=3), 9, params)
    whole = store_fit(codec, fit, fit.steps, params)
    for steps in range(fit.steps + 1):
        node, ranges = truncate(whole.node, steps)
        expected = store_fit(codec, fit, steps, params)
        assert node == expected.node
        assert b"".join(whole.fetch(start, count) for start, count in ranges) == expected.data


@pytest.mark.parametrize(("codec", "params"), LOSSY_FORMATS)
def test_a_shifted_entry_is_cut_at_its_own_place(codec: str, params: dict[str, str]) -> None:
    fit = fit_one(codec, decaying(40, 70, seed=4), 6, params)
    whole = store_fit(codec, fit, 6, params)
    moved = Stored(whole.node.shifted(11), b"x" * 11 + whole.data)
    node, ranges = truncate(moved.node, 2)
    assert node == truncate(whole.node, 2)[0]
    assert b"".join(moved.fetch(*piece) for piece in ranges) == store_fit(codec, fit, 2, params).data


def test_nothing_can_be_cut_from_nothing() -> None:
    empty = fit_one("lowrank", decaying(20, 30, seed=5) * 0, 4, {"factors": "int4"})
    stored = store_fit("lowrank", empty, 0, {"factors": "int4"})
    node, ranges = truncate(stored.node, 0)
    assert node == stored.node and sum(count for _, count in ranges) == 0
    assert isinstance(node, CodecNode)
    with pytest.raises(AssertionError):
        truncate(stored.node, 1)
