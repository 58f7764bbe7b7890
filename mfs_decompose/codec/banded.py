"""Banded: a delta as a sum of outer products, strong directions with many bits and weak ones with few.

Directions lie in five bands (linalg/bands.py), strongest first; factors are odd integers, along a vocabulary times a
byte for 64 of them (linalg/midrise.py) and across from it of 8 bits, range coded (linalg/band_codes.py), and each
direction carries one bf16 gain. Steps are made as large as the bytes that a plan gave the codes ask for. The
error of the first factor is fed into the second: with v^ for v, the left factor is solved for so that the stored delta
agrees with the fitted one on all of its input directions.
Agreeing there, and not having the least error, is what keeps drift low: least squares would shrink the delta.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch

from mfs_decompose.codec.arrays import read_array, tensor_bytes
from mfs_decompose.codec.base import Delta, Emit, Fetch
from mfs_decompose.codec.tree import CodecNode, Part
from mfs_decompose.errors import ArtifactInvalid
from mfs_decompose.linalg.band_codes import code_bits, decode_codes, encode_codes
from mfs_decompose.linalg.bands import WIDTHS, Bands, codes_bytes
from mfs_decompose.linalg.midrise import Levels, Quantiser, dequantise_levels, integers
from mfs_decompose.linalg.packing import pack_bits, packed_bytes, unpack_bits
from mfs_decompose.linalg.range_coder import OVERHEAD
from mfs_decompose.linalg.shapes import is_coded, scales_of, side_bits

_EXACT = 1 << 53
_TURN = 1.004  # by whose powers steps of codes are enlarged
_TURNS = range(-12, 2048)  # those powers, up to where all codes are the least
_EXPONENTS = range(-500, 501)
_LOUD = 2.0  # energy of a direction as it is stored: more is a direction that were better left out
_MAX_GROWTH = 2.0  # of a left direction by the feedback; more means that the quantised right factor is near singular


class Banded:
    """The codec `banded`; parameters are the bands and a power of two for the whole tensor."""

    name = "banded"

    def encode(
        self, left_RO: torch.Tensor, right_RI: torch.Tensor, bands: Bands, emit: Emit, times: float = 1.0
    ) -> CodecNode:
        """Write the leading `sum(bands)` directions of `left.T @ right`, finite factors on the CPU, strongest first.

        What is written is `times` as large, see `linalg.bands.made_up`.

        Directions of either factor must be orthogonal, as those of linalg/svd.py are. Bytes depend on the number of
        torch threads like those of the SVD do: set one where bytes matter.
        """
        rank = sum(bands)
        assert rank <= left_RO.shape[0] == right_RI.shape[0], f"bands {bands} of rank {left_RO.shape[0]}"
        left, right, exponent = _balance(left_RO[:rank], right_RI[:rank])
        shape = (left.shape[1], right.shape[1])
        vs, v_codes = _encode_side(right, bands, shape[0])
        fed = _feed_back(left, right, vs)
        unspent = _given(bands, *shape[::-1]) - len(v_codes)
        us, u_codes = _encode_side(fed, bands, shape[1], unspent)
        none = torch.zeros(0, dtype=torch.float64)
        gains = torch.cat([none, *(u.gains * v.gains for u, v in zip(us, vs, strict=True))])
        gains = _least_where_loud(gains, _growth(fed, us) * _growth(right, vs))
        written: list[tuple[str, str, tuple[int, ...], bytes]] = []
        written.append(("gain", "BF16", (rank,), tensor_bytes(_round_gains(gains * times, _peaks(us, vs)))))
        for side, levels, codes, length in (("u", us, u_codes, shape[0]), ("v", vs, v_codes, shape[1])):
            if scales_of(length):
                empty = torch.zeros(0, scales_of(length), dtype=torch.uint8)
                scales = torch.cat([empty, *(x.scales for x in levels if x.scales is not None)])
                written.append((side + "s", "U8", tuple(scales.shape), tensor_bytes(scales)))
            written.append((codes_part(side, length), "U8", (len(codes),), codes))
        parts, offset = [], 0
        for name, dtype, size, data in written:
            emit(data)
            parts.append(Part(name, dtype, size, offset, len(data)))
            offset += len(data)
        return CodecNode("banded", params={"bands": list(bands), "exponent": exponent}, parts=tuple(parts))

    def open(self, node: CodecNode, fetch: Fetch, shape: tuple[int, int]) -> Delta:
        """Open a stored delta.

        Raises:
            ArtifactInvalid: the node is not one that `encode` can write.
        """
        bands, exponent = _read_bands(node, shape)
        rank = sum(bands)
        gains = read_array(node, "gain", fetch, "BF16", (rank,))
        if not bool(torch.isfinite(gains).all()):
            raise ArtifactInvalid("codec 'banded': a gain is not finite")
        us, vs = (read_codes(node, side, fetch, bands, shape) for side in "uv")
        if not _is_exact(gains, _peaks(us, vs)):
            raise ArtifactInvalid("codec 'banded': factors whose product could round")
        return _Product(us, vs, torch.ldexp(gains.to(torch.float64), torch.tensor(exponent)), shape)


class _Product:
    """Integers below 2^53 of one unit throughout (`_is_exact`), so that fp64 sums are exact in any order."""

    def __init__(self, us: list[Levels], vs: list[Levels], gains: torch.Tensor, shape: tuple[int, int]) -> None:
        self._us, self._gains, self._columns = us, gains, shape[1]
        whole = [integers(v.codes, v.bits, v.scales) for v in vs]
        self._v_RI = torch.cat(whole) if whole else torch.zeros(0, shape[1], dtype=torch.float64)

    def rows(self, start: int, stop: int) -> torch.Tensor:
        if not self._us:
            return torch.zeros(stop - start, self._columns, dtype=torch.float64)
        u_RO = torch.cat([integers(u.codes[:, start:stop], u.bits, u.scales, start) for u in self._us])
        return (u_RO * self._gains.unsqueeze(1)).mT @ self._v_RI


def _balance(left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Both factors scaled by powers of two to a largest value of about 1, and the power of two that was taken out."""
    found, taken = [], 0
    for side in (left, right):
        peak = float(side.abs().max()) if side.numel() else 0.0
        power = math.frexp(peak)[1] if peak > 0 else 0
        found.append(torch.ldexp(side.to(torch.float64), torch.tensor(-power)).to(torch.float32))
        taken += power
    return found[0], found[1], taken


def _edges(bands: Bands) -> list[tuple[int, int, int]]:
    """Bits, first direction and end of each band that has any."""
    edges = pairwise(accumulate(bands, initial=0))
    return [(bits, *edge) for bits, edge in zip(WIDTHS, edges, strict=True) if edge[0] < edge[1]]


def codes_part(side: str, length: int) -> str:
    """The name of the array of codes along a side: another where they are range coded."""
    return side + "c" if is_coded(length) else side


def _given(bands: Bands, length: int, other: int) -> int:
    """Bytes that the codes of a side are given."""
    return sum(count * codes_bytes(length, other, bits) for count, bits in zip(bands, WIDTHS, strict=True))


def _encode_side(directions: torch.Tensor, bands: Bands, other: int, unspent: int = 0) -> tuple[list[Levels], bytes]:
    """The directions quantised, and their codes in at most the bytes given and those `unspent` by the other side."""
    length = directions.shape[1]
    quantisers = [
        Quantiser(directions[first:end], side_bits(length, other, bits)) for bits, first, end in _edges(bands)
    ]
    if not is_coded(length):
        levels = [one.levels() for one in quantisers]
        return levels, b"".join(tensor_bytes(pack_bits(x.codes, x.bits)) for x in levels)
    if not quantisers:
        return [], b""
    given, long = _given(bands, length, other) + unspent, scales_of(length) > 0

    def codes(turn: int) -> list[tuple[torch.Tensor, int]]:
        return [(one.codes(_TURN**turn), one.bits) for one in quantisers]

    def fits(turn: int) -> bool:
        return sum(code_bits(*band, long) for band in codes(turn)) / 8 + OVERHEAD <= given

    # Larger steps take fewer bytes. The least that fit are found by halving, then held against the words themselves.
    turn = _TURNS[bisect_left(_TURNS, True, key=fits)]
    while len(data := encode_codes(codes(turn), long)) > given:
        turn += 1
    return [one.levels(_TURN**turn) for one in quantisers], data


def _feed_back(left_RO: torch.Tensor, right_RI: torch.Tensor, vs: Sequence[Levels]) -> torch.Tensor:
    """U with `U^T V^ V^T = left^T V V^T`: the stored delta has the fitted one's effect on every input direction."""
    if not vs:
        return left_RO
    left, right = left_RO.to(torch.float64), right_RI.to(torch.float64)
    sizes = right.norm(dim=1)
    safe = torch.where(sizes > 0, sizes, 1.0)
    mixed = (torch.cat([dequantise_levels(v) for v in vs]) / safe.unsqueeze(1)) @ (right / safe.unsqueeze(1)).mT
    mixed.diagonal().masked_fill_(sizes == 0, 1.0)
    solved, failed = torch.linalg.solve_ex(mixed.mT, left * safe.unsqueeze(1))
    solved = solved / safe.unsqueeze(1)
    grown = solved.norm(dim=1) > _MAX_GROWTH * left.norm(dim=1)
    if int(failed) or not bool(torch.isfinite(solved).all()) or bool(grown.any()):
        return left_RO
    fed_back: torch.Tensor = solved.to(torch.float32)
    return fed_back


def _growth(directions: torch.Tensor, levels: Sequence[Levels]) -> torch.Tensor:
    """The energy of each direction as it is stored, over its own: 1, and its noise."""
    none = torch.zeros(0, directions.shape[1], dtype=torch.float64)
    stored = torch.cat([none, *map(dequantise_levels, levels)]).square().sum(dim=1)
    own = directions.to(torch.float64).square().sum(dim=1)
    return torch.where(own > 0, stored / torch.where(own > 0, own, 1.0), 1.0)


def _least_where_loud(gains: torch.Tensor, growth: torch.Tensor) -> torch.Tensor:
    """Directions with more noise than they explain, as a sparse delta's at 2 bits, shrunk to their least error."""
    return torch.where(growth > _LOUD, gains / growth, gains)


def _peaks(us: Sequence[Levels], vs: Sequence[Levels]) -> list[int]:
    """For each direction the largest magnitude that a product of its integers can have."""
    found: list[int] = []
    for u, v in zip(us, vs, strict=True):
        sides = [_largest(side) for side in (u, v)]
        found += [a * b * ((1 << u.bits) - 1) * ((1 << v.bits) - 1) for a, b in zip(*sides, strict=True)]
    return found


def _largest(side: Levels) -> list[int]:
    if side.scales is None:
        return [int(side.codes.shape[1] > 0)] * len(side.codes)
    return [int(scale) for scale in side.scales.amax(dim=1).tolist()]


def _round_gains(gains: torch.Tensor, peaks: list[int]) -> torch.Tensor:
    """Gains as bf16, all multiples of one power of two so large that the sum over directions stays exact in fp64."""
    bound = math.fsum(float(gain) * peak for gain, peak in zip(gains.tolist(), peaks, strict=True))
    if bound == 0:
        return gains.to(torch.bfloat16)
    # One bit more than needed: rounding to bf16 may enlarge a gain.
    unit = math.ldexp(1.0, math.frexp(bound)[1] + 1 - 53)
    rounded = ((gains.to(torch.bfloat16).to(torch.float64) / unit).round() * unit).to(torch.bfloat16)
    assert _is_exact(rounded, peaks)
    return rounded


def _is_exact(gains: torch.Tensor, peaks: list[int]) -> bool:
    pairs = [(math.frexp(abs(gain)), peak) for gain, peak in zip(gains.tolist(), peaks, strict=True) if gain and peak]
    whole = [(int(math.ldexp(mantissa, 8)), exponent, peak) for (mantissa, exponent), peak in pairs]
    odd = [(m >> _zeros(m), e + _zeros(m), peak) for m, e, peak in whole]
    least = min((e for _, e, _ in odd), default=0)
    return sum(m * peak << (e - least) for m, e, peak in odd) < _EXACT


def _zeros(number: int) -> int:
    return (number & -number).bit_length() - 1


def _read_bands(node: CodecNode, shape: tuple[int, int]) -> tuple[Bands, int]:
    if node.params.keys() != {"bands", "exponent"}:  # with scales beside, codes would mean something else
        raise ArtifactInvalid(f"codec 'banded': expected bands and an exponent, found {sorted(node.params)}"[:200])
    bands, exponent = node.params["bands"], node.params["exponent"]
    counts = [n for n in bands if type(n) is int and 0 <= n <= min(shape)] if isinstance(bands, list) else []
    if not isinstance(bands, list) or len(counts) != len(bands) or len(bands) != len(WIDTHS):
        raise ArtifactInvalid(f"codec 'banded': expected {len(WIDTHS)} counts of directions, found {bands!r}"[:200])
    if sum(counts) > min(shape):
        raise ArtifactInvalid(f"codec 'banded' of a delta {list(shape)}: found {sum(counts)} directions")
    if type(exponent) is not int or exponent not in _EXPONENTS:
        raise ArtifactInvalid(f"codec 'banded': expected an exponent within +-500, found {exponent!r}"[:200])
    return tuple(counts), exponent


def read_codes(node: CodecNode, side: str, fetch: Fetch, bands: Bands, shape: tuple[int, int]) -> list[Levels]:
    """The bands of a side of an [O, I] delta, all gains 1.

    Raises:
        ArtifactInvalid: arrays are not what `Banded.encode` writes.
    """
    length, other = shape if side == "u" else shape[::-1]
    edges = [(side_bits(length, other, bits), first, end) for bits, first, end in _edges(bands)]
    scales = None
    if scales_of(length):
        scales = read_array(node, side + "s", fetch, "U8", (sum(bands), scales_of(length)))
    name = codes_part(side, length)
    if is_coded(length):
        data = read_array(node, name, fetch, "U8", (node.part(name).nbytes,)).numpy().tobytes()
        found = decode_codes(data, [(end - first, bits) for bits, first, end in edges], length, scales is not None)
    else:
        sizes = [(end - first) * packed_bytes(length, bits) for bits, first, end in edges]
        pieces = torch.split(read_array(node, name, fetch, "U8", (sum(sizes),)), sizes)
        found = [
            unpack_bits(data.view(end - first, -1), bits, length)
            for data, (bits, first, end) in zip(pieces, edges, strict=True)
        ]
    return [
        Levels(codes, torch.ones(0, dtype=torch.float64), bits, None if scales is None else scales[first:end])
        for codes, (bits, first, end) in zip(found, edges, strict=True)
    ]
