"""Merged LoRAs, stored bit by bit: bytes against the adapter's own, and against the checkpoint's.

    python benchmarks/merged_lora.py --base DIR --variant DIR --adapter DIR [--workers 2]
    python benchmarks/merged_lora.py            # the synthetic pairs alone

Real: every tensor of VARIANT is stored exactly (identical, a peeled merge, or lossless where that is smaller), read
back and compared; the adapter's bytes are its parameters at two bytes each. Synthetic: three layers, a tall and a wide
one among them, of weights N(0, 0.02) in bf16, with a LoRA of rank 16 and an rms of 1e-4, merged in fp32, and in bf16 as
PEFT does it on a bf16 model: factors in bf16, their product rounded to bf16, then added in bf16. Bytes are those of the
tensors' entries; what shard headers and manifest need for them stands beside. Writes results/merged_lora.json.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measure import RESULTS, machine, say, versions, write_result
from residuals import Checkpoint

from mfs_decompose.codec.corrected import open_corrected
from mfs_decompose.codec.fixed import open_fixed
from mfs_decompose.codec.lora_exact import encode_lora_exact, fit_lora_exact
from mfs_decompose.codec.lossless import Lossless
from mfs_decompose.codec.tree import CodecNode
from mfs_decompose.linalg.seeds import random_matrix, stream_key
from mfs_decompose.source.header import TensorSpec

PACKAGES = ("mfs_decompose", "torch", "numpy", "constriction", "zstandard")
RANK, RMS, SIGMA = 16, 1e-4, 0.02
LAYERS = ((2048, 2048), (8192, 2048), (2048, 5632))


@dataclass(frozen=True)
class Stored:
    """One tensor: bytes in all, of its factors, and of what the manifest says of it; processor seconds by stage."""

    codec: str
    nbytes: int
    factors: int
    manifest: int
    rank: int
    merge: str
    seconds: dict[str, float]


def store(name: str, own: torch.Tensor, base: torch.Tensor | None) -> Stored:
    """Store a tensor exactly in the fewest bytes, and hold what is read back against it."""
    if base is not None and torch.equal(bits(own), bits(base)):
        return Stored("identical", 0, 0, len(json.dumps(CodecNode("identical").to_json())), 0, "", {})
    spec = TensorSpec(name, {torch.bfloat16: "BF16", torch.float16: "F16"}[own.dtype], tuple(own.shape))
    clock = time.thread_time()
    matrix = base is not None and own.dim() == 2
    fit = fit_lora_exact(own, base, stream_key(0, "peel", name)) if matrix and base is not None else None
    fitted = time.thread_time()
    plain: list[bytes] = []
    coded = Lossless().encode(rows_of(own), base if base is None else rows_of(base), spec, plain.append)
    if fit is None or base is None:
        return Stored("lossless", coded.nbytes, 0, len(json.dumps(coded.to_json())), 0, "", {"fit": fitted - clock})
    pieces: list[bytes] = []
    compared = time.thread_time()
    node = encode_lora_exact(fit, rows_of(own), rows_of(base), spec, pieces.append)
    encoded = time.thread_time()
    data = b"".join(pieces)
    delta = open_fixed(node.children[0], lambda at, count: data[at : at + count], (own.shape[0], own.shape[1]))
    read = open_corrected(node, lambda at, count: data[at : at + count], spec)
    back = read(0, spec.rows, rows_of(base), delta.rows)
    seconds = {"fit": fitted - clock, "encode": encoded - compared, "decode": time.thread_time() - encoded}
    if not torch.equal(bits(back), bits(own)):
        raise RuntimeError(f"{name} does not come back bit by bit")
    if coded.nbytes < node.nbytes:
        return Stored("lossless", coded.nbytes, 0, len(json.dumps(coded.to_json())), 0, "", seconds)
    manifest = len(json.dumps(node.to_json()))
    return Stored("lora", node.nbytes, node.children[0].nbytes, manifest, fit.factors.rank, fit.merge, seconds)


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().reshape(-1).view(torch.uint8)


def rows_of(values: torch.Tensor) -> Callable[[int, int], torch.Tensor]:
    return lambda start, stop: values[start:stop]


def total(found: dict[str, Stored], checkpoint: int, adapter: int) -> dict[str, Any]:
    """The table of one checkpoint."""
    nbytes, factors = (sum(getattr(one, field) for one in found.values()) for field in ("nbytes", "factors"))
    entries = {
        name: {"dtype": "U8", "shape": [one.nbytes], "data_offsets": [0, one.nbytes]} for name, one in found.items()
    }
    peeled = [one for one in found.values() if one.codec == "lora"]
    seconds: Counter[str] = Counter()
    for one in found.values():
        seconds.update(one.seconds)
    return {
        "checkpoint_bytes": checkpoint,
        "adapter_bytes_bf16": adapter,
        "bytes": nbytes,
        "over_adapter": nbytes / adapter,
        "of_checkpoint": nbytes / checkpoint,
        "factors_share": factors / nbytes,
        "residual_share": sum(one.nbytes - one.factors for one in peeled) / nbytes,
        "bits_a_factor_value": 8 * factors / (adapter / 2),
        "header_bytes": len(json.dumps(entries)),
        "manifest_bytes": sum(one.manifest for one in found.values()),
        "codecs": dict(Counter(one.codec for one in found.values())),
        "ranks": dict(Counter(one.rank for one in peeled)),
        "merges": dict(Counter(one.merge for one in peeled)),
        "cpu_seconds": {key: round(value, 2) for key, value in seconds.items()},
    }


def real(base_folder: Path, variant_folder: Path, adapter_folder: Path, workers: int) -> dict[str, Any]:
    """The whole checkpoint, several tensors at a time."""
    base, variant = Native(base_folder), Native(variant_folder)
    adapter = 2 * sum(math.prod(shape) for shape in Checkpoint(adapter_folder).shapes.values())
    names = sorted(variant.shapes)
    clock = time.perf_counter()
    with ThreadPoolExecutor(workers) as pool:
        stored = pool.map(lambda name: store(name, variant[name], base.get(name)), names)
        found = dict(zip(names, stored, strict=True))
    wall = time.perf_counter() - clock
    nbytes = sum(2 * math.prod(shape) for shape in variant.shapes.values())
    return {**total(found, nbytes, adapter), "workers": workers, "wall": round(wall, 1)}


class Native(Checkpoint):
    """A checkpoint's tensors in their own dtype."""

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor

    def get(self, name: str) -> torch.Tensor | None:
        """None for a tensor that it lacks."""
        return self[name] if name in self._files else None


def synthetic(merge: str) -> dict[str, Any]:
    """Layers made for the purpose, merged in `fp32` or in `bf16`."""
    found, numel, adapter = {}, 0, 0
    for rows, columns in LAYERS:
        name = f"{rows}x{columns}"
        base = (gauss(name, rows, columns) * SIGMA).to(torch.bfloat16)
        up, down = gauss(f"{name} B", rows, RANK), gauss(f"{name} A", RANK, columns)
        up *= RMS / float((up @ down).square().mean().sqrt())
        if merge == "fp32":
            own = (base.to(torch.float32) + up @ down).to(torch.bfloat16)
        else:
            product = up.to(torch.bfloat16).to(torch.float32) @ down.to(torch.bfloat16).to(torch.float32)
            own = base + product.to(torch.bfloat16)
        found[name] = store(name, own, base)
        say(f"{merge} {name}: {found[name].nbytes / own.numel() / 2:.4f} of the tensor, {found[name].merge}")
        numel, adapter = numel + own.numel(), adapter + RANK * (rows + columns)
    return total(found, 2 * numel, 2 * adapter)


def gauss(name: str, rows: int, columns: int) -> torch.Tensor:
    """Normal numbers, the same everywhere up to the last bit: Box and Muller's, from our own generator."""
    first, second = (random_matrix(stream_key(0, side, name), rows, columns) for side in ("radius", "angle"))
    return torch.sqrt(-2 * torch.log((first + 1) / 2)) * torch.cos(math.pi * second)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("base", "variant", "adapter"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {
        "schema": "mfs.bench.merged_lora/1",
        "machine": machine(),
        "versions": versions(Path(sys.executable), PACKAGES),
    }
    if args.variant:
        result["real"] = real(args.base, args.variant, args.adapter, args.workers)
        say(f"real: {result['real']['over_adapter']:.3f} of the adapter's bytes in {result['real']['wall']} s")
    result["synthetic"] = {merge: synthetic(merge) for merge in ("fp32", "bf16")}
    for merge, table in result["synthetic"].items():
        say(f"{merge}: {100 * table['of_checkpoint']:.2f} % of the checkpoint")
    say(f"wrote {write_result('merged_lora', result).relative_to(RESULTS.parent)}")


if __name__ == "__main__":
    main()
