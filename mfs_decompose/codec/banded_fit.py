"""A low rank delta before its bits are chosen: factors as pass 1 keeps them, which pass 2 quantises in bands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from mfs_decompose.codec.arrays import read_array
from mfs_decompose.codec.banded import Banded
from mfs_decompose.codec.base import Delta, Emit, Fetch, Fit
from mfs_decompose.codec.tree import CodecNode
from mfs_decompose.linalg.bands import Bands
from mfs_decompose.linalg.blocked import blocked_svd
from mfs_decompose.linalg.svd import Truncation, truncated_svd


class BandedFit:
    """Steps are directions, strongest first, whatever bits they will get.

    Factors lie in scratch as fp16 of unit peak, beside a scale each: an error of 2^-12, where 8 bits make one of 2^-8.
    """

    name = "banded"

    def array_names(self, params: Mapping[str, str]) -> tuple[str, ...]:
        return ("us", "vs", "u", "v")

    def fit(
        self, deltas_BOI: torch.Tensor, steps: int, keys: Sequence[int], params: Mapping[str, str]
    ) -> list[Fit | None]:
        return [None if found is None else _fit(found) for found in truncated_svd(deltas_BOI, steps, keys)]

    def fit_blocks(
        self,
        blocks: Callable[[], Iterator[tuple[int, torch.Tensor]]],
        shape: tuple[int, int],
        steps: int,
        key: int,
        params: Mapping[str, str],
        device: str = "cpu",
    ) -> Fit | None:
        found = blocked_svd(blocks, shape, steps, key, device)
        return None if found is None else _fit(found)

    def open(self, node: CodecNode, fetch: Fetch, shape: tuple[int, int]) -> Delta:
        return Banded().open(node, fetch, shape)


def encode_bands(fit: CodecNode, fetch: Fetch, bands: Bands, emit: Emit, rows: int, times: float = 1.0) -> CodecNode:
    """Quantise the leading `sum(bands)` directions of a fit that `fetch` reads out of scratch, for its first `rows`.

    What is written is `times` as large.
    """
    rank = sum(bands)
    sides = []
    for side in "uv":
        kept, length = fit.part(side).shape
        codes = read_array(fit, side, fetch, "F16", (kept, length))[:rank]
        scales = read_array(fit, side + "s", fetch, "F32", (kept, 1))[:rank]
        sides.append(codes.to(torch.float32) * scales)
    sides[0] = sides[0][:, :rows]
    return Banded().encode(sides[0], sides[1], bands, emit, times)


def _fit(found: Truncation) -> Fit:
    arrays: dict[str, torch.Tensor] = {}
    for side, directions in (("u", found.left), ("v", found.right)):
        peaks = directions.abs().amax(dim=1, keepdim=True) if directions.shape[1] else directions.new_zeros(1, 1)
        scales = torch.where(peaks > 0, peaks, 1.0).to(torch.float32)
        arrays[side + "s"] = scales
        arrays[side] = (directions / scales).to(torch.float16)
    return Fit(found.energy, found.total, arrays)
