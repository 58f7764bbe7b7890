"""Tiers alone: what is where, who gives way to whom, and that bytes stay within their limits."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from mfs_decompose.errors import ArtifactInvalid, UsageError
from mfs_decompose.runtime.tiers import NotReady, TierLimits, Tiers

SIZES = {"a": 3, "b": 5, "c": 2, "d": 4}


class Device:
    """Where payloads go; a payload says where it lies."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.sizes = sizes
        self.held: set[str] = set()
        self.reads: list[str] = []
        self.broken: set[str] = set()
        self.entered = 0

    def read(self, id: str) -> str:
        if id in self.broken:
            raise ArtifactInvalid(f"{id} is damaged")
        self.reads.append(id)
        return f"host {id}"

    def attach(self, id: str, payload: str) -> str:
        assert payload == f"host {id}" and id not in self.held
        self.held.add(id)
        return f"device {id}"

    def detach(self, id: str, payload: str) -> str:
        assert payload == f"device {id}"
        self.held.remove(id)
        return f"host {id}"

    @contextmanager
    def alone(self) -> Iterator[None]:
        self.entered += 1
        yield

    def tiers(self, limits: TierLimits | None = None) -> Tiers[str]:
        return Tiers(self.sizes, self.read, self.attach, self.detach, self.alone, limits)


@pytest.fixture
def device() -> Device:
    return Device(SIZES)


def filled(device: Device, limits: TierLimits | None = None) -> Tiers[str]:
    tiers = device.tiers(limits)
    tiers.fill({id: f"host {id}" for id in SIZES})
    return tiers


def test_without_limits_all_are_on_the_device(device: Device) -> None:
    tiers = filled(device)
    assert device.held == set(SIZES) and tiers.stats().device_bytes == 14
    assert tiers.bring(["d", "a"]) == ["d", "a"] and device.reads == []
    assert tiers.stats().swaps_in == 4 and tiers.stats().swaps_out == 0


def test_pinned_ones_come_first_and_stay(device: Device) -> None:
    tiers = filled(device, TierLimits(device=9, host=4, pinned=("d",)))
    stats = tiers.stats()
    assert stats.device == ("d", "a", "c") and stats.host == () and stats.dropped == 1  # b, of 5, has no room in 4
    assert tiers.bring(["b"]) == ["b"] and device.held == {"d", "b"}
    stats = tiers.stats()
    assert (stats.reads, stats.device, stats.host, stats.host_bytes) == (1, ("d", "b"), ("c",), 2)
    assert stats.dropped == 2  # a, of 3, went to host memory first, and from there when c came
    assert stats.longest_wait > 0 and stats.read_seconds > 0


def test_the_one_unused_for_the_longest_gives_way(device: Device) -> None:
    tiers = filled(device, TierLimits(device=9))
    assert device.held == {"a", "b"}  # c and d have no room beside them: 3 + 5 + 2
    tiers.bring(["a"])
    assert tiers.bring(["c"]) == ["c"] and device.held == {"a", "c"}
    assert tiers.bring(["d"]) == ["d"] and device.held == {"a", "c", "d"}
    assert device.reads == [] and tiers.stats().host == ("b",)


def test_one_that_was_asked_for_first_never_gives_way_to_a_later_one(device: Device) -> None:
    tiers = filled(device, TierLimits(device=7))
    assert tiers.bring(["b", "d", "c"]) == ["b", "c"]
    assert device.held == {"b", "c"}
    # a later one that is there does give way to an earlier one
    assert tiers.bring(["d", "b"]) == ["d"] and device.held == {"d"}


def test_one_in_use_stays_and_its_room_is_not_given(device: Device) -> None:
    tiers = filled(device, TierLimits(device=7))
    with tiers.using("b"):
        with tiers.using("b"):
            assert tiers.bring(["d", "c"]) == ["c"]
        with pytest.raises(NotReady, match="expected room for variant 'd'") as caught:
            tiers.bring(["d"])
        assert caught.value.id == "d" and device.held == {"b", "c"}
    assert tiers.bring(["d"]) == ["d"]


def test_what_cannot_be_read_says_so_and_the_others_go_on(device: Device) -> None:
    tiers = device.tiers(TierLimits(device=7, host=0))
    device.broken.add("b")
    with pytest.raises(NotReady, match="'b': b is damaged") as caught:
        tiers.bring(["b"])
    assert caught.value.id == "b" and caught.value.hint is not None
    assert tiers.bring(["a", "d"]) == ["a", "d"] and device.reads == ["a", "d"]
    device.broken.clear()
    assert tiers.bring(["b"]) == ["b"] and tiers.stats().host_bytes == 0


@pytest.mark.parametrize(
    ("limits", "match"),
    [
        (lambda: TierLimits(device=4), "limit of 4 B"),
        (lambda: TierLimits(device=8, pinned=("d",)), "expected room for 9 B"),
        (lambda: TierLimits(pinned=("x",)), "among a, b, c, d, found 'x'"),
        (lambda: TierLimits(host=-1), "host: expected bytes from 0"),
    ],
)
def test_limits_without_room_are_refused(device: Device, limits: Callable[[], TierLimits], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        device.tiers(limits())


@pytest.mark.parametrize("seed", range(30))
def test_random_use_stays_within_all_limits(seed: int) -> None:
    draw = random.Random(seed)
    sizes = {f"v{at}": draw.randint(1, 9) for at in range(draw.randint(1, 7))}
    pinned = tuple(draw.sample(sorted(sizes), draw.choice([0, 0, 1]))) if len(sizes) > 1 else ()
    least = sum(sizes[id] for id in pinned) + max(size for id, size in sizes.items() if id not in pinned)
    limits = TierLimits(device=least + draw.randint(0, 12), host=draw.choice([None, 0, 6, 15]), pinned=pinned)
    device = Device(sizes)
    tiers = device.tiers(limits)
    tiers.fill({id: f"host {id}" for id in draw.sample(sorted(sizes), draw.randint(0, len(sizes)))})
    assert device.held >= set(pinned)
    before = tiers.stats()
    for _ in range(60):
        asked = draw.sample(sorted(sizes), draw.randint(1, len(sizes)))
        device.broken = {draw.choice(sorted(sizes))} if draw.random() < 0.1 else set()
        try:
            ready = tiers.bring(asked)
        except NotReady as error:
            assert error.id in device.broken
            continue
        assert ready and ready == [id for id in asked if id in ready]
        assert ready[0] == asked[0], "the first one always gets in"
        stats = tiers.stats()
        assert set(stats.device) == device.held >= {*ready, *pinned}
        assert stats.device_bytes == sum(sizes[id] for id in device.held) <= (limits.device or 0)
        assert limits.host is None or stats.host_bytes <= limits.host
        assert not set(stats.device) & set(stats.host) and tiers.held().keys() == {*stats.device, *stats.host}
        assert stats.swaps_in - stats.swaps_out == len(stats.device)
        assert stats.reads >= before.reads and replace(stats) == stats
        before = stats
