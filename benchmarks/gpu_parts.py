"""The parts of gpu_check.py that need torch and numpy alone."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from mfs_decompose.linalg.blocked import blocked_svd
from mfs_decompose.linalg.device_batches import Lane
from mfs_decompose.linalg.seeds import random_matrix
from mfs_decompose.linalg.svd import Truncation, truncated_svd
from mfs_decompose.linalg.transfer import Arriving, CudaTransfer, Transfer

FASTER, RESIDUAL = 40, 1.01
_BLOCKS = 14  # row blocks of a large matrix
_THREADS = 3  # that bring batches


@dataclass
class Part:
    """What a part found: figures, and checks with the limit they were held to."""

    figures: dict[str, Any] = field(default_factory=dict)
    checks: list[dict[str, Any]] = field(default_factory=list)

    def check(self, what: str, value: Any, limit: Any, passed: bool) -> None:
        self.checks.append({"what": what, "value": value, "limit": limit, "passed": bool(passed)})

    def to_json(self) -> dict[str, Any]:
        return {"passed": all(check["passed"] for check in self.checks), "checks": self.checks, **self.figures}


class Device:
    """A CUDA device, or the CPU as one of pretended memory."""

    def __init__(self, name: str) -> None:
        self.name = f"{name}:0" if name == "cuda" else name
        self.is_cuda = self.name != "cpu"
        self._capacity: int | None = None

    def describe(self) -> str:
        return torch.cuda.get_device_name(self.name) if self.is_cuda else "cpu"

    def lane(self) -> Lane:
        """A lane of its own, whose counts begin at 0."""
        transfer: Transfer = CudaTransfer(self.name) if self.is_cuda else _Pretended(self)
        return Lane(self.name, transfer)

    def wait(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.name)

    def clock(self, call: Callable[[], Any]) -> float:
        self.wait()
        begun = time.perf_counter()
        call()
        self.wait()
        return time.perf_counter() - begun

    @contextmanager
    def room_for(self, elements: int) -> Iterator[None]:
        """Leave room for so many fp32 elements beside what is taken already."""
        if not self.is_cuda:
            self._capacity = elements
            yield
            self._capacity = None
            return
        torch.cuda.empty_cache()
        taken = torch.cuda.memory_reserved(self.name)
        total = torch.cuda.get_device_properties(self.name).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, (taken + 4 * elements) / total), self.name)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, self.name)

    def require_room(self, elements: int) -> None:
        if self._capacity is not None and elements > self._capacity:
            raise torch.OutOfMemoryError(f"pretended: {elements} elements of {self._capacity}")


class _Pretended:
    """Copies within the host, of which each may be as large as the device says."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def send(self, values: torch.Tensor) -> Arriving:
        self._device.require_room(3 * values.numel())  # work takes about twice as much again
        return _Here(values.clone())

    def release(self) -> None:
        return None


class _Here:
    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def take(self) -> torch.Tensor:
        return self._values


def delta(shape: tuple[int, int], key: int) -> torch.Tensor:
    """A power law over some hundred directions and a flat tail, as full fine-tunes have."""
    count = min(512, *shape) // 2
    strength = torch.arange(1, count + 1) ** -0.5
    low = (random_matrix(key, shape[0], count) * strength) @ random_matrix(key + 1, count, shape[1])
    return 3e-4 * (low + 0.7 * random_matrix(key + 2, *shape))


def same(one: Sequence[Truncation | None], other: Sequence[Truncation | None]) -> bool:
    """Whether truncations are equal in every bit."""
    return all(
        a is not None
        and b is not None
        and torch.equal(a.left.cpu(), b.left.cpu())
        and torch.equal(a.right.cpu(), b.right.cpu())
        and torch.equal(a.energy.cpu(), b.energy.cpu())
        for a, b in zip(one, other, strict=True)
    )


def bits(device: Device, shape: tuple[int, int], count: int, rank: int) -> Part:
    part = Part()
    batch, keys = torch.stack([delta(shape, at) for at in range(count)]), list(range(count))
    there = batch.to(device.name)
    whole = truncated_svd(there, rank, keys)
    alone = [found for at in keys for found in truncated_svd(batch[at : at + 1].to(device.name), rank, [at])]
    halves = [f for at in (slice(None, 2), slice(2, None)) for f in truncated_svd(there[at], rank, keys[at])]
    part.check("alone as in a batch", same(whole, alone), True, same(whole, alone))
    part.check("in halves as in a batch", same(whole, halves), True, same(whole, halves))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    tf32 = truncated_svd(there, rank, keys)
    torch.set_float32_matmul_precision(before)
    part.check("under TF32 as without", same(whole, tf32), True, same(whole, tf32))
    on_cpu = truncated_svd(batch, rank, keys)
    difference = max(abs(a.residual() / b.residual() - 1) for a, b in zip(whole, on_cpu, strict=True) if a and b)
    part.check("residuals differ from the CPU's by", difference, 1e-5, difference <= 1e-5)
    return part


def svd_speed(device: Device, shapes: Sequence[tuple[int, int]], rank: int, *, timed: bool) -> Part:
    part = Part()
    torch.linalg.svd(torch.randn(64, 48, device=device.name))  # libraries load on first use
    seconds = [0.0, 0.0]
    for shape in shapes:
        matrix = delta(shape, 7).to(device.name)
        found = truncated_svd(matrix[None], rank, [1])[0]
        ours = min(device.clock(partial(truncated_svd, matrix[None], rank, [1])) for _ in range(3))
        full = device.clock(partial(torch.linalg.svd, matrix, full_matrices=False))
        wide = matrix.to(torch.float64)
        least = float(torch.linalg.eigvalsh(wide.mT @ wide)[:-rank].sum())  # of all shapes the short side is the second
        name = "x".join(map(str, shape))
        part.figures[name] = {"ours_seconds": ours, "full_svd_seconds": full, "times_faster": full / ours}
        excess = math.inf if found is None else found.residual() / least
        part.check(f"{name}: residual over the least", excess, RESIDUAL, excess <= RESIDUAL)
        seconds = [seconds[0] + ours, seconds[1] + full]
    faster = seconds[1] / seconds[0]
    part.check("times faster than the full SVD", faster, FASTER if timed else None, not timed or faster >= FASTER)
    return part


def memory(device: Device, shape: tuple[int, int], large: tuple[int, int], count: int, rank: int) -> Part:
    part = Part()
    batch, keys = torch.stack([delta(shape, at) for at in range(count)]), list(range(count))
    matrix = delta(large, 3)
    step = -(-large[0] // _BLOCKS)

    def read() -> Iterator[tuple[int, torch.Tensor]]:
        return ((start, matrix[start : start + step]) for start in range(0, large[0], step))

    def fit(there: torch.Tensor, some: Sequence[int]) -> list[Truncation | None]:
        return [found and _home(found) for found in truncated_svd(there, rank, some)]

    def fit_blocks(blocks: Callable[[], Iterator[tuple[int, torch.Tensor]]], where: str) -> list[Truncation | None]:
        found = blocked_svd(blocks, large, rank, 5, where)
        return [found and _home(found)]

    free = device.lane()
    plain, plain_blocks = free.fit(batch, keys, fit), free.fit_blocks(read, fit_blocks)
    part.check("with room nothing is cut", free.halvings, 0, free.halvings == 0)
    tight = device.lane()
    size = shape[0] * shape[1]
    with device.room_for(size * (count - 2)):
        found = tight.fit(batch, keys, fit)
    part.check("batches halved for want of memory", tight.halvings, 1, tight.halvings >= 1)
    part.check("the same bits when halved", same(plain, found), True, same(plain, found))
    blocks_lane = device.lane()
    with device.room_for(int(0.8 * large[0] * large[1])):
        found_blocks = blocks_lane.fit_blocks(read, fit_blocks)
    equal = same(plain_blocks, found_blocks)
    part.check("the same bits when blocks come in passes", equal, True, equal)
    left = tight.left_to_cpu + blocks_lane.left_to_cpu
    part.check("nothing was left to the CPU", left, 0, left == 0)
    return part


def _home(found: Truncation) -> Truncation:
    return Truncation(found.left.cpu(), found.right.cpu(), found.energy.cpu(), found.total)


def buffering(device: Device, shape: tuple[int, int], batches: int, rank: int, *, timed: bool) -> Part:
    """Batches of one matrix, subtracted on the host like in pass 1, one after the other and side by side."""
    part = Part()
    base = random_matrix(1, *shape).to(torch.bfloat16)
    own = [base + delta(shape, at).to(torch.bfloat16) for at in range(min(batches, 4))]

    def load(at: int) -> torch.Tensor:
        return (own[at % len(own)].to(torch.float32) - base.to(torch.float32))[None]

    def fit(there: torch.Tensor, keys: Sequence[int]) -> list[Truncation | None]:
        return [found and _home(found) for found in truncated_svd(there, rank, keys)]

    found: dict[str, list[Truncation | None]] = {"plain": [], "side by side": []}

    def plain() -> None:
        found["plain"] = [one for at in range(batches) for one in fit(load(at).to(device.name), [at])]

    def side_by_side() -> None:
        lane = device.lane()
        with ThreadPoolExecutor(_THREADS) as pool:
            fitted = pool.map(lambda at: lane.fit(load(at), [at], fit), range(batches))
            found["side by side"] = [one for some in fitted for one in some]

    seconds = {call.__name__: min(device.clock(call) for _ in range(2)) for call in (plain, side_by_side)}
    copied = 4 * math.prod(shape) * batches
    part.figures |= {f"{name}_gb_s": copied / taken / 1e9 for name, taken in seconds.items()}
    copies = device.clock(lambda: [load(at).to(device.name) for at in range(batches)])
    part.figures["load_and_copy_alone_gb_s"] = copied / copies / 1e9
    ratio = seconds["plain"] / seconds["side_by_side"]
    part.check("times the throughput of plain copies", ratio, 1.0 if timed else None, not timed or ratio >= 1.0)
    equal = same(found["plain"], found["side by side"])
    part.check("the same bits", equal, True, equal)
    return part
