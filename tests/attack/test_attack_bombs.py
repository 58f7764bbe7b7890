"""Small artifacts that ask for much memory or time: refused before they get it."""

from __future__ import annotations

import copy
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from attack_artifacts import Target
from attack_reading import limits, read_tensor
from checkpoints import random_checkpoint

from mfs_decompose.artifact.reader import Family
from mfs_decompose.artifact.values import open_tensor
from mfs_decompose.artifact.verify import verify
from mfs_decompose.codec import corrected
from mfs_decompose.codec.deadzone import DeadZone
from mfs_decompose.codec.direct import row_blocks
from mfs_decompose.codec.opened import OpenedTensor
from mfs_decompose.codec.tree import CodecNode
from mfs_decompose.errors import ArtifactInvalid
from mfs_decompose.linalg.integer_coder import encode_integers
from mfs_decompose.source.header import TensorSpec

Attacked = Callable[[str], Target]
Json = Any


def part(name: str, nbytes: int, offset: int = 0) -> Json:
    return {"name": name, "dtype": "U8", "shape": [nbytes], "offset": offset, "nbytes": nbytes}


def refused(target: Target, name: str) -> None:
    target.seal()
    with limits(seconds=5):
        assert read_tensor(target.folder, "many", name, "") == "refused"


def only_here(target: Target, name: str, shape: list[int], tree: Json, data: bytes) -> None:
    """A tensor that no base bounds, of any shape that a source is said to have."""
    target.tensors[name].update(kind="only_in_variant", base_name=None, common_rows=0, tree=tree)
    target.claim_shape(name, shape)
    target.variant["missing"] = []
    target.blobs[name] = data
    if not data:
        target.blobs.pop(name)
        target.tensors[name]["blob"] = None


def zeros(count: int) -> bytes:
    """A frame of so many zeros, made without having them."""
    writer = zstandard.ZstdCompressor().compressobj(size=count)
    return b"".join(writer.compress(bytes(2**20)) for _ in range(count >> 20)) + writer.flush()


@pytest.mark.parametrize("version", [1, 2])
def test_one_chunk_for_all_of_a_tall_tensor(version: int, attacked: Attacked) -> None:
    """Half a gigabyte in a few kilobytes: chunks are as large as readers ask for, and not as large as they say."""
    target, rows = attacked("lossy"), 2**28
    frame = zeros(rows if version == 2 else 2 * rows)
    data = frame if version == 1 else b"\1\0" + struct.pack("<II", len(frame), len(frame)) + 2 * frame
    assert len(data) < 100_000
    params = {"predictor": "none", "rows": rows, "sizes": [len(data)]}
    tree = {"codec": "lossless", "version": version, "params": params, "parts": [part("data", len(data))]}
    only_here(target, "raw.weight", [rows, 1], tree, data)
    refused(target, "raw.weight")


@pytest.mark.parametrize("shape", [[2**40, 0], [2**39, 0, 2], [0, 2**40]])
def test_rows_without_number_and_without_elements(shape: list[int], attacked: Attacked) -> None:
    target = attacked("lossy")
    raw = {"name": "data", "dtype": "BF16", "shape": shape, "offset": 0, "nbytes": 0}
    only_here(target, "raw.weight", shape, {"codec": "raw", "version": 1, "parts": [raw]}, b"")
    target.seal()
    with limits(seconds=5):
        assert read_tensor(target.folder, "many", "raw.weight", "") == "mismatch"
        assert not verify(target.folder, "values").ok


def test_rows_beyond_counting(attacked: Attacked) -> None:
    target = attacked("lossy")
    for shape in ([2**62, 0], [2**62, 8], [2**20, 2**21], [2**41]):
        target.tensors["sign.weight"]["shape"] = shape
        refused(target, "sign.weight")


def test_blocks_are_counted_and_not_listed() -> None:
    with limits(seconds=2):
        blocks = row_blocks((2**60, 8))
        assert len(blocks) == 2**43
        assert blocks[-1] == (2**60 - 131_072, 2**60)


@pytest.mark.parametrize("codec", ["deadzone", "fixed", "corrected"])
def test_codes_of_one_value_cost_no_bytes(codec: str, attacked: Attacked) -> None:
    """A shape as large as one likes, of which the base has no rows: its base is asked before a code is decoded."""
    target, shape = attacked("lossy"), [8, 2**36]
    zero, classes = np.zeros(1, np.uint64), np.zeros(1, np.uint8)
    data = encode_integers(zero, classes, 5 if codec == "fixed" else 1)
    params: Json = {"shape": shape, "step": 1.0, "points": [0, 0], "sizes": [len(data)]}
    node: Json = {"codec": "deadzone", "version": 1, "params": params, "parts": [part("data", len(data))]}
    if codec == "fixed":
        head = struct.pack("<hBB", 0, 0, 0)
        side = struct.pack("<I", len(data)) + data
        data = head + side + side
        parts = [part("directions", 4), part("left", len(side), 4), part("right", len(side), 4 + len(side))]
        node = {"codec": "fixed", "version": 1, "params": {"rank": 1, "shape": shape}, "parts": parts}
    if codec == "corrected":
        params, own = {"merge": "once", "rows": 1, "sizes": [0] * 8}, [part("residual", 0)]
        node = {"codec": "corrected", "version": 1, "params": params, "parts": own, "children": [node]}
    target.tensors["sign.weight"].update(kind="resized", tree=node, common_rows=0)
    target.claim_shape("sign.weight", shape)
    target.blobs["sign.weight"] = data
    target.seal()
    asked = pytest.raises(ArtifactInvalid, match=r"of the base's 'sign\.weight'")
    with limits(seconds=5), Family.open(target.folder) as family, asked:
        open_tensor(family, "many", "sign.weight").restored(0, 1)


def test_directions_that_cost_no_bytes() -> None:
    """More of them than a peeled LoRA has would be gigabytes of zeros for a large matrix."""
    spec = TensorSpec("w", "BF16", (100_000, 4_000))
    node = CodecNode("fixed", params={"rank": 3_800, "shape": [100_000, 4_000]})
    with limits(seconds=5), pytest.raises(ArtifactInvalid, match="of rank 3800"):
        OpenedTensor(node, lambda offset, count: b"", spec).delta(0, 1)


@pytest.mark.parametrize("nested", [False, True])
def test_sums_of_nothing_without_end(nested: bool, attacked: Attacked) -> None:
    target = attacked("lossy")
    (own,) = (one for one in target.tensors["sum.weight"]["tree"]["children"] if one["codec"] == "lowrank")
    empty = copy.deepcopy(own)
    empty["params"]["steps"] = 0
    for one in empty["parts"]:
        one.update(offset=0, nbytes=0, shape=[0, *one["shape"][1:]])
    children = [empty] * 3_000
    if nested:
        children = [{"codec": "sum", "version": 1, "children": [empty] * 15} for _ in range(15)]
    target.tensors["sum.weight"].update(tree={"codec": "sum", "version": 1, "children": children}, blob=None)
    target.blobs.pop("sum.weight")
    refused(target, "sum.weight")


def test_chunks_of_one_row_over_blocks_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would have the delta's whole block decoded again, a hundred thousand times."""
    spec, pieces = TensorSpec("w", "BF16", (30, 9)), list[bytes]()
    base, step = torch.ones(30, 9, dtype=torch.bfloat16), {"step": 0.25}
    delta = DeadZone().encode(lambda start, stop: torch.ones(stop - start, 9), (30, 9), step, pieces.append)
    with monkeypatch.context() as patched:
        patched.setattr(corrected, "_CHUNK", 1)
        node = corrected.encode_corrected(
            lambda start, stop: 2 * base[start:stop],
            lambda start, stop: base[start:stop],
            lambda start, stop: torch.ones(stop - start, 9, dtype=torch.float64),
            spec,
            pieces.append,
        )
    assert node.params["rows"] == 1
    data = b"".join(pieces)
    with pytest.raises(ArtifactInvalid, match="expected chunks of 116508 rows, found 1"):
        OpenedTensor(corrected.with_child(node, delta), lambda offset, count: data[offset : offset + count], spec)


@pytest.mark.parametrize("kind", ["factors", "add"])
def test_an_adapter_that_adds_one_thing_again_and_again(kind: str, attacked: Attacked) -> None:
    target = attacked("linear" if kind == "factors" else "lora_bias")
    name, params = next(
        (name, one["tree"]["params"]) for name, one in target.tensors.items() if kind in one["tree"].get("params", {})
    )
    params[kind] = params[kind] * 60_000
    refused(target, name)


def test_an_adapter_is_fetched_once(attacked: Attacked) -> None:
    from mfs_decompose.codec.adapter import open_adapter_tensor

    fetched: list[str] = []

    def fetch(name: str) -> torch.Tensor:
        fetched.append(name)
        return torch.ones(3, 40) if name == "a" else torch.ones(20, 3)

    factor = {"a": "a", "b": "b", "scale": 2.0, "orientation": "out_in"}
    spec = TensorSpec("w", "F32", (20, 40))
    with limits(seconds=5):
        merged = open_adapter_tensor({"factors": [factor] * 9}, fetch, spec, spec)
        assert float(merged.rows(0, 20, lambda start, stop: torch.zeros(stop - start, 40))[0, 0]) == 54.0
    assert fetched == ["a", "b"]


def test_many_hostile_children_are_refused_by_their_number(attacked: Attacked) -> None:
    target = attacked("lossy")
    child = {"codec": "identical", "version": 1}
    for count in (65_537, 100_000):
        tree = {"codec": "rows", "version": 1, "params": {"splits": [0]}, "children": [child] * count}
        one = target.fresh()
        one.tensors["sign.weight"].update(tree=tree, blob=None)
        one.blobs.pop("sign.weight")
        refused(one, "sign.weight")


def test_a_manifest_too_large_to_read(attacked: Attacked) -> None:
    target = attacked("lossy")
    (target.folder / "manifest.json").write_bytes(b'{"a":"' + b"x" * 70_000_000 + b'"}')
    with limits(seconds=5):
        assert read_tensor(target.folder, "many", "sign.weight", "") == "refused"


def test_the_machine_is_given_back(tmp_path: Path) -> None:
    """The limits of these tests are real: what goes beyond them fails."""
    with limits(memory=50_000_000), pytest.raises((MemoryError, RuntimeError)):
        torch.zeros(10**9)
    assert random_checkpoint(tmp_path / "x", {"w": torch.zeros(3)}).is_dir()
