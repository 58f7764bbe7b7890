"""A device of small memory, made of the host's: it raises torch.OutOfMemoryError as a full GPU does."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator

import torch

from mfs_decompose.linalg.transfer import Arriving


class FakeDevice:
    """Holds at most `capacity` elements that were sent to it; what is no longer referred to is free again.

    `sizes` are the elements of each copy, `most` the largest amount there ever was.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.used, self.most = capacity, 0, 0
        self.releases = 0
        self.sizes: list[int] = []
        self._lock = threading.Lock()

    def send(self, values: torch.Tensor) -> Arriving:
        count = values.numel()
        with self._lock:
            if self.used + count > self.capacity:
                raise torch.OutOfMemoryError(f"planted: {self.used} + {count} of {self.capacity}")
            self.used += count
            self.most = max(self.most, self.used)
            self.sizes.append(count)
        there = values.clone()
        weakref.finalize(there.untyped_storage(), self._free, count)
        return _There(there)

    def release(self) -> None:
        self.releases += 1

    def _free(self, count: int) -> None:
        with self._lock:
            self.used -= count


class _There:
    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def take(self) -> torch.Tensor:
        return self._values


class Blocks:
    """Reads a matrix in row blocks, and counts how often each is read."""

    def __init__(self, matrix: torch.Tensor, step: int) -> None:
        self.matrix, self.step, self.reads = matrix, step, 0

    def __call__(self) -> Iterator[tuple[int, torch.Tensor]]:
        for start in range(0, self.matrix.shape[0], self.step):
            self.reads += 1
            yield start, self.matrix[start : start + self.step]
