"""Silence of the libraries below: what they would say is said here in other words, or must not be said.

huggingface_hub repeats warnings of the server on stderr; the HTTP client logs addresses, which hold signatures, and
the headers of answers.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_LEVELS = {"huggingface_hub": logging.ERROR, "httpx2": logging.WARNING, "httpcore2": logging.WARNING}

_lock = threading.Lock()
_before: list[dict[str, int]] = []
"""The levels to come back to, once for every block that is open: the outermost one counts."""


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Let nothing below a warning of ours through; levels are restored when the last of several threads leaves."""
    with _lock:
        _before.append({name: logging.getLogger(name).level for name in _LEVELS})
        if len(_before) == 1:
            for name, level in _LEVELS.items():
                logger = logging.getLogger(name)
                logger.setLevel(max(level, logger.level))
    try:
        yield
    finally:
        with _lock:
            first = _before[0]
            _before.pop()
            if not _before:
                for name, level in first.items():
                    logging.getLogger(name).setLevel(level)
