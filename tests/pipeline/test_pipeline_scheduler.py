"""Units side by side: each once, within the memory, and all stopped when one fails."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mfs_decompose.pipeline.scheduler import Stop, StoppedError, one_torch_thread, run_units


@dataclass(frozen=True)
class Load:
    """Work of a size; `waits` for another unit to be in flight too."""

    name: int
    peak_bytes: int


class Meter:
    """Adds up what is in flight."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.now = self.most = self.units = self.most_units = 0

    def work(self, unit: Load, stop: Stop) -> int:
        with self.lock:
            self.now, self.units = self.now + unit.peak_bytes, self.units + 1
            self.most, self.most_units = max(self.most, self.now), max(self.most_units, self.units)
        stop.check()
        with self.lock:
            self.now, self.units = self.now - unit.peak_bytes, self.units - 1
        return unit.name * 10


@given(st.lists(st.integers(0, 9), max_size=12), st.integers(1, 4), st.integers(1, 20))
def test_each_unit_once_within_threads_and_memory(sizes: list[int], threads: int, memory: int) -> None:
    units, meter, done = [Load(at, size) for at, size in enumerate(sizes)], Meter(), []
    run_units(units, meter.work, lambda unit, result: done.append((unit.name, result)), threads, memory)
    assert sorted(done) == [(unit.name, unit.name * 10) for unit in units]
    assert meter.most_units <= threads
    assert meter.most <= max([memory, *sizes])  # one that is too large runs alone


def test_one_thread_keeps_the_order() -> None:
    done: list[int] = []
    run_units([Load(at, 1) for at in (3, 1, 2)], Meter().work, lambda unit, _: done.append(unit.name), 1, 100)
    assert done == [3, 1, 2]


def test_units_really_run_side_by_side() -> None:
    meet = threading.Barrier(3, timeout=20)
    run_units([Load(at, 1) for at in range(3)], lambda unit, stop: meet.wait(), lambda unit, _: None, 3, 3)


def test_a_smaller_unit_fits_beside_a_large_one() -> None:
    meet = threading.Barrier(2, timeout=20)

    def work(unit: Load, stop: Stop) -> None:
        if unit.name != 1:
            meet.wait()

    run_units([Load(0, 8), Load(1, 5), Load(2, 2)], work, lambda unit, _: None, 2, 10)


def test_what_does_not_fit_waits_until_there_is_room() -> None:
    small, started, seen = threading.Event(), [], []

    def work(unit: Load, stop: Stop) -> None:
        started.append(unit.name)
        if unit.name == 2:
            small.set()
        if unit.name == 0:
            assert small.wait(20)
            seen.extend(started)

    run_units([Load(0, 6), Load(1, 6), Load(2, 1)], work, lambda unit, _: None, 3, 10)
    assert seen == [0, 2]
    assert started == [0, 2, 1]


@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt()])
def test_an_error_stops_the_others_and_is_raised(error: BaseException) -> None:
    started, stopped = threading.Event(), []

    def work(unit: Load, stop: Stop) -> None:
        if unit.name == 0:
            assert started.wait(20)
            raise error
        started.set()
        give_up = time.monotonic() + 20
        try:
            while time.monotonic() < give_up:
                stop.check()
        except StoppedError:
            stopped.append(unit.name)
            raise

    with pytest.raises(type(error)):
        run_units([Load(at, 1) for at in range(9)], work, lambda unit, _: None, 2, 100)
    assert stopped == [1]  # and those that waited never began


def test_an_error_while_recording_stops_the_run() -> None:
    meter = Meter()

    def full(unit: Load, result: int) -> None:
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        run_units([Load(at, 1) for at in range(9)], meter.work, full, 1, 100)
    assert meter.most_units == 1


def test_tensor_operations_run_at_one_thread_and_what_was_set_comes_back() -> None:
    torch.set_num_threads(2)
    try:
        found: list[int] = []
        with one_torch_thread():
            assert torch.get_num_threads() == 1
            run_units(
                [Load(0, 1)], lambda unit, stop: found.append(torch.get_num_threads()), lambda unit, _: None, 2, 9
            )
        assert found == [1]
        assert torch.get_num_threads() == 2
        with pytest.raises(ValueError, match="inside"), one_torch_thread():
            raise ValueError("inside")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
