"""Reading what an attacker made, in bounded time and memory, and what may come of it."""

from __future__ import annotations

import hashlib
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

from mfs_decompose.artifact.reader import Family
from mfs_decompose.artifact.values import open_tensor, row_bytes
from mfs_decompose.errors import ArtifactInvalid

Outcome = Literal["refused", "mismatch", "same"]

SECONDS = 20
MEMORY = 400_000_000
"""Beyond what the process has already; artifacts of these tests are below 200 kB."""


class TooSlow(BaseException):
    """Not an Exception, so that nothing that forgives a decoder its errors forgives this one."""


@contextmanager
def limits(seconds: float = SECONDS, memory: int = MEMORY) -> Iterator[None]:
    """Raise TooSlow after some seconds; fail allocations above so many bytes more than there are."""

    def stop(number: int, frame: object) -> None:
        raise TooSlow(f"took more than {seconds} s")

    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + memory, before[1]))
    handler = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


def read_tensor(artifact: Path, id: str, name: str, recorded: str) -> Outcome:
    """Read a tensor in every way there is. Whatever is raised beside ArtifactInvalid goes through."""
    try:
        with Family.open(artifact) as family:
            stored = open_tensor(family, id, name)
            digest = hashlib.sha256()
            for start, stop in stored.blocks():
                digest.update(row_bytes(stored.restored(start, stop)))
                stored.served(start, stop)
                stored.restored(start, stop, torch.float32)
    except ArtifactInvalid:
        return "refused"
    return "same" if digest.hexdigest() == recorded else "mismatch"


def read_whole(artifact: Path, id: str) -> dict[str, Any]:
    """Every tensor of a variant, restored."""
    with Family.open(artifact) as family:
        names = family.variant(id).tensors
        return {
            name: [row_bytes(stored.restored(*block)).tobytes() for block in stored.blocks()]
            for name in names
            for stored in [open_tensor(family, id, name)]
        }
