"""Puts a variant as it would be served into a gauge: encoded and decoded as the artifact will be, in memory."""

from __future__ import annotations

import io
from collections.abc import Container, Mapping
from contextlib import nullcontext
from typing import BinaryIO

import torch

from mfs_decompose.codec.opened import OpenedTensor
from mfs_decompose.pipeline.direct import reader_at
from mfs_decompose.pipeline.encode import Choice, Encoder
from mfs_decompose.pipeline.gauge import Gauge
from mfs_decompose.pipeline.passes import Job, fits_of
from mfs_decompose.pipeline.scheduler import Stop
from mfs_decompose.pipeline.surveyed import Surveyed
from mfs_decompose.plan.allocate import Key
from mfs_decompose.plan.model import Item

_EXACT = ("raw", "lossless", "lora-exact", "alias")


class Prober:
    """Serves choices that are not written down yet."""

    def __init__(self, job: Job, surveyed: Mapping[Key, Surveyed]) -> None:
        self._job, self._surveyed = job, surveyed
        self._encoder = Encoder(job.sources, lambda _: None)
        self._items = {item.key: item for item in job.plan.items()}

    def put(
        self, gauge: Gauge, variant: str, choices: Mapping[Key, Choice], names: Container[str] | None = None
    ) -> None:
        """Put tensors of a variant in place, all by default, as these choices would serve them."""
        for unit in self._job.plan.units:
            own = [item for item in unit.items if item.variant == variant and (names is None or item.name in names)]
            if not own:
                continue
            fits = fits_of(self._job, unit, self._surveyed, Stop())
            with open(fits, "rb") if fits else nullcontext() as source:
                for item in own:
                    gauge.put(item.name, self._served(item, choices[item.key], source))

        # An alias is what it names, whatever unit that lies in.
        for key, choice in choices.items():
            if key[0] == variant and choice.of is not None and (names is None or choice.of in names):
                gauge.put(key[1], self._served_again(key[0], choice.of, choices))

    def _served_again(self, variant: str, name: str, choices: Mapping[Key, Choice]) -> torch.Tensor:
        item = self._items[variant, name]
        unit = next(unit for unit in self._job.plan.units if item in unit.items)
        fits = fits_of(self._job, unit, self._surveyed, Stop())
        with open(fits, "rb") if fits else nullcontext() as source:
            return self._served(item, choices[item.key], source)

    def _served(self, item: Item, choice: Choice, fits: BinaryIO | None) -> torch.Tensor:
        sources, rows = self._job.sources, item.spec.rows
        if choice.codec in _EXACT:
            return sources.own(item)(0, rows)
        output = io.BytesIO()
        node = self._encoder.write(item, self._surveyed[item.key], choice, fits, output)
        opened = OpenedTensor(node, reader_at(output, 0), item.spec, sources.shared.get(item.key))
        return opened.served(0, rows, sources.of_base(item))
