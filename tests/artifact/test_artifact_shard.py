"""The streaming writer against the safetensors library."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save

from mfs_decompose.artifact.layout import MAX_HEADER_BYTES
from mfs_decompose.artifact.shard import Entry, ShardPlan, library_order, split_into_shards, write_shard
from mfs_decompose.errors import ResourceShortage
from mfs_decompose.events import NullSink
from mfs_decompose.source.header import read_shard_header

NAMES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.uint8: "U8", torch.int64: "I64", torch.float64: "F64"}


def entry_of(name: str, tensor: torch.Tensor) -> Entry:
    return Entry(name, NAMES[tensor.dtype], tuple(tensor.shape), tensor.nbytes)


def data_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


def write_tensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> Any:
    entries = library_order(entry_of(name, tensor) for name, tensor in tensors.items())
    return write_shard(path, entries, (data_of(tensors[entry.name]) for entry in entries), metadata)


def test_golden_bytes(tmp_path: Path) -> None:
    entries = [Entry.of_bytes("b", 3), Entry("a", "BF16", (1, 2), 4), Entry("empty", "F32", (0, 5), 0)]
    record = write_shard(tmp_path / "x.safetensors", entries, [b"\1\2", b"\3\4\5\6\7"], {"z": "1", "mfs.x": "ü"})
    text = (
        '{"__metadata__":{"format":"pt","mfs.x":"ü","z":"1"},'
        '"b":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},'
        '"a":{"dtype":"BF16","shape":[1,2],"data_offsets":[3,7]},'
        '"empty":{"dtype":"F32","shape":[0,5],"data_offsets":[7,7]}}'
    ).encode()
    padded = text + b" " * (-len(text) % 8)
    expected = len(padded).to_bytes(8, "little") + padded + bytes(range(1, 8))
    assert (tmp_path / "x.safetensors").read_bytes() == expected
    assert (record.path, record.size) == ("x.safetensors", len(expected))
    assert record.sha256 == hashlib.sha256(expected).hexdigest()


def test_the_same_bytes_as_the_library(tmp_path: Path) -> None:
    tensors = {
        "w": torch.arange(15, dtype=torch.float32).reshape(5, 3).bfloat16(),
        "b": torch.arange(7, dtype=torch.float32),
        "scalar": torch.tensor(3.0, dtype=torch.float64),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "a": torch.ones(3, 1, 2, dtype=torch.float64),
        "zero": torch.zeros(0, 4),
    }
    write_tensors(tmp_path / "ours", tensors, {})
    assert (tmp_path / "ours").read_bytes() == save(tensors, {"format": "pt"})


shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
printable = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=8)


@settings(max_examples=40)
@given(st.dictionaries(printable, st.tuples(st.sampled_from(list(NAMES)), shapes), max_size=6), st.data())
def test_any_shard_opens_in_the_library(
    tmp_path_factory: pytest.TempPathFactory,
    specs: dict[str, tuple[torch.dtype, tuple[int, ...]]],
    data: st.DataObject,
) -> None:
    path = tmp_path_factory.mktemp("shard") / "x.safetensors"
    generator = torch.Generator().manual_seed(5)
    tensors = {
        name: torch.randint(0, 100, shape, generator=generator).to(dtype) for name, (dtype, shape) in specs.items()
    }
    entries = library_order(entry_of(name, tensor) for name, tensor in tensors.items())
    whole = b"".join(data_of(tensors[entry.name]) for entry in entries)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=4)))
    chunks = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    write_shard(path, entries, chunks, {"mfs.owner": "é"})
    with safe_open(path, "pt") as shard:
        assert set(shard.keys()) == set(tensors)
        assert shard.metadata() == {"format": "pt", "mfs.owner": "é"}
        for name, tensor in tensors.items():
            assert torch.equal(shard.get_tensor(name), tensor)
    header = read_shard_header(path)
    assert [tensor.name for tensor in header.tensors if tensor.nbytes] == [e.name for e in entries if e.nbytes]
    assert header.size == ShardPlan(tuple(entries), {"mfs.owner": "é"}).size


def test_progress_counts_the_data(tmp_path: Path) -> None:
    class Counter(NullSink):
        total = 0

        def advance(self, nbytes: int) -> None:
            self.total += nbytes

    counter = Counter()
    write_shard(tmp_path / "x", [Entry.of_bytes("a", 10)], [b"12345", b"67890"], {}, progress=counter)
    assert counter.total == 10


def test_chunks_are_used_one_at_a_time(tmp_path: Path) -> None:
    """The same buffer may be refilled for each piece: memory does not grow with the shard."""

    def refill() -> Any:
        buffer = bytearray(4)
        for number in range(3):
            buffer[:] = bytes([number]) * 4
            yield memoryview(buffer)

    write_shard(tmp_path / "x", [Entry.of_bytes("a", 12)], refill(), {})
    assert (tmp_path / "x").read_bytes().endswith(b"\0\0\0\0\1\1\1\1\2\2\2\2")


def test_the_header_of_an_original_is_written_as_it_stood(tmp_path: Path) -> None:
    text = b'{ "a" : {"shape":[4],"data_offsets":[0,4],"dtype":"U8"}}  '
    header = len(text).to_bytes(8, "little") + text
    record = write_shard(tmp_path / "x", [Entry.of_bytes("a", 4)], [b"1234"], {"ignored": "x"}, header=header)
    assert (tmp_path / "x").read_bytes() == header + b"1234"
    assert record.sha256 == hashlib.sha256(header + b"1234").hexdigest()
    with safe_open(tmp_path / "x", "pt") as shard:
        assert shard.get_tensor("a").tolist() == [49, 50, 51, 52]


@pytest.mark.parametrize("chunks", [[b"123"], [b"1234", b"5"], []])
def test_a_stream_of_another_length_is_a_bug_and_publishes_nothing(tmp_path: Path, chunks: list[bytes]) -> None:
    with pytest.raises(AssertionError, match="were planned"):
        write_shard(tmp_path / "x", [Entry.of_bytes("a", 4)], chunks, {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "entries",
    [
        [Entry("a", "F32", (2,), 4)],
        [Entry.of_bytes("a", 1), Entry.of_bytes("a", 1)],
        [Entry.of_bytes("__metadata__", 1)],
    ],
)
def test_plans_that_lie_are_bugs(entries: list[Entry]) -> None:
    with pytest.raises(AssertionError):
        ShardPlan(tuple(entries), {}).header()


def test_a_full_disk_in_the_middle_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, room = os.write, 400

    def write(fd: int, data: Any) -> int:
        nonlocal room
        if room == 0:
            raise OSError(28, "No space left on device")
        count = real(fd, data[:room])
        room -= count
        return count

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(ResourceShortage, match=r"v0001-00001\.safetensors"):
        write_shard(tmp_path / "v0001-00001.safetensors", [Entry.of_bytes("a", 5000)], [b"x" * 5000], {})
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


def test_an_error_in_the_stream_leaves_nothing(tmp_path: Path) -> None:
    def stream() -> Any:
        yield b"12"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_shard(tmp_path / "x", [Entry.of_bytes("a", 4)], stream(), {})
    assert list(tmp_path.iterdir()) == []


entries_of_bytes = st.lists(st.integers(0, 50), max_size=20).map(
    lambda sizes: [Entry.of_bytes(f"t{number}", size) for number, size in enumerate(sizes)]
)


@given(entries_of_bytes, st.integers(1, 120))
def test_a_split_keeps_order_and_sizes(entries: list[Entry], shard_size: int) -> None:
    shards = split_into_shards(entries, shard_size)
    assert [entry for shard in shards for entry in shard] == entries
    assert all(shards)
    for shard in shards:
        assert len(shard) == 1 or sum(entry.nbytes for entry in shard) <= shard_size
    for shard, following in itertools.pairwise(shards):  # no shard could have taken one entry more
        assert sum(entry.nbytes for entry in shard) + following[0].nbytes > shard_size


def test_a_split_keeps_headers_small() -> None:
    entries = [Entry.of_bytes(f"层.{number}.weight" * 3, 1) for number in range(2000)]
    shards = split_into_shards(entries, 10**12, header_limit=40_000)
    assert len(shards) > 4
    headers = [
        len(ShardPlan(shard, {"mfs.owner": "v" * 64, "mfs.schema": "mfs.family/1"}).header()) for shard in shards
    ]
    assert max(headers) < 40_000
    assert min(headers[:-1]) > 20_000


def test_the_default_limit_is_below_what_libraries_refuse() -> None:
    entries = [Entry.of_bytes(f"{'x' * 900}{number}", 1) for number in range(20_000)]
    shards = split_into_shards(entries, 10**12)
    assert len(shards) > 1
    assert all(len(ShardPlan(shard, {}).header()) < MAX_HEADER_BYTES for shard in shards)


def test_offsets_beyond_32_bits_are_planned_without_memory() -> None:
    plan = ShardPlan((Entry("a", "I8", (2**31 + 8, 3), 3 * (2**31 + 8)), Entry.of_bytes("b", 5)), {})
    table = json.loads(plan.header()[8:])
    assert table["b"]["data_offsets"] == [6_442_450_968, 6_442_450_973]
    assert plan.size == len(plan.header()) + plan.data_bytes
