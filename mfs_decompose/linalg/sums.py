"""Sums that do not depend on the number of threads.

`torch.sum` of 16 million values differs at 1, 2 and 4 threads. Every recorded figure is summed over blocks of a
fixed size, each by one thread, and the block sums are added exactly rounded (`math.fsum`).
"""

from __future__ import annotations

import math

import torch

_BLOCK = 1 << 12
_DEVICE_CHUNK = 1 << 22  # on a device every chunk is a round trip
_CHUNK = 1 << 16  # half a MiB in fp64: stays in the cache, and in memory the allocator has at hand


def squared_norm(values: torch.Tensor) -> float:
    """`sum(values ** 2)` in fp64 over all elements; 0.0 for an empty tensor."""
    flat = values.reshape(-1)
    partial: list[float] = []
    step = _CHUNK if flat.device.type == "cpu" else _DEVICE_CHUNK
    for at in range(0, flat.numel(), step):
        chunk = flat[at : at + step].to(torch.float64).square()
        whole = chunk.numel() // _BLOCK * _BLOCK
        if whole:
            partial.extend(chunk[:whole].view(-1, _BLOCK).sum(dim=1).tolist())
        if whole < chunk.numel():
            partial.append(float(chunk[whole:].sum()))
    return math.fsum(partial)
