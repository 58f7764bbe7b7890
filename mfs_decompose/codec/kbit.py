"""k-bit and ternary: a whole delta as small integers, one bf16 scale for 64 values of a row.

`fit` says how a scale is found: `mse` searches the one of least squared error, which clips the largest values;
`absmax` clips nothing. Ternary packs five values of -1, 0 and 1 into a byte, 1.6 bits each.
"""

from __future__ import annotations

import torch

from mfs_decompose.codec.base import Delta, Emit, Fetch
from mfs_decompose.codec.direct import Context, DeltaRows, Params, params_of
from mfs_decompose.codec.direct_sizes import TRITS, direct_bytes
from mfs_decompose.codec.packed_rows import PackedRows, as_scale, grouped, write_packed
from mfs_decompose.codec.tree import CodecNode
from mfs_decompose.linalg.packing import pack_bits, packed_bytes, unpack_bits
from mfs_decompose.linalg.shapes import GROUP

_FITS = ("mse", "absmax")
_POWERS = torch.tensor([3**at for at in range(TRITS)], dtype=torch.int16)
_CLIPS = 24  # scales tried, from a fifth of the one that clips nothing up to it


class KBit:
    """The codec `kbit`; parameters `bits`, 2 to 8, and `fit`."""

    name = "kbit"

    def nbytes(self, shape: tuple[int, int], params: Params) -> int | None:
        return direct_bytes("kbit", shape, params)

    def encode(
        self, rows: DeltaRows, shape: tuple[int, int], params: Params, emit: Emit, *, context: Context | None = None
    ) -> CodecNode:
        bits, fit = params["bits"], params["fit"]
        assert type(bits) is int and 2 <= bits <= 8 and fit in _FITS, f"{bits} bits fitted by {fit}"
        levels = (1 << (bits - 1)) - 1

        def block(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            codes, scales = quantise_groups(values, levels, clip=fit == "mse")
            return pack_bits((codes + levels).to(torch.uint8), bits), scales

        kept: Params = {"bits": bits, "fit": fit}
        return write_packed("kbit", kept, rows, shape, packed_bytes(shape[1], bits), block, emit)

    def open(self, node: CodecNode, fetch: Fetch, shape: tuple[int, int]) -> Delta:
        bits, _ = params_of(node, bits=tuple(range(2, 9)), fit=_FITS)
        assert type(bits) is int
        width, zero = bits, float((1 << (bits - 1)) - 1)

        def unpack(packed: torch.Tensor) -> torch.Tensor:
            return unpack_bits(packed, width, shape[1]).to(torch.float64).sub_(zero)

        scales = (shape[0], -(-shape[1] // GROUP))
        return PackedRows(node, fetch, packed_bytes(shape[1], bits), shape, scales, unpack)


class Ternary:
    """The codec `ternary`; parameter `fit`."""

    name = "ternary"

    def nbytes(self, shape: tuple[int, int], params: Params) -> int | None:
        return direct_bytes("ternary", shape, params)

    def encode(
        self, rows: DeltaRows, shape: tuple[int, int], params: Params, emit: Emit, *, context: Context | None = None
    ) -> CodecNode:
        fit = params["fit"]
        assert fit in _FITS, f"scales fitted by {fit}"

        def block(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            codes, scales = quantise_groups(values, 1, clip=fit == "mse")
            return _pack_trits(codes), scales

        return write_packed("ternary", {"fit": fit}, rows, shape, -(-shape[1] // TRITS), block, emit)

    def open(self, node: CodecNode, fetch: Fetch, shape: tuple[int, int]) -> Delta:
        params_of(node, fit=_FITS)
        scales = (shape[0], -(-shape[1] // GROUP))

        def unpack(packed: torch.Tensor) -> torch.Tensor:
            trits = (packed.to(torch.int16).unsqueeze(2) // _POWERS) % 3 - 1
            return trits.flatten(1)[:, : shape[1]].to(torch.float64)

        return PackedRows(node, fetch, -(-shape[1] // TRITS), shape, scales, unpack)


def quantise_groups(values_NI: torch.Tensor, levels: int, *, clip: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers within +-levels [N, I], as fp32, and bf16 scales [N, groups] of 64 finite fp32 values each."""
    values = grouped(values_NI)
    peaks = values.abs().amax(dim=2)
    best = as_scale(peaks / levels)
    if clip:
        unit = torch.where(peaks > 0, peaks, 1.0).unsqueeze(
            2
        )  # errors relative to it: squares of a delta may underflow
        least = _error(values, best, levels, unit)
        for turn in range(_CLIPS):
            scales = as_scale(peaks / levels * (0.2 + 0.8 * turn / _CLIPS))
            error = _error(values, scales, levels, unit)
            better = error < least
            least, best = torch.where(better, error, least), torch.where(better, scales, best)
    codes = _round(values, best, levels).flatten(1)
    return codes[:, : values_NI.shape[1]], best


def _round(values: torch.Tensor, scales: torch.Tensor, levels: int) -> torch.Tensor:
    steps = scales.to(torch.float32).unsqueeze(2)
    return torch.where(steps > 0, values / steps, 0.0).round().clamp(-levels, levels)


def _error(values: torch.Tensor, scales: torch.Tensor, levels: int, unit: torch.Tensor) -> torch.Tensor:
    stored = _round(values, scales, levels) * (scales.to(torch.float32).unsqueeze(2) / unit)
    return (values / unit - stored).square().sum(dim=2)


def _pack_trits(codes_NI: torch.Tensor) -> torch.Tensor:
    rows, columns = codes_NI.shape
    padded = torch.nn.functional.pad(codes_NI.to(torch.int16) + 1, (0, -columns % TRITS), value=1)
    return (padded.view(rows, -(-columns // TRITS), TRITS) * _POWERS).sum(dim=2).to(torch.uint8)
