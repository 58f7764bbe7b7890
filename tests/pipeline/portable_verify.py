"""`python portable_verify.py ARTIFACT...`: verify artifacts in whatever environment this runs in.

Prints, as JSON, the threads and vector instructions there are, and the tensors that do not decode to what was recorded,
by artifact: `honest`, and `planted` with products rounded to fp32, which is the least that a decode in fp32 would do.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from mfs_decompose.artifact.verify import verify
from mfs_decompose.codec import banded, lowrank
from mfs_decompose.linalg.fixed_point import FixedFactors


@contextmanager
def planted_fp32_decode() -> Iterator[None]:
    owners = (lowrank._Product, banded._Product, FixedFactors)
    honest = [owner.rows for owner in owners]

    def rounded(at: int):  # type: ignore[no-untyped-def]
        return lambda self, start, stop: honest[at](self, start, stop).to(torch.float32).to(torch.float64)

    for at, owner in enumerate(owners):
        owner.rows = rounded(at)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for owner, rows in zip(owners, honest, strict=True):
            owner.rows = rows  # type: ignore[method-assign, assignment]


def wrong(artifact: Path) -> list[str]:
    return [f"{problem.tensor}: {problem.what}" for problem in verify(artifact, "values").problems]


def main(artifacts: list[str]) -> None:
    about = {"threads": torch.get_num_threads(), "capability": torch.backends.cpu.get_cpu_capability()}
    honest = {name: wrong(Path(name)) for name in artifacts}
    with planted_fp32_decode():
        planted = {name: wrong(Path(name)) for name in artifacts}
    json.dump({**about, "honest": honest, "planted": planted}, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
