"""Where the deltas of each variant are: on the device, in host memory, or in the artifact alone.

A variant is in one place at a time, and always in the artifact. What a step needs is brought to the device; what was
used longest ago goes to host memory, or is dropped where that is full. Pinned variants and those in use never leave.
Nothing here knows what a delta is: reading, attaching and moving are given.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from mfs_decompose.errors import MfsError, ResourceShortage, UsageError
from mfs_decompose.units import format_bytes

T = TypeVar("T")


@dataclass(frozen=True)
class TierLimits:
    """Bytes of deltas on the device and in host memory, the base not counted; None is without a limit.

    On a CPU both are the same memory: `device` is what can answer at once, `host` what need not be decoded again.
    `pinned` variants are brought to the device first and stay there.
    """

    device: int | None = None
    host: int | None = None
    pinned: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, value in (("device", self.device), ("host", self.host)):
            if value is not None and value < 0:
                raise UsageError(f"{name}: expected bytes from 0, found {value}", hint=f"leave {name} out for no limit")


@dataclass(frozen=True)
class TierStats:
    """Where variants are, and what moving them took.

    Attributes:
        device, host: ids, used longest ago first.
        reads, read_seconds: from the artifact, decoded into resident forms.
        swaps_in, swap_seconds: to the device, attached; reading not counted.
        longest_wait: seconds of the longest single way to the device, reading included.
        swaps_out, dropped: from the device; of these and of host memory, those that only the artifact holds now.
    """

    device: tuple[str, ...] = ()
    host: tuple[str, ...] = ()
    device_bytes: int = 0
    host_bytes: int = 0
    reads: int = 0
    read_seconds: float = 0.0
    swaps_in: int = 0
    swap_seconds: float = 0.0
    longest_wait: float = 0.0
    swaps_out: int = 0
    dropped: int = 0


class NotReady(ResourceShortage):
    """A variant that was asked for cannot be brought to the device; others can."""

    def __init__(self, message: str, *, hint: str | None = None, id: str = "") -> None:
        super().__init__(message, hint=hint)
        self.id = id


class Tiers(Generic[T]):
    """The places of the variants of one family.

    Args:
        sizes: bytes of every variant.
        read: a variant as it comes from the artifact, in host memory.
        attach: from host memory to the device; what lies there.
        detach: from the device to host memory, the other way.
        alone: entered while something is moved: no step runs meanwhile.

    Raises:
        UsageError: a variant that has no room beside the pinned ones, or a pinned one that is not there.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        read: Callable[[str], T],
        attach: Callable[[str, T], T],
        detach: Callable[[str, T], T],
        alone: Callable[[], AbstractContextManager[None]],
        limits: TierLimits | None = None,
    ) -> None:
        self._sizes, self._read, self._attach, self._detach, self._alone = dict(sizes), read, attach, detach, alone
        self.limits = limits or TierLimits()
        self._device: OrderedDict[str, T] = OrderedDict()
        self._host: OrderedDict[str, T] = OrderedDict()
        self._users: Counter[str] = Counter()
        self._counts = TierStats()
        _check_room(self._sizes, self.limits)

    def fill(self, read: Mapping[str, T]) -> None:
        """Take in what was read already, as far as it has room: pinned ones first, then the first of the others."""
        with self._alone():
            self._host.update(read)
            for id in sorted(self._sizes, key=lambda id: id not in self.limits.pinned):
                if id in self.limits.pinned or (id in self._host and self._fits(self._sizes[id])):
                    self._bring(id)
            self._shrink_host()

    def is_resident(self, id: str) -> bool:
        """Whether a variant can answer at once."""
        return id in self._device

    def bring(self, ids: Sequence[str]) -> list[str]:
        """Bring to the device what there is room for, the first ones first; those that are there then.

        None of them gives way to a later one, and no pinned one or one in use to any.

        Raises:
            NotReady: a variant that cannot be read, or the first one where nothing can give way to it.
        """
        with self._alone():
            ready: list[str] = []
            for at, id in enumerate(ids):
                if id not in self._device and not self._make_room(self._sizes[id], ready, ids[at + 1 :]):
                    if not ready and at == len(ids) - 1:
                        raise NotReady(
                            f"expected room for variant {ids[0]!r} on the device, found all of it in use",
                            hint="raise the limit of the device",
                            id=ids[0],
                        )
                    continue
                self._bring(id)
                ready.append(id)
            return ready

    @contextmanager
    def using(self, id: str) -> Iterator[None]:
        """A variant on the device, which stays there inside.

        Raises:
            NotReady: as `bring` does.
        """
        with self._alone():
            self.bring([id])
            self._users[id] += 1
        try:
            yield
        finally:
            with self._alone():
                self._users[id] -= 1

    def held(self) -> dict[str, T]:
        """What is on the device or in host memory, by variant."""
        return {**self._host, **self._device}

    def stats(self) -> TierStats:
        with self._alone():
            return replace(
                self._counts,
                device=tuple(self._device),
                host=tuple(self._host),
                device_bytes=self._bytes(self._device),
                host_bytes=self._bytes(self._host),
            )

    def _bring(self, id: str) -> None:
        if id in self._device:
            self._device.move_to_end(id)
            return
        started = time.perf_counter()
        known = self._host.pop(id, None)
        try:
            found = self._read(id) if known is None else known
            read = time.perf_counter() - started if known is None else 0.0
            self._device[id] = self._attach(id, found)
        except (MfsError, OSError, MemoryError, RuntimeError) as error:
            raise NotReady(
                f"cannot load variant {id!r}: {error}", hint="run `mfs verify` on the artifact", id=id
            ) from error
        waited = time.perf_counter() - started
        counts = self._counts
        self._counts = replace(
            counts,
            reads=counts.reads + (known is None),
            read_seconds=counts.read_seconds + read,
            swaps_in=counts.swaps_in + 1,
            swap_seconds=counts.swap_seconds + waited - read,
            longest_wait=max(counts.longest_wait, waited),
        )

    def _make_room(self, needed: int, ready: Sequence[str], later: Sequence[str]) -> bool:
        """Let others go until `needed` bytes fit; False, and nobody gone, where that cannot be."""
        staying = {*ready, *self.limits.pinned, *(id for id, users in self._users.items() if users)}
        going = [id for id in self._device if id not in staying and id not in later]
        going += [id for id in reversed(later) if id in self._device and id not in staying]
        limit = self.limits.device
        if limit is None:
            return True
        free = limit - self._bytes(self._device)
        if free + sum(self._sizes[id] for id in going) < needed:
            return False
        for id in going:
            if self._fits(needed):
                break
            self._evict(id)
        return True

    def _evict(self, id: str) -> None:
        self._host[id] = self._detach(id, self._device.pop(id))
        self._counts = replace(self._counts, swaps_out=self._counts.swaps_out + 1)
        self._shrink_host()

    def _shrink_host(self) -> None:
        limit = self.limits.host
        while limit is not None and self._bytes(self._host) > limit:
            self._host.popitem(last=False)
            self._counts = replace(self._counts, dropped=self._counts.dropped + 1)

    def _fits(self, needed: int) -> bool:
        limit = self.limits.device
        return limit is None or self._bytes(self._device) + needed <= limit

    def _bytes(self, held: Mapping[str, T]) -> int:
        return sum(self._sizes[id] for id in held)


def _check_room(sizes: Mapping[str, int], limits: TierLimits) -> None:
    unknown = [id for id in limits.pinned if id not in sizes]
    if unknown:
        raise UsageError(
            f"expected pinned variants among {', '.join(sizes)}, found {unknown[0]!r}", hint="pin what is loaded"
        )
    if limits.device is None:
        return
    pinned = sum(sizes[id] for id in set(limits.pinned))
    largest = max((size for id, size in sizes.items() if id not in limits.pinned), default=0)
    if pinned + largest > limits.device:
        raise UsageError(
            f"expected room for {format_bytes(pinned + largest)} of deltas on the device (pinned ones and the largest "
            f"other), found a limit of {format_bytes(limits.device)}",
            hint="raise the limit, or pin fewer variants",
        )
