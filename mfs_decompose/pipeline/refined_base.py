"""A base that is neither given nor the mean: for every matrix the one that leaves least to low-rank deltas.

Vectors, matrices beyond 2^26 elements, tensors with NaN or infinities, and those that are not stored by directions take
the mean. Where three variants or more look like one unknown base with merged LoRAs, their own ranks are used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch

from mfs_decompose.artifact.files import FileRecord
from mfs_decompose.base_extraction import Refined, family_ranks, refine
from mfs_decompose.codec.base import matrix_shape, slice_shape
from mfs_decompose.events import ProgressSink
from mfs_decompose.linalg.seeds import stream_key
from mfs_decompose.linalg.shapes import sketch_width
from mfs_decompose.pipeline.base_stage import BaseUnit, make_base, mean_blocks, names_of_variants
from mfs_decompose.pipeline.scheduler import Stop
from mfs_decompose.pipeline.workspace import Workspace
from mfs_decompose.plan.build import headroom
from mfs_decompose.plan.model import Item, Plan
from mfs_decompose.source.checkpoint import Checkpoint, TensorReader
from mfs_decompose.source.comparable import comparable
from mfs_decompose.source.dtypes import is_float, torch_dtype
from mfs_decompose.source.header import TensorSpec

LARGEST = 1 << 26
"""Elements of a matrix that is refined; a larger one takes the mean."""

_BY_DIRECTIONS = ("lowrank", "banded")


@dataclass(frozen=True)
class BaseRefiner:
    """Makes tensors of the base; thread-safe. `started` counts where those of this run came from."""

    plan: Plan
    readers: Sequence[TensorReader]
    own_names: Mapping[tuple[str, str], str]
    start: TensorReader | None
    ranks: Mapping[str, int]
    started: Counter[str] = field(default_factory=Counter)

    def values(self, spec: TensorSpec, stop: Stop) -> Iterator[torch.Tensor]:
        """A tensor in row blocks, in the dtype it is stored in."""
        matrices = matrices_of(spec)
        if matrices is None:
            return mean_blocks(self.own_names, self.readers, spec, stop)
        return self._refined(spec, matrices, stop)

    def _refined(self, spec: TensorSpec, matrices: Sequence[tuple[int, int]], stop: Stop) -> Iterator[torch.Tensor]:
        for at, (first, end) in enumerate(matrices):
            stop.check()
            weights = self.weights(spec, first, end)
            found = self.refine(spec, at, first, end, weights)
            if found is None:
                part = TensorSpec(spec.name, spec.dtype, (end - first, *spec.shape[1:]))
                yield from mean_blocks(self.own_names, self.readers, part, stop, first)
                continue
            self.started[found.start] += 1
            yield found.base.reshape(end - first, *spec.shape[1:])

    def weights(self, spec: TensorSpec, first: int, end: int) -> list[torch.Tensor]:
        """Rows of a tensor of every variant, by sorted id."""
        return [reader.rows(self.own_names[reader.checkpoint.id, spec.name], first, end) for reader in self.readers]

    def refine(
        self, spec: TensorSpec, at: int, first: int, end: int, weights: Sequence[torch.Tensor]
    ) -> Refined | None:
        """Matrix `at` of a tensor; None where it takes the mean."""
        if not all(bool(torch.isfinite(own).all()) for own in weights):
            return None
        flat = [own.reshape(_rows(own), -1) for own in weights]
        key = stream_key(self.plan.recipe.seed, "refined", f"{spec.name}\0{at}")
        family = family_ranks(flat, key)
        if family is not None and 0 in family:  # its own bits, rather than what would leave less of the others' noise
            own = flat[family.index(0)]
            return Refined(own.to(torch_dtype(spec.dtype)), 0.0, "a variant whose LoRA leaves it alone", 0)
        ranks = family or (min(self.ranks.get(spec.name, 0), *flat[0].shape),) * len(flat)
        if not any(ranks) and len(flat) > 1:
            return None
        return refine(flat, ranks, torch_dtype(spec.dtype), key, self._known(spec, first, end, flat[0].shape))

    def _known(self, spec: TensorSpec, first: int, end: int, shape: torch.Size) -> torch.Tensor | None:
        """The matrix of a base to start from, where that has one of this shape."""
        info = None if self.start is None else self.start.checkpoint.tensors.get(spec.name)
        if self.start is None or info is None or not comparable(info, spec) or info.rows < end:
            return None
        rows = self.start.rows(spec.name, first, end)
        return rows.reshape(shape) if bool(torch.isfinite(rows).all()) else None


@contextmanager
def open_refiner(plan: Plan, variants: Mapping[str, TensorReader], start: Checkpoint | None) -> Iterator[BaseRefiner]:
    """A refiner of the variants, which reads `start` as long as it is open."""
    readers = [variants[id] for id in sorted(variants)]
    with nullcontext() if start is None else TensorReader(start) as reader:
        yield BaseRefiner(plan, readers, names_of_variants(plan), reader, even_ranks(plan))


def make_refined_base(
    workspace: Workspace,
    plan: Plan,
    units: Sequence[BaseUnit],
    variants: Mapping[str, TensorReader],
    threads: int,
    memory: int,
    progress: ProgressSink,
    *,
    start: Checkpoint | None,
) -> list[FileRecord]:
    """Write the refined base into the artifact's base shards; `start` may be as good a beginning as the mean."""
    sized = [replace(unit, peak_bytes=max(unit.peak_bytes, _peak(unit, plan, len(variants)))) for unit in units]
    with open_refiner(plan, variants, start) as refiner:
        records = make_base(workspace, plan, sized, refiner.values, "base: refined", threads, memory, progress)
    if refiner.started:
        found = ", ".join(f"{count} from {name}" for name, count in sorted(refiner.started.items()))
        progress.note(f"refined base: matrices by where they started: {found}; all others are the mean")
    return records


def even_ranks(plan: Plan) -> dict[str, int]:
    """The rank that deltas of each base tensor will have: the recipe's, or that of a budget spent evenly."""
    found: dict[str, int] = {}
    for item in plan.items():
        if item.base is not None and item.codec in _BY_DIRECTIONS and item.matrix is not None:
            found[item.base.name] = max(found.get(item.base.name, 0), _even(item))
    return found


def _even(item: Item) -> int:
    return item.steps if item.fixed else max(1, item.steps // headroom(item.codec))


def matrices_of(spec: TensorSpec) -> list[tuple[int, int]] | None:
    """Row ranges of a tensor that are matrices of their own; None where it takes the mean as a whole."""
    if not is_float(spec.dtype) or torch_dtype(spec.dtype).itemsize == 1:
        return None
    stacked = slice_shape(spec.shape)
    if stacked is not None:
        small = stacked[0] * stacked[1] <= LARGEST
        return [(at, at + 1) for at in range(spec.rows)] if small else None
    return [(0, spec.rows)] if matrix_shape(spec.shape) is not None and spec.numel <= LARGEST else None


def _rows(own: torch.Tensor) -> int:
    """Rows of the matrix that a codec sees: of [1, O, I] those of its slice, of a thin [E, O, I] all of them."""
    return own.shape[0] * own.shape[1] if own.dim() == 3 else own.shape[0]


def _peak(unit: BaseUnit, plan: Plan, variants: int) -> int:
    """Bytes while the largest matrix of a unit is refined: weights, truncations, and fp64 matrices beside the SVD."""
    ranks = even_ranks(plan)
    most = 0
    for spec in unit.tensors:
        matrices = matrices_of(spec)
        if not matrices:
            continue
        elements = spec.numel * (matrices[0][1] - matrices[0][0]) // max(spec.rows, 1)
        shape = slice_shape(spec.shape) or matrix_shape(spec.shape)
        assert shape is not None
        width = sketch_width(max(ranks.get(spec.name, 0), min(shape) // 4), min(shape))
        most = max(most, elements * (variants * 4 + 7 * 8) + (2 * variants + 6) * 8 * width * sum(shape))
    return most
