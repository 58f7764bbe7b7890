"""Before a shared delta is decided upon: what the variants' deltas have in common, and what that leaves.

For each base tensor the deltas are averaged over the variants that are nearer to the mean than to the base. Of the
directions of that mean those are common that the variants agree on; a direction that one variant learnt alone is in the
mean as well, and taking it from the others would only move it there. Truncations of what is left of each delta are
then taken out, and the mean of the rest is looked at once more: `M = mean_k(D_k - L_k)`, without directions that are
not common.

What a variant stores is fitted to `D_k - M` with all of M, and not to what the stored directions of M leave: the tail
of M has more energy than what makes a variant itself, does little harm, and would be stored K times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from mfs_decompose.base_extraction import delta_rows
from mfs_decompose.codec.base import block_rows
from mfs_decompose.linalg.blocked import blocked_svd
from mfs_decompose.linalg.device_batches import lane_of
from mfs_decompose.linalg.seeds import stream_key
from mfs_decompose.linalg.sums import squared_norm
from mfs_decompose.linalg.svd import Truncation, truncated_svd
from mfs_decompose.pipeline.deltas import same_bits
from mfs_decompose.pipeline.reading import Advance, Sources
from mfs_decompose.pipeline.scheduler import Stop
from mfs_decompose.plan.allocate import Key
from mfs_decompose.plan.model import Item
from mfs_decompose.plan.shared_groups import SharedGroup
from mfs_decompose.plan.shared_sizes import Curve, SharedCurves
from mfs_decompose.plan.units import ROW_BLOCK_ELEMENTS

Blocks = Callable[[], Iterator[tuple[int, torch.Tensor]]]

_TURNS = 2
_AGREED = 0.5
"""Of a direction's energy in all variants together, what may differ from their mean: 0 where all have as much of it, 1
where of two one has all of it."""


@dataclass(frozen=True)
class SharedSurvey:
    """What is known of one group: the curves of the variants that would use a mean; no mean where fewer than two do.

    `exact` are the variants whose delta is not finite.
    """

    mean: Curve = field(default_factory=lambda: Curve((), 0.0))
    rests: Mapping[str, Curve] = field(default_factory=dict)
    alone: Mapping[str, Curve] = field(default_factory=dict)
    exact: tuple[str, ...] = ()

    def curves(self, group: SharedGroup) -> SharedCurves:
        first = group.items[0]
        bits = 4 if first.params.get("factors") == "int4" else 8
        rank = first.steps if all(item.fixed for item in group.items) else None
        return SharedCurves(group.name, group.matrix, self.mean, self.rests, self.alone, rank, bits)

    def to_json(self) -> dict[str, Any]:
        return {
            "mean": _dump(self.mean),
            "rests": {id: _dump(curve) for id, curve in self.rests.items()},
            "alone": {id: _dump(curve) for id, curve in self.alone.items()},
            "exact": list(self.exact),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> SharedSurvey:
        return cls(
            _load(document["mean"]),
            {id: _load(one) for id, one in sorted(document["rests"].items())},
            {id: _load(one) for id, one in sorted(document["alone"].items())},
            tuple(document["exact"]),
        )


@dataclass(frozen=True)
class Common:
    """What deltas have in common: its strongest directions, and all of it [O, I], bf16, mapped from a scratch file.

    `found.total` is the squared norm of all of it.
    """

    found: Truncation
    whole: torch.Tensor

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Rows of all of it, fp32."""
        return self.whole[start:stop].to(torch.float32)


def open_whole(path: Path, shape: tuple[int, int]) -> torch.Tensor:
    """The matrix of a scratch file, bf16."""
    return torch.from_file(str(path), shared=True, size=shape[0] * shape[1], dtype=torch.bfloat16).reshape(shape)


@dataclass(frozen=True)
class SharedSurveyor:
    """Reads the deltas of groups; thread-safe."""

    sources: Sources
    seed: int
    device: str
    advance: Advance

    def survey(self, group: SharedGroup, scratch: Path, stop: Stop) -> SharedSurvey:
        """Curves of one group; `scratch` is a file to work with."""
        sizes = {item.variant: _measure(self._deltas(group, item, stop)) for item in group.items}
        exact = tuple(id for id, size in sizes.items() if not math.isfinite(size))
        users = self._users(group, sizes, stop)
        if len(users) < 2:
            return SharedSurvey(exact=exact)
        common = self.common(group, users, scratch, stop)
        if common is None:
            return SharedSurvey(exact=exact)
        rests = {item.variant: self._factorise(group, self._rest(group, item, common, stop)) for item in users}
        alone = {item.variant: self._factorise(group, self._deltas(group, item, stop)) for item in users}
        if None in rests.values() or None in alone.values():
            return SharedSurvey(exact=exact)
        return SharedSurvey(_curve(common.found), _curves(rests), _curves(alone), exact)

    def common(self, group: SharedGroup, users: Sequence[Item], scratch: Path, stop: Stop) -> Common | None:
        """What the deltas of the users have in common, in `scratch`; None where it has no direction, or SVDs failed."""
        taken: list[Truncation] = []
        for turn in range(_TURNS):
            blocks = self._mean_blocks(group, users, taken, stop)
            mean = self._factorise(group, blocks)
            if mean is None:
                return None
            keep = self._agreed(group, users, mean, taken, stop)
            if not bool(keep.any()):
                return None
            dropped = _part(mean, ~keep)
            # Written, and mapped after: on a full disk a write raises, where a mapping would end the process.
            with scratch.open("wb") as file:
                for first, rows in blocks():
                    common = (rows - rows_of(dropped, first, first + rows.shape[0])).to(torch.bfloat16)
                    file.write(common.contiguous().view(torch.int16).numpy().data)
            whole = open_whole(scratch, group.matrix)
            total = max(mean.total - math.fsum(dropped.energy.tolist()), 0.0)
            found = Common(replace(_part(mean, keep), total=total), whole)
            if turn == _TURNS - 1:
                return found
            own = [self._factorise(group, self._rest(group, item, found, stop)) for item in users]
            if None in own:
                return None
            taken = [one.head(max(1, one.rank // 2)) for one in own if one is not None]
        return None

    def _agreed(
        self,
        group: SharedGroup,
        users: Sequence[Item],
        mean: Truncation,
        taken: Sequence[Truncation],
        stop: Stop,
    ) -> torch.Tensor:
        """Which directions of the mean the variants have about equally much of."""
        sizes = mean.energy.sqrt().clamp(min=torch.finfo(torch.float64).tiny)
        apart = torch.zeros_like(sizes)
        for index, item in enumerate(users):
            amount = torch.zeros_like(sizes)
            for first, delta in self._without(group, item, taken[index : index + 1], stop)():
                left = mean.left[:, first : first + delta.shape[0]].to(torch.float64)
                amount += ((left @ delta.to(torch.float64)) * mean.right.to(torch.float64)).sum(dim=1)
            apart += (amount / sizes - sizes).square()  # both sides hold the root of the size
        return apart <= _AGREED * len(users) * mean.energy

    def _users(self, group: SharedGroup, sizes: Mapping[str, float], stop: Stop) -> tuple[Item, ...]:
        """The items whose delta is finite, not zero, and nearer to the mean of such deltas than to zero."""
        able = [item for item in group.items if 0.0 < sizes[item.variant] < math.inf]
        if len(able) < 2:
            return ()
        distances: dict[Key, list[float]] = {item.key: [] for item in able}
        for start, end in self._rows(group):
            stop.check()
            deltas = [self._delta(item, start, end) for item in able]
            mean = _mean(deltas)
            for item, delta in zip(able, deltas, strict=True):
                distances[item.key].append(squared_norm(delta - mean))
        near = tuple(item for item in able if math.fsum(distances[item.key]) < sizes[item.variant])
        return near if len(near) > 1 else ()

    def _mean_blocks(
        self, group: SharedGroup, users: Sequence[Item], taken: Sequence[Truncation], stop: Stop
    ) -> Blocks:
        """The mean of the deltas without what is taken of each, in row blocks, fp32, summed in fp64."""
        sources = [self._without(group, item, taken[at : at + 1], stop) for at, item in enumerate(users)]

        def blocks() -> Iterator[tuple[int, torch.Tensor]]:
            for parts in zip(*(source() for source in sources), strict=True):
                yield parts[0][0], _mean(part for _, part in parts)

        return blocks

    def same_bits(self, one: Item, other: Item) -> bool:
        """Whether two tensors of a variant are the same, bit by bit."""
        if (one.spec.dtype, one.spec.shape) != (other.spec.dtype, other.spec.shape):
            return False
        rows, others, step = self.sources.own(one), self.sources.own(other), block_rows(one.spec, ROW_BLOCK_ELEMENTS)
        starts = range(0, one.spec.rows, step)
        return all(same_bits(rows(at, end), others(at, end)) for at in starts if (end := min(at + step, one.spec.rows)))

    def _factorise(self, group: SharedGroup, blocks: Blocks) -> Truncation | None:
        """The truncation of a matrix of the group to the directions that are looked at."""
        key, steps = stream_key(self.seed, "shared", group.name), group.steps
        lane = lane_of(self.device)
        if not group.whole:
            return lane.fit_blocks(blocks, lambda source, device: blocked_svd(source, group.matrix, steps, key, device))
        matrix = torch.cat([block for _, block in blocks()])
        return lane.fit(matrix[None], [key], lambda part, keys: truncated_svd(part, steps, keys))[0]

    def _deltas(self, group: SharedGroup, item: Item, stop: Stop) -> Blocks:
        def blocks() -> Iterator[tuple[int, torch.Tensor]]:
            for start, end in self._rows(group):
                stop.check()
                yield start * _scale(group), self._delta(item, start, end).reshape(-1, group.matrix[1])

        return blocks

    def _rest(self, group: SharedGroup, item: Item, common: Common, stop: Stop) -> Blocks:
        """A delta without all that is common, in row blocks."""

        def blocks() -> Iterator[tuple[int, torch.Tensor]]:
            for first, delta in self._deltas(group, item, stop)():
                yield first, delta - common.rows(first, first + delta.shape[0])

        return blocks

    def _without(self, group: SharedGroup, item: Item, taken: Sequence[Truncation], stop: Stop) -> Blocks:
        """A delta without some products, in row blocks."""

        def blocks() -> Iterator[tuple[int, torch.Tensor]]:
            for first, delta in self._deltas(group, item, stop)():
                for one in taken:
                    delta = delta - rows_of(one, first, first + delta.shape[0])
                yield first, delta

        return blocks

    def _delta(self, item: Item, start: int, end: int) -> torch.Tensor:
        base = self.sources.of_base(item)
        assert base is not None and item.base is not None
        self.advance((end - start) * (item.spec.row_bytes + item.base.row_bytes))
        return delta_rows(self.sources.own(item)(start, end), base(start, end))

    def _rows(self, group: SharedGroup) -> list[tuple[int, int]]:
        spec = group.items[0].common
        step = block_rows(spec, ROW_BLOCK_ELEMENTS)
        return [(start, min(start + step, spec.rows)) for start in range(0, spec.rows, step)]


def _mean(deltas: Iterable[torch.Tensor]) -> torch.Tensor:
    total, count = torch.zeros((), dtype=torch.float64), 0
    for delta in deltas:
        total, count = total + delta.to(torch.float64), count + 1
    return (total / count).to(torch.float32)


def _measure(blocks: Blocks) -> float:
    """The squared norm; infinite where an element is not finite, which no factorisation takes."""
    total = math.fsum(squared_norm(block) for _, block in blocks())
    return total if math.isfinite(total) else math.inf


def rows_of(product: Truncation, start: int, stop: int) -> torch.Tensor:
    """Rows of `left.T @ right`, fp32."""
    return product.left[:, start:stop].mT @ product.right


def _part(found: Truncation, chosen_R: torch.Tensor) -> Truncation:
    return Truncation(found.left[chosen_R], found.right[chosen_R], found.energy[chosen_R], found.total)


def _scale(group: SharedGroup) -> int:
    return group.matrix[0] // group.items[0].common.rows


def _curve(found: Truncation) -> Curve:
    return Curve(tuple(float(f"{value:.7g}") for value in found.energy.tolist()), found.total)


def _curves(found: Mapping[str, Truncation | None]) -> dict[str, Curve]:
    return {id: _curve(one) for id, one in found.items() if one is not None}


def _dump(curve: Curve) -> dict[str, Any]:
    return {"energy": list(curve.energy), "total": curve.total}


def _load(document: Mapping[str, Any]) -> Curve:
    return Curve(tuple(document["energy"]), document["total"])
