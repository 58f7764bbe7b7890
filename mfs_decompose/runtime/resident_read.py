"""Deltas of an artifact as resident forms: what each lossy codec becomes in memory.

Every form is exact where its numbers fit fp32: codes stay codes. int4 factors and those of bands become int8, which
hold the same codes; entropy-coded codes are packed again, at the next width of 1, 2, 4 or 8 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch

from mfs_decompose.codec.arrays import read_array
from mfs_decompose.codec.banded import read_codes
from mfs_decompose.codec.base import Fetch
from mfs_decompose.codec.fixed import open_fixed
from mfs_decompose.codec.registry import open_delta
from mfs_decompose.codec.sizes import SHORT_INDEX
from mfs_decompose.codec.sparse import read_index
from mfs_decompose.codec.tree import CodecNode
from mfs_decompose.linalg.packing import pack_bits, packed_bytes, unpack_int4
from mfs_decompose.linalg.shapes import GROUP
from mfs_decompose.runtime.resident_forms import TRITS, Csr, Ell, Factor, Form, LowRank, Packed, Rows

_CODES = {"int4": "U8", "int8": "I8", "bf16": "BF16"}
_BLOCK = 1 << 20  # elements decoded at a time


def read_forms(
    node: CodecNode, fetch: Fetch, shape: tuple[int, int], shared: Callable[[], list[Form]] | None = None
) -> list[Form]:
    """The forms whose sum is the delta [O, I] of a tree of LOSSY codecs, which was checked and opened before.

    `shared` gives the forms of the family's own delta of the base tensor, for the leaf of that name.

    Raises:
        ArtifactInvalid: arrays are not what the codec writes.
    """
    if node.codec == "sum":
        return [form for child in node.children for form in read_forms(child, fetch, shape, shared)]
    if node.codec == "shared":
        assert shared is not None, "it was opened before"
        return shared()
    readers: dict[str, Callable[[CodecNode, Fetch, tuple[int, int]], Form | None]] = {
        "lowrank": _lowrank,
        "banded": _banded,
        "fixed": _fixed,
        "sparse": _sparse,
        "sign": _sign,
        "ternary": _ternary,
        "kbit": _kbit,
        "deadzone": _decoded,
        "rowsparse": _rowsparse,
    }
    form = readers[node.codec](node, fetch, shape)
    return [] if form is None else [form]


def read_stack(node: CodecNode, fetch: Fetch, matrices: int, shape: tuple[int, int]) -> list[Form | None]:
    """The forms of a stack of matrices in one node (codec/slices.py); None where one has no steps."""
    given = node.params["slices"]
    assert isinstance(given, list), "it was opened before"
    steps = [count for count in given if isinstance(count, int)]
    assert len(steps) == matrices, "it was opened before"
    if node.codec == "lowrank":
        us, vs = (_factor(node, side, fetch, sum(steps), length) for side, length in zip("uv", shape, strict=True))
        edges = pairwise(accumulate(steps, initial=0))
        return [LowRank(_part(us, *edge), _part(vs, *edge)) if edge[0] < edge[1] else None for edge in edges]
    columns, codes, scales = _entries(node, fetch, sum(steps), shape)
    found: list[Form | None] = []
    for start, stop in pairwise(accumulate(steps, initial=0)):
        own = None if scales is None else scales[start:stop].mT.contiguous()
        entries = Ell(columns[start:stop].mT.contiguous(), codes[start:stop].mT.contiguous(), own, shape[1])
        found.append(entries if start < stop else None)
    return found


def dense_form(rows: Callable[[int, int], torch.Tensor], shape: tuple[int, int]) -> Form | None:
    """A delta that is read as rows of fp64, in the smallest form; None where it is zero.

    Forms are packed codes (of at most 256 values), single entries, and rows that are not zero.
    """
    step = max(1, _BLOCK // max(shape[1], 1))
    blocks = [rows(start, min(start + step, shape[0])).to(torch.float32) for start in range(0, shape[0], step)]
    values = torch.cat(blocks) if blocks else torch.zeros(shape)
    kept = values.ne(0).any(dim=1).nonzero().flatten()
    if not kept.numel():
        return None
    index = kept.to(torch.int32)
    whole = Rows(None, values, None, False) if index.numel() == shape[0] else Rows(index, values[kept], None, False)
    named = _name_values(values)
    packed = None if named is None else _as_codes(*named, shape[1])
    entries = (_as_entries(values, named), _as_entries(values, None))
    found: list[Form] = [whole, *entries, *([] if packed is None else [packed])]
    return min(found, key=lambda form: sum(tensor.nbytes for tensor in form.tensors()))


def _lowrank(node: CodecNode, fetch: Fetch, shape: tuple[int, int]) -> Form | None:
    rank = node.integer("steps")
    left, right = (_factor(node, side, fetch, rank, length) for side, length in zip("uv", shape, strict=True))
    return LowRank(left, right) if rank else None


def _factor(node: CodecNode, side: str, fetch: Fetch, rank: int, length: int) -> Factor:
    fmt = str(node.params["factors"])
    width = -(-length // 2) if fmt == "int4" else length
    codes = read_array(node, side, fetch, _CODES[fmt], (rank, width))
    if fmt == "bf16":
        return Factor(codes)
    scales = read_array(node, side + "s", fetch, "BF16", (rank, -(-length // GROUP))).to(torch.float32)
    return Factor(unpack_int4(codes, length) if fmt == "int4" else codes, scales)


def _part(factor: Factor, start: int, stop: int) -> Factor:
    scales = None if factor.scales is None else factor.scales[start:stop]
    return Factor(factor.codes[start:stop], scales, factor.half)


def _banded(node: CodecNode, fetch: Fetch, shape: tuple[int, int]) -> Form | None:
    bands = node.params["bands"]
    assert isinstance(bands, list), "it was opened before"
    counts = [count for count in bands if isinstance(count, int)]
    exponent, rank = node.params["exponent"], sum(counts)
    assert isinstance(exponent, int)
    if not rank:
        return None
    sides = []
    for side in "uv":
        levels = read_codes(node, side, fetch, tuple(counts), shape)
        # Odd integers 2 c + 1 - 2^b are 2 (c - 2^(b-1) + 1/2).
        codes = [(one.codes.to(torch.int16) - (1 << (one.bits - 1))).to(torch.int8) for one in levels]
        scales = [torch.ones(len(one.codes), 1) if one.scales is None else one.scales.float() for one in levels]
        sides.append((torch.cat(codes), 2.0 * torch.cat(scales)))
    gains = torch.ldexp(read_array(node, "gain", fetch, "BF16", (rank,)).to(torch.float64), torch.tensor(exponent))
    (left, left_scales), (right, right_scales) = sides
    scaled = right_scales.to(torch.float64) * gains.unsqueeze(1)
    if not _fits(scaled):
        return dense_form(open_delta(node, fetch, shape).rows, shape)
    return LowRank(Factor(left, left_scales, True), Factor(right, scaled.to(torch.float32), True))


def _fits(scales: torch.Tensor) -> bool:
    """Whether fp32 holds these numbers with all their bits; those of ordinary deltas are far from its ends."""
    sizes = scales.abs()
    limits = torch.finfo(torch.float32)
    return bool(((sizes == 0) | ((sizes >= limits.tiny) & (sizes <= limits.max / 2**20))).all())


def _fixed(node: CodecNode, fetch: Fetch, shape: tuple[int, int]) -> Form | None:
    found = open_fixed(node, fetch, shape)
    if not found.rank:
        return None
    gains = torch.tensor([math.ldexp(1.0, exponent) for exponent in found.exponents], dtype=torch.float64)
    if not _fits(gains):
        return dense_form(found.rows, shape)
    return LowRank(Factor(_narrow(found.left)), Factor(_narrow(found.right), gains.to(torch.float32).unsqueeze(1)))


def _narrow(codes: torch.Tensor) -> torch.Tensor:
    """Integers of at most 24 bits in the narrowest type that an op takes."""
    peak = int(codes.abs().max()) if codes.numel() else 0
    return codes.to(torch.int8 if peak < 1 << 7 else torch.int16 if peak < 1 << 15 else torch.float32)


def _entries(
    node: CodecNode, fetch: Fetch, steps: int, shape: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    rows, index = shape[0], read_index(node, fetch, steps, shape)
    whole = node.params["values"] == "bf16"
    codes = read_array(node, "value", fetch, "BF16" if whole else "I8", (steps, rows))
    return index, codes, None if whole else read_array(node, "scale", fetch, "BF16", (steps, -(-rows // GROUP)))


def _sparse(node: CodecNode, fetch: Fetch, shape: tuple[int, int]) -> Form | None:
    steps = node.integer("steps")
    columns, codes, scales = _entries(node, fetch, steps, shape)
    own = None if scales is None else scales.mT.contiguous()
    return Ell(columns.mT.contiguous(), codes.mT.contiguous(), own, shape[1]) if steps else None


def _sign(node: CodecNode, fetch: Fetch, shape: tuple[int, int]) -> Form | None:
    scales = {"tensor": (1,), "row": (shape[0],)}.get(str(node.params["scale"]), (shape[0], -(-shape[1] // GROUP)))
    return _packed(node, fetch, 1, packed_bytes(shape[1], 1), [-1.0, 1.0], scales, shape)


def _ternary(node: CodecNode, fetch: Fetch, shape: tuple[int, int]) -> Form | None:
    scales = (shape[0], -(-shape[1] // GROUP))
    return _packed(node, fetch, 0, -(-shape[1] // TRITS), [-1.0, 0.0, 1.0], scales, shape)


def _kbit(node: CodecNode, fetch: Fetch, shape: tuple[int, int]) -> Form | None:
    bits = node.integer("bits")
    levels = [float(code - ((1 << (bits - 1)) - 1)) for code in range(1 << bits)]
    return _packed(node, fetch, bits, packed_bytes(shape[1], bits), levels, (shape[0], -(-shape[1] // GROUP)), shape)


def _packed(
    node: CodecNode,
    fetch: Fetch,
    bits: int,
    width: int,
    levels: Sequence[float],
    scales: tuple[int, ...],
    shape: tuple[int, int],
) -> Form:
    codes = read_array(node, "code", fetch, "U8", (shape[0], width))
    own = read_array(node, "scale", fetch, "BF16", scales)
    return Packed(codes, bits, torch.tensor(levels, dtype=torch.float32), own, shape[1])


def _decoded(node: CodecNode, fetch: Fetch, shape: tuple[int, int]) -> Form | None:
    return dense_form(open_delta(node, fetch, shape).rows, shape)


def _rowsparse(node: CodecNode, fetch: Fetch, shape: tuple[int, int]) -> Form | None:
    count = node.integer("rows")
    index = read_array(node, "index", fetch, "I32", (count,))
    codes = read_array(node, "value", fetch, "I8", (count, shape[1]))
    return Rows(index, codes, read_array(node, "scale", fetch, "BF16", (count,)), False) if count else None


def _name_values(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Rising levels and the int64 names of the values; None where there are more than 256 of them."""
    if values.numel() and torch.unique(values[: max(1, _BLOCK // max(values.shape[1], 1))]).numel() > 256:
        return None
    levels, names = torch.unique(values, return_inverse=True)
    return (levels, names) if levels.numel() <= 256 else None


def _as_codes(levels: torch.Tensor, names: torch.Tensor, width: int) -> Packed:
    """Codes of 1, 1.6, 2, 4 or 8 bits: those that are unpacked by the byte."""
    ones, count = torch.ones(1, dtype=torch.bfloat16), levels.numel()
    if count == 3:
        padded = torch.nn.functional.pad(names.to(torch.int16), (0, -width % TRITS)).view(names.shape[0], -1, TRITS)
        powers = torch.tensor([3**at for at in range(TRITS)], dtype=torch.int16)
        return Packed((padded * powers).sum(dim=2).to(torch.uint8), 0, levels, ones, width)
    bits = next(width for width in (1, 2, 4, 8) if count <= 1 << width)
    table = torch.nn.functional.pad(levels, (0, (1 << bits) - count))
    return Packed(pack_bits(names.to(torch.uint8), bits), bits, table, ones, width)


def _as_entries(values: torch.Tensor, named: tuple[torch.Tensor, torch.Tensor] | None) -> Csr:
    there = values.ne(0)
    offsets = torch.nn.functional.pad(there.sum(dim=1).cumsum(0), (1, 0)).to(torch.int32)
    columns = there.nonzero()[:, 1].to(torch.int32).to(torch.uint16 if values.shape[1] <= SHORT_INDEX else torch.int32)
    if named is None:
        return Csr(offsets, columns, values[there], None, values.shape[1])
    return Csr(offsets, columns, named[1][there].to(torch.uint8), named[0], values.shape[1])
