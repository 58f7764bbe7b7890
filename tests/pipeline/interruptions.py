"""Runs that are stopped or disturbed at a moment of their progress, and what they leave."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Family
from pipeline_runs import Recording, run

from mfs_decompose.source.checkpoint import open_checkpoint

PASS_1, PASS_2 = "pass 1: read and factorise", "pass 2: encode and measure"


class Interrupting(Recording):
    """Does something at the n-th advance of a stage, by default what Ctrl-C does."""

    def __init__(self, stage: str, advance: int = 0, act: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.stage, self.left, self.act = stage, advance, act
        self.thread = threading.current_thread()

    def start(self, stage: str, total_bytes: int | None) -> None:
        super().start(stage, total_bytes)
        if stage == self.stage and self.left == 0:
            self._now()

    def advance(self, nbytes: int) -> None:
        super().advance(nbytes)
        if self.stages[-1] == self.stage and self.left > 0:
            self.left -= 1
            if self.left == 0:
                self._now()

    def _now(self) -> None:
        self.thread = threading.current_thread()
        if self.act is None:
            raise KeyboardInterrupt
        self.act()


def interrupted(out: Path, family: Family, stage: str, advance: int = 0, **changes: Any) -> Interrupting:
    """A run of the family that Ctrl-C ends in a stage."""
    sink = Interrupting(stage, advance)
    with pytest.raises(KeyboardInterrupt):
        run(out, family.base, family.variants, sink=sink, **changes)
    assert not out.exists()
    assert not out.with_name(f"{out.name}.lock").exists()
    return sink


def partial(out: Path) -> Path:
    return out.with_name(f"{out.name}.partial")


def touched(folder: Path) -> None:
    """Give the weights another time."""
    os.utime(next(folder.glob("*.safetensors")), ns=(1, 1))


def rewritten(folder: Path, tensor: str, keep_time: bool) -> None:
    """Change a tensor in place, as a trainer does that saves into the same file."""
    info = open_checkpoint(folder, "x").tensors[tensor]
    status = (folder / info.file).stat()
    with open(folder / info.file, "r+b") as stream:
        stream.seek(info.start + 5)
        stream.write(b"\x31")
    times = (status.st_atime_ns, status.st_mtime_ns if keep_time else status.st_mtime_ns + 10**9)
    os.utime(folder / info.file, ns=times)
