"""Pass 1 of a stack [E, O, I]: every slice is a matrix of its own, whatever its neighbours are.

Slices are read in groups of bounded size. Those that are the base's are done with; the others of a group are factorised
as one batch, with the steps that the whole group was planned to have: rank goes where the change is.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch

from mfs_decompose.base_extraction import delta_rows
from mfs_decompose.codec.arrays import tensor_bytes
from mfs_decompose.codec.base import DECODE_ELEMENTS, Fit
from mfs_decompose.codec.registry import lossy_codec
from mfs_decompose.linalg.device_batches import lane_of
from mfs_decompose.linalg.seeds import stream_key
from mfs_decompose.pipeline.deltas import count_nonfinite, delta_energy, same_bits
from mfs_decompose.pipeline.reading import Advance, Sources, row_blocks
from mfs_decompose.pipeline.scheduler import Stop
from mfs_decompose.pipeline.surveyed import Slice, Surveyed, fit_bytes
from mfs_decompose.plan.model import Item
from mfs_decompose.plan.units import slice_groups, slice_steps


@dataclass(frozen=True)
class StackSurveyor:
    """Surveys stacks; see `Surveyor`."""

    sources: Sources
    seed: int
    device: str
    advance: Advance

    def survey(self, item: Item, scratch: BinaryIO, stop: Stop) -> Surveyed:
        """Read a stack once and write the fits of its changed slices to `scratch`, one behind another."""
        own_rows, base_rows = self.sources.own(item), self.sources.of_base(item)
        assert base_rows is not None and item.base is not None
        found = _Findings()
        for start, end in slice_groups(item):
            stop.check()
            own = own_rows(start, end)
            found.digest.update(tensor_bytes(own))
            self.advance((end - start) * item.spec.row_bytes)
            base = base_rows(start, end)
            self.advance((end - start) * item.base.row_bytes)
            self._group(item, start, own, base, found, scratch)
        for start, end in row_blocks(item, DECODE_ELEMENTS):
            if start >= item.common_rows:  # rows that the base does not have
                stop.check()
                own = own_rows(start, end)
                found.digest.update(tensor_bytes(own))
                found.nonfinite += count_nonfinite(own)
                self.advance((end - start) * item.spec.row_bytes)
        return found.surveyed()

    def _group(
        self, item: Item, first: int, own: torch.Tensor, base: torch.Tensor, found: _Findings, scratch: BinaryIO
    ) -> None:
        slices: list[Slice] = []
        deltas: list[torch.Tensor] = []
        for at in range(own.shape[0]):
            if item.comparable_bits and same_bits(own[at], base[at]):
                slices.append("identical")
                found.nonfinite += count_nonfinite(own[at])
                continue
            delta = delta_rows(own[at], base[at])
            energy, finite = delta_energy(delta)
            found.energies.append(energy)
            found.nonfinite += 0 if finite else count_nonfinite(own[at])
            slices.append(() if finite else "exact")
            if finite:
                deltas.append(delta)
        if deltas:
            steps = slice_steps(item, len(slices), len(deltas))
            changed = [at for at, one in enumerate(slices) if one == ()]
            keys = [stream_key(self.seed, "sketch", f"{item.name}\0{first + at}") for at in changed]
            batch = torch.stack(deltas)
            deltas.clear()
            codec = lossy_codec(item.codec)
            fits = lane_of(self.device).fit(
                batch, keys, lambda part, part_keys: codec.fit(part, steps, part_keys, item.params)
            )
            for at, fit in zip(changed, fits, strict=True):
                slices[at] = found.keep(item, fit, scratch)
        found.slices.extend(slices)


class _Findings:
    """What is known of a stack while it is read."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256()
        self.slices: list[Slice] = []
        self.energies: list[float] = []
        self.nonfinite = 0
        self.like: dict[str, Any] | None = None

    def keep(self, item: Item, fit: Fit | None, scratch: BinaryIO) -> Slice:
        if fit is None:
            return "exact"
        node, blob = fit_bytes(item, fit)
        scratch.write(blob)
        self.like = self.like or node.to_json()
        # Seven digits order steps as well as seventeen, in half the journal.
        return tuple(float(f"{value:.7g}") for value in fit.energy.tolist())

    def surveyed(self) -> Surveyed:
        identical = all(found == "identical" for found in self.slices)
        return Surveyed(
            self.digest.hexdigest(),
            identical,
            self.nonfinite,
            math.fsum(self.energies),
            fit=self.like,
            slices=tuple(self.slices) if self.like is not None else (),
        )
