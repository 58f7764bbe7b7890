"""Keep freed memory of temporaries instead of giving it back to the kernel after every operation.

glibc maps every allocation above a threshold anew and unmaps it when it is freed; the kernel then clears each page
again. For the temporaries of element-wise work that costs five times the work itself (measured on a 16 MiB difference).
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEEP = 1 << 25
"""Larger ones, batches and row blocks, are mapped and unmapped: they would fragment what is kept."""


def keep_freed_memory() -> None:
    """Set glibc's thresholds for the whole process; does nothing under another C library."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, _KEEP)
    mallopt(_M_TRIM_THRESHOLD, 4 * _KEEP)
