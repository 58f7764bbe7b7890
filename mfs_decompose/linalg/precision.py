"""fp32 products in fp32, whatever the process around has asked for.

`torch.set_float32_matmul_precision("high")`, set by any library, would have a GPU round the factors of every product to
TF32, and some CPUs to bf16. Ambient settings must not decide about bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_lock = threading.Lock()
_inside = 0
_before: list[str] = []


@contextmanager
def full_fp32() -> Iterator[None]:
    """No TF32 and no bf16 in fp32 products inside the block; what was set before afterwards.

    The settings belong to the process: of blocks that overlap in several threads, the last one out restores them.
    """
    global _inside
    with _lock:
        if _inside == 0:
            _before[:] = [backend.fp32_precision for backend in _backends()]
            _set(["ieee"] * len(_before))
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                _set(_before)


def _backends() -> tuple[Any, ...]:
    return torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


def _set(values: list[str]) -> None:
    for backend, value in zip(_backends(), values, strict=True):
        backend.fp32_precision = value
