"""Corrections give all bits back over any delta, in any window, near the entropy that the margins leave."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from codec_entries import Stored, bits, decaying, generator, random_bits, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st

from mfs_decompose.codec.corrected import encode_corrected, is_correctable, open_corrected, with_child
from mfs_decompose.codec.lossless import Lossless
from mfs_decompose.codec.tree import CodecNode, Part
from mfs_decompose.errors import ArtifactInvalid
from mfs_decompose.linalg.boxes import delta_boxes
from mfs_decompose.linalg.margins import Merge
from mfs_decompose.source.dtypes import torch_dtype
from mfs_decompose.source.header import TensorSpec

_DTYPES = ["BF16", "F16", "F32"]


def _store(
    own: torch.Tensor, base: torch.Tensor, delta: torch.Tensor, spec: TensorSpec, merge: Merge = "once"
) -> Stored:
    pieces: list[bytes] = []
    node = encode_corrected(rows_of(own), rows_of(base), rows_of(delta), spec, pieces.append, merge)
    return Stored(node, b"".join(pieces))


def _read(
    stored: Stored, base: torch.Tensor, delta: torch.Tensor, spec: TensorSpec, start: int = 0, stop: int | None = None
) -> torch.Tensor:
    rows = open_corrected(stored.node, stored.fetch, spec)
    return rows(start, spec.rows if stop is None else stop, rows_of(base), rows_of(delta))


def _case(
    dtype: str, shape: tuple[int, int] = (61, 37), seed: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, TensorSpec]:
    """A fine-tune, its base, and a delta that is right to about a tenth of it."""
    draw = generator(seed)
    base = (torch.randn(shape, generator=draw) * 0.02).to(torch_dtype(dtype))
    delta = decaying(*shape, seed)
    own = (base.float() + delta).to(base.dtype)
    guess = (delta * (1 + 0.1 * torch.randn(shape, generator=draw))).double()
    return own, base, guess, TensorSpec("w", dtype, shape)


@pytest.mark.parametrize("merge", ["once", "twice"])
@pytest.mark.parametrize("dtype", _DTYPES)
def test_all_bits_come_back(dtype: str, merge: Merge) -> None:
    own, base, delta, spec = _case(dtype)
    stored = _store(own, base, delta, spec, merge)
    assert bits(_read(stored, base, delta, spec)) == bits(own)
    assert stored.node.nbytes == len(stored.data)


@pytest.mark.parametrize("dtype", _DTYPES)
def test_any_bit_patterns_come_back(dtype: str) -> None:
    shape = (23, 19)
    own, base = random_bits(dtype, shape, 1), random_bits(dtype, shape, 2)
    delta = random_bits("F64", shape, 3)
    spec = TensorSpec("w", dtype, shape)
    for merge in ("once", "twice"):
        stored = _store(own, base, delta, spec, merge)  # type: ignore[arg-type]
        assert bits(_read(stored, base, delta, spec)) == bits(own)


@pytest.mark.parametrize("dtype", _DTYPES)
def test_special_values_come_back(dtype: str) -> None:
    numbers = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-7, -6e-8, 1e-45, 65504.0, 3.3e38, -1.0, 1.0]
    own = torch.tensor([numbers, numbers[::-1]]).to(torch_dtype(dtype))
    base = torch.tensor([numbers[::-1], numbers]).to(torch_dtype(dtype))
    delta = torch.tensor([numbers, numbers], dtype=torch.float64)
    spec = TensorSpec("w", dtype, tuple(own.shape))
    assert bits(_read(_store(own, base, delta, spec), base, delta, spec)) == bits(own)


@settings(max_examples=40)
@given(st.sampled_from(_DTYPES), st.integers(1, 9), st.integers(0, 9), st.integers(0, 5), st.floats(-8, 3))
def test_any_shape_and_any_quality_of_delta(dtype: str, rows: int, columns: int, seed: int, log_error: float) -> None:
    draw = generator(seed)
    base = torch.randn(rows, columns, generator=draw).to(torch_dtype(dtype))
    own = (base.float() + torch.randn(rows, columns, generator=draw) * 0.01).to(base.dtype)
    noise = torch.randn(rows, columns, generator=draw, dtype=torch.float64) * 10.0**log_error
    delta = own.double() - base.double() + noise
    spec = TensorSpec("w", dtype, (rows, columns))
    assert bits(_read(_store(own, base, delta, spec), base, delta, spec)) == bits(own)


def test_windows_across_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mfs_decompose.codec.corrected._CHUNK", 37 * 10)
    own, base, delta, spec = _case("BF16")
    stored = _store(own, base, delta, spec)
    assert stored.node.params["rows"] == 10 and len(stored.node.params["sizes"]) == 7  # type: ignore[arg-type]
    for start, stop in ((0, 61), (0, 0), (61, 61), (9, 11), (10, 20), (59, 61), (5, 58)):
        assert bits(_read(stored, base, delta, spec, start, stop)) == bits(own[start:stop])


def test_no_more_than_a_chunk_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mfs_decompose.codec.corrected._CHUNK", 37 * 10)
    own, base, delta, spec = _case("BF16")
    asked: list[int] = []

    def watched(values: torch.Tensor) -> Callable[[int, int], torch.Tensor]:
        def rows(start: int, stop: int) -> torch.Tensor:
            asked.append(stop - start)
            return values[start:stop]

        return rows

    node = encode_corrected(watched(own), watched(base), watched(delta), spec, lambda data: None)
    assert node.nbytes and max(asked) == 10 and len(asked) == 3 * 7


def test_a_delta_in_the_shape_of_its_matrix_serves_a_stack() -> None:
    own, base, delta, _ = _case("BF16", (60, 37))
    spec = TensorSpec("w", "BF16", (4, 15, 37))
    stack, stack_base = own.reshape(4, 15, 37), base.reshape(4, 15, 37)

    def rows(start: int, stop: int) -> torch.Tensor:
        return delta[start * 15 : stop * 15]

    pieces: list[bytes] = []
    node = encode_corrected(rows_of(stack), rows_of(stack_base), rows, spec, pieces.append)
    stored = Stored(node, b"".join(pieces))
    found = open_corrected(node, stored.fetch, spec)(1, 3, rows_of(stack_base), rows)
    assert bits(found) == bits(stack[1:3])


def test_a_perfect_delta_costs_next_to_nothing() -> None:
    own, base, _, spec = _case("BF16", (300, 200))
    exact = own.double() - base.double()
    assert _store(own, base, exact, spec).node.nbytes < 60
    assert _store(own, base, exact + 1e-9, spec).node.nbytes < 300


def test_a_good_delta_costs_less_than_lossless_and_a_better_one_less_still() -> None:
    own, base, delta, spec = _case("BF16", (400, 300))
    pieces: list[bytes] = []
    lossless = Lossless().encode(rows_of(own), rows_of(base), spec, pieces.append).nbytes
    truth = own.double() - base.double()
    sizes = [_store(own, base, truth + (delta - truth) * share, spec).node.nbytes for share in (1.0, 0.3, 0.1, 0.03)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] < lossless


def test_the_distance_to_the_edge_is_worth_its_classes() -> None:
    """The size is near what a coder would need that knew of every weight how likely each outcome is."""
    draw, error = generator(5), 2e-6
    base = (torch.randn(700, 500, generator=draw) * 0.02).to(torch.bfloat16)
    delta = torch.randn(700, 500, generator=draw, dtype=torch.float64) * 1e-4
    own = (base.double() + delta).float().to(torch.bfloat16)
    guess = delta + torch.randn(700, 500, generator=draw, dtype=torch.float64) * error
    spec = TensorSpec("w", "BF16", (700, 500))
    found = 8 * _store(own, base, guess, spec).node.nbytes / own.numel()
    low, high = delta_boxes(own, base, "once")
    chance = torch.special.ndtr((high.double() - guess) / error) - torch.special.ndtr((low.double() - guess) / error)
    ideal = float(-chance.clamp(min=1e-12).log2().mean())
    assert 0.95 * ideal < found < 1.1 * ideal


def _hostile(node: CodecNode, **changes: object) -> CodecNode:
    return CodecNode("corrected", params={**node.params, **changes}, parts=node.parts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": 0},
        {"rows": -3},
        {"rows": 7},
        {"rows": 1 << 40},
        {"sizes": []},
        {"sizes": [True]},
        {"sizes": "all"},
        {"sizes": [3, 4]},
        {"sizes": None},
        {"merge": "thrice"},
        {"merge": None},
    ],
)
def test_a_hostile_node_is_refused(changes: dict[str, object]) -> None:
    own, base, delta, spec = _case("BF16")
    stored = _store(own, base, delta, spec)
    with pytest.raises(ArtifactInvalid):
        open_corrected(_hostile(stored.node, **changes), stored.fetch, spec)


def test_nodes_that_do_not_fit_the_tensor_are_refused() -> None:
    own, base, delta, spec = _case("BF16")
    stored = _store(own, base, delta, spec)
    for other in (TensorSpec("w", "F64", spec.shape), TensorSpec("w", "I32", spec.shape), TensorSpec("w", "BF16", ())):
        assert not is_correctable(other) or not other.shape
        with pytest.raises(ArtifactInvalid):
            open_corrected(stored.node, stored.fetch, other)
    with pytest.raises(ArtifactInvalid):
        open_corrected(CodecNode("corrected", params=stored.node.params), stored.fetch, spec)


@settings(max_examples=120)
@given(st.data())
def test_damaged_chunks_are_refused_or_decode_to_something(data: st.DataObject) -> None:
    own, base, delta, spec = _case("BF16", (20, 9))
    stored = _store(own, base, delta, spec)
    blob = bytearray(stored.data)
    for _ in range(data.draw(st.integers(1, 3))):
        blob[data.draw(st.integers(0, len(blob) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = _read(Stored(stored.node, bytes(blob)), base, delta, spec)
    except ArtifactInvalid:
        return
    assert found.shape == own.shape and found.dtype == own.dtype


def test_the_tree_shifts_behind_its_child() -> None:
    own, base, delta, spec = _case("BF16")
    stored = _store(own, base, delta, spec)
    child = CodecNode("lowrank", parts=(Part("u", "U8", (9,), 0, 9),))
    tree = with_child(stored.node, child)
    assert tree.children == (child,) and tree.text() == "corrected(lowrank)"
    assert tree.part("residual").offset == 9 and tree.nbytes == 9 + stored.node.nbytes
    moved = Stored(tree, b"\0" * 9 + stored.data)
    assert bits(_read(moved, base, delta, spec)) == bits(own)
    assert CodecNode.from_json(tree.to_json()) == tree
