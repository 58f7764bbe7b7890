"""The rates of mfs_decompose/plan/duration.py, fitted on this machine.

    python benchmarks/calibrate_duration.py BASE VARIANT

Decomposes one variant at one thread in several ways (ranks, a budget, sparse, lossless), each in a process of its own
on a quiet machine, and fits non-negative rates to the sums of the stages in run.json. Prints the rates and, run by run,
the seconds measured beside those the fit gives. Writes results/calibrate_duration.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from measure import RESULTS, machine, say, versions, write_result
from scipy.optimize import nnls

from mfs_decompose.pipeline.prepare import prepare
from mfs_decompose.pipeline.request import DecomposeRequest
from mfs_decompose.plan.duration import SECONDS_PER, _probe, count_work
from mfs_decompose.recipe.load import load_recipe

WAYS: dict[str, dict[str, object]] = {
    "rank 8": {"objective.rank": 8},
    "rank 16": {"objective.rank": 16},
    "rank 64": {"objective.rank": 64},
    "budget 2%": {"objective.budget": "2%"},
    "budget 5%": {"objective.budget": "5%"},
    "banded 5%": {"objective.budget": "5%", "deltas.default": {"codec": "lowrank", "factors": "banded"}},
    "sparse 2%": {"deltas.default.codec": "sparse", "objective.density": "2%"},
    "lossless": {"deltas.default.codec": "lossless"},
    "raw": {"deltas.default.codec": "raw"},
    "rank 16, reference": {"objective.rank": 16, "base.store": "reference"},
}


def run(base: str, variant: str, changes: dict[str, object]) -> tuple[dict[str, float], float]:
    """The counted work of one way, and the seconds it took."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "art"
        request = DecomposeRequest({"v": variant}, out, load_recipe(None, changes), base)
        prepared = prepare(request)
        words = [sys.executable, "-m", "mfs_decompose", "decompose", "--base", base, "--variants", f"v={variant}"]
        words += ["--out", str(out), "--threads", "1", "--progress", "none", "-q"]
        for key, value in changes.items():
            words += ["--set", f"{key}={value}"]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        stages = json.loads((out / "run.json").read_text())["stages"]
    return count_work(prepared.plan, prepared.estimate.base_bytes), sum(stages.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base")
    parser.add_argument("variant")
    args = parser.parse_args()
    found: list[tuple[str, dict[str, float], float]] = []
    for name, changes in WAYS.items():
        work, seconds = run(args.base, args.variant, changes)
        found.append((name, work, seconds))
        say(f"{name}: {seconds:.2f} s")
    kinds = list(SECONDS_PER)
    amounts = np.array([[work[kind] for kind in kinds] for _, work, _ in found])
    measured = np.array([seconds for _, _, seconds in found])
    # Relative residuals: a run of a second counts as much as one of a minute.
    scale = amounts.max(axis=0)
    rates = nnls(amounts / scale / measured[:, None], np.ones(len(measured)))[0] / scale
    runs: list[dict[str, Any]] = [
        {"way": name, "seconds": seconds, "fitted": float(row @ rates)}
        for (name, _, seconds), row in zip(found, amounts, strict=True)
    ]
    for one in runs:
        say(f"{one['way']}: {one['seconds']:.2f} s measured, {one['fitted']:.2f} s fitted")
    document = {
        "schema": "mfs.bench.calibrate_duration/1",
        "machine": machine(),
        "versions": versions(Path(sys.executable), ("mfs_decompose", "torch", "numpy")),
        "hashing": _probe(),
        "rates": dict(zip(kinds, map(float, rates), strict=True)),
        "runs": runs,
    }
    say(json.dumps(document["rates"]))
    say(f"wrote {write_result('calibrate_duration', document).relative_to(RESULTS.parent)}")


if __name__ == "__main__":
    main()
