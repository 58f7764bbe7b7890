"""Pass 1: read every tensor once, digest it, and fit the lossy ones at the largest size they may be given.

What allocation needs of a tensor is how much of its delta each step explains; the fit itself goes to scratch, so that
pass 2 only cuts it to size.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import BinaryIO

import torch

from mfs_decompose.base_extraction import delta_rows
from mfs_decompose.codec.arrays import tensor_bytes
from mfs_decompose.codec.base import DECODE_ELEMENTS, Fit
from mfs_decompose.codec.registry import lossy_codec
from mfs_decompose.linalg.device_batches import lane_of
from mfs_decompose.linalg.seeds import stream_key
from mfs_decompose.pipeline.deltas import count_nonfinite, delta_energy, same_bits
from mfs_decompose.pipeline.direct import encode_direct
from mfs_decompose.pipeline.exact import CountingSink, encode_exact, encode_rows
from mfs_decompose.pipeline.merge_items import survey_merged
from mfs_decompose.pipeline.reading import Advance, Sources, row_blocks
from mfs_decompose.pipeline.rests import survey_open
from mfs_decompose.pipeline.scheduler import Stop
from mfs_decompose.pipeline.stack import StackSurveyor
from mfs_decompose.pipeline.surveyed import Surveyed, fit_bytes, slice_runs
from mfs_decompose.plan.model import Item, Unit
from mfs_decompose.plan.units import ROW_BLOCK_ELEMENTS
from mfs_decompose.source.dtypes import is_float, torch_dtype

__all__ = ["Surveyed", "Surveyor"]


@dataclass(frozen=True)
class Surveyor:
    """Surveys units, on a device, under a seed, beside a budget or not; thread-safe.

    `base_digests` are those of the base's tensors, which an adapter that leaves them alone has as well.
    """

    sources: Sources
    seed: int
    device: str
    capped: bool
    advance: Advance
    base_digests: Mapping[str, str]

    def survey(self, unit: Unit, scratch: BinaryIO, stop: Stop) -> list[Surveyed]:
        """Survey the items of one unit in order, and write their fits to `scratch`."""
        if unit.kind == "batch":
            return self._batch(unit.items, scratch, stop)
        if unit.kind == "stack":
            stacks = StackSurveyor(self.sources, self.seed, self.device, self.advance)
            return [self._force(item, stacks.survey(item, scratch, stop)) for item in unit.items]
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
            own_common, base_common = own[: item.common_rows], base[: item.common_rows]
            delta = delta_rows(own_common, base_common).reshape(item.matrix)
            surveyed, fits = _describe(item, hashlib.sha256(raw.numpy().data).hexdigest(), identical, own, delta)
            found.append(surveyed)
            if fits:
                if item.key in self.sources.shared:
                    delta = self.sources.fitted_of(item)(0, own_common, base_common).reshape(item.matrix)
                deltas.append(delta)
                chosen.append(at)
        if chosen:
            first = items[chosen[0]]
            keys = [_key(self.seed, items[at]) for at in chosen]
            batch = torch.stack(deltas)
            deltas.clear()
            codec = lossy_codec(first.codec)
            fits_found = lane_of(self.device).fit(
                batch, keys, lambda part, part_keys: codec.fit(part, first.steps, part_keys, first.params)
            )
            for at, fit in zip(chosen, fits_found, strict=True):
                found[at] = self._keep(items[at], found[at], fit, scratch)
        return [self._force(item, surveyed) for item, surveyed in zip(items, found, strict=True)]

    def _single(self, item: Item, scratch: BinaryIO, stop: Stop) -> Surveyed:
        if item.codec == "identical":
            assert item.base is not None
            return Surveyed(self.base_digests[item.base.name], True, 0, 0.0)
        if item.codec == "adapter":
            sha256, energy, overflows = survey_merged(item, self.sources, self.advance, stop)
            return Surveyed(sha256, False, overflows, energy)
        surveyed, fits = self._scan(item, stop)
        if not (fits or surveyed.identical):
            surveyed = replace(surveyed, finite=False)
        if item.fitted and fits:
            assert item.matrix is not None

            def blocks() -> Iterator[tuple[int, torch.Tensor]]:
                for block in self.sources.fitted_blocks(item, self.advance):
                    stop.check()
                    yield block

            codec, key, matrix = lossy_codec(item.codec), _key(self.seed, item), item.matrix
            fit = lane_of(self.device).fit_blocks(
                blocks, lambda source, device: codec.fit_blocks(source, matrix, item.steps, key, item.params, device)
            )
            surveyed = self._keep(item, surveyed, fit, scratch)
        return self._force(item, surveyed)

    def _scan(self, item: Item, stop: Stop) -> tuple[Surveyed, bool]:
        """Read a tensor once, block by block: its digest, whether it is the base's, and the size of its delta."""
        own_rows, base_rows = self.sources.own(item), self.sources.of_base(item)
        digest = hashlib.sha256()
        identical, finite, nonfinite = item.comparable_bits, True, 0
        norms: list[float] = []
        for start, end in row_blocks(item, ROW_BLOCK_ELEMENTS if item.fitted else DECODE_ELEMENTS):
            stop.check()
            own = own_rows(start, end)
            digest.update(tensor_bytes(own))
            self.advance((end - start) * item.spec.row_bytes)
            if base_rows is None or item.base is None or start >= item.common_rows:
                nonfinite += count_nonfinite(own)
                continue
            base = base_rows(start, end)
            self.advance((end - start) * item.base.row_bytes)
            identical = identical and same_bits(own, base)
            if is_float(item.spec.dtype) and is_float(item.base.dtype):
                energy, whole = delta_energy(delta_rows(own, base))
                nonfinite += 0 if whole else count_nonfinite(own)
                finite = finite and whole
                norms.append(energy)
            else:
                nonfinite += count_nonfinite(own)
        total = 0.0 if identical else math.fsum(norms)
        return Surveyed(digest.hexdigest(), identical, nonfinite, total), finite and not identical

    def _keep(self, item: Item, surveyed: Surveyed, fit: Fit | None, scratch: BinaryIO) -> Surveyed:
        if fit is None:
            return surveyed
        node, blob = fit_bytes(item, fit)
        offset = scratch.tell()
        scratch.write(blob)
        return Surveyed(
            sha256=surveyed.sha256,
            identical=False,
            nonfinite=surveyed.nonfinite,
            energy=surveyed.energy,
            explained=tuple(fit.energy.tolist()),
            fit=node.to_json(),
            offset=offset,
            open=survey_open(item, fit, self.sources) if item.auto else None,
        )

    def _force(self, item: Item, surveyed: Surveyed) -> Surveyed:
        """Find out what the lossless codec costs where allocation must know, see `Surveyed`."""
        runs = [run for run in slice_runs(surveyed.slices) if run[0] == "exact"]
        coded = item.direct or item.codec in ("lossless", "lora-exact")
        wanted = runs or (surveyed.fit is None if item.fitted else self.capped and coded)
        if surveyed.identical or not wanted:
            return surveyed
        sink = CountingSink()
        for _, start, end in runs:
            encode_rows(item, start, end, self.sources, sink)
        if item.direct and surveyed.finite:
            encode_direct(item, self.sources, sink)
        elif not runs:
            codec = "lora-exact" if item.codec == "lora-exact" else "lossless"
            encode_exact(item, codec, self.sources, sink)
        return replace(surveyed, exact_bytes=sink.tell())


def _describe(
    item: Item, sha256: str, identical: bool, own: torch.Tensor, delta: torch.Tensor
) -> tuple[Surveyed, bool]:
    energy, finite = delta_energy(delta)
    # Where the delta is finite the common rows are, and only new rows are left to be looked at.
    nonfinite = count_nonfinite(own[item.common_rows :] if finite else own)
    return Surveyed(sha256, identical, nonfinite, energy), finite and not identical


def _key(seed: int, item: Item) -> int:
    return stream_key(seed, "sketch", item.name)
