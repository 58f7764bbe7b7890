"""One tensor of a variant: the facts of its delta, its spectrum, and its class.

The tensor is read once for its facts, and its delta kept for the spectrum while it is small enough. A stack [E, O, I],
such as the experts of a layer, is E matrices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch

from mfs_decompose.base_extraction import delta_rows
from mfs_decompose.codec.base import Rows, block_rows, matrix_shape, slice_shape
from mfs_decompose.linalg.boxes import has_boxes
from mfs_decompose.linalg.peel import find_rank, make_problem
from mfs_decompose.linalg.rounding_noise import count_units, predict_noise
from mfs_decompose.linalg.seeds import stream_key
from mfs_decompose.linalg.spectrum import blocked_spectrum, gram_spectra, resolution
from mfs_decompose.linalg.sums import squared_norm
from mfs_decompose.pipeline.delta_class import Facts, Verdict, classify
from mfs_decompose.pipeline.spectra_sides import Of, Pair, Proof
from mfs_decompose.source.checkpoint import TensorReader
from mfs_decompose.source.dtypes import torch_dtype

BLOCK_ELEMENTS = 1 << 22
HELD_ELEMENTS = 1 << 26
"""Deltas up to this size are kept in memory between their facts and their spectrum; larger ones are read again."""
BOX_ELEMENTS = 1 << 24
"""Rounding boxes are looked at in about this many elements of a tensor, in runs of rows evenly spread over it."""
_RUNS = 16
_WORDS: dict[int, torch.dtype] = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Measured:
    """One matrix of a variant, a whole tensor or slice number `slice` of a stack; without facts where it has no delta.

    `nonfinite` counts elements with a NaN or an infinity on either side, which count as unchanged by nothing.
    """

    tensor: str
    slice: int | None
    shape: tuple[int, ...]
    dtype: str
    of: Of
    nonfinite: int = 0
    facts: Facts | None = None
    verdict: Verdict | None = None


@dataclass(frozen=True)
class _Matrix:
    """Rows start..stop of a tensor, which are one matrix; `shape` None where they are too few or too thin to be one."""

    slice: int | None
    start: int
    stop: int
    shape: tuple[int, int] | None


def measure_pair(
    pair: Pair, variant: str, original: TensorReader | None, device: str, check: Callable[[], None]
) -> list[Measured]:
    """The facts and classes of one tensor, slice by slice where it is a stack; `check` may raise to stop.

    Raises:
        AnotherOriginal, ArtifactInvalid: its rows are not those on record.
    """
    if not pair.comparable:
        return [Measured(pair.name, None, pair.spec.shape, pair.spec.dtype, pair.of)]
    matrices = _matrices(pair)
    if pair.identical:
        counts = [(one.stop - one.start) * _row_elements(pair) for one in matrices]
        facts = [Facts(one.shape, count, count, 0.0, 0.0) for one, count in zip(matrices, counts, strict=True)]
        return [_measured(pair, one, 0, found) for one, found in zip(matrices, facts, strict=True)]
    scan = _Scan(pair, matrices, Proof(pair, variant, original), check)
    spectra = _spectra(scan, matrices, device, check)
    measured = []
    for matrix, sums in zip(matrices, scan.sums, strict=True):
        check()
        found = _facts(pair, matrix, sums)
        if matrix.start in spectra:
            energies = spectra[matrix.start]
            found = replace(found, energies=energies.numpy(), resolution=resolution(energies))
        measured.append(_measured(pair, matrix, sums.nonfinite, found))
    return measured


def _measured(pair: Pair, matrix: _Matrix, nonfinite: int, facts: Facts) -> Measured:
    verdict = classify(facts, _box_search(pair, matrix))
    shape = pair.spec.shape if matrix.slice is None else pair.spec.shape[1:]
    return Measured(pair.name, matrix.slice, shape, pair.spec.dtype, pair.of, nonfinite, facts, verdict)


def _matrices(pair: Pair) -> list[_Matrix]:
    inner = slice_shape(pair.spec.shape)
    if inner is not None:
        return [_Matrix(at, at, at + 1, inner) for at in range(pair.common)]
    return [_Matrix(None, 0, pair.common, matrix_shape((pair.common, *pair.spec.shape[1:])))]


@dataclass
class _Sums:
    """What adds up over the rows of one matrix."""

    elements: int = 0
    unchanged: int = 0
    nonfinite: int = 0
    energies: list[float] = field(default_factory=list)
    units: torch.Tensor = field(default_factory=lambda: torch.zeros(256, dtype=torch.int64))

    def add(self, own: torch.Tensor, base: torch.Tensor, delta: torch.Tensor) -> None:
        self.elements += own.numel()
        self.unchanged += _count_equal(own, base)
        self.nonfinite += own.numel() - int((own.isfinite() & base.isfinite()).sum())
        self.energies.append(squared_norm(delta))
        self.units += count_units(own)


class _Scan:
    """One reading of a tensor: sums of each of its matrices, and the delta where it is small enough to be held."""

    def __init__(self, pair: Pair, matrices: list[_Matrix], proof: Proof, check: Callable[[], None]) -> None:
        self.pair = pair
        self.sums = [_Sums() for _ in matrices]
        held = pair.common * _row_elements(pair) <= HELD_ELEMENTS
        self._held = torch.empty((pair.common, *pair.spec.shape[1:])) if held else None
        for matrix, sums in zip(matrices, self.sums, strict=True):
            for start, stop in blocks(pair, matrix.start, matrix.stop):
                check()
                own, base = pair.own_rows(start, stop), pair.base_rows(start, stop)
                proof.add(own)
                delta = _finite_delta(own, base)
                sums.add(own, base, delta)
                if self._held is not None:
                    self._held[start:stop] = delta
        proof.finish(pair.common)

    def delta(self, start: int, stop: int) -> torch.Tensor:
        """Rows of the delta, fp32 [stop - start, ...], zero where a side is not finite."""
        if self._held is not None:
            return self._held[start:stop]
        return _finite_delta(self.pair.own_rows(start, stop), self.pair.base_rows(start, stop))


def _facts(pair: Pair, matrix: _Matrix, sums: _Sums) -> Facts:
    energy = math.fsum(sums.energies)
    noise = predict_noise(sums.units, pair.dtype, sums.unchanged, energy, on_grid=pair.on_grid)
    return Facts(matrix.shape, sums.elements, sums.unchanged, energy, noise)


def _spectra(scan: _Scan, matrices: list[_Matrix], device: str, check: Callable[[], None]) -> dict[int, torch.Tensor]:
    """The squared singular values of each matrix by its first row: fp64 [K]."""
    if matrices[0].shape is None:
        return {}
    if matrices[0].slice is None:
        return {matrices[0].start: _blocked(scan, matrices[0].stop, matrices[0].shape, device)}
    found: dict[int, torch.Tensor] = {}
    for start, stop in blocks(scan.pair, 0, len(matrices)):
        check()
        found |= dict(zip(range(start, stop), gram_spectra(scan.delta(start, stop).to(device)), strict=True))
    return found


def _blocked(scan: _Scan, stop: int, shape: tuple[int, int], device: str) -> torch.Tensor:
    scale = shape[0] // stop  # matrix rows of one row of the tensor
    edges = [0, *(high * scale for _, high in blocks(scan.pair, 0, stop))]

    def read(low: int, high: int) -> torch.Tensor:
        return scan.delta(low // scale, high // scale).reshape(high - low, shape[1])

    return blocked_spectrum(read, edges, shape[1], device)


def _box_search(pair: Pair, matrix: _Matrix) -> Callable[[int], int | None] | None:
    """A search for the rank that meets the rounding boxes; None where weights are too fine to have any to be seen."""
    shape, base = matrix.shape, pair.base
    if shape is None or base is None or base.dtype != pair.dtype or not has_boxes(torch_dtype(pair.dtype)):
        return None

    def search(guess: int) -> int | None:
        own = _sample(pair.own_rows, matrix.start, matrix.stop, shape)
        below = _sample(pair.base_rows, matrix.start, matrix.stop, shape)
        problem = make_problem(own, below, "once", stream_key(0, "spectrum", pair.name))
        return find_rank(problem, min(shape) // 4, guess)

    return search


def _sample(rows: Rows, start: int, stop: int, shape: tuple[int, int]) -> torch.Tensor:
    """All of a matrix, or runs of its rows spread evenly over it."""
    count = stop - start
    run = max(1, BOX_ELEMENTS * count // (shape[0] * shape[1]) // _RUNS)
    if count <= run * _RUNS:
        return rows(start, stop).reshape(-1, shape[1])
    firsts = [start + (count - run) * at // (_RUNS - 1) for at in range(_RUNS)]
    return torch.cat([rows(first, first + run).reshape(-1, shape[1]) for first in firsts])


def blocks(pair: Pair, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Rows start..stop in blocks of bounded size."""
    step = block_rows(pair.spec, BLOCK_ELEMENTS)
    for low in range(start, stop, step):
        yield low, min(low + step, stop)


def peak_bytes(pair: Pair) -> int:
    """Anonymous memory for one tensor: its delta if held, blocks in fp64, then the Gram matrix or the boxes."""
    shape = slice_shape(pair.spec.shape) or matrix_shape(pair.spec.shape)
    row = _row_elements(pair)
    block = 32 * max(BLOCK_ELEMENTS, row)
    if not pair.comparable or pair.identical or shape is None:
        return block
    elements = pair.common * row
    held = 4 * elements if elements <= HELD_ELEMENTS else 0
    return held + block + max(3 * 8 * min(shape) ** 2, 40 * min(BOX_ELEMENTS, shape[0] * shape[1]))


def _finite_delta(own: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(delta_rows(own, base), 0.0, 0.0, 0.0)


def _count_equal(own: torch.Tensor, base: torch.Tensor) -> int:
    """Elements of the same bits; under two dtypes, of the same value."""
    if own.dtype != base.dtype:
        return int((own.to(torch.float64) == base.to(torch.float64)).sum())
    word = _WORDS[own.element_size()]
    return int((own.contiguous().view(word) == base.contiguous().view(word)).sum())


def _row_elements(pair: Pair) -> int:
    return pair.spec.numel // max(pair.spec.rows, 1)
