"""Memory and time of `mfs decompose` on a large sharded family, made for the purpose.

    python benchmarks/sharded_memory.py --work DIR [--max-ram 1.5GB] [--variants 3]
    python benchmarks/sharded_memory.py --work DIR --hidden 1024 --vocabulary 12000 --layers 8   # a tenth, to try

The default is 3 GB a checkpoint: hidden 2048, 16 layers, vocabulary 128,256, untied. It is decomposed at a quarter,
half and all of its layers. A sampler reads the anonymous memory of the whole process tree 20 times a second
(RssAnon, and once a second the exact count of smaps_rollup); file pages of mapped inputs are the kernel's to drop and
do not count. Times are of whole processes, start-up included. DIR needs about (variants + 2.5) times 3 GB; what is
written there is removed again. Writes results/sharded_memory.json; `--name` gives the file another name.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from measure import RESULTS, folder_bytes, machine, say, versions, watch, write_result
from synthetic_family import Size, write_family

from mfs_decompose.units import format_bytes, parse_bytes

PACKAGES = ("mfs_decompose", "torch", "safetensors", "numpy")


def size_of(args: argparse.Namespace, fraction: float) -> Size:
    layers = max(1, round(args.layers * fraction))
    return Size(args.hidden, args.intermediate or 4 * args.hidden, layers, args.vocabulary, args.heads, args.kv_heads)


def measure_one(args: argparse.Namespace, size: Size) -> dict[str, Any]:
    """Make the family, decompose it once under watch, and clear up."""
    family, artifact = args.work / "family", args.work / "artifact"
    for folder in (family, artifact):
        shutil.rmtree(folder, ignore_errors=True)
    tensor_bytes = write_family(family, size, args.variants, parse_bytes(args.shard_size))
    say(f"{size.layers} layers: {args.variants + 1} checkpoints of {format_bytes(tensor_bytes)}")
    command = [str(Path(sys.executable).with_name("mfs")), "decompose", "--base", str(family / "base"), "--variants"]
    command += [f"v{number}={family / f'v{number}'}" for number in range(1, args.variants + 1)]
    command += ["--max-ram", args.max_ram, "--progress", "none", "--out", str(artifact), *args.extra]
    run = watch(command)
    if run.exit_code != 0:
        raise RuntimeError(f"mfs decompose ended with {run.exit_code}:\n{run.log[-2000:]}")
    read = tensor_bytes * (args.variants + 1)
    stages = json.loads((artifact / "run.json").read_text())["stages"]
    result = {
        "layers": size.layers,
        "checkpoint_bytes": tensor_bytes,
        "family_bytes": read,
        "artifact_bytes": folder_bytes(artifact),
        "wall": run.wall,
        "seconds_per_gb": run.wall / read * 1e9,
        "stages": stages,
        "peak_anonymous": run.memory.anonymous,
        "peak_anonymous_exact": run.memory.anonymous_exact,
        "peak_shared": run.memory.shared,
        "peak_resident": run.memory.resident,
        "samples": run.memory.samples,
    }
    say(f"{run.wall:.1f} s, {result['seconds_per_gb']:.2f} s a GB, {format_bytes(run.memory.anonymous)} anonymous")
    if not args.keep:
        shutil.rmtree(family)
        shutil.rmtree(artifact)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="a folder on a disk with room")
    parser.add_argument("--max-ram", default="1.5GB")
    parser.add_argument("--variants", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, help="default: four times --hidden")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--shard-size", default="500MB")
    parser.add_argument("--fractions", type=float, nargs="+", default=[0.25, 0.5, 1.0])
    parser.add_argument("--name", default="sharded_memory")
    parser.add_argument("--keep", action="store_true", help="leave the last family and artifact in --work")
    parser.add_argument("extra", nargs="*", help="after --: more options for mfs decompose")
    args = parser.parse_args()
    limit = parse_bytes(args.max_ram)
    facts = {"machine": machine(), "versions": versions(Path(sys.executable), PACKAGES)}
    runs = [measure_one(args, size_of(args, fraction)) for fraction in args.fractions]
    rates = [run["seconds_per_gb"] for run in runs]
    result = {
        "schema": "mfs.bench.sharded_memory/1",
        **facts,
        "variants": args.variants,
        "max_ram": limit,
        "under_limit": max(max(run["peak_anonymous"], run["peak_anonymous_exact"]) for run in runs) <= limit,
        "slowest_rate_over_fastest": max(rates) / min(rates),
        "runs": runs,
    }
    say(f"wrote {write_result(args.name, result).relative_to(RESULTS.parent)}")


if __name__ == "__main__":
    main()
