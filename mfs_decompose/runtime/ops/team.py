"""Compiled kernels on the threads that torch has: threads of another pool would wait for the same cores.

torch for Linux runs its loops on OpenMP. The runtime of it that torch itself is linked to is found through torch's own
library; where there is none, a kernel runs on the thread that calls it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

_FEW = 1 << 15
"""Bytes of codes that one thread reads sooner than a second one is woken for."""


class Team(NamedTuple):
    """Addresses of the functions that a kernel asks , 0 for none; `run` calls a kernel on several threads."""

    thread: int
    threads: int
    barrier: int
    run: Callable[[int, int, int, int], None] | None


@cache
def torch_team() -> Team:
    """torch's own threads, none where they are not OpenMP's."""
    for library in sorted((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*")):
        try:
            loaded = ctypes.CDLL(str(library))
            names = ("omp_get_thread_num", "omp_get_num_threads", "GOMP_barrier", "GOMP_parallel")
            thread, threads, barrier, run = (getattr(loaded, name) for name in names)
        except (OSError, AttributeError):
            continue
        run.restype, run.argtypes = None, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        return Team(_address(thread), _address(threads), _address(barrier), run)
    return Team(0, 0, 0, None)


def _address(function: object) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0  # type: ignore[arg-type]


def team_for(nbytes: int) -> int:
    """How many threads a kernel should have that reads so many bytes."""
    return 1 if nbytes < _FEW or torch_team().run is None else torch.get_num_threads()
