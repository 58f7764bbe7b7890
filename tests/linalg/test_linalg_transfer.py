"""The way to a CUDA device, as far as it can be walked without one: what is called, in which order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mfs_decompose.linalg.transfer import CudaTransfer


class Calls:
    """Stands in for torch.cuda and for the tensors that would lie there."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.inside = ""
        self.copying = SimpleNamespace(name="copying")
        self.working = SimpleNamespace(name="working", wait_event=self.waits)

    def say(self, what: str) -> None:
        self.names.append(f"{self.inside}{what}")

    def waits(self, event: object) -> None:
        self.say("work waits for the copy")

    def stream(self, stream: Any) -> Any:
        calls = self

        class Within:
            def __enter__(self) -> None:
                calls.inside = f"{stream.name}: "

            def __exit__(self, *_: object) -> None:
                calls.inside = ""

        return Within()

    def event(self) -> Any:
        return SimpleNamespace(record=lambda stream: self.say(f"event on {stream.name}"))


class Host:
    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def pin_memory(self) -> Host:
        self._calls.say("pin")
        return self

    def to(self, device: torch.device, non_blocking: bool) -> There:
        self._calls.say(f"copy to {device}, {'not ' if non_blocking else ''}waited for")
        return There(self._calls, device)


class There:
    def __init__(self, calls: Calls, device: torch.device) -> None:
        self._calls, self.device = calls, device

    def record_stream(self, stream: Any) -> None:
        self._calls.say(f"memory kept for {stream.name}")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: calls.copying)
    monkeypatch.setattr(torch.cuda, "stream", calls.stream)
    monkeypatch.setattr(torch.cuda, "Event", calls.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: calls.working)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.say("empty"))
    return calls


def test_a_copy_runs_on_its_own_stream_and_work_waits_for_it_alone(calls: Calls) -> None:
    transfer = CudaTransfer("cuda:1")
    arriving = transfer.send(Host(calls))  # type: ignore[arg-type]
    sent = ["pin", "copying: copy to cuda:1, not waited for", "copying: event on copying"]
    assert calls.names == sent
    there = arriving.take()
    assert isinstance(there, There)
    assert calls.names == [*sent, "work waits for the copy", "memory kept for working"]


def test_freed_memory_goes_back(calls: Calls) -> None:
    CudaTransfer("cuda:0").release()
    assert calls.names == ["empty"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_real_copy() -> None:
    values = torch.arange(1000, dtype=torch.float32).reshape(20, 50)
    there = CudaTransfer("cuda:0").send(values).take()
    assert there.is_cuda and torch.equal(there.cpu(), values)
