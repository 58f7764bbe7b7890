"""Reading weights: the bytes the library reads, in blocks, from threads, and never from a file that changed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from checkpoints import Family, random_checkpoint, read_weights
from hypothesis import given
from hypothesis import strategies as st

from mfs_decompose.errors import SourceIncompatible
from mfs_decompose.source.checkpoint import TensorReader, open_checkpoint

ALL_TYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool, torch.complex64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    as_bytes = [tensor.reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*as_bytes)


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """Every type, 0-d and empty tensors, and bit patterns that arithmetic would not keep."""
    bits = torch.arange(7 * 3 * 8, dtype=torch.int64).mul_(37).to(torch.uint8).reshape(7, 24)
    tensors = {f"type.{dtype}": bits.clone().view(dtype) for dtype in ALL_TYPES if dtype is not torch.bool}
    tensors["type.torch.bool"] = (bits % 3 == 0).contiguous()
    tensors["scalar"] = torch.tensor(-0.0)
    tensors["no rows"] = torch.empty(0, 5)
    tensors["no columns"] = torch.empty(4, 0, dtype=torch.bfloat16)
    tensors["nan"] = torch.tensor([0x7FC1, 0x7F81, 0xFF80, 0x0001], dtype=torch.uint16).view(torch.bfloat16)
    tensors["deep"] = torch.arange(3 * 5 * 2 * 4).reshape(3, 5, 2, 4).float()
    return random_checkpoint(tmp_path / "odd", tensors)


def test_every_tensor_is_what_the_library_reads(odd: Path, family: Family, untied_family: Family) -> None:
    for folder in (odd, family.base, *family.variants.values(), untied_family.variants["vocab"]):
        checkpoint = open_checkpoint(folder, "x")
        with TensorReader(checkpoint) as reader:
            for name, expected in read_weights(folder).items():
                assert same_bits(reader.rows(name), expected), name
                assert same_bits(reader.raw(name), expected.reshape(-1).view(torch.uint8))
            assert reader.bytes_read == 2 * checkpoint.tensor_bytes


@given(st.data())
def test_blocks_of_rows(family: Family, data: st.DataObject) -> None:
    checkpoint = open_checkpoint(family.variants["math"], "x")
    name = data.draw(st.sampled_from(sorted(checkpoint.tensors)))
    rows = checkpoint.tensors[name].rows
    start = data.draw(st.integers(0, rows))
    stop = data.draw(st.integers(start, rows))
    expected = read_weights(family.variants["math"])[name][start:stop]
    with TensorReader(checkpoint) as reader:
        assert same_bits(reader.rows(name, start, stop), expected)
        assert same_bits(reader.raw(name, start, stop), expected.reshape(-1).view(torch.uint8))
        assert reader.bytes_read == 2 * expected.nbytes
        assert same_bits(reader.rows(name, start), read_weights(family.variants["math"])[name][start:])


def test_shapes_of_blocks(odd: Path) -> None:
    with TensorReader(open_checkpoint(odd, "x")) as reader:
        assert reader.rows("deep", 1, 3).shape == (2, 5, 2, 4)
        assert reader.rows("deep", 2, 2).shape == (0, 5, 2, 4)
        assert reader.rows("no rows").shape == (0, 5)
        assert reader.rows("no columns", 1, 3).shape == (2, 0)
        assert reader.rows("scalar").shape == ()
        assert reader.raw("scalar").tolist() == [0, 0, 0, 0x80]


def test_heads(odd: Path) -> None:
    with TensorReader(open_checkpoint(odd, "x")) as reader:
        assert torch.equal(reader.head("deep", 7), torch.arange(7).float())
        assert reader.bytes_read == 28
        assert reader.head("deep", 1000).shape == (120,)
        assert reader.head("scalar", 5).shape == (1,)
        assert reader.head("no rows", 5).shape == (0,)


def test_what_is_read_may_be_written_to(odd: Path) -> None:
    before = (odd / "model.safetensors").read_bytes()
    with TensorReader(open_checkpoint(odd, "x")) as reader:
        reader.rows("deep").fill_(1)
        assert torch.equal(reader.rows("deep", 0, 1).reshape(-1)[:3], torch.arange(3).float())
    assert (odd / "model.safetensors").read_bytes() == before


def test_rows_out_of_range_are_a_bug(odd: Path) -> None:
    with TensorReader(open_checkpoint(odd, "x")) as reader:
        for start, stop in ((-1, 2), (2, 1), (0, 4), (4, None)):
            with pytest.raises(AssertionError, match="deep"):
                reader.rows("deep", start, stop)
    with pytest.raises(AssertionError, match="closed"):
        reader.rows("deep")


def test_many_threads(family: Family) -> None:
    checkpoint = open_checkpoint(family.variants["math"], "x")
    expected = read_weights(family.variants["math"])
    names = sorted(expected) * 20
    with TensorReader(checkpoint) as reader, ThreadPoolExecutor(8) as pool:
        for name, found in zip(names, pool.map(reader.rows, names), strict=True):
            assert same_bits(found, expected[name])
        assert reader.bytes_read == 20 * checkpoint.tensor_bytes


def test_short_reads_are_continued(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv

    def hesitant(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return real(fd, [buffers[0][:1000]], offset)

    monkeypatch.setattr(os, "preadv", hesitant)
    name = "model.embed_tokens.weight"
    with TensorReader(open_checkpoint(family.base, "x")) as reader:
        assert same_bits(reader.rows(name), read_weights(family.base)[name])


def test_no_descriptor_stays_open(family: Family, odd: Path) -> None:
    before = list(Path("/proc/self/fd").iterdir())
    readers = [TensorReader(open_checkpoint(folder, "x")) for folder in (*family.variants.values(), odd)]
    for reader in readers:
        for name in reader.checkpoint.tensors:
            reader.rows(name)
    assert len(list(Path("/proc/self/fd").iterdir())) == len(before)


class TestChangedFiles:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return random_checkpoint(tmp_path / "x", {"first": torch.ones(5, 3), "last": torch.ones(2000, 3)})

    @pytest.mark.parametrize("how", ["shrunk", "grown", "touched", "replaced", "gone", "folder gone", "link out"])
    def test_is_refused(self, folder: Path, how: str) -> None:
        file = folder / "model.safetensors"
        reader = TensorReader(open_checkpoint(folder, "x"))
        assert reader.rows("first").shape == (5, 3)
        if how == "shrunk":
            os.truncate(file, file.stat().st_size - 100)
        elif how == "grown":
            os.truncate(file, file.stat().st_size + 100)
        elif how == "touched":
            os.utime(file, ns=(1, 1))
        elif how == "replaced":
            random_checkpoint(folder, {"first": torch.zeros(5, 3), "last": torch.ones(2000, 3)})
            os.utime(file, ns=(1, 1))
        elif how == "gone":
            file.unlink()
        elif how == "folder gone":
            shutil.rmtree(folder)
        else:
            file.rename(folder.parent / "elsewhere")
            file.symlink_to("../elsewhere")
        with pytest.raises(SourceIncompatible, match=r"changed while it was being read|outside of") as caught:
            reader.rows("last")
        assert caught.value.exit_code == 12
        assert str(file) in caught.value.message

    def test_that_shrink_between_two_reads(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        real = os.preadv

        def cut(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            got = real(fd, [buffers[0][:1000]], offset)
            os.truncate(folder / "model.safetensors", offset + got)
            return got

        reader = TensorReader(open_checkpoint(folder, "x"))
        monkeypatch.setattr(os, "preadv", cut)
        with pytest.raises(SourceIncompatible, match="changed while it was being read"):
            reader.rows("last")
        assert reader.bytes_read == 0
