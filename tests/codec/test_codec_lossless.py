"""Chunks of the lossless codec: each way of coding against a reader by the letter, sizes, threads, other bases."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from codec_entries import bits, generator, random_bits, rows_of
from hypothesis import given
from hypothesis import strategies as st
from lossless_oracle import read_chunk

from mfs_decompose.codec import lossless
from mfs_decompose.codec.lossless import Lossless
from mfs_decompose.codec.lossless_chunk import DIFFERENCE, GROUPED, OWN, RAW, decode_chunk, encode_chunk
from mfs_decompose.codec.predictor import can_predict, layout_of, predicted_words, words_of
from mfs_decompose.codec.tree import CodecNode
from mfs_decompose.errors import ArtifactInvalid
from mfs_decompose.linalg.words import Words
from mfs_decompose.source.dtypes import torch_dtype
from mfs_decompose.source.header import TensorSpec

FLOATS = ["BF16", "F16", "F32", "F64"]


def tuned(dtype: str, shape: tuple[int, ...], seed: int, change: float = 1e-3) -> tuple[torch.Tensor, torch.Tensor]:
    """A fine-tune and its base."""
    draw = generator(seed)
    base = torch.randn(shape, generator=draw, dtype=torch.float64) * 0.1
    own = base + torch.randn(shape, generator=draw, dtype=torch.float64) * change
    return own.to(torch_dtype(dtype)), base.to(torch_dtype(dtype))


def check_chunk(own: Words, base: Words | None, dtype: str, way: int | None = None) -> bytes:
    """Code a chunk, read it back and by the letter."""
    layout = layout_of(dtype)
    kept = own.copy()
    data = encode_chunk(own, base, layout)
    assert np.array_equal(own, kept) and encode_chunk(own, base, layout) == data
    assert len(data) <= own.nbytes + 1
    assert way is None or data[0] == way
    words = decode_chunk(data, own.size, base, layout)
    assert words.dtype == own.dtype and np.array_equal(words, own)
    known = None if base is None else base.tolist()
    assert read_chunk(data, own.size, known, layout.size, layout.exponent) == own.tolist()
    return data


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("count", [9001, 8192, 30_003])
def test_a_fine_tune_is_grouped(dtype: str, count: int) -> None:
    own, base = (words_of(values) for values in tuned(dtype, (count,), 1))
    data = check_chunk(own, base, dtype, GROUPED)
    plain = len(encode_chunk(own, None, layout_of(dtype)))
    assert len(data) < plain


def test_blocks_of_the_format_follow_each_other() -> None:
    own, base = (words_of(values) for values in tuned("BF16", ((1 << 18) + 6,), 2))
    check_chunk(own, base, "BF16", GROUPED)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scale", [0.0, 1e-7, 1e-2, 10.0])
def test_any_size_of_change(dtype: str, scale: float) -> None:
    own, base = (words_of(values) for values in tuned(dtype, (9005,), 3, scale))
    check_chunk(own, base, dtype)


@given(st.sampled_from(FLOATS), st.integers(1, 9000), st.integers(0, 1000), st.floats(0, 1))
def test_any_bits_against_any_bits(dtype: str, count: int, seed: int, same: float) -> None:
    own, base = words_of(random_bits(dtype, (count,), seed)), words_of(random_bits(dtype, (count,), seed + 1))
    keep = np.random.default_rng(seed).random(count) < same
    check_chunk(np.where(keep, base, own), base, dtype)


@pytest.mark.parametrize("dtype", [*FLOATS, "I8", "I64", "BOOL", "F8_E4M3", "C64"])
def test_unrelated_bits_cost_a_byte_a_chunk(dtype: str) -> None:
    own, base = words_of(random_bits(dtype, (9001,), 1)), words_of(random_bits(dtype, (9001,), 2))
    if dtype != "BOOL":
        assert len(check_chunk(own, base, dtype, RAW)) == own.nbytes + 1
    check_chunk(own, None, dtype)


def test_a_base_of_no_help_is_left_alone() -> None:
    own = words_of((torch.randn(20_000, generator=generator(1)) * 0.1).to(torch.bfloat16))
    foreign = words_of(random_bits("BF16", (20_000,), 2))
    data = check_chunk(own, foreign, "BF16", OWN)
    assert data == encode_chunk(own, None, layout_of("BF16")) and len(data) < 0.7 * own.nbytes


def test_few_changes_are_left_to_zstd() -> None:
    base = words_of((torch.randn(20_000, generator=generator(1)) * 0.1).to(torch.bfloat16))
    own = base.copy()
    own[7000:7040] += 1
    assert len(check_chunk(own, base, "BF16", DIFFERENCE)) < 200


@pytest.mark.parametrize("dtype", ["I32", "U8", "BOOL"])
def test_what_is_no_float_is_a_plain_difference(dtype: str) -> None:
    base = words_of(random_bits(dtype, (9001,), 1))
    own = base.copy()
    own[::7] ^= 1
    assert len(check_chunk(own, base, dtype, DIFFERENCE)) < 0.5 * own.nbytes


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_a_handful_of_words(dtype: str, count: int) -> None:
    own, base = (words_of(values) for values in tuned(dtype, (count,), count))
    check_chunk(own, base, dtype)
    check_chunk(base, base, dtype)
    check_chunk(own, None, dtype)


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, float("nan"), float("inf"), 1e-41])
def test_a_constant_is_a_few_bytes(value: float) -> None:
    own = words_of(torch.full((50_000,), value))
    assert len(check_chunk(own, None, "F32", OWN)) < 110
    assert len(check_chunk(own, own, "F32")) < 110


@pytest.mark.parametrize(("narrow", "wide"), [("BF16", "F32"), ("F16", "F32"), ("BF16", "F64"), ("F32", "F64")])
def test_upcast_weights_cost_what_the_narrow_ones_do(narrow: str, wide: str) -> None:
    # An fp32 merge of bf16 weights: the bits that say nothing are not stored, with a base of either dtype.
    own, base = tuned(narrow, (30_000,), 5)
    spec = TensorSpec("w", wide, (30_000,))
    own_wide = words_of(own.to(torch_dtype(wide)))
    cost = len(encode_chunk(words_of(own), words_of(base), layout_of(narrow)))
    for known in (base, base.to(torch_dtype(wide))):
        data = check_chunk(own_wide, predicted_words(known, spec), wide, GROUPED)
        assert len(data) < 1.03 * cost
    alone = len(encode_chunk(words_of(own), None, layout_of(narrow)))
    assert len(check_chunk(own_wide, None, wide)) < 1.03 * alone


def test_narrow_words_against_a_base_with_more_bits() -> None:
    own, base = tuned("BF16", (9001,), 6)
    exact_base = words_of(base.to(torch.float32) + 1e-6)
    check_chunk(words_of(own.to(torch.float32)), exact_base, "F32", GROUPED)


@pytest.mark.parametrize("own", FLOATS)
@pytest.mark.parametrize("known", [*FLOATS, "I32", "F8_E5M2"])
def test_which_dtypes_predict_which(own: str, known: str) -> None:
    spec = TensorSpec("model.w", own, (40, 9))
    values, base = tuned(own, (40, 9), 7)[0], random_bits(known, (40, 9), 8)
    predicts = known in FLOATS and (known == own or known != "F64")
    assert can_predict(base, spec) == predicts
    pieces: list[bytes] = []
    node = Lossless().encode(rows_of(values), rows_of(base), spec, pieces.append)
    assert node.params["predictor"] == ("base" if predicts else "none")
    reader = Lossless().open(node, lambda offset, count: b"".join(pieces)[offset : offset + count], spec)
    assert bits(reader(3, 31, rows_of(base) if predicts else None)) == bits(values[3:31])


def test_a_nan_that_is_converted_predicts_zero() -> None:
    base = torch.tensor([1.0, float("nan"), float("inf")], dtype=torch.bfloat16)
    words = predicted_words(base, TensorSpec("w", "F32", (3,)))
    assert words.tolist() == [0x3F800000, 0, 0x7F800000]
    same = predicted_words(base, TensorSpec("w", "BF16", (3,)))
    assert same.tolist() == words_of(base).tolist()


def test_a_base_of_another_kind_is_refused_when_read() -> None:
    spec = TensorSpec("model.w", "BF16", (40, 9))
    values, base = tuned("BF16", (40, 9), 7)
    pieces: list[bytes] = []
    node = Lossless().encode(rows_of(values), rows_of(base), spec, pieces.append)
    reader = Lossless().open(node, lambda offset, count: b"".join(pieces)[offset : offset + count], spec)
    with pytest.raises(ArtifactInvalid, match=r"'model\.w' of BF16 cannot be coded against a base of torch\.float64"):
        reader(0, 40, rows_of(base.to(torch.float64)))


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_threads_change_no_byte(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lossless, "_CHUNK", 9100)
    values, base = tuned(dtype, (700, 91), 9)
    spec = TensorSpec("w", dtype, (700, 91))

    def encoded(threads: int) -> tuple[CodecNode, bytes]:
        pieces: list[bytes] = []
        node = Lossless(threads).encode(rows_of(values), rows_of(base), spec, pieces.append)
        return node, b"".join(pieces)

    node, data = encoded(1)
    sizes = node.params["sizes"]
    assert isinstance(sizes, list) and len(sizes) == 7 and node.version == 2
    assert encoded(3) == encoded(2) == (node, data)
    for threads in (1, 2, 3):
        reader = Lossless(threads).open(node, lambda offset, count: data[offset : offset + count], spec)
        assert bits(reader(0, 700, rows_of(base))) == bits(values)
        assert bits(reader(95, 333, rows_of(base))) == bits(values[95:333])


def test_few_chunks_are_in_memory_at_a_time() -> None:
    taken: list[int] = []

    def given() -> object:
        for number in range(20):
            taken.append(number)
            yield number

    for threads in (1, 3):
        taken.clear()
        for made in lossless._side_by_side(threads, lambda number: -number, given()):  # type: ignore[arg-type]
            assert len(taken) <= -made + threads + 1
        assert taken == list(range(20))


def test_reading_stays_with_the_callers_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    monkeypatch.setattr(lossless, "_CHUNK", 900)
    values, base = tuned("BF16", (70, 91), 9)
    spec = TensorSpec("w", "BF16", (70, 91))
    seen: set[int] = set()

    def watched(tensor: torch.Tensor):  # type: ignore[no-untyped-def]
        def rows(start: int, stop: int) -> torch.Tensor:
            seen.add(threading.get_ident())
            return tensor[start:stop]

        return rows

    pieces: list[bytes] = []
    node = Lossless(3).encode(watched(values), watched(base), spec, pieces.append)

    def fetch(offset: int, count: int) -> bytes:
        seen.add(threading.get_ident())
        return b"".join(pieces)[offset : offset + count]

    Lossless(3).open(node, fetch, spec)(0, 70, watched(base))
    assert seen == {threading.get_ident()}
