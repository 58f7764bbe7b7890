"""Seconds of each stage of a factorisation, its calls of other stages not counted.

Functions are wrapped where they are looked up, products by what they multiply: the product with the random matrix is
the sketch, every other one of a large matrix a power iteration (the last of them is also what the answer is made of).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

STAGES = ("read", "subtract", "norm", "sketch", "power iterations", "orthonormalise", "small SVD", "quantise", "other")
_PRODUCTS = (torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.__matmul__)


class StageClock:
    """Adds up the time of stages, and the time outside of any as `other`."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self._open: list[str] = []
        self._since = 0.0
        self.random: list[torch.Tensor] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self._turn()
        self._open.append(name)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def _turn(self) -> None:
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now

    def wrapped(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **named: Any) -> Any:
            with self.stage(name):
                return function(*args, **named)

        return timed

    def drawn(self, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """`function` makes the random matrix of a sketch."""

        def timed(*args: Any) -> torch.Tensor:
            with self.stage("sketch"):
                self.random = [function(*args)]
                return self.random[0]

        return timed

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time what is done inside; products only in this thread."""
        with self.stage("other"), _Products(self), _wrapping(self):
            yield


class _Products(TorchFunctionMode):
    """Times products of two matrices of which one is not small."""

    LARGE = 1 << 12

    def __init__(self, clock: StageClock) -> None:
        super().__init__()
        self._clock = clock

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inside = self._clock._open[-1]
        if func not in _PRODUCTS or inside != "other" or args[0].dtype != torch.float32:
            return func(*args, **(kwargs or {}))
        random = any(args[1] is matrix for matrix in self._clock.random)
        with self._clock.stage("sketch" if random else "power iterations"):
            return func(*args, **(kwargs or {}))


@contextmanager
def _wrapping(clock: StageClock) -> Iterator[None]:
    """The stages of linalg/, codec/lowrank.py and the reading of weights, until the block ends."""
    from mfs_decompose import base_extraction
    from mfs_decompose.codec import lowrank
    from mfs_decompose.linalg import blocked, svd
    from mfs_decompose.pipeline import reading
    from mfs_decompose.source.checkpoint import TensorReader

    places: list[tuple[Any, str, str]] = [
        (TensorReader, "raw", "read"),
        *((module, "delta_rows", "subtract") for module in (base_extraction, reading)),
        (lowrank, "_fit", "quantise"),
        *((module, "squared_norm", "norm") for module in (svd, blocked)),
        *((module, "orthonormalise", "orthonormalise") for module in (svd, blocked)),
        *((module, "from_range", "small SVD") for module in (svd, blocked)),
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in places]
    sketches: list[tuple[Any, str]] = [(svd, "random_matrix"), (blocked, "random_matrix")]
    before += [(module, name, getattr(module, name)) for module, name in sketches]
    try:
        for module, name, stage in places:
            setattr(module, name, clock.wrapped(stage, getattr(module, name)))
        for module, name in sketches:
            setattr(module, name, clock.drawn(getattr(module, name)))
        yield
    finally:
        for module, name, function in before:
            setattr(module, name, function)
