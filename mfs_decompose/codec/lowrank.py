"""Low rank: a delta as a sum of few outer products, its factors quantised.

Steps are directions. At 4 bits four times the directions fit into the bytes of 16-bit factors, and the error of
the 4 bits is far below the energy of the added directions, at every size measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from mfs_decompose.codec.arrays import read_array
from mfs_decompose.codec.base import Fetch, Fit
from mfs_decompose.codec.tree import CodecNode, shown
from mfs_decompose.errors import ArtifactInvalid
from mfs_decompose.linalg.blocked import blocked_svd
from mfs_decompose.linalg.packing import pack_int4, unpack_int4
from mfs_decompose.linalg.quantise import FactorFormat, Quantised, dequantise, quantise
from mfs_decompose.linalg.shapes import GROUP
from mfs_decompose.linalg.svd import Truncation, truncated_svd

_FORMATS: dict[str, FactorFormat] = {"int4": "int4", "int8": "int8", "bf16": "bf16"}
_CODE_DTYPE = {"int4": "U8", "int8": "I8", "bf16": "BF16"}


class LowRank:
    """The codec `lowrank`; parameter `factors` is int4, int8 or bf16."""

    name = "lowrank"

    def array_names(self, params: Mapping[str, str]) -> tuple[str, ...]:
        return ("u", "v") if params["factors"] == "bf16" else ("us", "vs", "u", "v")

    def fit(
        self, deltas_BOI: torch.Tensor, steps: int, keys: Sequence[int], params: Mapping[str, str]
    ) -> list[Fit | None]:
        fmt = _FORMATS[params["factors"]]
        return [None if found is None else _fit(found, fmt) for found in truncated_svd(deltas_BOI, steps, keys)]

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
        return None if found is None else _fit(found, _FORMATS[params["factors"]])

    def open(self, node: CodecNode, fetch: Fetch, shape: tuple[int, int]) -> _Product:
        fmt = node.params.get("factors")
        if not isinstance(fmt, str) or fmt not in _FORMATS or node.params.get("group") != GROUP:
            found = f"{shown(fmt)} in groups of {shown(node.params.get('group'))}"
            raise ArtifactInvalid(f"codec 'lowrank': unknown factors {found}")
        rank = node.integer("steps")
        u, v = (_read(node, side, fetch, rank, length, fmt) for side, length in zip("uv", shape, strict=True))
        return _Product(u, dequantise(v))


class _Product:
    """U^T V, computed in fp64 where it is exact (see linalg/quantise.py)."""

    def __init__(self, u: Quantised, v_RI: torch.Tensor) -> None:
        self._u, self._v_RI = u, v_RI

    def rows(self, start: int, stop: int) -> torch.Tensor:
        return dequantise(self._u, start, stop).mT @ self._v_RI


def _fit(found: Truncation, fmt: FactorFormat) -> Fit:
    arrays: dict[str, torch.Tensor] = {}
    for side, directions in (("u", found.left), ("v", found.right)):
        quantised = quantise(directions, fmt)
        arrays[side] = pack_int4(quantised.codes) if fmt == "int4" else quantised.codes
        if quantised.scales is not None:
            arrays[side + "s"] = quantised.scales
    return Fit(found.energy, found.total, arrays)


def _read(node: CodecNode, side: str, fetch: Fetch, rank: int, length: int, fmt: str) -> Quantised:
    width = -(-length // 2) if fmt == "int4" else length
    codes = read_array(node, side, fetch, _CODE_DTYPE[fmt], (rank, width))
    if fmt == "bf16":
        return Quantised(codes, None)
    scales = read_array(node, side + "s", fetch, "BF16", (rank, -(-length // GROUP)))
    return Quantised(unpack_int4(codes, length) if fmt == "int4" else codes, scales)
