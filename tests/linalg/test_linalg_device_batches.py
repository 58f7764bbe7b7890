"""Batches on a device: the same bits whatever fits, and no more on it than two."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from fake_device import Blocks, FakeDevice
from linalg_matrices import generator, power_law, with_spectrum

from mfs_decompose.linalg.blocked import blocked_svd
from mfs_decompose.linalg.device_batches import FitBlocks, Lane, lane_of
from mfs_decompose.linalg.shapes import passes
from mfs_decompose.linalg.svd import Truncation, truncated_svd
from mfs_decompose.linalg.transfer import is_out_of_memory

ROWS, COLUMNS, RANK = 61, 43, 3
SIZE = ROWS * COLUMNS


def matrices(count: int) -> torch.Tensor:
    return torch.randn(count, ROWS, COLUMNS, generator=generator(count))


def factorise(batch: torch.Tensor, keys: Sequence[int]) -> list[Truncation | None]:
    return truncated_svd(batch, RANK, keys)


def same(one: Truncation | None, other: Truncation | None) -> bool:
    assert one is not None and other is not None
    return (
        torch.equal(one.left, other.left)
        and torch.equal(one.right, other.right)
        and torch.equal(one.energy, other.energy)
        and one.total == other.total
    )


def check_batch(lane: Lane, count: int) -> None:
    batch, keys = matrices(count), list(range(count))
    found = lane.fit(batch, keys, factorise)
    assert len(found) == count
    assert all(map(same, found, factorise(batch, keys)))


def test_on_the_cpu_nothing_is_copied() -> None:
    lane, batch = lane_of("cpu"), matrices(2)
    assert lane is lane_of("cpu") and lane.device == "cpu"
    seen: list[torch.Tensor] = []

    def work(given: torch.Tensor, keys: Sequence[int]) -> Sequence[int]:
        seen.append(given)
        return keys

    assert lane.fit(batch, [5, 6], work) == [5, 6]
    assert seen[0] is batch
    blocks = Blocks(batch[0], 20)
    assert lane.fit_blocks(blocks, lambda read, device: (read, device)) == (blocks, "cpu")


def test_on_the_cpu_threads_do_not_wait_for_each_other() -> None:
    together = threading.Barrier(3, timeout=20)

    def work(given: torch.Tensor, keys: Sequence[int]) -> Sequence[int]:
        together.wait()
        return keys

    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(lane_of("cpu").fit, matrices(1), [at], work) for at in range(3)]
        assert [future.result() for future in futures] == [[0], [1], [2]]


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_what_fits_is_sent_once(count: int) -> None:
    device = FakeDevice(8 * SIZE)
    lane = Lane("cpu", device)
    check_batch(lane, count)
    assert device.sizes == [count * SIZE]
    assert (lane.halvings, lane.left_to_cpu, device.used) == (0, 0, 0)


@pytest.mark.parametrize(
    ("room", "sizes"), [(6, [7, 3, 4]), (3, [7, 3, 4, 2, 2]), (2, [7, 3, 1, 2, 4, 2, 2]), (1, [7])]
)
def test_a_batch_is_halved_until_it_fits_and_no_bit_changes(room: int, sizes: list[int]) -> None:
    device = FakeDevice(room * SIZE)
    lane = Lane("cpu", device)
    check_batch(lane, 7)
    assert device.sizes == ([size * SIZE for size in sizes if size <= room] if room > 1 else [SIZE] * 7)
    assert device.most <= room * SIZE
    assert lane.halvings == (6 if room == 1 else sum(size > room for size in sizes))
    assert lane.left_to_cpu == 0 and device.used == 0 and device.releases > 0


@pytest.mark.parametrize("message", [None, "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling x"])
def test_work_that_runs_out_is_given_less(message: str | None) -> None:
    lane = Lane("cpu", FakeDevice(100 * SIZE))
    seen: list[int] = []

    def work(given: torch.Tensor, keys: Sequence[int]) -> list[Truncation | None]:
        seen.append(len(keys))
        if len(keys) > 2:
            raise torch.OutOfMemoryError("planted") if message is None else RuntimeError(message)
        return factorise(given, keys)

    batch = matrices(6)
    assert all(map(same, lane.fit(batch, range(6), work), factorise(batch, range(6))))
    assert seen == [6, 3, 1, 2, 3, 1, 2] and lane.halvings == 3


def test_what_does_not_fit_alone_is_left_to_the_cpu() -> None:
    device = FakeDevice(SIZE - 1)
    lane = Lane("cpu", device)
    check_batch(lane, 3)
    assert device.sizes == [] and lane.left_to_cpu == 3
    assert lane.take_left_to_cpu() == 3 and lane.take_left_to_cpu() == 0


def test_other_errors_are_raised_and_the_lane_goes_on() -> None:
    lane = Lane("cpu", FakeDevice(10 * SIZE))

    def broken(given: torch.Tensor, keys: Sequence[int]) -> list[int]:
        raise RuntimeError("a kernel failed")

    def unreadable() -> Iterator[tuple[int, torch.Tensor]]:
        yield 0, torch.zeros(2, 3)
        raise KeyError("stopped")

    for _ in range(3):
        with pytest.raises(RuntimeError, match="a kernel failed"):
            lane.fit(matrices(2), [1, 2], broken)
        with pytest.raises(KeyError, match="stopped"):
            lane.fit_blocks(unreadable, lambda read, device: None)
    check_batch(lane, 2)
    assert lane.halvings == 0


def test_which_errors_say_that_a_device_is_full() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))


class Meeting:
    """Threads at one lane, started one after the other; the first holds its turn until it is let go."""

    def __init__(self, lane: Lane, device: FakeDevice) -> None:
        self.lane, self.device = lane, device
        self.pool = ThreadPoolExecutor(8)
        self.holding, self.go_on = threading.Event(), threading.Event()

    def hold(self, given: torch.Tensor, keys: Sequence[int]) -> list[Truncation | None]:
        self.holding.set()
        assert self.go_on.wait(20)
        return factorise(given, keys)

    def until(self, said: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not said():
            assert time.monotonic() < deadline
            time.sleep(0.001)


def test_the_next_batch_is_copied_while_one_is_worked_on_and_no_third() -> None:
    device = FakeDevice(100 * SIZE)
    lane = Lane("cpu", device)
    meeting = Meeting(lane, device)
    first = meeting.pool.submit(lane.fit, matrices(1), [1], meeting.hold)
    assert meeting.holding.wait(20)
    others = [meeting.pool.submit(lane.fit, matrices(count), range(count), factorise) for count in (2, 3, 4)]
    meeting.until(lambda: len(device.sizes) == 2)
    time.sleep(0.02)
    assert len(device.sizes) == 2 and not any(other.done() for other in others)
    meeting.go_on.set()
    assert same(first.result()[0], factorise(matrices(1), [1])[0])
    for count, other in zip((2, 3, 4), others, strict=True):
        assert all(map(same, other.result(), factorise(matrices(count), range(count))))
    assert len(device.sizes) == 4 and device.used == 0


def test_what_was_sent_early_makes_way() -> None:
    device = FakeDevice(3 * SIZE)
    lane = Lane("cpu", device)
    meeting = Meeting(lane, device)
    tried: list[int] = []

    def greedy(given: torch.Tensor, keys: Sequence[int]) -> list[Truncation | None]:
        meeting.hold(given, keys)
        tried.append(device.used // SIZE)
        device.send(torch.zeros(2 * SIZE)).take()  # room for three, of which one is the other's
        return factorise(given, keys)

    first = meeting.pool.submit(lane.fit, matrices(1), [1], greedy)
    assert meeting.holding.wait(20)
    second = meeting.pool.submit(lane.fit, matrices(2)[:1], [1], factorise)
    meeting.until(lambda: len(device.sizes) == 2)
    meeting.go_on.set()
    assert same(first.result()[0], factorise(matrices(1), [1])[0])
    assert same(second.result()[0], factorise(matrices(2)[:1], [1])[0])
    assert tried == [2, 1] and lane.left_to_cpu == lane.halvings == 0
    # From now on each comes when it is its turn.
    meeting.holding.clear()
    meeting.go_on.clear()
    third = meeting.pool.submit(lane.fit, matrices(1), [1], meeting.hold)
    assert meeting.holding.wait(20)
    sent = len(device.sizes)
    fourth = meeting.pool.submit(lane.fit, matrices(1), [1], factorise)
    time.sleep(0.02)
    assert len(device.sizes) == sent
    meeting.go_on.set()
    assert third.result() and fourth.result()


def test_no_room_beside_the_one_that_is_worked_on() -> None:
    device = FakeDevice(SIZE)
    lane = Lane("cpu", device)
    meeting = Meeting(lane, device)
    first = meeting.pool.submit(lane.fit, matrices(1), [1], meeting.hold)
    assert meeting.holding.wait(20)
    second = meeting.pool.submit(lane.fit, matrices(1), [1], factorise)
    time.sleep(0.02)
    meeting.go_on.set()
    assert same(first.result()[0], second.result()[0])
    assert (lane.halvings, lane.left_to_cpu, device.most) == (0, 0, SIZE)


def test_many_threads_in_little_room() -> None:
    device = FakeDevice(5 * SIZE)
    lane = Lane("cpu", device)
    with ThreadPoolExecutor(6, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        list(pool.map(lambda count: check_batch(lane, count), [1, 4, 7, 2, 9, 3, 6, 5, 8, 1, 12]))
    assert device.used == 0 and device.most <= device.capacity and lane.left_to_cpu == 0


# Row blocks.

_BLOCK = 16


def tall() -> torch.Tensor:
    return with_spectrum(power_law(43, 0.7), 101, 43, seed=3)


def svd_of(matrix: torch.Tensor) -> FitBlocks[Truncation | None]:
    shape = (matrix.shape[0], matrix.shape[1])
    return lambda read, device: blocked_svd(read, shape, RANK, 9, device)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("room", ["all", "four blocks", "less than one"])
def test_blocks_stay_where_they_fit_and_come_again_where_not(turned: bool, room: str) -> None:
    matrix, step = (tall().mT.contiguous(), 8) if turned else (tall(), _BLOCK)
    shape = (matrix.shape[0], matrix.shape[1])
    blocks = Blocks(matrix, step)
    count, size = -(-shape[0] // step), step * shape[1]
    device = FakeDevice({"all": matrix.numel(), "four blocks": 4 * size, "less than one": size - 1}[room])
    lane = Lane("cpu", device)
    found = lane.fit_blocks(blocks, svd_of(matrix))
    assert same(found, blocked_svd(Blocks(matrix, step), shape, RANK, 9))
    assert device.most <= device.capacity and device.used == 0
    assert lane.left_to_cpu == (room == "less than one")
    # Where not all fit, two attempts to keep them end in the middle.
    assert blocks.reads == count if room == "all" else blocks.reads >= passes(shape, RANK) * count


def test_blocks_are_sent_while_another_is_worked_on() -> None:
    matrix = tall()
    device = FakeDevice(3 * matrix.numel())
    lane = Lane("cpu", device)
    meeting = Meeting(lane, device)
    first = meeting.pool.submit(lane.fit, matrices(1), [1], meeting.hold)
    assert meeting.holding.wait(20)
    second = meeting.pool.submit(lane.fit_blocks, Blocks(matrix, _BLOCK), svd_of(matrix))
    meeting.until(lambda: len(device.sizes) == 1 + 7)
    assert not second.done()
    meeting.go_on.set()
    assert first.result()[0] is not None
    assert same(second.result(), blocked_svd(Blocks(matrix, _BLOCK), (101, 43), RANK, 9))
    assert len(device.sizes) == 1 + 7


def test_blocks_that_were_sent_early_make_way() -> None:
    matrix = tall()
    device = FakeDevice(matrix.numel() + 2 * SIZE)
    lane = Lane("cpu", device)
    meeting = Meeting(lane, device)

    def greedy(given: torch.Tensor, keys: Sequence[int]) -> list[Truncation | None]:
        meeting.hold(given, keys)
        device.send(torch.zeros(3 * SIZE // 2)).take()
        return factorise(given, keys)

    first = meeting.pool.submit(lane.fit, matrices(1), [1], greedy)
    assert meeting.holding.wait(20)
    second = meeting.pool.submit(lane.fit_blocks, Blocks(matrix, _BLOCK), svd_of(matrix))
    meeting.until(lambda: len(device.sizes) == 1 + 7)
    meeting.go_on.set()
    assert first.result()[0] is not None
    assert same(second.result(), blocked_svd(Blocks(matrix, _BLOCK), (101, 43), RANK, 9))
    assert lane.left_to_cpu == lane.halvings == 0


def test_what_met_blocks_that_then_made_way_by_themselves_is_tried_again() -> None:
    matrix = tall()
    device = FakeDevice(matrix.numel())
    lane = Lane("cpu", device)
    met = threading.Event()
    calls: list[int] = []

    def blocks() -> Iterator[tuple[int, torch.Tensor]]:
        for first, block in Blocks(matrix, _BLOCK)():
            assert first == 0 or met.wait(20)
            yield first, block

    def crowded(given: torch.Tensor, keys: Sequence[int]) -> list[Truncation | None]:
        calls.append(len(keys))
        if len(calls) == 1:
            Meeting(lane, device).until(lambda: len(device.sizes) == 2)
            met.set()
            # The blocks do not fit beside this one, and are dropped before it says that it had no room.
            Meeting(lane, device).until(lambda: device.used == SIZE)
            raise torch.OutOfMemoryError("planted")
        return factorise(given, keys)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(lane.fit, matrices(1), [1], crowded)
        Meeting(lane, device).until(lambda: bool(calls))
        second = pool.submit(lane.fit_blocks, blocks, svd_of(matrix))
        assert same(first.result()[0], factorise(matrices(1), [1])[0])
        assert same(second.result(), blocked_svd(Blocks(matrix, _BLOCK), (101, 43), RANK, 9))
    assert len(calls) == 2 and lane.left_to_cpu == lane.halvings == 0


def test_no_blocks_at_all() -> None:
    lane = Lane("cpu", FakeDevice(10))
    empty = Blocks(torch.zeros(0, 4), 3)
    assert lane.fit_blocks(empty, lambda read, device: list(read())) == []
