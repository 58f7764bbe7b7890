"""Settings of the C library's allocator are a matter of speed: where there are none, nothing happens."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest

from mfs_decompose.pipeline.allocator import keep_freed_memory


def test_both_thresholds_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=lambda *pair: calls.append(pair)))
    keep_freed_memory()
    settings = dict(calls)
    assert settings.keys() == {-1, -3}
    assert settings[-1] > settings[-3] >= 1 << 20
    assert settings[-3] <= 1 << 25  # glibc refuses more


def test_another_c_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    keep_freed_memory()

    def absent(name: object) -> None:
        raise OSError

    monkeypatch.setattr(ctypes, "CDLL", absent)
    keep_freed_memory()
