"""Pass 1: read every tensor once, digest it, and fit the lossy ones at the largest size they may be given.

What allocation needs of a tensor is how much of its delta each step explains; the fit itself goes to scratch, so that
pass 2 only cuts it to size.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch

from mfs_decompose.base_extraction import delta_rows
from mfs_decompose.codec.arrays import head_parts, tensor_bytes
from mfs_decompose.codec.base import DECODE_ELEMENTS, Fit
from mfs_decompose.codec.registry import lossy_codec
from mfs_decompose.codec.tree import CodecNode
from mfs_decompose.linalg.seeds import stream_key
from mfs_decompose.linalg.shapes import GROUP
from mfs_decompose.linalg.sums import squared_norm
from mfs_decompose.pipeline.exact import CountingSink, encode_exact
from mfs_decompose.pipeline.reading import Advance, Sources, row_blocks
from mfs_decompose.pipeline.scheduler import Stop
from mfs_decompose.plan.model import Item, Unit
from mfs_decompose.plan.units import BLOCK_ELEMENTS
from mfs_decompose.source.dtypes import is_float, torch_dtype


@dataclass(frozen=True, slots=True)
class Surveyed:
    """What pass 1 found out about one item.

    `identical` says that the rows which have a counterpart in the base have its bits. `energy` is ||delta||^2 over
    those rows, `explained[i]` the part of it that step i explains. `exact_bytes` are those of the lossless codec, where
    allocation must know them: it was chosen beside a budget, or no lossy codec could be used. `fit` and `offset` say
    what lies in the unit's scratch file, and where.
    """

    sha256: str
    identical: bool
    nonfinite: int
    energy: float
    explained: tuple[float, ...] = ()
    exact_bytes: int | None = None
    fit: dict[str, Any] | None = None
    offset: int = 0

    def to_json(self) -> dict[str, Any]:
        """Plain JSON; not `asdict`, which would copy every step of every tensor twice."""
        return {name: getattr(self, name) for name in self.__slots__} | {"explained": list(self.explained)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Surveyed:
        return cls(**{**document, "explained": tuple(document["explained"])})


@dataclass(frozen=True)
class Surveyor:
    """Surveys units, on a device, under a seed, beside a budget or not; thread-safe."""

    sources: Sources
    seed: int
    device: str
    capped: bool
    advance: Advance

    def survey(self, unit: Unit, scratch: BinaryIO, stop: Stop) -> list[Surveyed]:
        """Survey the items of one unit in order, and write their fits to `scratch`."""
        if unit.kind == "batch":
            return self._batch(unit.items, scratch, stop)
        return [self._single(item, scratch, stop) for item in unit.items]

    def _batch(self, items: Sequence[Item], scratch: BinaryIO, stop: Stop) -> list[Surveyed]:
        found: list[Surveyed] = []
        deltas: list[torch.Tensor] = []
        chosen: list[int] = []
        base_name, base_raw = "", torch.empty(0, dtype=torch.uint8)
        for at, item in enumerate(items):
            stop.check()
            assert item.base is not None and item.matrix is not None
            if item.base.name != base_name:  # items of one tensor follow each other
                base_name, base_raw = item.base.name, self.sources.base.raw(item.base.name)
                self.advance(item.base.nbytes)
            raw = self.sources.variants[item.variant].raw(item.name)
            self.advance(item.spec.nbytes)
            common = item.common.nbytes
            identical = item.comparable_bits and torch.equal(raw[:common], base_raw[:common])
            own = raw.view(torch_dtype(item.spec.dtype)).reshape(item.spec.shape)
            base = base_raw.view(torch_dtype(item.base.dtype)).reshape(item.base.shape)
            delta = delta_rows(own[: item.common_rows], base[: item.common_rows]).reshape(item.matrix)
            surveyed, fits = _describe(item, hashlib.sha256(raw.numpy().data).hexdigest(), identical, own, delta)
            found.append(surveyed)
            if fits:
                deltas.append(delta)
                chosen.append(at)
        if chosen:
            first = items[chosen[0]]
            keys = [_key(self.seed, items[at]) for at in chosen]
            batch = torch.stack(deltas).to(self.device)
            deltas.clear()
            fits_found = lossy_codec(first.codec).fit(batch, first.steps, keys, first.params)
            for at, fit in zip(chosen, fits_found, strict=True):
                found[at] = self._keep(items[at], found[at], fit, scratch)
        return [self._force(item, surveyed) for item, surveyed in zip(items, found, strict=True)]

    def _single(self, item: Item, scratch: BinaryIO, stop: Stop) -> Surveyed:
        surveyed, fits = self._scan(item, stop)
        if item.lossy and fits:
            assert item.matrix is not None

            def blocks() -> Iterator[tuple[int, torch.Tensor]]:
                for block in self.sources.delta_blocks(item, self.advance):
                    stop.check()
                    yield block[0], block[1].to(self.device)

            codec = lossy_codec(item.codec)
            fit = codec.fit_blocks(blocks, item.matrix, item.steps, _key(self.seed, item), item.params, self.device)
            surveyed = self._keep(item, surveyed, fit, scratch)
        return self._force(item, surveyed)

    def _scan(self, item: Item, stop: Stop) -> tuple[Surveyed, bool]:
        """Read a tensor once, block by block: its digest, whether it is the base's, and the size of its delta."""
        own_rows, base_rows = self.sources.own(item), self.sources.of_base(item)
        digest = hashlib.sha256()
        identical, finite, nonfinite = item.comparable_bits, True, 0
        norms: list[float] = []
        for start, end in row_blocks(item, BLOCK_ELEMENTS if item.lossy else DECODE_ELEMENTS):
            stop.check()
            own = own_rows(start, end)
            digest.update(tensor_bytes(own))
            self.advance((end - start) * item.spec.row_bytes)
            if base_rows is None or item.base is None or start >= item.common_rows:
                nonfinite += _count_nonfinite(own)
                continue
            base = base_rows(start, end)
            self.advance((end - start) * item.base.row_bytes)
            identical = identical and torch.equal(_bits(own), _bits(base))
            if is_float(item.spec.dtype) and is_float(item.base.dtype):
                energy, whole = _energy(delta_rows(own, base))
                nonfinite += 0 if whole else _count_nonfinite(own)
                finite = finite and whole
                norms.append(energy)
            else:
                nonfinite += _count_nonfinite(own)
        total = 0.0 if identical else math.fsum(norms)
        return Surveyed(digest.hexdigest(), identical, nonfinite, total), finite and not identical

    def _keep(self, item: Item, surveyed: Surveyed, fit: Fit | None, scratch: BinaryIO) -> Surveyed:
        if fit is None:
            return surveyed
        codec = lossy_codec(item.codec)
        parts, blob = head_parts(fit.arrays, codec.array_names(item.params), fit.steps)
        params: dict[str, Any] = {"steps": fit.steps, **item.params}
        if item.codec == "lowrank":
            params["group"] = GROUP
        offset = scratch.tell()
        scratch.write(blob)
        return Surveyed(
            sha256=surveyed.sha256,
            identical=False,
            nonfinite=surveyed.nonfinite,
            energy=surveyed.energy,
            explained=tuple(fit.energy.tolist()),
            fit=CodecNode(item.codec, params=params, parts=parts).to_json(),
            offset=offset,
        )

    def _force(self, item: Item, surveyed: Surveyed) -> Surveyed:
        """Find out what the lossless codec costs where allocation must know, see `Surveyed`."""
        wanted = surveyed.fit is None if item.lossy else self.capped and item.codec == "lossless"
        if surveyed.identical or not wanted:
            return surveyed
        sink = CountingSink()
        encode_exact(item, "lossless", self.sources, sink)
        return Surveyed(surveyed.sha256, False, surveyed.nonfinite, surveyed.energy, exact_bytes=sink.tell())


def _describe(
    item: Item, sha256: str, identical: bool, own: torch.Tensor, delta: torch.Tensor
) -> tuple[Surveyed, bool]:
    energy, finite = _energy(delta)
    # Where the delta is finite the common rows are, and only new rows are left to be looked at.
    nonfinite = _count_nonfinite(own[item.common_rows :] if finite else own)
    return Surveyed(sha256, identical, nonfinite, energy), finite and not identical


def _energy(delta: torch.Tensor) -> tuple[float, bool]:
    """||delta||^2 over its finite elements, and whether all are: squares of fp32 cannot overflow in fp64."""
    energy = squared_norm(delta)
    if math.isfinite(energy):
        return energy, True
    return squared_norm(torch.nan_to_num(delta, 0.0, 0.0, 0.0)), False


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(-1).view(torch.uint8)


def _count_nonfinite(values: torch.Tensor) -> int:
    if not values.is_floating_point() or values.element_size() == 1:
        return 0
    return int(values.numel() - torch.isfinite(values).sum())


def _key(seed: int, item: Item) -> int:
    return stream_key(seed, "sketch", item.name)
