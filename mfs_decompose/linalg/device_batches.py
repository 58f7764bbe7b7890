"""Where factorisations run: on the CPU, or on a device that works on one batch while the next one is copied to it.

Several threads read and subtract; each sends its batch to the device as soon as there is a slot, then waits for its
turn. A batch that does not fit is halved, down to one matrix, and a matrix that does not fit by itself is left to the
CPU. As the matrices of a batch have nothing to do with each other (see svd.py), halving changes no bit of them. The
CPU does: it is the last resort, and counted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

import torch

from mfs_decompose.linalg.blocked import Blocks
from mfs_decompose.linalg.transfer import Arriving, CudaTransfer, Transfer, is_out_of_memory

R = TypeVar("R")
Fit = Callable[[torch.Tensor, Sequence[int]], Sequence[R]]
"""Works on a batch [B, M, N], wherever it lies, under B keys: B answers."""
FitBlocks = Callable[[Blocks, str], R]
"""Works on one matrix in row blocks, which lie on the device named."""
_Sent = list[tuple[int, Arriving]]
_Read = Callable[[], Iterable[tuple[int, torch.Tensor]]]

_SLOTS = 2  # one batch worked on, one on its way


class Lane:
    """Turns on a device, for all threads of the process; `transfer` is None where its memory is the host's.

    `halvings` counts batches that were cut in two, `left_to_cpu` matrices that did not fit even alone.
    """

    def __init__(self, device: str, transfer: Transfer | None) -> None:
        self.device = device
        self.halvings = 0
        self.left_to_cpu = 0
        self._transfer = transfer
        self._slots = threading.BoundedSemaphore(_SLOTS)
        self._turn = threading.Lock()
        self._early = _Early()

    def fit(self, batch_BMN: torch.Tensor, keys: Sequence[int], work: Fit[R]) -> list[R]:
        """Let `work` have a host batch on the device, whole or in parts."""
        if self._transfer is None:
            return list(work(batch_BMN, keys))
        with self._visit(self._transfer, lambda: [(0, batch_BMN)]) as ticket:
            return self._fit_parts(self._transfer, batch_BMN, keys, work, ticket)

    def fit_blocks(self, read: Blocks, work: FitBlocks[R]) -> R:
        """Let `work` have the row blocks of one matrix on the device.

        All of them stay there; where there is no room for that, they are brought anew for each pass.
        """
        transfer, device = self._transfer, self.device
        if transfer is None:
            return work(read, device)
        with self._visit(transfer, read) as ticket:

            def resident() -> R:
                blocks = ticket.claim() or list(_send_all(transfer, read()))
                return work(lambda: ((first, block.take()) for first, block in blocks), device)

            def streamed() -> R:
                return work(lambda: _ahead(transfer, read), device)

            found = self._unless_full(transfer, resident) or self._unless_full(transfer, streamed)
            if found:
                return found[0]
            self.left_to_cpu += 1
        return work(read, "cpu")

    def take_left_to_cpu(self) -> int:
        """`left_to_cpu`, counted from 0 again."""
        left, self.left_to_cpu = self.left_to_cpu, 0
        return left

    def _fit_parts(
        self, transfer: Transfer, batch_BMN: torch.Tensor, keys: Sequence[int], work: Fit[R], ticket: _Ticket
    ) -> list[R]:
        def whole() -> Sequence[R]:
            sent = ticket.claim() or [(0, transfer.send(batch_BMN))]
            return work(sent[0][1].take(), keys)

        found = self._unless_full(transfer, whole)
        if found:
            return list(found[0])
        if len(keys) == 1:
            self.left_to_cpu += 1
            return list(work(batch_BMN, keys))
        self.halvings += 1
        middle = len(keys) // 2
        parts = (slice(None, middle), slice(middle, None))
        return [one for part in parts for one in self._fit_parts(transfer, batch_BMN[part], keys[part], work, ticket)]

    def _unless_full(self, transfer: Transfer, call: Callable[[], R]) -> list[R]:
        """What the call gives, in a list; an empty one where the device has no room for it, even alone."""
        for _ in range(2):
            try:
                return [call()]
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
            # Here and not above: until the error is gone, its traceback holds the tensors of the call.
            crowded = self._early.give_up()
            transfer.release()
            if not crowded:
                break
        return []

    @contextmanager
    def _visit(self, transfer: Transfer, read: _Read) -> Iterator[_Ticket]:
        """A turn on the device; what `read` gives is sent there while another has its turn."""
        with self._slots, self._early.send(transfer, read) as ticket, self._turn:
            yield ticket


class _Ticket:
    """What was sent early for one visit."""

    def __init__(self) -> None:
        self.sent: _Sent = []
        self.complete = False

    def drop(self) -> bool:
        """Let go of it; whether there was anything."""
        had = bool(self.sent)
        self.sent, self.complete = [], False
        return had

    def claim(self) -> _Sent | None:
        """Take it, if it is complete: the taker alone decides how long it stays in memory."""
        sent = self.sent if self.complete else None
        self.drop()
        return sent


class _Early:
    """What lies on a device before its turn. Once the device has been full, nothing does any more."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._tickets: list[_Ticket] = []
        self._allowed = True
        self._made_way = False

    @contextmanager
    def send(self, transfer: Transfer, read: _Read) -> Iterator[_Ticket]:
        ticket = _Ticket()
        with self._mutex:
            self._tickets.append(ticket)
        try:
            self._fill(ticket, transfer, read)
            yield ticket
        finally:
            with self._mutex:
                self._tickets.remove(ticket)

    def _fill(self, ticket: _Ticket, transfer: Transfer, read: _Read) -> None:
        if not self._allowed:
            return
        try:
            for first, values in read():
                with self._mutex:
                    if not self._allowed:
                        return
                    ticket.sent.append((first, transfer.send(values)))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            with self._mutex:  # not beside the other one, which it may have crowded; its turn will come
                self._made_way |= ticket.drop()
            return
        with self._mutex:
            ticket.complete = self._allowed

    def give_up(self) -> bool:
        """Drop what was sent early, for good; whether there was anything, now or until it made way by itself."""
        with self._mutex:
            self._allowed = False
            dropped = [ticket.drop() for ticket in self._tickets]
            made_way, self._made_way = self._made_way, False
            return made_way or any(dropped)


@cache
def lane_of(device: str) -> Lane:
    """The lane of `cpu` or `cuda:N` in this process."""
    return Lane(device, None if device == "cpu" else CudaTransfer(device))


def _send_all(transfer: Transfer, blocks: Iterable[tuple[int, torch.Tensor]]) -> Iterator[tuple[int, Arriving]]:
    for first, block in blocks:
        yield first, transfer.send(block)


def _ahead(transfer: Transfer, read: Blocks) -> Iterator[tuple[int, torch.Tensor]]:
    """Blocks on the device, each while the next one is copied."""
    sent: _Sent = []
    for one in _send_all(transfer, read()):
        sent.append(one)
        if len(sent) == _SLOTS:
            first, block = sent.pop(0)
            yield first, block.take()
    for first, block in sent:
        yield first, block.take()
