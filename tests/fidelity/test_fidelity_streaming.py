"""Logits of a large vocabulary never pile up: what is alive at once does not grow with the text."""

from __future__ import annotations

import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mfs_decompose.events import NullSink
from mfs_decompose.fidelity import evaluate
from mfs_decompose.fidelity.divergence import CHUNK_ELEMENTS
from mfs_decompose.fidelity.evaluate import measure_drift
from mfs_decompose.fidelity.model import LoadedModel
from mfs_decompose.fidelity.settings import EvalSettings
from mfs_decompose.fidelity.text import Corpus

VOCABULARY = 30_011
WINDOW = 16
LOGITS = WINDOW * VOCABULARY * 4


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the storages that operations make, while they live."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self._keep(tensor.untyped_storage())
        return result

    def _keep(self, storage: Any) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.live += nbytes
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._drop, key, nbytes)

    def _drop(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.live -= nbytes


class WideNetwork:
    """Answers with logits over many tokens, computed from nothing but the ids."""

    def __init__(self, phase: float) -> None:
        self.ramp_V = torch.arange(VOCABULARY) / 7.0 + phase

    def __call__(self, input_ids: torch.Tensor, **_: Any) -> Any:
        return SimpleNamespace(logits=input_ids[..., None] * self.ramp_V)


def peak(family: dict[str, Path], windows: int, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> int:
    phases = {"original": 0.0, "served": 0.01, "restored": 0.02, "base": 0.3}

    def load(folder: Path, role: str, *rest: Any) -> LoadedModel:
        return LoadedModel(WideNetwork(phases[role]), role, "cpu", VOCABULARY, None)

    monkeypatch.setattr(evaluate, "load_model", load)
    text = Corpus("long", tuple("The quick brown fox jumps. " * 4 for _ in range(windows)))
    how = EvalSettings(window=WINDOW, max_tokens=WINDOW * windows, **settings)
    candidates = {"served": family["near"], "restored": family["far"]}
    bytes_alive = LiveBytes()
    with bytes_alive:
        results = measure_drift(family["original"], candidates, family["base"], [text], how, "v", NullSink())
    assert all(result.tokens > 10 * windows for result in results)
    return bytes_alive.peak


@pytest.mark.parametrize("settings", [{}, {"batch_size": 3}])
def test_what_is_alive_does_not_grow_with_the_text(
    family: dict[str, Path], monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    short, long = (peak(family, windows, monkeypatch, **settings) for windows in (6, 30))
    assert long <= short + 100_000
    batch = settings.get("batch_size", 1) * LOGITS
    # Logits of two models (of a batch and one window for the noise floor), and float64 temporaries of one window.
    assert 2 * batch < long < 2 * batch + 2 * LOGITS + 9 * min(2 * LOGITS, 8 * CHUNK_ELEMENTS)


def test_the_count_of_live_bytes_counts() -> None:
    with LiveBytes() as bytes_alive:
        first = torch.ones(1000) + 1
        assert bytes_alive.live == 4000
        view = first[10:]
        assert bytes_alive.live == 4000
        del first, view
        assert bytes_alive.live == 0
        kept = [torch.ones(500) + i for i in range(3)]
        assert bytes_alive.peak >= 6000 and bytes_alive.live == 6000
        del kept
