"""Where factorisations run: on the CPU, or on a device that works on one batch while the next one is copied to it.

Several threads read and subtract; each brings its batch to the device as soon as there is a slot, then waits for its
turn. A batch that does not fit is halved, down to one matrix, and a matrix that does not fit by itself is left to the
CPU. As the matrices of a batch have nothing to do with each other (see svd.py), halving changes no bit of them. The
CPU does: it is the last resort, and counted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import TypeVar

import torch

from mfs_decompose.linalg.blocked import Blocks
from mfs_decompose.linalg.transfer import Arriving, CudaTransfer, Transfer, is_out_of_memory

R = TypeVar("R")
Fit = Callable[[torch.Tensor, Sequence[int]], Sequence[R]]
"""Works on a batch [B, M, N], wherever it lies, under B keys: B answers."""
FitBlocks = Callable[[Blocks, str], R]
"""Works on one matrix in row blocks, on the device named."""

_SLOTS = 2  # one batch worked on, one on its way


class Lane:
    """A device's turn-taking, for all threads of the process; `transfer` is None where memory is the host's."""

    def __init__(self, device: str, transfer: Transfer | None) -> None:
        self.device = device
        self.halvings = 0
        self.left_to_cpu = 0
        self._transfer = transfer
        self._slots = threading.BoundedSemaphore(_SLOTS)
        self._turn = threading.Lock()
        self._early = _Early()

    def fit(self, batch_BMN: torch.Tensor, keys: Sequence[int], work: Fit[R]) -> list[R]:
        """Let `work` have a host batch on the device, whole or in halves."""
        if self._transfer is None:
            return list(work(batch_BMN, keys))
        with self._slots:
            early = self._early.send(self._transfer, [batch_BMN])
            with self._turn:
                return self._halving(self._transfer, batch_BMN, keys, work, early)

    def fit_blocks(self, read: Blocks, work: FitBlocks[R]) -> R:
        """Let `work` have the row blocks of one matrix on the device: kept there from the first reading on, or, where
        there is no room for all of them, brought again for each."""
        if self._transfer is None:
            return work(read, self.device)
        with self._slots:
            early = self._early.send(self._transfer, (block for _, block in read()))
            with self._turn:
                ...
