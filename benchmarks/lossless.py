"""The lossless codec beside XOR with zstd and beside ZipNN's delta mode: bytes, and speed in the same run.

    python benchmarks/lossless.py BASE VARIANT [--threads N] [--turns N] [--name NAME]

Whole checkpoints, tensor by tensor, in memory. `xor` is what one writes in an afternoon, and writes well: the words of
both XORed, byte planes, zstd level 3, in chunks of as many elements as ours. Ways take turns; of each the best turn
counts. Speeds are of wall time; the ratios are given of processor time too, which a busy machine distorts less. `zipnn`
runs where that package is installed, on all bytes at once. Writes results/NAME.json (default lossless).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from measure import machine, say, versions, write_result
from residuals import Checkpoint

from mfs_decompose.codec.base import DECODE_ELEMENTS
from mfs_decompose.codec.lossless import Lossless, _side_by_side
from mfs_decompose.codec.predictor import words_of
from mfs_decompose.linalg.words import Words, from_planes, to_planes
from mfs_decompose.source.header import TensorSpec

MIB = 1 << 20
NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64"}


@dataclass(frozen=True)
class Pair:
    """One tensor of both checkpoints, of one dtype and shape."""

    spec: TensorSpec
    own: torch.Tensor
    base: torch.Tensor


class Way(Protocol):
    """A way to code a pair."""

    def encode(self, pair: Pair) -> Any: ...

    def decode(self, coded: Any, pair: Pair) -> torch.Tensor: ...

    def size(self, coded: Any) -> int: ...


class Ours:
    """The codec `lossless`."""

    def __init__(self, threads: int) -> None:
        self._codec = Lossless(threads)

    def encode(self, pair: Pair) -> Any:
        pieces: list[bytes] = []
        node = self._codec.encode(rows(pair.own), rows(pair.base), pair.spec, pieces.append)
        return node, pieces

    def decode(self, coded: Any, pair: Pair) -> torch.Tensor:
        node, pieces = coded
        whole = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        reader = self._codec.open(node, lambda offset, count: whole[offset : offset + count], pair.spec)
        return reader(0, pair.spec.rows, rows(pair.base))

    def size(self, coded: Any) -> int:
        return sum(map(len, coded[1]))


class Xor:
    """XOR of the bits, byte planes, zstd level 3."""

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def encode(self, pair: Pair) -> list[list[bytes]]:
        chunks = zip(cut(words_of(pair.own)), cut(words_of(pair.base)), strict=True)
        return list(_side_by_side(self._threads, lambda both: xor_encode(*both), chunks))

    def decode(self, coded: list[list[bytes]], pair: Pair) -> torch.Tensor:
        chunks = zip(coded, cut(words_of(pair.base)), strict=True)
        words = list(_side_by_side(self._threads, lambda both: xor_decode(*both), chunks))
        joined = words[0] if len(words) == 1 else np.concatenate(words)
        return torch.from_numpy(joined.view(np.uint8)).view(pair.own.dtype).reshape(pair.own.shape)

    def size(self, coded: list[list[bytes]]) -> int:
        return sum(len(plane) for planes in coded for plane in planes)


def xor_encode(own: Words, base: Words) -> list[bytes]:
    import zstandard

    mixed, compressor = own ^ base, zstandard.ZstdCompressor(level=3)
    if own.itemsize != 2:
        return [compressor.compress(to_planes(mixed))]
    return [compressor.compress(mixed.astype(np.uint8)), compressor.compress((mixed >> 8).astype(np.uint8))]


def xor_decode(planes: list[bytes], base: Words) -> Words:
    import zstandard

    data = [zstandard.ZstdDecompressor().decompress(plane) for plane in planes]
    if base.itemsize != 2:
        return from_planes(data[0], base.itemsize) ^ base
    words = np.frombuffer(data[1], np.uint8).astype("<u2")
    words <<= 8
    words |= np.frombuffer(data[0], np.uint8)
    words ^= base
    return words


def rows(tensor: torch.Tensor) -> Callable[[int, int], torch.Tensor]:
    return lambda start, stop: tensor[start:stop] if tensor.dim() else tensor


def cut(words: Words) -> Iterator[Words]:
    edges = [*range(0, words.size, DECODE_ELEMENTS), words.size]
    return (words[low:high] for low, high in pairwise(edges))


def read_pairs(base_folder: Path, variant_folder: Path) -> list[Pair]:
    base, own = Checkpoint(base_folder), Checkpoint(variant_folder)
    found: list[Pair] = []
    for name, shape in own.shapes.items():
        if base.shapes.get(name) == shape:
            tensors = [side._files[name].get_tensor(name) for side in (own, base)]
            found.append(Pair(TensorSpec(name, NAMES[tensors[0].dtype], tuple(shape)), *tensors))
    return found


def take_turn(way: Way, pairs: list[Pair]) -> dict[str, float]:
    """Seconds to encode and decode all pairs, and the bytes; every bit is compared."""
    seconds, size = dict.fromkeys(("encode", "decode", "encode_cpu", "decode_cpu"), 0.0), 0
    for pair in pairs:
        clock, cpu = time.perf_counter(), time.process_time()
        coded = way.encode(pair)
        seconds["encode"] += time.perf_counter() - clock
        seconds["encode_cpu"] += time.process_time() - cpu
        size += way.size(coded)
        clock, cpu = time.perf_counter(), time.process_time()
        back = way.decode(coded, pair)
        seconds["decode"] += time.perf_counter() - clock
        seconds["decode_cpu"] += time.process_time() - cpu
        assert np.array_equal(words_of(back), words_of(pair.own)), pair.spec.name
    return {**seconds, "bytes": size}


def zipnn_turn(pairs: list[Pair], threads: int) -> dict[str, float] | None:
    try:
        from zipnn import ZipNN
    except ImportError:
        return None
    own, base = (bytearray(b"".join(words_of(getattr(p, side)).tobytes() for p in pairs)) for side in ("own", "base"))
    coder = ZipNN(bytearray_dtype="bfloat16", delta_compressed_type="byte", threads=threads)
    copy = bytearray(own)
    clocks = [(time.perf_counter(), time.process_time())]
    coded = coder.compress(copy, delta_second_data=base)
    clocks.append((time.perf_counter(), time.process_time()))
    back = coder.decompress(coded, delta_second_data=base)
    clocks.append((time.perf_counter(), time.process_time()))
    assert bytes(back) == bytes(own)
    (encode, encode_cpu), (decode, decode_cpu) = ((b[0] - a[0], b[1] - a[1]) for a, b in pairwise(clocks))
    return {
        "encode": encode,
        "decode": decode,
        "encode_cpu": encode_cpu,
        "decode_cpu": decode_cpu,
        "bytes": len(coded),
    }


def summary(turns: list[dict[str, float]], total: int) -> dict[str, Any]:
    best = {key: min(turn[key] for turn in turns) for key in turns[0] if key != "bytes"}
    spread = {key: max(turn[key] for turn in turns) / best[key] for key in ("encode", "decode")}
    return {
        "bytes": int(turns[0]["bytes"]),
        "share": turns[0]["bytes"] / total,
        "encode_mib_s": total / MIB / best["encode"],
        "decode_mib_s": total / MIB / best["decode"],
        "encode_cpu_seconds": best["encode_cpu"],
        "decode_cpu_seconds": best["decode_cpu"],
        "slowest_over_best_turn": max(spread.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path)
    parser.add_argument("variant", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--name", default="lossless")
    args = parser.parse_args()
    torch.set_num_threads(1)
    facts = machine()
    pairs = read_pairs(args.base, args.variant)
    total = sum(pair.spec.nbytes for pair in pairs)
    ways: dict[str, Way] = {"xor": Xor(args.threads), "ours": Ours(args.threads)}
    turns: dict[str, list[dict[str, float]]] = {"xor": [], "ours": [], "zipnn": []}
    for _ in range(args.turns):
        for name, way in ways.items():
            turns[name].append(take_turn(way, pairs))
        other = zipnn_turn(pairs, args.threads)
        turns["zipnn"] += [] if other is None else [other]
    found = {name: summary(taken, total) for name, taken in turns.items() if taken}
    ours, xor = found["ours"], found["xor"]
    result = {
        "schema": "mfs.bench.lossless/1",
        "machine": facts,
        "versions": versions(Path(sys.executable), ["mfs_decompose", "numpy", "torch", "zstandard", "zipnn"]),
        "threads": args.threads,
        "turns": args.turns,
        "tensors": len(pairs),
        "checkpoint_bytes": total,
        "ways": found,
        "bytes_over_xor": ours["bytes"] / xor["bytes"],
        "encode_speed_over_xor": ours["encode_mib_s"] / xor["encode_mib_s"],
        "decode_speed_over_xor": ours["decode_mib_s"] / xor["decode_mib_s"],
        "encode_cpu_speed_over_xor": xor["encode_cpu_seconds"] / ours["encode_cpu_seconds"],
        "decode_cpu_speed_over_xor": xor["decode_cpu_seconds"] / ours["decode_cpu_seconds"],
    }
    say(f"{'':8}{'share':>9}{'encode MiB/s':>15}{'decode MiB/s':>15}{'slowest/best':>15}")
    for name, way_ in found.items():
        speeds = f"{way_['encode_mib_s']:15.0f}{way_['decode_mib_s']:15.0f}{way_['slowest_over_best_turn']:15.2f}"
        say(f"{name:8}{way_['share']:9.2%}{speeds}")
    for key in [key for key in result if key.endswith("_over_xor")]:
        say(f"{key}: {result[key]:.3f}")
    say(f"wrote {write_result(args.name, result).name}")


if __name__ == "__main__":
    main()
