"""Codecs that give the tensor's own bits back: every element type, every bit pattern, every shape, every window."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from codec_entries import Stored, bits, generator, random_bits, rows_of, store_exact
from hypothesis import given
from hypothesis import strategies as st

from mfs_decompose.codec import lossless, lossless_chunk, raw
from mfs_decompose.codec.raw import from_bytes
from mfs_decompose.codec.registry import exact_codec
from mfs_decompose.codec.tree import CodecNode
from mfs_decompose.errors import ArtifactInvalid
from mfs_decompose.source import dtypes
from mfs_decompose.source.dtypes import torch_dtype
from mfs_decompose.source.header import TensorSpec

_DTYPES = sorted(dtypes._SIZES)
_SHAPES: list[tuple[int, ...]] = [(), (1,), (13,), (5, 7), (3, 2, 5), (0,), (0, 4), (4, 0), (3, 0, 2)]


def read(stored: Stored, spec: TensorSpec, start: int, stop: int, base: torch.Tensor | None) -> torch.Tensor:
    reader = exact_codec(stored.node.codec).open(stored.node, stored.fetch, spec)
    return reader(start, stop, None if base is None else rows_of(base))


def check(codec: str, values: torch.Tensor, base: torch.Tensor | None, spec: TensorSpec) -> Stored:
    """Encode, and hold all rows and some windows against the tensor."""
    stored = store_exact(codec, values, base, spec)
    assert stored.node.nbytes == len(stored.data)
    whole = read(stored, spec, 0, spec.rows, base)
    assert whole.dtype == values.dtype and whole.shape == values.shape
    assert bits(whole) == bits(values)
    if spec.shape:
        for start in range(spec.rows + 1):
            for stop in {start, min(start + 1, spec.rows), spec.rows}:
                window = read(stored, spec, start, stop, base)
                assert window.shape == (stop - start, *spec.shape[1:]) and window.dtype == values.dtype
                assert bits(window) == bits(values[start:stop])
    return stored


@pytest.mark.parametrize("shape", _SHAPES)
@pytest.mark.parametrize("dtype", _DTYPES)
def test_lossless_is_bit_exact(dtype: str, shape: tuple[int, ...]) -> None:
    spec = TensorSpec("w", dtype, shape)
    values, base = random_bits(dtype, shape, 1), random_bits(dtype, shape, 2)
    assert check("lossless", values, None, spec).node.params["predictor"] == "none"
    assert check("lossless", values, base, spec).node.params["predictor"] == "base"
    check("lossless", values, values, spec)


@pytest.mark.parametrize("shape", _SHAPES)
@pytest.mark.parametrize("dtype", _DTYPES)
def test_raw_is_the_bytes(dtype: str, shape: tuple[int, ...]) -> None:
    spec = TensorSpec("w", dtype, shape)
    values = random_bits(dtype, shape, 3)
    stored = check("raw", values, None, spec)
    assert stored.data == bits(values)
    assert check("raw", values, random_bits(dtype, shape, 4), spec) == stored


@pytest.mark.parametrize("shape", _SHAPES)
@pytest.mark.parametrize("dtype", _DTYPES)
def test_identical_is_the_base_at_no_bytes(dtype: str, shape: tuple[int, ...]) -> None:
    spec = TensorSpec("w", dtype, shape)
    values = random_bits(dtype, shape, 5)
    assert check("identical", values, values, spec).data == b""


def test_identical_without_a_base_is_refused() -> None:
    spec = TensorSpec("model.norm.weight", "F32", (3,))
    stored = store_exact("identical", torch.ones(3), torch.ones(3), spec)
    with pytest.raises(ArtifactInvalid, match=r"'model\.norm\.weight' is stored as identical to the base"):
        read(stored, spec, 0, 3, None)


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_every_pattern_of_16_bits_against_every_kind_of_base(dtype: str) -> None:
    spec = TensorSpec("w", dtype, (256, 256))
    words = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    every = words.view(torch_dtype(dtype)).reshape(256, 256)
    shuffled = words[torch.randperm(65536, generator=generator(1))].view(torch_dtype(dtype)).reshape(256, 256)
    for base in (None, every.flip(0), shuffled):
        stored = store_exact("lossless", every, base, spec)
        assert bits(read(stored, spec, 0, 256, base)) == bits(every)


def special_words(exponent_bits: int, size: int) -> list[int]:
    """Zeros, subnormals, the largest finite, infinities and NaNs of both signs of a binary float of `size` bytes."""
    fraction = 8 * size - 1 - exponent_bits
    infinity = ((1 << exponent_bits) - 1) << fraction
    positive = [0, 1, (1 << fraction) - 1, 1 << fraction, infinity - 1, infinity, infinity + 1]
    return [*positive, *(word | 1 << (8 * size - 1) for word in positive), (1 << 8 * size) - 1]


@pytest.mark.parametrize(("dtype", "exponent_bits"), [("F32", 8), ("F64", 11)])
def test_special_values_against_each_other(dtype: str, exponent_bits: int) -> None:
    size = dtypes.item_size(dtype)
    words = np.array(special_words(exponent_bits, size), dtype=f"<u{size}")
    own, base = np.meshgrid(words, words)
    spec = TensorSpec("w", dtype, own.shape)
    values, known = (from_bytes(each.tobytes(), spec, len(words)) for each in (own, base))
    check("lossless", values, known, spec)


@given(
    st.sampled_from(["BF16", "F32", "I64", "U8"]),
    st.integers(0, 12),
    st.integers(0, 6),
    st.integers(1, 40),
    st.booleans(),
    st.integers(0, 1000),
)
def test_chunks_do_not_show(dtype: str, rows: int, columns: int, chunk: int, with_base: bool, seed: int) -> None:
    spec = TensorSpec("w", dtype, (rows, columns))
    values = random_bits(dtype, spec.shape, seed)
    base = random_bits(dtype, spec.shape, seed + 1) if with_base else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lossless, "_CHUNK", chunk)
        patch.setattr(raw, "_BLOCK", chunk)
        stored = check("lossless", values, base, spec)
        assert store_exact("raw", values, base, spec).data == bits(values)
    step = stored.node.integer("rows")
    sizes = stored.node.params["sizes"]
    assert isinstance(sizes, list) and len(sizes) == -(-rows // step)
    assert step == 1 or min(step, rows) * columns <= chunk
    # The chunk is written down: readers need not know how it was chosen.
    assert bits(read(stored, spec, 0, rows, base)) == bits(values)


def test_only_the_chunks_of_a_window_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lossless, "_CHUNK", 30)
    spec = TensorSpec("w", "F32", (20, 10))
    values, base = random_bits("F32", (20, 10), 1), random_bits("F32", (20, 10), 2)
    stored = store_exact("lossless", values, base, spec)
    fetched: list[int] = []
    based: list[tuple[int, int]] = []

    def fetch(offset: int, count: int) -> bytes:
        fetched.append(count)
        return stored.fetch(offset, count)

    def rows(start: int, stop: int) -> torch.Tensor:
        based.append((start, stop))
        return base[start:stop]

    reader = exact_codec("lossless").open(stored.node, fetch, spec)
    assert bits(reader(7, 10, rows)) == bits(values[7:10])
    sizes = stored.node.params["sizes"]
    assert isinstance(sizes, list)
    assert fetched == sizes[2:4]
    assert based == [(6, 9), (9, 12)]


def test_a_real_delta_is_smaller_than_the_tensor() -> None:
    base = torch.randn(300, 200, generator=generator(1)).to(torch.bfloat16)
    change = torch.randn(300, 200, generator=generator(2)) * 2e-3
    values = (base.to(torch.float32) + change).to(torch.bfloat16)
    spec = TensorSpec("w", "BF16", (300, 200))
    against_base, alone = (store_exact("lossless", values, known, spec) for known in (base, None))
    assert len(against_base.data) < 0.5 * spec.nbytes
    assert len(against_base.data) < len(alone.data) < 1.01 * spec.nbytes


def test_the_same_tensor_gives_the_same_bytes() -> None:
    spec = TensorSpec("w", "F32", (30, 20))
    values, base = random_bits("F32", (30, 20), 1), random_bits("F32", (30, 20), 2)
    assert store_exact("lossless", values, base, spec) == store_exact("lossless", values, base, spec)


def test_a_view_is_coded_as_its_values() -> None:
    spec = TensorSpec("w", "F32", (30, 20))
    values = random_bits("F32", (20, 30), 1).mT
    for codec in ("lossless", "raw"):
        assert store_exact(codec, values, None, spec) == store_exact(codec, values.contiguous(), None, spec)


_SPEC = TensorSpec("model.w", "BF16", (20, 6))


@pytest.fixture
def entry(monkeypatch: pytest.MonkeyPatch) -> Stored:
    """A [20, 6] tensor in chunks of 7 rows."""
    monkeypatch.setattr(lossless, "_CHUNK", 42)
    return store_exact("lossless", random_bits("BF16", (20, 6), 1), random_bits("BF16", (20, 6), 2), _SPEC)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Stored:
    """The same tensor where it compresses: few words differ."""
    monkeypatch.setattr(lossless, "_CHUNK", 42)
    base = random_bits("BF16", (20, 6), 2)
    own = base.clone()
    own[::3, 1] = 1.5
    return store_exact("lossless", own, base, _SPEC)


@pytest.mark.parametrize(
    "change",
    [
        {"rows": 0},
        {"rows": -1},
        {"rows": 6},
        {"rows": 20},
        {"rows": "7"},
        {"rows": None},
        {"sizes": None},
        {"sizes": 3},
        {"sizes": []},
        {"sizes": [1, 2]},
        {"sizes": [1, 2, 3]},
        {"sizes": ["1", 2, 3]},
        {"predictor": None},
        {"predictor": "mean"},
        {"predictor": ["base"]},
    ],
)
def test_wrong_parameters_are_refused(entry: Stored, change: dict[str, object]) -> None:
    with pytest.raises(ArtifactInvalid, match="lossless"):
        exact_codec("lossless").open(entry.with_params(**change), entry.fetch, _SPEC)


def test_sizes_that_are_negative_or_no_numbers_are_refused(entry: Stored) -> None:
    sizes = entry.node.params["sizes"]
    assert isinstance(sizes, list) and len(sizes) == 3
    total = len(entry.data)
    for wrong in ([total + 5, -5, 0], [total, False, 0], [float(total), 0, 0], [10**30, total - 10**30, 0]):
        with pytest.raises(ArtifactInvalid, match="do not add up"):
            exact_codec("lossless").open(entry.with_params(sizes=wrong), entry.fetch, _SPEC)


def test_chunks_cut_elsewhere_are_refused(entry: Stored) -> None:
    sizes = entry.node.params["sizes"]
    assert isinstance(sizes, list)
    first, second, third = (size for size in sizes if isinstance(size, int))
    for wrong in ([first - 1, second + 1, third], [first + 1, second - 1, third], [first + second, 0, third]):
        stored = Stored(entry.with_params(sizes=wrong), entry.data)
        with pytest.raises(ArtifactInvalid, match="lossless"):
            read(stored, _SPEC, 0, 20, random_bits("BF16", (20, 6), 2))


@pytest.mark.parametrize("shape", [(21, 6), (20, 7), (120,)])
def test_a_tensor_of_another_shape_is_refused(entry: Stored, shape: tuple[int, ...]) -> None:
    spec = TensorSpec("model.w", "BF16", shape)
    with pytest.raises(ArtifactInvalid, match="lossless"):
        read(entry, spec, 0, spec.rows, random_bits("BF16", shape, 2))


@pytest.mark.parametrize("dtype", ["F32", "U8"])
def test_a_tensor_of_another_size_is_refused(entry: Stored, dtype: str) -> None:
    with pytest.raises(ArtifactInvalid, match="expected a chunk of"):
        read(entry, TensorSpec("model.w", dtype, (20, 6)), 0, 20, random_bits(dtype, (20, 6), 2))


def test_a_missing_base_is_named(entry: Stored) -> None:
    with pytest.raises(ArtifactInvalid, match=r"'model\.w' was coded against a base tensor that is not there"):
        read(entry, _SPEC, 0, 20, None)


@pytest.mark.parametrize("damage", ["zeros", "cut", "junk", "nothing"])
def test_damaged_chunks_are_refused(plain: Stored, damage: str) -> None:
    def fetch(offset: int, count: int) -> bytes:
        data = plain.fetch(offset, count)
        damaged = {"zeros": bytes(count), "cut": data[: count // 2], "junk": b"<html>" + data[6:], "nothing": b""}
        return damaged[damage]

    reader = exact_codec("lossless").open(plain.node, fetch, _SPEC)
    with pytest.raises(ArtifactInvalid, match="lossless"):
        reader(0, 20, rows_of(random_bits("BF16", (20, 6), 2)))


def test_a_chunk_that_announces_more_is_not_unpacked() -> None:
    import zstandard

    frame = zstandard.ZstdCompressor().compress(bytes(1 << 20))
    bomb = bytes((lossless_chunk.OWN, 0)) + len(frame).to_bytes(4, "little") + frame
    spec = TensorSpec("w", "U8", (4, 4))
    node = store_exact("lossless", random_bits("U8", (4, 4), 1), None, spec)
    changed = Stored(Stored(node.with_part("data", nbytes=len(bomb)), b"").with_params(sizes=[len(bomb)]), bomb)
    with pytest.raises(ArtifactInvalid, match="expected a chunk of 16 bytes, found 1048576"):
        read(changed, spec, 0, 4, None)


@pytest.mark.parametrize("change", [{"dtype": "F16"}, {"shape": (6, 20)}, {"shape": (120,)}, {"nbytes": 239}])
def test_raw_refuses_another_shape(change: dict[str, object]) -> None:
    stored = store_exact("raw", random_bits("BF16", (20, 6), 1), None, _SPEC)
    with pytest.raises(ArtifactInvalid, match=r"raw bytes of 'model\.w': expected BF16 \[20, 6\]"):
        exact_codec("raw").open(stored.with_part("data", **change), stored.fetch, _SPEC)
    with pytest.raises(ArtifactInvalid, match="needs an array 'data'"):
        exact_codec("raw").open(CodecNode("raw"), stored.fetch, _SPEC)


@pytest.mark.parametrize("count", [0, 1, 239, 241])
def test_more_or_fewer_bytes_than_rows_are_refused(count: int) -> None:
    stored = store_exact("raw", random_bits("BF16", (20, 6), 1), None, _SPEC)
    reader = exact_codec("raw").open(stored.node, lambda offset, wanted: bytes(count), _SPEC)
    with pytest.raises(ArtifactInvalid, match=f"expected 240 bytes, found {count}"):
        reader(0, 20, None)


def test_raw_reads_only_the_rows_asked_for() -> None:
    values = random_bits("BF16", (20, 6), 1)
    stored = store_exact("raw", values, None, _SPEC)
    fetched: list[tuple[int, int]] = []

    def fetch(offset: int, count: int) -> bytes:
        fetched.append((offset, count))
        return (b"x" * 7 + stored.data)[offset : offset + count]

    reader = exact_codec("raw").open(stored.node.shifted(7), fetch, _SPEC)
    assert bits(reader(3, 8, None)) == bits(values[3:8])
    assert fetched == [(7 + 3 * 12, 5 * 12)]
