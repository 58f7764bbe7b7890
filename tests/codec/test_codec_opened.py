"""Stored tensors, opened: served and restored rows, any window of them, across codecs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from codec_entries import (
    LOSSY_FORMATS,
    Stored,
    bits,
    decaying,
    fit_one,
    generator,
    join,
    random_bits,
    rows_of,
    store_exact,
    store_fit,
)
from hypothesis import given
from hypothesis import strategies as st

from mfs_decompose.codec.base import matrix_shape
from mfs_decompose.codec.opened import OpenedTensor
from mfs_decompose.codec.tree import CodecNode, Part
from mfs_decompose.errors import ArtifactInvalid
from mfs_decompose.linalg.grid import GRIDS
from mfs_decompose.linalg.margins import Merge, predict
from mfs_decompose.linalg.rounding import Rounding, round_to, rounding_key
from mfs_decompose.source.dtypes import torch_dtype
from mfs_decompose.source.header import TensorSpec

_NAME = "model.layers.1.mlp.down_proj.weight"


def weights(dtype: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64).to(torch_dtype(dtype))


def lossy(spec: TensorSpec, codec: str, params: dict[str, str], steps: int, seed: int = 3) -> Stored:
    shape = matrix_shape(spec.shape)
    assert shape is not None
    return store_fit(codec, fit_one(codec, decaying(*shape, seed=seed, scale=0.01), steps, params), steps, params)


def opened(stored: Stored, spec: TensorSpec) -> OpenedTensor:
    return OpenedTensor(stored.node, stored.fetch, spec)


class Mixed:
    """23 low-rank rows, then 5 raw ones, 4 lossless ones and 8 of the base's own."""

    def __init__(self, dtype: str = "BF16") -> None:
        self.spec = TensorSpec(_NAME, dtype, (40, 19))
        self.base = weights(dtype, (40, 19), 1)
        self.own = weights(dtype, (40, 19), 2)
        self.own[32:] = self.base[32:]
        pieces = [
            lossy(TensorSpec("", dtype, (23, 19)), "lowrank", {"factors": "int4"}, 4),
            store_exact("raw", self.own[23:28], None, TensorSpec("", dtype, (5, 19))),
            store_exact("lossless", self.own[28:32], self.base[28:32], TensorSpec("", dtype, (4, 19))),
            Stored(CodecNode("identical"), b""),
        ]
        nodes, data = [], b""
        for piece in pieces:
            nodes.append(piece.node.shifted(len(data)))
            data += piece.data
        params = {"splits": [0, 23, 28, 32, 40]}
        self.stored = Stored(CodecNode("rows", params=params, children=tuple(nodes)), data)  # type: ignore[arg-type]
        self.tensor = opened(self.stored, self.spec)


_MIXED = {dtype: Mixed(dtype) for dtype in ("BF16", "F16", "F32")}


@pytest.mark.parametrize(("codec", "params"), LOSSY_FORMATS)
@pytest.mark.parametrize("shape", [(40, 30), (5, 8, 19), (10, 3, 3, 3)])
def test_served_and_restored_are_base_plus_delta(codec: str, params: dict[str, str], shape: tuple[int, ...]) -> None:
    spec = TensorSpec(_NAME, "BF16", shape)
    base = weights("BF16", shape, 1)
    tensor = opened(lossy(spec, codec, params, 6), spec)
    assert not tensor.exact
    delta = tensor.delta(0, shape[0])
    assert delta is not None and delta.dtype == torch.float64 and delta.shape == matrix_shape(shape)
    total = base.to(torch.float64) + delta.reshape(shape)
    served = tensor.served(0, shape[0], rows_of(base))
    assert served.dtype == torch.float32 and torch.equal(served, total.to(torch.float32))
    restored = tensor.restored(0, shape[0], rows_of(base))
    key = rounding_key(_NAME)
    assert restored.dtype == torch.bfloat16
    assert torch.equal(restored, round_to(total, torch.bfloat16, "stochastic", key, 0))
    nearest = tensor.restored(0, shape[0], rows_of(base), rounding="nearest")
    assert torch.equal(nearest, total.to(torch.bfloat16))
    half = tensor.restored(0, shape[0], rows_of(base), torch.float16)
    assert torch.equal(half, round_to(total, torch.float16, "stochastic", key, 0))
    assert torch.equal(tensor.restored(0, shape[0], rows_of(base), torch.float64), total)


def test_served_keeps_what_nearest_rounding_would_lose() -> None:
    spec = TensorSpec(_NAME, "BF16", (40, 30))
    base = torch.ones(40, 30, dtype=torch.bfloat16)
    params = {"factors": "int8"}
    delta = torch.outer(torch.linspace(1, 2, 40), torch.linspace(1, 2, 30)) * 1e-4
    tensor = opened(store_fit("lowrank", fit_one("lowrank", delta, 1, params), 1, params), spec)
    served = tensor.served(0, 40, rows_of(base)).to(torch.float64) - 1
    assert torch.allclose(served, delta.to(torch.float64), rtol=0.02, atol=1e-7)
    assert torch.equal(tensor.restored(0, 40, rows_of(base), rounding="nearest"), base)
    restored = tensor.restored(0, 40, rows_of(base)).to(torch.float64) - 1
    assert bool(restored.any())
    assert float(restored.mean()) == pytest.approx(float(delta.mean()), rel=0.5)


@given(
    st.sampled_from(sorted(_MIXED)), st.integers(0, 40), st.integers(0, 40), st.sampled_from(["stochastic", "nearest"])
)
def test_any_window_is_a_slice_of_the_whole(dtype: str, one: int, other: int, rounding: Rounding) -> None:
    mixed = _MIXED[dtype]
    start, stop = sorted((one, other))
    base = rows_of(mixed.base)
    for target in (None, torch.float32, torch.float16, torch.bfloat16):
        whole = mixed.tensor.restored(0, 40, base, target, rounding)
        window = mixed.tensor.restored(start, stop, base, target, rounding)
        assert window.shape == (stop - start, 19)
        assert window.dtype == (target or torch_dtype(dtype))
        assert torch.equal(window, whole[start:stop])
    served = mixed.tensor.served(start, stop, base)
    assert served.dtype == torch.float32
    assert torch.equal(served, mixed.tensor.served(0, 40, base)[start:stop])


@given(st.lists(st.integers(0, 40), max_size=5))
def test_any_cut_into_blocks_gives_the_same_bytes(cuts: list[int]) -> None:
    mixed = _MIXED["BF16"]
    edges = [0, *sorted(cuts), 40]
    pieces = [mixed.tensor.restored(edges[at], edges[at + 1], rows_of(mixed.base)) for at in range(len(edges) - 1)]
    assert bits(torch.cat(pieces)) == bits(mixed.tensor.restored(0, 40, rows_of(mixed.base)))


@pytest.mark.parametrize("dtype", sorted(_MIXED))
def test_each_segment_reads_its_own_rows(dtype: str) -> None:
    mixed = _MIXED[dtype]
    restored = mixed.tensor.restored(0, 40, rows_of(mixed.base))
    assert bits(restored[23:]) == bits(mixed.own[23:])
    delta = mixed.tensor.delta(0, 23)
    assert delta is not None
    total = mixed.base[:23].to(torch.float64) + delta
    assert torch.equal(mixed.tensor.served(0, 40, rows_of(mixed.base))[:23], total.to(torch.float32))
    assert torch.equal(mixed.tensor.served(0, 40, rows_of(mixed.base))[23:], mixed.own[23:].to(torch.float32))
    assert not mixed.tensor.exact


def test_rows_after_a_split_round_by_their_place_in_the_tensor() -> None:
    spec = TensorSpec(_NAME, "BF16", (40, 19))
    base = weights("BF16", (40, 19), 1)
    head = store_exact("raw", base[:13], None, TensorSpec("", "BF16", (13, 19)))
    tail = lossy(TensorSpec("", "BF16", (27, 19)), "lowrank", {"factors": "int8"}, 3)
    tensor = opened(join(head, tail, [0, 13, 40]), spec)
    delta = tensor.delta(13, 40)
    assert delta is not None
    total = base[13:].to(torch.float64) + delta
    expected = round_to(total, torch.bfloat16, "stochastic", rounding_key(_NAME), 13 * 19)
    assert torch.equal(tensor.restored(13, 40, rows_of(base)), expected)
    assert torch.equal(tensor.rounded(delta, base[13:], 13), expected)


def test_rounded_is_what_restored_gives() -> None:
    spec = TensorSpec(_NAME, "F16", (6, 8, 10))
    base = weights("BF16", (6, 8, 10), 4)
    tensor = opened(lossy(spec, "sparse", {"values": "int8"}, 3), spec)
    for start, stop in ((0, 6), (2, 5), (5, 6)):
        delta = tensor.delta(start, stop)
        assert delta is not None
        assert torch.equal(tensor.rounded(delta, base[start:stop], start), tensor.restored(start, stop, rows_of(base)))


def test_deltas_lie_in_one_segment() -> None:
    tensor = _MIXED["BF16"].tensor
    whole = tensor.delta(0, 23)
    part = tensor.delta(4, 9)
    assert whole is not None and part is not None
    assert torch.equal(part, whole[4:9])
    assert tensor.delta(23, 28) is None and tensor.delta(30, 31) is None
    with pytest.raises(AssertionError):
        tensor.delta(20, 25)


def test_a_tensor_of_exact_segments_is_exact() -> None:
    spec = TensorSpec("w", "F32", (6, 3))
    values = random_bits("F32", (6, 3), 1)
    first = store_exact("raw", values[:4], None, TensorSpec("", "F32", (4, 3)))
    second = store_exact("lossless", values[4:], None, TensorSpec("", "F32", (2, 3)))
    tensor = opened(join(first, second, [0, 4, 6]), spec)
    assert tensor.exact
    assert bits(tensor.restored(0, 6, None)) == bits(values)
    assert tensor.delta(0, 3) is None


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])
@pytest.mark.parametrize("target", [None, torch.float32, torch.bfloat16, torch.float16])
def test_exact_rows_convert_only_when_asked(dtype: str, target: torch.dtype | None) -> None:
    spec = TensorSpec("w", dtype, (9,))
    values = weights(dtype, (9,), 5)
    tensor = opened(store_exact("raw", values, None, spec), spec)
    found = tensor.restored(2, 9, None, target)
    expected = values[2:] if target is None else values[2:].to(target)
    assert found.dtype == expected.dtype and bits(found) == bits(expected)


@pytest.mark.parametrize("dtype", ["I64", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "C64", "U16"])
def test_what_is_no_float_keeps_its_type(dtype: str) -> None:
    spec = TensorSpec("w", dtype, (9, 2))
    values = random_bits(dtype, (9, 2), 6)
    tensor = opened(store_exact("raw", values, None, spec), spec)
    for found in (tensor.restored(1, 5, None, torch.float32), tensor.served(1, 5, None)):
        assert found.dtype == values.dtype and bits(found) == bits(values[1:5])


@pytest.mark.parametrize("codec", ["raw", "lossless", "identical"])
@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (4, 0)])
def test_shapes_with_nothing_to_cut(codec: str, shape: tuple[int, ...]) -> None:
    spec = TensorSpec("w", "BF16", shape)
    values = random_bits("BF16", shape, 7)
    tensor = opened(store_exact(codec, values, values, spec), spec)
    restored = tensor.restored(0, spec.rows, rows_of(values))
    assert restored.shape == shape and bits(restored) == bits(values)
    assert tensor.served(0, spec.rows, rows_of(values)).dtype == torch.float32


def test_an_empty_segment_is_passed_over() -> None:
    spec = TensorSpec("w", "F32", (5, 3))
    values = weights("F32", (5, 3), 8)
    nothing = store_exact("raw", values[:0], None, TensorSpec("", "F32", (0, 3)))
    tensor = opened(join(nothing, store_exact("raw", values, None, spec), [0, 0, 5]), spec)
    assert torch.equal(tensor.restored(0, 5, None), values)
    assert tensor.restored(0, 0, None).shape == (0, 3)


@pytest.mark.parametrize("window", [(-1, 3), (3, 2), (0, 41), (41, 41)])
def test_windows_outside_of_the_tensor_are_a_bug(window: tuple[int, int]) -> None:
    with pytest.raises(AssertionError):
        _MIXED["BF16"].tensor.restored(*window, rows_of(_MIXED["BF16"].base))


def test_a_delta_without_its_base_is_named() -> None:
    with pytest.raises(ArtifactInvalid, match=f"delta of '{_NAME}' has no base tensor"):
        _MIXED["BF16"].tensor.restored(0, 5, None)


@pytest.mark.parametrize(
    "splits",
    [None, 3, [], [0, 23], [0, 23, 28, 32, 41], [1, 23, 28, 32, 40], [0, 28, 23, 32, 40], [0, 23, 28, 32, "40"],
     [0, 23, 28, 32.0, 40], [False, 23, 28, 32, 40], [0, 23, 28, 32, 36, 40], [-1, 23, 28, 32, 40]],
)  # fmt: skip
def test_splits_that_do_not_cover_the_rows_are_refused(splits: object) -> None:
    mixed = _MIXED["BF16"]
    with pytest.raises(ArtifactInvalid, match="codec 'rows' of"):
        OpenedTensor(mixed.stored.with_params(splits=splits), mixed.stored.fetch, mixed.spec)


def test_rows_without_children_are_refused() -> None:
    with pytest.raises(ArtifactInvalid, match="its splits do not match its nodes"):
        OpenedTensor(
            CodecNode("rows", params={"splits": [0]}), lambda offset, count: b"", TensorSpec("w", "F32", (0, 3))
        )


@pytest.mark.parametrize(
    "node", [CodecNode("alias", params={"of": "v"}), CodecNode("rows", params={"splits": [0, 40]})]
)
def test_an_alias_or_rows_inside_rows_are_refused(node: CodecNode) -> None:
    tree = CodecNode("rows", params={"splits": [0, 40]}, children=(node,))
    for each in (tree, node) if node.codec == "alias" else (tree,):
        with pytest.raises(ArtifactInvalid, match="cannot stand here"):
            OpenedTensor(each, lambda offset, count: b"", _MIXED["BF16"].spec)


@pytest.mark.parametrize(
    "node", [CodecNode("zfp"), CodecNode("raw", version=2), CodecNode("raw", children=(CodecNode("raw"),))]
)
def test_what_this_version_does_not_know_is_refused(node: CodecNode) -> None:
    with pytest.raises(ArtifactInvalid, match=node.codec):
        OpenedTensor(node, lambda offset, count: b"", _MIXED["BF16"].spec)


@pytest.mark.parametrize(
    ("dtype", "shape"), [("BF16", (40,)), ("BF16", (40, 7)), ("BF16", ()), ("I32", (40, 19)), ("F8_E4M3", (40, 19))]
)
@pytest.mark.parametrize(("codec", "params"), LOSSY_FORMATS)
def test_a_delta_of_what_has_none_is_refused(
    dtype: str, shape: tuple[int, ...], codec: str, params: dict[str, str]
) -> None:
    stored = lossy(TensorSpec("", "BF16", (40, 19)), codec, params, 2)
    with pytest.raises(ArtifactInvalid, match="expected a matrix of floats, found"):
        OpenedTensor(stored.node, stored.fetch, TensorSpec("w", dtype, shape))


class TestTheSignOfZero:
    """A product of zeros is +0 or -0 as kernel and block shape will have it; weights must not show it."""

    spec = TensorSpec(_NAME, "BF16", (16, 24))

    def stored(self) -> Stored:
        left, right = torch.ones(1, 16, dtype=torch.bfloat16), -torch.ones(1, 24, dtype=torch.bfloat16)
        left[0, 3] = 0
        data = b"".join(bytes(side.view(torch.uint8).numpy().reshape(-1)) for side in (left, right))
        parts = (Part("u", "BF16", (1, 16), 0, 32), Part("v", "BF16", (1, 24), 32, 48))
        return Stored(CodecNode("lowrank", params={"steps": 1, "factors": "bf16", "group": 64}, parts=parts), data)

    def test_a_row_alone_has_the_bits_of_the_whole(self) -> None:
        tensor = opened(self.stored(), self.spec)
        rows = rows_of(torch.full((16, 24), -0.0, dtype=torch.bfloat16))
        for dtype in (None, torch.float32):
            whole = bits(tensor.restored(0, 16, rows, dtype))
            parts = [tensor.restored(at, at + 1, rows, dtype) for at in range(16)]
            assert whole == bits(torch.cat(parts))
        assert not torch.signbit(tensor.restored(3, 4, rows).float()).any()

    @pytest.mark.parametrize("merge", ["once", "twice"])
    def test_a_prediction_does_not_know_it_either(self, merge: Merge) -> None:
        base = np.array([-0.0, -0.0, 0.0, 1.0])
        plus, minus = np.array([0.0, 0.0, 0.0, 0.0]), np.array([-0.0, 0.0, -0.0, -0.0])
        one, other = (predict(base, delta, GRIDS["BF16"], merge) for delta in (plus, minus))
        assert one.words.tolist() == other.words.tolist()
        assert one.distance.tolist() == other.distance.tolist()
