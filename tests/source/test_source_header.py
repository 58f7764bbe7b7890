from __future__ import annotations

import hashlib
import json
import math
import os
import zipfile
from pathlib import Path

import pytest
import torch
from checkpoints import shard_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save, save_file

from mfs_decompose.errors import MfsError, SourceIncompatible, SourceNotFound
from mfs_decompose.source import header as header_module
from mfs_decompose.source.header import TensorInfo, TensorSpec, read_shard_header

ENTRY = {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}
DATA = b"abc"


def one(**changes: object) -> dict[str, object]:
    """A header of one tensor, with parts of it replaced; None takes a part away."""
    return {"a": {key: value for key, value in {**ENTRY, **changes}.items() if value is not None}}


def two(first: list[int], second: list[int]) -> dict[str, object]:
    sizes = [[end - start] for start, end in (first, second)]
    return {
        "a": {"dtype": "U8", "shape": sizes[0], "data_offsets": first},
        "b": {"dtype": "U8", "shape": sizes[1], "data_offsets": second},
    }


def place(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    return path


class TestSpec:
    @pytest.mark.parametrize(
        ("dtype", "shape", "numel", "nbytes", "rows", "row_bytes"),
        [
            ("BF16", (5, 3, 7), 105, 210, 5, 42),
            ("F32", (9,), 9, 36, 9, 4),
            ("F64", (), 1, 8, 1, 8),
            ("F16", (0, 4), 0, 0, 0, 8),
            ("I64", (4, 0), 0, 0, 4, 0),
            ("C64", (2, 3), 6, 48, 2, 24),
            ("BF16", (2**20, 2**20), 2**40, 2**41, 2**20, 2**21),
        ],
    )
    def test_counts(
        self, dtype: str, shape: tuple[int, ...], numel: int, nbytes: int, rows: int, row_bytes: int
    ) -> None:
        spec = TensorSpec("x", dtype, shape)
        assert (spec.numel, spec.nbytes, spec.rows, spec.row_bytes) == (numel, nbytes, rows, row_bytes)
        assert spec.rows * spec.row_bytes == spec.nbytes

    def test_info_is_a_spec_with_a_place(self) -> None:
        info = TensorInfo("x", "F32", (2, 3), "model.safetensors", 100)
        assert info.spec == TensorSpec("x", "F32", (2, 3))
        assert info.nbytes == 24


class TestRealFiles:
    def test_agrees_with_the_library(self, tmp_path: Path) -> None:
        tensors = {
            "w": torch.randn(5, 3, dtype=torch.float64),
            "half": torch.randn(7, 2).bfloat16(),
            "scalar": torch.tensor(3.5),
            "none": torch.empty(0, 4),
            "flags": torch.tensor([True, False, True]),
            "steps": torch.arange(6, dtype=torch.int32).reshape(2, 3),
            "ütf/8 name": torch.zeros(1),
        }
        path = tmp_path / "model.safetensors"
        save_file(tensors, path, {"format": "pt", "note": "ünder"})
        header = read_shard_header(path)
        content = path.read_bytes()
        assert header.file == "model.safetensors"
        assert header.size == len(content)
        assert header.mtime_ns == path.stat().st_mtime_ns
        assert header.metadata == {"format": "pt", "note": "ünder"}
        assert content.startswith(header.raw)
        assert len(header.raw) == 8 + int.from_bytes(content[:8], "little")
        assert header.sha256 == hashlib.sha256(header.raw).hexdigest()
        assert [tensor.start for tensor in header.tensors] == sorted(tensor.start for tensor in header.tensors)
        with safe_open(path, "pt") as library:
            assert {tensor.name for tensor in header.tensors} == set(library.keys())
            for tensor in header.tensors:
                expected = library.get_tensor(tensor.name)
                assert tensor.shape == tuple(expected.shape)
                assert tensor.nbytes == expected.nbytes
                found = content[tensor.start : tensor.start + tensor.nbytes]
                assert found == expected.reshape(-1).view(torch.uint8).numpy().tobytes()

    @pytest.mark.parametrize(
        ("header", "data", "names"),
        [
            ({}, b"", []),
            ({"a": ENTRY}, DATA, ["a"]),
            ({"__metadata__": {}, "a": ENTRY}, DATA, ["a"]),
            ({"__metadata__": {"unheard of": "1"}, "a": ENTRY}, DATA, ["a"]),
            (json.dumps({"a": ENTRY}) + "     ", DATA, ["a"]),
            (two([2, 3], [0, 2]), DATA, ["b", "a"]),
            ({"z": {"dtype": "F32", "shape": [0, 9], "data_offsets": [3, 3]}, "a": ENTRY}, DATA, ["a", "z"]),
            ({"../../x": ENTRY}, DATA, ["../../x"]),
            ({"a" * 1024: ENTRY}, DATA, ["a" * 1024]),
        ],
        ids=[
            "empty",
            "plain",
            "no-metadata",
            "odd-metadata",
            "padded",
            "order",
            "zero-size",
            "dots-in-name",
            "long-name",
        ],
    )
    def test_accepts(self, tmp_path: Path, header: dict[str, object] | str, data: bytes, names: list[str]) -> None:
        found = read_shard_header(place(tmp_path, shard_bytes(header, data)))
        assert [tensor.name for tensor in found.tensors] == names

    def test_a_header_longer_than_the_first_read(self, tmp_path: Path) -> None:
        tensors = {f"layer.{number:03d}.weight": torch.full((2, 3), float(number)) for number in range(40)}
        path = tmp_path / "model.safetensors"
        save_file(tensors, path)
        header = read_shard_header(path)
        assert len(header.raw) > 2000
        assert len(header.tensors) == 40

    def test_offsets_beyond_four_gigabytes(self, tmp_path: Path) -> None:
        rows = 2**31 + 8
        header = {
            "big": {"dtype": "I8", "shape": [rows], "data_offsets": [0, rows]},
            "late": {"dtype": "BF16", "shape": [2**31, 1], "data_offsets": [rows, rows + 2**32]},
        }
        path = place(tmp_path, shard_bytes(header))
        start = path.stat().st_size
        os.truncate(path, start + rows + 2**32)  # sparse
        found = read_shard_header(path)
        assert [tensor.start for tensor in found.tensors] == [start, start + rows]
        assert found.tensors[1].nbytes == 2**32


# Cases of 12 are files that are none of ours or would be unsafe to read, those of 11 files that are not all there.
INCOMPATIBLE: dict[str, tuple[bytes, str]] = {
    "n=0": (shard_bytes(b"", b"", 0), "not JSON"),
    "n=0 and data": (shard_bytes(b"xyz", b"", 0), "begins with"),
    "n=1": (shard_bytes("{"), "not JSON"),
    "n=2^40": (shard_bytes("{}", length=2**40), "announce a header of 1099511627776 bytes"),
    "n=2^64-1": (shard_bytes("{}", length=2**64 - 1), "announce a header"),
    "n=100,000,001": (shard_bytes("{}", length=100_000_001), "more than the 100000000 allowed"),
    "non-UTF-8": (shard_bytes(b'{"\xff\xfe": 1}'), "not UTF-8"),
    "BOM": (shard_bytes(b"\xef\xbb\xbf{}"), "begins with"),
    "leading blank": (shard_bytes(" {}"), "begins with"),
    "trailing text": (shard_bytes("{} x"), "not JSON"),
    "NaN literal": (shard_bytes('{"a": {"dtype": "U8", "shape": [NaN], "data_offsets": [0, 3]}}', DATA), "NaN"),
    "depth": (shard_bytes('{"a":' * 10_000), "nested too deeply"),
    "list": (shard_bytes('{"a": [1]}'), "needs exactly dtype, shape and data_offsets"),
    "duplicate key": (shard_bytes(f'{{"a": {json.dumps(ENTRY)}, "a": {json.dumps(ENTRY)}}}', DATA), "twice"),
    "duplicate, the first of zero size": (
        shard_bytes(
            f'{{"a": {{"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}, "a": {json.dumps(ENTRY)}}}', DATA
        ),
        "twice",
    ),
    "duplicate inside": (shard_bytes('{"a": {"dtype": "U8", "dtype": "I8"}}'), "'dtype' stands in it twice"),
    "missing dtype": (shard_bytes(one(dtype=None), DATA), "needs exactly"),
    "missing shape": (shard_bytes(one(shape=None), DATA), "needs exactly"),
    "missing offsets": (shard_bytes(one(data_offsets=None), DATA), "needs exactly"),
    "extra field": (shard_bytes(one(strides=[1]), DATA), "needs exactly"),
    "unknown dtype": (shard_bytes(one(dtype="U7"), DATA), "'U7', which this version does not read"),
    "dtype of less than a byte": (shard_bytes(one(dtype="F4", shape=[6]), DATA), "'F4'"),
    "F4 misaligned": (shard_bytes(one(dtype="F4", shape=[5]), DATA), "'F4'"),
    "dtype a number": (shard_bytes(one(dtype=8), DATA), "'8'"),
    "negative shape": (shard_bytes(one(shape=[-3]), DATA), "expected whole numbers"),
    "two of minus one": (shard_bytes(one(shape=[-1, -1], data_offsets=[0, 1]), b"a"), "expected whole numbers"),
    "two negatives": (shard_bytes(one(shape=[-3, -1]), DATA), "expected whole numbers"),
    "float shape": (shard_bytes(one(shape=[3.0]), DATA), "expected whole numbers"),
    "bool shape": (shard_bytes(one(shape=[3, True]), DATA), "expected whole numbers"),
    "shape a number": (shard_bytes(one(shape=3), DATA), "expected whole numbers"),
    "too many dimensions": (shard_bytes(one(shape=[3] + [1] * 64), DATA), "expected whole numbers"),
    "shape product overflow": (shard_bytes(one(shape=[2**32, 2**32]), DATA), "2\\^40"),
    "shape product wraps to 3": (shard_bytes(one(shape=[3, 2**63 + 1, 2]), DATA), "2\\^40"),
    "overflow beside a zero": (shard_bytes(one(shape=[0, 2**63], data_offsets=[0, 0])), "2\\^40"),
    "bytes do not match": (shard_bytes(one(dtype="F32"), DATA), "needs 12 bytes, its offsets span 3"),
    "offsets swapped": (shard_bytes(one(data_offsets=[3, 0]), DATA), "expected a start and an end"),
    "offsets negative": (shard_bytes(one(data_offsets=[-3, 0]), DATA), "expected a start and an end"),
    "offsets of three": (shard_bytes(one(data_offsets=[0, 1, 3]), DATA), "expected a start and an end"),
    "offsets float": (shard_bytes(one(data_offsets=[0.0, 3.0]), DATA), "expected a start and an end"),
    "hole in front": (shard_bytes(one(data_offsets=[1, 4]), b"xabc"), "a hole"),
    "hole in the middle": (shard_bytes(two([0, 1], [2, 4]), b"abcd"), "a hole"),
    "hole at the end": (shard_bytes(one(), DATA + b"x"), "1 bytes follow its last tensor"),
    "overlap": (shard_bytes(two([0, 2], [1, 3]), DATA), "an overlap"),
    "same bytes twice": (shard_bytes(two([0, 3], [0, 3]), DATA), "an overlap"),
    "trailing bytes": (shard_bytes({}, b"x" * 100), "100 bytes follow"),
    "metadata int": (shard_bytes({"__metadata__": {"a": 1}}), "__metadata__"),
    "metadata nested": (shard_bytes({"__metadata__": {"a": {"b": "c"}}}), "__metadata__"),
    "metadata null": (shard_bytes({"__metadata__": None}), "__metadata__"),
    "metadata list": (shard_bytes({"__metadata__": ["a"]}), "__metadata__"),
    "metadata twice": (shard_bytes('{"__metadata__": {}, "__metadata__": {}}'), "twice"),
    "tensor called __metadata__": (shard_bytes({"__metadata__": ENTRY}, DATA), "__metadata__"),
    "name with NUL": (shard_bytes({"a\0b": ENTRY}, DATA), "printable"),
    "name with newline": (shard_bytes({"a\nb": ENTRY}, DATA), "printable"),
    "name with escape": (shard_bytes({"\x1b[2J": ENTRY}, DATA), "printable"),
    "name turned round": (shard_bytes({"a\u202eb": ENTRY}, DATA), "printable"),
    "name half a letter": (shard_bytes('{"\\ud800": 1}'), "printable"),
    "name empty": (shard_bytes({"": ENTRY}, DATA), "printable"),
    "name of 100 kB": (shard_bytes({"a" * 100_000: ENTRY}, DATA), "1 to 1024 characters"),
    "HTML": (b"<!DOCTYPE html>\n<html><body>Log in</body></html>", "an HTML page"),
    "HTML in capitals": (b"\n  <HTML><HEAD>", "an HTML page"),
    "short HTML": (b"<html>", "an HTML page"),
    "LFS pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 134217728\n",
        "a Git LFS pointer",
    ),
    "pickle": (b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00", "a Python pickle"),
    "GGUF": (b"GGUF\x03\x00\x00\x00" + b"\0" * 40, "a GGUF file"),
    "JSON error": (b'{"error": "Repository not found"}', "a JSON document"),
    "zeros": (b"\0" * 4096, "zeros"),
    "anything": (b"\x05\x00\x00\x00\x00\x00\x00\x00hello", "begins with"),
}
NOT_ALL_THERE: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "has 0 bytes"),
    "7 bytes": (b"\x02\0\0\0\0\0\0", "has 7 bytes"),
    "only the length": (shard_bytes(b"", b"", 40), "expected at least 48 bytes, found 8"),
    "n>size": (shard_bytes('{"a', length=300), "inside its header: expected at least 308 bytes, found 11"),
    "short by 1": (shard_bytes(one(), DATA[:-1]), "expected 71 bytes by its header, found 70"),
    "no data": (shard_bytes(one()), "expected 71 bytes by its header, found 68"),
}


class TestMutations:
    @pytest.mark.parametrize("case", INCOMPATIBLE)
    def test_incompatible(self, tmp_path: Path, case: str) -> None:
        content, gist = INCOMPATIBLE[case]
        path = place(tmp_path, content)
        with pytest.raises(SourceIncompatible, match=gist) as caught:
            read_shard_header(path)
        assert caught.value.exit_code == 12
        assert str(path) in caught.value.message
        assert caught.value.hint
        assert len(caught.value.message) < 1000
        assert caught.value.message.isprintable()

    @pytest.mark.parametrize("case", NOT_ALL_THERE)
    def test_not_all_there(self, tmp_path: Path, case: str) -> None:
        content, gist = NOT_ALL_THERE[case]
        path = place(tmp_path, content)
        with pytest.raises(SourceNotFound, match=gist) as caught:
            read_shard_header(path)
        assert caught.value.exit_code == 11
        assert str(path) in caught.value.message
        assert caught.value.hint

    def test_zip(self, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        torch.save({"a": torch.zeros(3)}, path)
        with pytest.raises(SourceIncompatible, match="a zip archive") as caught:
            read_shard_header(path)
        assert "save_pretrained" in (caught.value.hint or "")

    def test_a_zip_that_looks_like_a_short_header(self, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a", b"abc")
        content = path.read_bytes()
        path.write_bytes(content[:4] + b"\0\0\0\0" + content[8:])
        with pytest.raises(SourceIncompatible, match="a zip archive"):
            read_shard_header(path)

    def test_too_many_tensors(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(header_module, "MAX_TENSORS", 50)
        entries = {str(number): {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for number in range(51)}
        with pytest.raises(SourceIncompatible, match="lists 51 tensors, more than the 50 allowed"):
            read_shard_header(place(tmp_path, shard_bytes(entries)))

    @pytest.mark.parametrize("make", ["missing", "folder", "fifo", "dangling"])
    def test_not_a_file(self, tmp_path: Path, make: str) -> None:
        path = tmp_path / "model.safetensors"
        if make == "folder":
            path.mkdir()
        elif make == "fifo":
            os.mkfifo(path)
        elif make == "dangling":
            path.symlink_to(tmp_path / "nowhere")
        with pytest.raises(SourceIncompatible if make == "fifo" else SourceNotFound, match=r"model\.safetensors"):
            read_shard_header(path)

    def test_every_cut_is_noticed(self, tmp_path: Path) -> None:
        whole = save({"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3).bfloat16()})
        for length in range(len(whole)):
            with pytest.raises(SourceNotFound, match="cut off"):
                read_shard_header(place(tmp_path, whole[:length]))


TENSORS = st.dictionaries(
    st.text(st.characters(codec="utf-8", categories=("L", "N", "P")), min_size=1, max_size=8).filter(
        lambda name: name != "__metadata__"
    ),
    st.tuples(
        st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool]),
        st.lists(st.integers(0, 4), max_size=3),
    ),
    max_size=6,
)


@given(tensors=TENSORS, metadata=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2))
def test_reads_all_that_the_library_writes(
    tmp_path_factory: pytest.TempPathFactory,
    tensors: dict[str, tuple[torch.dtype, list[int]]],
    metadata: dict[str, str],
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    zeros = {name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape) in tensors.items()}
    path.write_bytes(save(zeros, metadata or None))  # no tensors and an empty map make version 0.8 write broken JSON
    header = read_shard_header(path)
    assert header.metadata == metadata
    assert {tensor.name: list(tensor.shape) for tensor in header.tensors} == {
        name: shape for name, (_, shape) in tensors.items()
    }
    assert sum(tensor.nbytes for tensor in header.tensors) == header.size - len(header.raw)


@settings(max_examples=400)
@given(st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=4))
def test_changed_bytes_never_crash_or_point_outside(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[float, int]]
) -> None:
    content = bytearray(save({"a": torch.ones(2, 3), "bb": torch.ones(5).bfloat16()}, {"format": "pt"}))
    end = 8 + int.from_bytes(content[:8], "little")
    for place_in_header, value in changes:
        content[math.floor(place_in_header * end)] = value
    path = tmp_path_factory.getbasetemp() / "mutated.safetensors"
    path.write_bytes(content)
    try:
        header = read_shard_header(path)
    except MfsError as error:
        assert error.exit_code in (11, 12)
        return
    assert all(len(header.raw) <= tensor.start <= len(content) - tensor.nbytes for tensor in header.tensors)
