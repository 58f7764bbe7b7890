"""What only a GPU can show: factorisations on CUDA against the CPU and against torch's own, memory, and copies.

    benchmarks/gpu_check.sh                               # finds a Python with CUDA, under 6 minutes on an H200
    python benchmarks/gpu_check.py --toy --device cpu     # the same code in seconds, on a device of pretended memory

bits       a matrix has the same bits alone, in halves and in a batch, whatever precision the process has asked for
svd        `truncated_svd` against `torch.linalg.svd` on the same device: time, and residual over the least
memory     a batch and a matrix in row blocks under a limit of memory: halved, brought in passes, the same bits
buffering  batches copied while others are factorised, against one after the other
family     `mfs decompose` of 4096-wide bf16 layers, two variants, on the device and on the CPU: recorded errors

Writes results/gpu_check.json (or --out) after every part; ends with 0 where every check passed, else with 1.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_parts import Device, Part, bits, buffering, memory, svd_speed
from measure import RESULTS, machine, say, versions
from synthetic_family import Size, write_family

PACKAGES = ("mfs_decompose", "torch", "numpy", "safetensors", "triton")
ERRORS = 1e-4


@dataclass(frozen=True)
class Sizes:
    """`matrix` is of the batches, `large` goes in row blocks; `count` matrices in a batch, `batches` of them."""

    matrix: tuple[int, int]
    large: tuple[int, int]
    rank: int
    count: int
    batches: int
    family: Size


FULL = Sizes((4096, 4096), (14336, 4096), 16, 6, 16, Size(4096, 14336, 2, 4096, 32, 8))
TOY = Sizes((131, 83), (403, 83), 4, 6, 5, Size(64, 112, 2, 70, 4, 2))


def family(sizes: Sizes, device: Device, work: Path) -> Part:
    """Decompose on the device and on the CPU; errors are compared tensor by tensor."""
    part = Part()
    try:
        from mfs_decompose.pipeline.decompose import decompose
        from mfs_decompose.pipeline.request import DecomposeRequest
        from mfs_decompose.recipe.load import load_recipe
    except ImportError as error:
        part.check("the packages of mfs_decompose are there", str(error), None, False)
        return part
    write_family(work / "family", sizes.family, 2, 1 << 30)
    recipe = load_recipe(None, {"objective.rank": sizes.rank, "base.store": "reference"})
    variants = {id: str(work / "family" / id) for id in ("v1", "v2")}
    errors: list[dict[str, float]] = []
    for where in (device.name, "cpu"):
        out = work / f"on-{len(errors)}"
        begun = time.perf_counter()
        report = decompose(DecomposeRequest(variants, out, recipe, str(work / "family" / "base"), device=where))
        part.figures[f"seconds {len(errors)} {where}"] = time.perf_counter() - begun
        part.figures[f"stages {len(errors)} {where}"] = report.stages
        errors.append(recorded_errors(out))
    worst = max(abs(error / errors[1][key] - 1) for key, error in errors[0].items())
    both = errors[0].keys() == errors[1].keys()
    part.check("the same tensors are lossy on both", len(errors[0]), len(errors[1]), both)
    part.check("recorded errors differ by", worst, ERRORS, worst <= ERRORS)
    return part


def recorded_errors(artifact: Path) -> dict[str, float]:
    """The error of every lossy tensor of every variant, unsquared."""
    manifest = json.loads((artifact / "manifest.json").read_bytes())
    return {
        f"{variant['id']} {name}": tensor["error"] ** 0.5
        for variant in manifest["variants"]
        for name, tensor in variant["tensors"].items()
        if not tensor["exact"]
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--toy", action="store_true", help="small matrices")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_check.json")
    args = parser.parse_args(argv)
    if args.device != "cpu" and not torch.cuda.is_available():
        say(f"expected a CUDA device for --device {args.device}, found none; try --toy --device cpu")
        return 2
    device, sizes = Device(args.device), TOY if args.toy else FULL
    result: dict[str, Any] = {
        "schema": "mfs.bench.gpu_check/1",
        "machine": machine() | {"device": device.describe()},
        "versions": versions(Path(sys.executable), PACKAGES) | {"cuda": torch.version.cuda},
        "toy": args.toy,
        "parts": {},
    }
    with tempfile.TemporaryDirectory() as work:
        parts: dict[str, Callable[[], Part]] = {
            "bits": lambda: bits(device, sizes.matrix, sizes.count, sizes.rank),
            "svd": lambda: svd_speed(device, (sizes.matrix, sizes.large), sizes.rank, timed=not args.toy),
            "memory": lambda: memory(device, sizes.matrix, sizes.large, sizes.count, sizes.rank),
            "buffering": lambda: buffering(device, sizes.matrix, sizes.batches, sizes.rank, timed=not args.toy),
            "family": lambda: family(sizes, device, Path(work)),
        }
        for name, run in parts.items():
            begun = time.perf_counter()
            part = run()
            result["parts"][name] = part.to_json() | {"seconds": time.perf_counter() - begun}
            result["passed"] = len(result["parts"]) == len(parts) and all(p["passed"] for p in result["parts"].values())
            args.out.parent.mkdir(exist_ok=True)
            args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
            say(f"{name} ({result['parts'][name]['seconds']:.1f} s)")
            for check in part.checks:
                say(f"  {'ok  ' if check['passed'] else 'FAIL'} {check['what']}: {check['value']}")
    say(f"wrote {args.out.name}")
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
