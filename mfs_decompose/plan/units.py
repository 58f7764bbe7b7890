"""Cut items into units of work: by shapes and names alone, never by memory, threads or the order of variants."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from mfs_decompose.codec.base import DECODE_ELEMENTS
from mfs_decompose.codec.sizes import read_passes
from mfs_decompose.linalg.shapes import sketch_width, uses_gram
from mfs_decompose.plan.model import Item, Unit, UnitKind

BLOCK_ELEMENTS = 1 << 24
"""Elements of a batch, and of the largest matrix that is not read in row blocks: 64 MiB in fp32."""
ROW_BLOCK_ELEMENTS = 1 << 22
"""Elements of a row block: small enough for memory that is kept (pipeline/allocator.py), else clearing pages costs more
than reading and subtracting."""

_BATCH_MATRICES = 256
_KINDS: tuple[UnitKind, ...] = ("batch", "blocks", "exact", "stack")
_EXACT_BYTES = 1 << 26
_PEELED_BYTES = 32
"""An element, while a merged LoRA is peeled off a matrix: see codec/lora_exact.py."""
MAX_PEELED = 1 << 26


def cut_units(items: Iterable[Item]) -> tuple[Unit, ...]:
    """Units, the costliest first, so that none is left alone at the end."""
    ordered = sorted(items, key=lambda item: (_batch_key(item), item.name, item.variant))
    groups: list[tuple[UnitKind, tuple[Item, ...]]] = []
    for key, run in groupby(ordered, key=_batch_key):
        kind = _KINDS[key[0]]
        groups.extend((kind, batch) for batch in _cut(tuple(run), kind))
    groups.sort(key=lambda group: (-_cost(*group), group[1][0].name, group[1][0].variant))
    return tuple(
        Unit(number, kind, batch, _read_bytes(kind, batch), peak_bytes(kind, batch))
        for number, (kind, batch) in enumerate(groups)
    )


def _batch_key(item: Item) -> tuple[int, str, tuple[tuple[str, str], ...], tuple[int, int], int]:
    if item.merged is not None or item.codec == "identical":
        return (_KINDS.index("exact"), "adapter", (), (0, 0), 0)
    if item.matrix is None:
        return (_KINDS.index("exact"), item.codec if item.direct or item.codec == "lora-exact" else "", (), (0, 0), 0)
    large = item.matrix[0] * item.matrix[1] > BLOCK_ELEMENTS
    kind: UnitKind = "stack" if item.stacked else "blocks" if large else "batch"
    return (
        _KINDS.index(kind),
        f"{item.codec}{' auto' if item.auto else ''}",
        tuple(sorted(item.params.items())),
        item.matrix,
        item.steps,
    )


def _cut(run: Sequence[Item], kind: UnitKind) -> list[tuple[Item, ...]]:
    if kind in ("blocks", "stack"):
        return [(item,) for item in run]
    batches: list[tuple[Item, ...]] = []
    current: list[Item] = []
    size = 0
    limit = _EXACT_BYTES if kind == "exact" else BLOCK_ELEMENTS
    for item in run:
        weight = item.spec.nbytes if kind == "exact" else item.spec.numel
        if current and (size + weight > limit or len(current) >= _BATCH_MATRICES):
            batches.append(tuple(current))
            current, size = [], 0
        current.append(item)
        size += weight
    if current:
        batches.append(tuple(current))
    return batches


def _cost(kind: UnitKind, items: Sequence[Item]) -> int:
    """Multiplications, roughly: what orders units, and nothing else."""
    if kind == "exact":
        return sum(item.spec.nbytes for item in items)
    return sum(item.spec.numel * (8 + item.steps) for item in items)


def _read_bytes(kind: UnitKind, items: Sequence[Item]) -> int:
    """Bytes of weights that pass 1 reads: each variant's tensor, and the base's; in a batch once for all variants."""
    passes = 1
    if kind == "blocks":
        matrix = items[0].matrix
        assert matrix is not None
        passes = 1 + read_passes(items[0].codec, matrix, items[0].steps)
    if any(item.merged is not None or item.codec == "identical" for item in items):  # an adapter reads the base alone
        return sum(item.spec.nbytes for item in items if item.merged is not None)
    own = sum(item.spec.nbytes for item in items)
    bases = [item.base for item in items if item.base is not None]
    if kind == "batch":
        bases = list({base.name: base for base in bases}.values())
    return passes * (own + sum(base.nbytes for base in bases))


def slice_groups(item: Item) -> list[tuple[int, int]]:
    """Slices of a stack that are read and factorised together: a block of them, or one that is larger."""
    assert item.matrix is not None and item.stacked
    step = max(1, min(_BATCH_MATRICES, BLOCK_ELEMENTS // (item.matrix[0] * item.matrix[1])))
    return [(start, min(start + step, item.common_rows)) for start in range(0, item.common_rows, step)]


def slice_steps(item: Item, slices: int, changed: int) -> int:
    """Steps fitted to each of the `changed` ones of some slices: what the others do not need is theirs.

    Never more for all of them than `slices` times the item's steps.
    """
    return item.steps if item.fixed else min(item.worthwhile_steps, item.steps * slices // changed)


def peak_bytes(kind: UnitKind, items: Sequence[Item]) -> int:
    """Anonymous memory one unit needs at most, in either pass: an upper estimate."""
    widest_row = max((item.spec.row_bytes for item in items), default=0)
    decode = 8 * 5 * DECODE_ELEMENTS + 6 * widest_row
    if kind == "exact":
        peeled = max((item.spec.numel for item in items if item.codec == "lora-exact"), default=0)
        direct = 8 * 4 * DECODE_ELEMENTS if any(item.direct for item in items) else 0
        return decode + 8 * DECODE_ELEMENTS + direct + _PEELED_BYTES * min(peeled, MAX_PEELED)
    if kind == "stack":
        return _stack_peak(items[0], decode)
    matrix, steps = items[0].matrix, items[0].steps
    assert matrix is not None
    count = 1 if kind == "blocks" else len(items)
    elements = (
        BLOCK_ELEMENTS if kind == "blocks" else sum(item.matrix[0] * item.matrix[1] for item in items if item.matrix)
    )
    work = _fit_work(items[0].codec, matrix, steps, count, elements)
    if any(item.auto for item in items):  # and its rest, or all its bits, coded
        decode += 8 * 4 * DECODE_ELEMENTS + max(item.spec.nbytes for item in items)
    loading = 4 * 3 * (BLOCK_ELEMENTS if kind == "blocks" else max(item.spec.numel for item in items))
    mergeable = [item.spec.numel for item in items if item.auto and item.comparable_bits]
    peeling = _PEELED_BYTES * max((numel for numel in mergeable if numel <= MAX_PEELED), default=0)
    return max(work + max(loading, peeling), decode + peeling + 16 * sum(matrix) * max(steps, 1))


def _stack_peak(item: Item, decode: int) -> int:
    assert item.matrix is not None and item.base is not None
    size, slices = item.matrix[0] * item.matrix[1], slice_groups(item)[0][1]
    work = max(
        _fit_work(item.codec, item.matrix, slice_steps(item, slices, changed), changed, changed * size)
        for changed in range(1, slices + 1)
    )
    loading = slices * (item.spec.row_bytes + item.base.row_bytes + 4 * size) + 4 * 3 * size
    # A slice is decoded whole: in fp64 its delta, the base, their sum, and what rounds it.
    return max(work + loading, decode + 8 * 5 * size + 16 * sum(item.matrix) * item.worthwhile_steps)


def _fit_work(codec: str, matrix: tuple[int, int], steps: int, count: int, elements: int) -> int:
    """Bytes that `count` matrices of `elements` in all take while they are fitted."""
    long, short = max(matrix), min(matrix)
    sketch = sketch_width(steps, short) if codec != "sparse" else 0
    if sketch and uses_gram(steps, short):
        work = 8 * (3 * short * short + elements // count) + 4 * (elements + 2 * count * (long + short) * steps)
    else:
        work = 4 * elements + (4 + 8 + 8) * count * long * sketch + 8 * count * short * sketch * 3
    if codec == "sparse":
        work = (4 + 4 + 8 + 8) * elements // count + 4 * elements + 8 * count * steps * matrix[0]
    return work
