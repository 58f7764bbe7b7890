"""Run units of work over threads, within a limit of memory, until done or told to stop.

Factorisations give other bits with other numbers of threads, so every unit runs its tensor operations at one thread and
units run side by side.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Protocol, TypeVar

from mfs_decompose.pipeline.allocator import keep_freed_memory


class Work(Protocol):
    """Anything that says how much memory it will need."""

    @property
    def peak_bytes(self) -> int:
        """Anonymous memory while it is worked on, at most."""


U = TypeVar("U", bound=Work)
R = TypeVar("R")


class StoppedError(Exception):
    """Raised inside a unit when the run is being stopped."""


class Stop:
    """A flag that units look at between two tensors."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        self._event.set()

    def check(self) -> None:
        """Leave the unit if the run is being stopped."""
        if self._event.is_set():
            raise StoppedError


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """One thread for each tensor operation inside the block; what was set before afterwards."""
    import torch

    keep_freed_memory()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run_units(
    units: Sequence[U],
    work: Callable[[U, Stop], R],
    done: Callable[[U, R], None],
    threads: int,
    memory: int,
) -> None:
    """Do `work` on every unit, at most `threads` at a time and within `memory` bytes by their estimates.

    `done` is called in this thread as units finish, in any order. When a unit fails or this thread is interrupted, the
    others stop at their next tensor, and the error is raised.
    """
    stop = Stop()
    waiting = list(units)
    running: dict[Future[R], U] = {}
    with ThreadPoolExecutor(max_workers=threads, initializer=_single) as pool:
        try:
            while waiting or running:
                _start(waiting, running, pool, work, stop, threads, memory)
                # A timeout, because a wait without one cannot be interrupted.
                finished, _ = wait(running, timeout=0.5, return_when=FIRST_COMPLETED)
                for future in finished:
                    done(running.pop(future), future.result())
        except BaseException:
            stop.set()
            raise


def _single() -> None:
    import torch

    torch.set_num_threads(1)


def _start(
    waiting: list[U],
    running: dict[Future[R], U],
    pool: ThreadPoolExecutor,
    work: Callable[[U, Stop], R],
    stop: Stop,
    threads: int,
    memory: int,
) -> None:
    used = sum(unit.peak_bytes for unit in running.values())
    for unit in list(waiting):
        if len(running) >= threads:
            return
        if running and used + unit.peak_bytes > memory:
            continue  # a smaller one may fit beside the large ones
        waiting.remove(unit)
        running[pool.submit(work, unit, stop)] = unit
        used += unit.peak_bytes
