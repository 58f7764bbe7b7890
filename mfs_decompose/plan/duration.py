"""How long a run will take: the plan's counted work, times rates of one machine, scaled by how fast this one hashes.

It is an estimate, and called one wherever it is shown. The rates are those of one thread on the machine of
`benchmarks/results` (see `benchmarks/calibrate_duration.py`, which prints them anew); on machines whose matrix products
are faster beside their hashing, runs take less.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass

from mfs_decompose.linalg.shapes import POWER_ITERATIONS, sketch_width, uses_gram
from mfs_decompose.plan.mixes import SAMPLED
from mfs_decompose.plan.model import Item, Plan

_PROBE_BYTES = 1 << 23
REFERENCE_HASHING = 1.95e9
"""Bytes a second of sha256 on the machine of the rates."""

SECONDS_PER = {
    "copied": 1.0e-9,
    "elements": 1.83e-8,
    "fp32": 4.66e-11,
    "fp64": 4.05e-11,
    "sorted": 2.84e-8,
    "coded": 1.38e-8,
    "surveyed": 2.5e-7,
    "sized": 5.0e-8,
    "peeled": 9.0e-7,
    "corrected": 3.5e-7,
}
"""One thread: bytes of the base brought in; elements read, compared, digested, decoded and rounded; multiplications
of fp32 and fp64 products; elements sorted by `sparse`; bytes coded by `lossless`; of open tensors, elements sampled to
see how rests would be coded, and elements coded, once to be written and SIZED times to be counted; elements peeled for
`lora-exact`, and those whose bits are corrected. Runs of a 135M model were fitted, which had no peeled and no corrected
tensors (benchmarks/results/calibrate_duration.json). Copying was lost in it, and has the rate of its stage."""


SIZED = 2


@dataclass(frozen=True)
class Duration:
    """An estimate in seconds, and the probe it was scaled by: bytes a second that this machine hashes now."""

    seconds: float
    hashing: float


def count_work(plan: Plan, base_bytes: int) -> dict[str, float]:
    """The work of both passes, in the units of `SECONDS_PER`."""
    work = dict.fromkeys(SECONDS_PER, 0.0)
    work["copied"] = float(base_bytes)
    for item in plan.items():
        work["elements"] += item.spec.numel
        if item.auto:
            work["surveyed"] += min(item.spec.numel, SAMPLED)
            work["sized"] += (1 + SIZED) * item.spec.numel
        if item.keep_exact:
            work["corrected"] += item.spec.numel
        if item.codec == "lossless":
            work["coded"] += item.spec.nbytes
        elif item.codec == "sparse":
            work["sorted"] += item.spec.numel
        elif item.codec == "lora-exact":
            work["peeled"] += item.spec.numel
        elif item.codec in ("lowrank", "banded"):
            _count_lowrank(item, work)
    return work


def estimate_duration(plan: Plan, base_bytes: int, threads: int) -> Duration:
    """Estimate a run of the plan with `threads` units side by side; takes about 20 ms of hashing."""
    hashing = _probe()
    seconds = sum(SECONDS_PER[kind] * amount for kind, amount in count_work(plan, base_bytes).items())
    return Duration(seconds * REFERENCE_HASHING / hashing / max(1, min(threads, len(plan.units))), hashing)


def _count_lowrank(item: Item, work: dict[str, float]) -> None:
    assert item.matrix is not None
    long, short = max(item.matrix), min(item.matrix)
    width, count = sketch_width(item.steps, short), float(item.matrices)
    if uses_gram(item.steps, short):
        work["fp64"] += count * (long * short**2 + 5.0 * short**3)  # the product, and its eigenvectors
    else:
        work["fp32"] += count * (2 * POWER_ITERATIONS + 1) * long * short * width
        work["fp64"] += count * (4.0 * POWER_ITERATIONS * short * width**2 + 5.0 * width**3)
    # Allocation takes about half of what was fitted, see plan/build.py.
    work["fp64"] += count * long * short * (item.steps if item.fixed else item.steps / 2)


def _probe() -> float:
    """Bytes a second of sha256, the best of three short turns."""
    data = bytes(_PROBE_BYTES)
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        hashlib.sha256(data).digest()
        best = min(best, time.perf_counter() - started)
    return _PROBE_BYTES / best
