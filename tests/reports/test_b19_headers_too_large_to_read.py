"""B19: a 7 GB file of 1.29 million small tensors is written and can never be read: readers cap headers at 100 MB.

What we write is cut by header size long before that, and a file whose header no reader would take is refused when it is
to be written. Both limits are forced low here.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import random_checkpoint, read_weights
from report_program import run, succeeded
from report_runs import Tensors, same_bits
from safetensors import safe_open

from mfs_decompose.artifact import shard
from mfs_decompose.source import header

LAYERS, VARIANTS = 70, 4
LOW = 4096 + 2500  # the first part is the margin that a header keeps


def tiny_layers(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"model.layers.{at}.{part}.weight": torch.randn(shape, generator=generator)
        for at in range(LAYERS)
        for part, shape in {"up": (5, 3), "norm": (3,)}.items()
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("b19")
    base = tiny_layers(0)
    found = {"base": random_checkpoint(root / "base", base)}
    for at in range(VARIANTS):
        own = {name: weight + 0.01 * tiny_layers(at + 1)[name] for name, weight in base.items()}
        found[f"v{at}"] = random_checkpoint(root / f"v{at}", own, {"format": "pt"})
    return found


def header_bytes(path: Path) -> int:
    return int.from_bytes(path.read_bytes()[:8], "little")


def decompose(folders: dict[str, Path], out: Path, *more: str) -> None:
    variants = [f"{id}={folder}" for id, folder in folders.items() if id != "base"]
    known = () if "--base-mode" in more else ("--base", folders["base"])
    succeeded("decompose", *known, "--variants", *variants, "--codec", "lossless", "--out", out, *more)


@pytest.mark.parametrize("more", [(), ("--base-mode", "mean")], ids=["known", "mean"])
def test_our_shards_are_cut_by_the_size_of_their_headers(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    decompose(folders, tmp_path / "plain", *more)
    assert {path.name for path in (tmp_path / "plain").glob("v0001-*")} == {"v0001-00001.safetensors"}
    monkeypatch.setattr(shard, "MAX_HEADER_BYTES", LOW)
    decompose(folders, tmp_path / "art", *more)
    for at in range(1, VARIANTS + 1):
        shards = sorted((tmp_path / "art").glob(f"v{at:04d}-*.safetensors"))
        assert len(shards) > 5
        assert all(header_bytes(path) <= LOW for path in shards)
    ours = sorted((tmp_path / "art").glob("base-*.safetensors"))
    if more:  # the mean is written by us; a given base is the user's own file
        assert len(ours) > 5 and all(header_bytes(path) <= LOW for path in ours)
    entries = 0
    for path in sorted((tmp_path / "art").glob("v0003-*.safetensors")):
        with safe_open(path, "pt") as opened:
            entries += len(opened.keys())
    record = json.loads((tmp_path / "art" / "manifest.json").read_bytes())["variants"][2]
    assert entries == len([one for one in record["tensors"].values() if one["blob"] is not None])
    succeeded("verify", tmp_path / "art", "--level", "values")
    succeeded("restore", tmp_path / "art", "--variant", "v2", "--exact", "--out", tmp_path / "back")
    original = read_weights(folders["v2"])
    assert all(same_bits(one, original[name]) for name, one in read_weights(tmp_path / "back").items())


def test_a_file_that_nobody_could_read_is_refused_when_it_is_to_be_written(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file for what came in several: the only place where we do not choose the cut."""
    from safetensors.torch import save_file

    own = tmp_path / "own"
    own.mkdir()
    weights = read_weights(folders["v1"])
    half = len(weights) // 2
    for number, part in enumerate((dict(list(weights.items())[:half]), dict(list(weights.items())[half:])), start=1):
        save_file(part, own / f"model-0000{number}-of-00002.safetensors", {"format": "pt"})
    succeeded("decompose", "--base", folders["base"], "--variants", own, "--codec", "lossless", "--out", tmp_path / "a")
    largest = max(header_bytes(path) for path in own.iterdir())
    monkeypatch.setattr(shard, "MAX_READ_HEADER_BYTES", largest)
    before = sorted(path.name for path in tmp_path.iterdir())
    ran = run("restore", tmp_path / "a", "--variant", "own", "--layout", "single", "--out", tmp_path / "back")
    assert ran.code == 2
    assert f"expected a header of at most {largest} bytes in model.safetensors, found " in ran.err
    assert f"for {len(weights)} tensors" in ran.err and "Hint: Leave --layout single out" in ran.err
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    succeeded("restore", tmp_path / "a", "--variant", "own", "--out", tmp_path / "back")
    assert all(same_bits(one, weights[name]) for name, one in read_weights(tmp_path / "back").items())


def test_such_a_file_is_refused_as_a_source(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = header_bytes(folders["v0"] / "model.safetensors")
    monkeypatch.setattr(header, "MAX_HEADER_BYTES", found - 1)
    base = random_checkpoint(tmp_path / "base", {"model.layers.0.up.weight": torch.randn(5, 3)})
    ran = run("decompose", "--base", base, "--variants", folders["v0"], "--out", tmp_path / "art")
    assert ran.code == 12
    assert f"announce a header of {found} bytes, more than the {found - 1} allowed" in ran.err
    assert not (tmp_path / "art").exists()


def test_the_limit_we_write_by_is_far_below_the_one_that_readers_have() -> None:
    assert shard.MAX_HEADER_BYTES == 8_000_000
    assert shard.MAX_READ_HEADER_BYTES == header.MAX_HEADER_BYTES == 100_000_000


def test_a_long_name_counts_with_all_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Characters of several bytes, and such that JSON escapes."""
    monkeypatch.setattr(shard, "MAX_HEADER_BYTES", LOW)
    names = [f"{at}." + 'ż"\\' * 60 for at in range(60)]
    entries = [shard.Entry(name, "U8", (1,), 1) for name in names]
    parts = shard.split_into_shards(entries, 10**9)
    assert [entry.name for part in parts for entry in part] == names
    for at, part in enumerate(parts):
        shard.write_shard(tmp_path / f"{at}.safetensors", part, [b"x" * len(part)], {"mfs.owner": "v" * 64})
        assert header_bytes(tmp_path / f"{at}.safetensors") <= LOW
        with safe_open(tmp_path / f"{at}.safetensors", "pt") as opened:
            assert list(opened.keys()) == sorted(entry.name for entry in part)
    shutil.rmtree(tmp_path)
