"""A reader of family artifacts by the letter of docs/format.md: numpy, zstandard, and nothing of the package."""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

Doubles = npt.NDArray[np.float64]
Longs = npt.NDArray[np.int64]
Any1 = npt.NDArray[Any]

_WORDS = {"BF16": "<u2", "F16": "<u2", "F32": "<u4", "U8": "u1", "I8": "i1", "U16": "<u2", "I32": "<i4", "I64": "<i8"}
_FORMATS = {
    "BF16": (7, -126, float(2**128 - 2**120)),
    "F16": (10, -14, 65504.0),
    "F32": (23, -126, float(2**128 - 2**104)),
}
_64 = (1 << 64) - 1


def read_shard(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Entries of a safetensors file: dtype, shape, bytes."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    header.pop("__metadata__", None)
    return {
        name: (entry["dtype"], tuple(entry["shape"]), body[slice(*entry["data_offsets"])])
        for name, entry in header.items()
    }


def values_of(words: Any1, dtype: str) -> Doubles:
    """The numbers that words of a dtype stand for."""
    if dtype == "BF16":
        return (words.astype("<u4") << 16).view("<f4").astype(np.float64)
    kinds = {"F16": "<f2", "F32": "<f4"}
    return (words.view(kinds[dtype]) if dtype in kinds else words).astype(np.float64)


class Page:
    """One artifact with a copied base."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.manifest = json.loads((folder / "manifest.json").read_bytes())
        self._base: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
        for shard in self.manifest["base"]["shards"]:
            self._base |= read_shard(folder / shard)
        self._shared: dict[str, Tensor] = {}
        if "shared" in self.manifest:
            common = self.manifest["shared"]
            shards = [read_shard(folder / name) for name in common["shards"]]
            for name, record in common["tensors"].items():
                data = shards[record["blob"]["shard"]][record["blob"]["entry"]][2]
                assert hashlib.sha256(data).hexdigest() == record["sha256"]
                below = {"dtype": self._base[name][0], "shape": self._base[name][1], "tree": record["tree"]}
                self._shared[name] = Tensor(name, below, data, None)

    def tensors(self, id: str) -> dict[str, Tensor]:
        variant = next(one for one in self.manifest["variants"] if one["id"] == id)
        shards = [read_shard(self._folder / name) for name in variant["shards"]]
        found = {}
        for name, record in variant["tensors"].items():
            blob = record["blob"]
            data = b"" if blob is None else shards[blob["shard"]][blob["entry"]][2]
            found[name] = Tensor(name, record, data, self._base.get(record["base_name"]))
            found[name].shared = self._shared.get(record["base_name"])
        return found

    def adapter(self, id: str) -> dict[str, Doubles]:
        """The values of a variant's adapter, by name."""
        variant = next(one for one in self.manifest["variants"] if one["id"] == id)
        shards = [read_shard(self._folder / name) for name in variant["shards"]]
        found = {}
        for name, record in variant["adapter"]["tensors"].items():
            data = shards[record["blob"]["shard"]][record["blob"]["entry"]][2]
            values = values_of(np.frombuffer(data, _WORDS[record["dtype"]]), record["dtype"])
            found[name] = values.reshape(record["shape"])
        return found


class Tensor:
    """One stored tensor."""

    def __init__(self, name: str, record: Any, data: bytes, base: tuple[str, tuple[int, ...], bytes] | None) -> None:
        self.name, self.record, self._data = name, record, data
        self.shared: Tensor | None = None
        self._dtype, self._shape = record["dtype"], tuple(record["shape"])
        self._rows = self._shape[0] if self._shape else 1
        self.base: Doubles = np.zeros(0)
        self._base_words: Any1 = np.zeros(0, np.uint8)
        if base is not None:
            words = np.frombuffer(base[2], _WORDS.get(base[0], "u1"))
            self._base_words = words.reshape(base[1][0] if base[1] else 1, -1)
            self.base = values_of(self._base_words, base[0])

    def served(self) -> Any1:
        """fp32, flat; of a tensor with its own bits, its values."""
        return np.concatenate([self._served(*segment) for segment in self._segments()])

    def restored(self) -> Any1:
        """Words in the original's dtype, flat."""
        return np.concatenate([self._restored(*segment) for segment in self._segments()])

    def _segments(self) -> list[tuple[Any, int, int]]:
        tree = self.record["tree"]
        if tree["codec"] != "rows":
            return [(tree, 0, self._rows)]
        splits = tree["params"]["splits"]
        return list(zip(tree["children"], splits, splits[1:], strict=False))

    def _own(self, node: Any, start: int, stop: int) -> Any1 | None:
        if node["codec"] == "identical":
            return self._base_words[start:stop].reshape(-1)
        return self._part(node, "data").view(_WORDS[self._dtype]) if node["codec"] == "raw" else None

    def _served(self, node: Any, start: int, stop: int) -> Any1:
        own = self._own(node, start, stop)
        if own is not None:
            return values_of(own, self._dtype).astype(np.float32)
        delta = self._delta(node["children"][0] if node["codec"] == "corrected" else node, stop - start)
        return (self.base[start:stop].reshape(-1) + delta.reshape(-1)).astype(np.float32)

    def _restored(self, node: Any, start: int, stop: int) -> Any1:
        own = self._own(node, start, stop)
        if own is not None:
            return own
        base = self.base[start:stop].reshape(-1)
        if node["codec"] == "corrected":
            return self._corrected(node, base, self._delta(node["children"][0], stop - start).reshape(-1), stop - start)
        sums = base + (self._delta(node, stop - start).reshape(-1) + 0.0)
        return self.rounded(sums, start * (math.prod(self._shape) // self._rows))

    def rounded(self, v: Doubles, first: int = 0) -> Any1:
        """Values from flat index `first` on, rounded as restore does by default."""
        r = random16(self.name, first, v.size)
        if self._dtype == "BF16":
            return ((v.astype(np.float32).view("<u4").astype(np.int64) + r) >> 16).astype("<u2")
        if self._dtype == "F32":
            return v.astype("<f4").view("<u4")
        n = v.astype(np.float32).astype(np.float16)
        m = np.nextafter(n, np.where(v > n, np.inf, -np.inf).astype(np.float16))
        gap = np.abs(m.astype(np.float64) - n.astype(np.float64))
        return np.where((v != n) & ((r + 0.5) / 65536 < np.abs(v - n) / gap), m, n).astype("<f2").view("<u2")

    def _part(self, node: Any, name: str) -> Any1:
        part = next(one for one in node["parts"] if one["name"] == name)
        data = self._data[part["offset"] : part["offset"] + part["nbytes"]]
        if name == "data" and node["codec"] == "raw":
            return np.frombuffer(data, np.uint8)
        return np.frombuffer(data, _WORDS[part["dtype"]]).reshape(part["shape"])

    def _floats(self, node: Any, name: str) -> Doubles:
        return values_of(self._part(node, name), "BF16")

    def _delta(self, node: Any, rows: int) -> Doubles:
        """The matrix [O, I]."""
        shape, params = (rows, *self._shape[1:]), node.get("params", {})
        if "slices" in params:
            return self._stack(node, shape)
        columns = math.prod(shape[1:]) if len(shape) != 3 else shape[2]
        matrix = (math.prod(shape) // columns, columns)
        if node["codec"] == "sum":
            total = self._delta(node["children"][0], rows)
            for child in node["children"][1:]:
                total = total + self._delta(child, rows)
            return total
        if node["codec"] == "shared":
            assert self.shared is not None
            return self.shared._delta(self.shared.record["tree"], self.shared._rows)[: matrix[0]]
        decoders = {
            "lowrank": self._lowrank,
            "sparse": self._sparse,
            "banded": self._banded,
            "fixed": self._fixed,
            "rowsparse": self._rowsparse,
            "deadzone": self._deadzone,
        }
        return decoders.get(node["codec"], self._packed)(node, matrix)

    def _stack(self, node: Any, shape: tuple[int, ...]) -> Doubles:
        found, first = [], 0
        for steps in node["params"]["slices"]:
            parts = []
            for part in node["parts"]:
                step = part["nbytes"] // max(part["shape"][0], 1)
                moved = {"shape": [steps, *part["shape"][1:]], "offset": part["offset"] + first * step}
                parts.append({**part, **moved, "nbytes": steps * step})
            params = {key: value for key, value in node["params"].items() if key != "slices"}
            one = {**node, "params": {**params, "steps": steps}, "parts": parts}
            found.append((self._lowrank if node["codec"] == "lowrank" else self._sparse)(one, shape[1:3]))
            first += steps
        return np.concatenate(found)

    def _lowrank(self, node: Any, shape: tuple[int, ...]) -> Doubles:
        sides = []
        for side, length in zip("uv", shape, strict=True):
            codes = self._part(node, side)
            if node["params"]["factors"] == "bf16":
                sides.append(values_of(codes, "BF16"))
                continue
            if node["params"]["factors"] == "int4":
                halves = np.stack([codes & 15, codes >> 4], axis=2).reshape(len(codes), -1)[:, :length].astype(np.int64)
                codes = np.where(halves > 7, halves - 16, halves)
            sides.append(codes * wide(self._floats(node, side + "s"), length))
        return sides[0].T @ sides[1]

    def _sparse(self, node: Any, shape: tuple[int, ...]) -> Doubles:
        value = self._part(node, "value")
        if node["params"]["values"] == "bf16":
            kept = values_of(value, "BF16")
        else:
            kept = value * wide(self._floats(node, "scale"), shape[0])
        dense = np.zeros(shape)
        for columns, row in zip(self._part(node, "index"), kept, strict=True):
            dense[np.arange(shape[0]), columns] = row
        return dense

    def _banded(self, node: Any, shape: tuple[int, ...]) -> Doubles:
        sides = []
        for side, length in zip("uv", shape, strict=True):
            across = length <= 30_000 < max(shape)
            widths = [
                8 if across else bits
                for bits, count in zip((8, 6, 4, 3, 2), node["params"]["bands"], strict=True)
                for _ in range(count)
            ]
            if length < 192:
                rows = self._packed_codes(node, side, widths, length)
            else:
                rows = band_codes(self._part(node, side + "c").tobytes(), widths, length, length > 30_000)
            rows = [2 * codes + 1 - (1 << bits) for codes, bits in zip(rows, widths, strict=True)]
            side_rows = np.array(rows, np.float64).reshape(-1, length)
            if length > 30_000:
                side_rows *= wide(self._part(node, side + "s").astype(np.float64), length)
            sides.append(side_rows)
        gain = self._floats(node, "gain") * 2.0 ** node["params"]["exponent"]
        return (sides[0] * gain[:, None]).T @ sides[1]

    def _packed_codes(self, node: Any, side: str, widths: Sequence[int], length: int) -> list[Longs]:
        packed, at, rows = self._part(node, side), 0, []
        for bits in widths:
            width = -(-length * bits // 8)
            rows.append(unpack(packed[None, at : at + width], bits, length)[0])
            at += width
        return rows

    def _fixed(self, node: Any, shape: tuple[int, ...]) -> Doubles:
        rank, head = node["params"]["rank"], self._part(node, "directions").tobytes()
        table = np.frombuffer(head, np.dtype([("e", "<i2"), ("left", "u1"), ("right", "u1")]))
        sides = []
        for side, length in zip(("left", "right"), shape, strict=True):
            data, octaves = self._part(node, side).tobytes(), table[side].astype(np.int64)
            size = int.from_bytes(data[:4], "little")
            high = unzigzag(integers(data[4 : 4 + size], np.repeat(np.minimum(octaves, 4), length), 5))
            stream, at, rows = np.unpackbits(np.frombuffer(data[4 + size :], np.uint8)).astype(np.int64), 0, []
            for row, octave in zip(high.reshape(rank, length), octaves, strict=True):
                split = max(int(octave) - 4, 0)
                row = row << split
                for plane in range(split):
                    row = row + (stream[at : at + length] << plane)
                    at += length
                rows.append(row.astype(np.float64))
            sides.append(np.array(rows).reshape(rank, length))
        return (sides[0] * (2.0 ** table["e"].astype(np.float64))[:, None]).T @ sides[1]

    def _rowsparse(self, node: Any, shape: tuple[int, ...]) -> Doubles:
        dense = np.zeros(shape)
        dense[self._part(node, "index")] = self._part(node, "value") * self._floats(node, "scale")[:, None]
        return dense

    def _packed(self, node: Any, shape: tuple[int, ...]) -> Doubles:
        codes, scale, columns = self._part(node, "code"), self._floats(node, "scale"), shape[1]
        if node["codec"] == "sign":
            whole = 2 * unpack(codes, 1, columns) - 1
        elif node["codec"] == "ternary":
            digits = codes[:, :, None].astype(np.int64) // 3 ** np.arange(5) % 3 - 1
            whole = digits.reshape(len(codes), -1)[:, :columns]
        else:
            bits = node["params"]["bits"]
            whole = unpack(codes, bits, columns) - ((1 << (bits - 1)) - 1)
        if scale.ndim == 2:
            return whole * wide(scale, columns)
        return whole * (scale if scale.size == 1 else scale[:, None])

    def _deadzone(self, node: Any, shape: tuple[int, ...]) -> Doubles:
        params, data, at, found = node["params"], self._part(node, "data").tobytes(), 0, []
        step, points, height = params["step"], params["points"], max(8, 8 * (2**20 // (8 * shape[1])))
        for start, size in zip(range(0, shape[0], height), params["sizes"], strict=True):
            count = min(height, shape[0] - start) * shape[1]
            found.append(unzigzag(integers(data[at : at + size], np.zeros(count, np.int64), 1)))
            at += size
        codes = np.concatenate(found).reshape(shape)
        fine = 256 * np.abs(codes) + np.where(np.abs(codes) == 1, points[0], points[1])
        return np.where(codes == 0, 0, np.sign(codes) * fine) * (step / 256)

    def _corrected(self, node: Any, base: Doubles, delta: Doubles, rows: int) -> Any1:
        params, data, at, found = node["params"], self._part(node, "residual").tobytes(), 0, []
        columns = base.size // rows
        for start, size in zip(range(0, rows, params["rows"]), params["sizes"], strict=True):
            span = slice(start * columns, min(start + params["rows"], rows) * columns)
            found.append(correct(data[at : at + size], base[span], delta[span], params["merge"], self._dtype))
            at += size
        return np.concatenate(found)


def random16(name: str, first: int, count: int) -> Longs:
    """The random numbers of elements first to first + count."""
    key = int.from_bytes(hashlib.sha256(b"0\0round\0" + name.encode()).digest()[:8], "little")
    found = []
    for i in range(first, first + count):
        state = (key + (i // 4 + 1) * 0x9E3779B97F4A7C15) & _64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _64
        state ^= state >> 31
        found.append((state >> (16 * (i % 4))) & 0xFFFF)
    return np.array(found, np.int64)


def wide(scales: Doubles, length: int) -> Doubles:
    return np.repeat(scales, 64, axis=1)[:, :length]


def unpack(packed: Any1, bits: int, length: int) -> Longs:
    """Codes of rows of bytes, lowest bits first."""
    planes = np.unpackbits(packed, axis=1, bitorder="little")[:, : bits * length].astype(np.int64)
    return (planes.reshape(len(packed), length, bits) << np.arange(bits)).sum(axis=2)


def unzigzag(words: Sequence[int]) -> Longs:
    return np.array([-(word + 1) // 2 if word & 1 else word // 2 for word in words], np.int64)


def integers(data: bytes, classes: Longs, count: int) -> list[int]:
    """Coded integers, given the class of each."""
    lengths = [int.from_bytes(data[at : at + 4], "little") for at in (0, 4, 8)]
    assert len(data) == 12 + sum(lengths)
    first, second = 12 + lengths[0], 12 + lengths[0] + lengths[1]
    models, at = zstandard.ZstdDecompressor().decompress(data[12:first]), 0
    decoder = RangeDecoder(np.frombuffer(data[first:second], "<u4").tolist())
    buckets = [0] * len(classes)
    for one in range(count):
        size = int.from_bytes(models[at : at + 2], "little")
        table = models[at + 2 : at + 2 + size]
        at += 2 + size
        present = [bucket for bucket, y in enumerate(table) if y]
        shares = [(8 + (y - 1) % 8) * 2 ** ((y - 1) // 8) for y in table if y]
        cumulative = frequencies(shares) if len(shares) > 1 else []
        for place in np.flatnonzero(classes == one):
            buckets[place] = present[decoder.symbol(cumulative) if cumulative else 0]
    assert at == len(models)
    low = [max(bucket // 16 - 1, 0) for bucket in buckets]
    found = [(bucket - 16 * s) << s if bucket >= 32 else bucket for bucket, s in zip(buckets, low, strict=True)]
    stream = iter(np.unpackbits(np.frombuffer(data[second:], np.uint8)).tolist())
    for plane in range(max(low, default=0)):
        for place, s in enumerate(low):
            if s > plane:
                found[place] |= next(stream) << plane
    return found


def band_codes(data: bytes, widths: Sequence[int], length: int, scaled: bool) -> list[Longs]:
    """Codes of directions of some bits each."""
    decoder = RangeDecoder(np.frombuffer(data, "<u4").tolist())
    return [
        np.array([decoder.symbol(cumulative) for _ in range(length)])
        for cumulative in (frequencies(band_shares(bits, scaled)) for bits in widths)
    ]


def band_shares(bits: int, scaled: bool) -> list[int]:
    t = {8: 1047693, 6: 1033823, 4: 865195, 3: 567934, 2: 172099}
    if scaled:
        t = {8: 1048052, 6: 1039483, 4: 920232, 3: 603587, 2: 149108}
    half, s, w = [], 1 << 20, 1 << 20
    while len(half) < 1 << (bits - 1):
        half.append(max(w, 16))
        s = s * t[bits] >> 20
        w = w * s >> 20
    return half[::-1] + half


def frequencies(shares: Sequence[int]) -> list[int]:
    """Cumulative frequencies of a model."""
    chances = [share / sum(shares) for share in shares]
    total = 0.0
    for chance in chances:
        total += chance
    factor, before, found = ((1 << 24) - len(shares)) / total, 0.0, []
    for at, chance in enumerate(chances):
        found.append(int(factor * before) + at)
        before += chance
    return [*found, 1 << 24]


class RangeDecoder:
    def __init__(self, words: list[int]) -> None:
        self._words = iter(words)
        self._low, self._range = 0, _64
        self._point = next(self._words, 0) << 32 | next(self._words, 0)

    def symbol(self, cumulative: Sequence[int]) -> int:
        r = self._range >> 24
        found = bisect_right(cumulative, ((self._point - self._low) & _64) // r) - 1
        self._low = (self._low + r * cumulative[found]) & _64
        self._range = r * (cumulative[found + 1] - cumulative[found])
        if self._range < 1 << 32:
            self._low, self._range = (self._low << 32) & _64, self._range << 32
            self._point = (self._point << 32 | next(self._words, 0)) & _64
        return found


def correct(data: bytes, base: Doubles, delta: Doubles, merge: str, dtype: str) -> Any1:
    """The words of one chunk of a corrected delta, one element after another."""
    way, top = data[0], int.from_bytes(data[1:3], "little")
    grid = _Grid(dtype)
    seen = [grid.predict(float(b), float(d), merge == "twice") for b, d in zip(base, delta, strict=True)]
    count = (64, 128)[way]
    classes = pooled([grid.near_class(p, distance, way, top) for p, _, distance in seen], count)
    values = integers(data[3:], np.array(classes, np.int64), max(classes, default=0) + 1)
    words = []
    for (p, up, _), v in zip(seen, values, strict=True):
        offset = (v + 1) // 2
        words.append(grid.unordered(grid.ordered(grid.bits(p)) + (offset if bool(v % 2) == up else -offset)))
    return np.array(words, _WORDS[dtype])


def pooled(classes: list[int], count: int) -> list[int]:
    members = [classes.count(one) for one in range(count)]
    joined, number, seen = [], 0, 0
    for size in members:
        joined.append(number)
        seen += size
        if seen >= 512:
            number, seen = number + 1, 0
    return [min(joined[one], max(number - 1, 0)) for one in classes]


class _Grid:
    def __init__(self, dtype: str) -> None:
        self._dtype, self._bits = dtype, 32 if dtype == "F32" else 16
        self._mantissa, self._least, self._largest = _FORMATS[dtype]

    def unit(self, a: float) -> float:
        return 2.0 ** (max(math.frexp(a)[1] - 1 if a else self._least, self._least) - self._mantissa)

    def near(self, a: float) -> float:
        rounded = math.copysign(float(round(abs(a) / self.unit(a))), a) * self.unit(a)
        return max(-self._largest, min(self._largest, rounded))

    def above(self, a: float) -> float:
        return -self.below(-a)

    def below(self, a: float) -> float:
        edge = math.frexp(abs(a))[0] == 0.5 and abs(a) > 2.0**self._least
        return a - self.unit(a) / (2 if edge and a > 0 else 1)

    def predict(self, b: float, d: float, twice: bool) -> tuple[float, bool, float]:
        b, d = b if math.isfinite(b) else 0.0, d + 0.0 if math.isfinite(d) else 0.0
        t = b + (self.near(d) if twice else d)
        p = self.near(max(-2 * self._largest, min(2 * self._largest, t)))
        low, high = (self.below(p) + p) / 2 - b, (p + self.above(p)) / 2 - b
        if twice:
            odd = (p / self.unit(p)) % 2 == 1
            low, high = self._edge(low, odd), -self._edge(-high, odd)
        down, up = d - low, high - d
        return p, up < down, max(min(down, up), 0.0)

    def _edge(self, a: float, odd: bool) -> float:
        r = self.near(a)
        if r < a or (r == a and odd):
            r = self.above(r)
        return (self.below(r) + r) / 2

    def near_class(self, p: float, distance: float, way: int, top: int) -> int:
        if way == 0:
            half_octave = int(np.float64(distance).view(np.int64)) >> 51
            return min(max(half_octave - top + 63, 0), 63)
        unit = self.unit(p)
        g = min(max(math.frexp(unit)[1] - 1 + 1023 - top + 15, 0), 15)
        s = max(distance / unit, 2.0**-9)
        return 8 * g + min(max(-(math.frexp(s)[1] - 1) - 2, 0), 7)

    def bits(self, p: float) -> int:
        if self._dtype == "F16":
            return int(np.float16(p).view(np.uint16))
        word = int(np.float32(p).view(np.uint32))
        return word if self._bits == 32 else word >> 16

    def ordered(self, word: int) -> int:
        sign = 1 << (self._bits - 1)
        return ~word & (2 * sign - 1) if word & sign else word | sign

    def unordered(self, word: int) -> int:
        sign = 1 << (self._bits - 1)
        return word & ~sign if word & sign else ~word & (2 * sign - 1)
