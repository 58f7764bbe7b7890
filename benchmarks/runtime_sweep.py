"""What serving many variants costs by rank and by codec: decode steps of mixed batches over those of base rows only.

    python benchmarks/runtime_sweep.py --work DIR
    python benchmarks/runtime_sweep.py --work DIR --layers 2 --vocabulary 2000 --variants 2 --ranks 8   # to try

A family of the shape of SmolLM2-135M is made (random weights, deltas of rank 8 and rounding noise), decomposed at each
rank with all variants and under each codec with four of them, and measured by `mfs bench runtime` with a batch of base
rows, of one variant, of two, up to all mixed. What a step costs depends on shapes, ranks and codecs, not on values.
DIR needs about (variants + 3) times 0.33 GB; what is written there is removed again. Writes results/runtime_sweep.json
after every cell; a second call goes on where the first one stopped.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from measure import RESULTS, machine, mfs, say, versions
from synthetic_family import Size, write_family

RANKS = (8, 16, 32, 64, 128, 256)
CODECS: Mapping[str, Sequence[str]] = {
    "auto 5%": ["--codec", "auto", "--budget", "5%"],
    "auto 10%": ["--codec", "auto", "--budget", "10%"],
    "lowrank int8 16": ["--rank", "16", "--set", "deltas.default.factors=int8"],
    "lowrank bf16 16": ["--rank", "16", "--set", "deltas.default.factors=bf16"],
    "banded 5%": ["--codec", "lowrank", "--budget", "5%", "--set", "deltas.default.factors=banded"],
    "sparse 2%": ["--codec", "sparse", "--set", "objective.density=2%"],
    "sign": ["--codec", "sign"],
    "ternary": ["--codec", "ternary"],
    "kbit 4": ["--codec", "kbit", "--set", "deltas.default.bits=4"],
    "deadzone": ["--codec", "deadzone", "--set", "deltas.default.step=2e-4"],
}
FEW = 4  # variants under each codec
PACKAGES = ("mfs-decompose", "torch", "transformers", "safetensors")


def measure(args: argparse.Namespace, how: Sequence[str], variants: int) -> dict[str, Any]:
    """One cell: bytes by part, and seconds of a decode step by the number of distinct variants in the batch."""
    family, artifact = args.work / "family", args.work / "artifact"
    shutil.rmtree(artifact, ignore_errors=True)
    named = [f"v{number}={family / f'v{number}'}" for number in range(1, variants + 1)]
    given = ["--base", family / "base", "--variants", *named, "--out", artifact, "--base-store", "reference"]
    mfs("decompose", *given, *how, "--threads", args.threads)
    asked = ["--rows", args.rows, "--rounds", args.rounds, "--threads", args.threads, "--no-peers"]
    found = json.loads(mfs("bench", "runtime", artifact, "--base", family / "base", *asked, "--json"))
    return {key: found[key] for key in ("memory", "mixed", "single", "cap", "settings")}


def cells(args: argparse.Namespace) -> dict[str, tuple[Sequence[str], int]]:
    """How each cell is decomposed, and of how many variants."""
    ranks = {f"lowrank int4 {rank}": (["--rank", str(rank)], args.variants) for rank in args.ranks}
    codecs = {name: (how, min(FEW, args.variants)) for name, how in CODECS.items() if name in args.codecs}
    return {**ranks, **codecs}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=RESULTS / "runtime_sweep.json")
    parser.add_argument("--variants", type=int, default=16)
    parser.add_argument("--ranks", type=int, nargs="*", default=list(RANKS))
    parser.add_argument("--codecs", nargs="*", default=list(CODECS), choices=list(CODECS))
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args(argv)
    size = Size(576, 1536, args.layers, args.vocabulary, 9, 3)
    done: dict[str, Any] = json.loads(args.out.read_text())["cells"] if args.out.exists() else {}
    left = {name: cell for name, cell in cells(args).items() if name not in done}
    if not left:
        say("everything is measured already")
        return
    shutil.rmtree(args.work / "family", ignore_errors=True)
    write_family(args.work / "family", size, args.variants, 1 << 30)
    for name, (how, variants) in left.items():
        done[name] = measure(args, how, variants)
        step = done[name]["mixed"][-1]["overhead"]
        say(f"{name}: {variants} variants mixed take {step:.2f} times a step of base rows")
        result = {
            "machine": machine(),
            "versions": versions(Path(sys.executable), PACKAGES),
            "shape": size.config(),
            "cells": done,
        }
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    for folder in ("family", "artifact"):
        shutil.rmtree(args.work / folder, ignore_errors=True)


if __name__ == "__main__":
    main()
