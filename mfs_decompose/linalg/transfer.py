"""Copies from the host to a CUDA device that run beside its work."""

from __future__ import annotations

from typing import Protocol

import torch


class Arriving(Protocol):
    """A tensor on its way."""

    def take(self) -> torch.Tensor:
        """The tensor on the device, for the work that the current stream is given from now on."""


class Transfer(Protocol):
    """The way to a device with memory of its own."""

    def send(self, values: torch.Tensor) -> Arriving:
        """Begin to copy a host tensor.

        Raises:
            torch.OutOfMemoryError: the device has no room for it.
        """

    def release(self) -> None:
        """Give freed memory back to the device."""


class CudaTransfer:
    """Copies out of pinned memory on a stream of its own."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def send(self, values: torch.Tensor) -> Arriving:
        # Pinned pages are torch's to keep: freed ones wait in its cache until the copies out of them are done.
        pinned = values.pin_memory()
        with torch.cuda.stream(self._stream):
            there = pinned.to(self._device, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self._stream)
        return _OnStream(there, copied)

    def release(self) -> None:
        torch.cuda.empty_cache()


class _OnStream:
    def __init__(self, values: torch.Tensor, copied: torch.cuda.Event) -> None:
        self._values, self._copied = values, copied

    def take(self) -> torch.Tensor:
        stream = torch.cuda.current_stream(self._values.device)
        stream.wait_event(self._copied)
        self._values.record_stream(stream)  # else its memory goes to the next copy while this stream still reads it
        return self._values


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an error says that the device is full: torch's own, or a library's that could not make its workspace."""
    return isinstance(error, torch.OutOfMemoryError) or "ALLOC_FAILED" in str(error)
