"""What the weights say about a rename: the heads of a few tensors, read with numpy alone, compared by their cosine.

Planning reads no torch, and most runs need none of this: only tensors that a rename is in question for are looked at.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING

from mfs_decompose.errors import MfsError
from mfs_decompose.source.checkpoint import Checkpoint
from mfs_decompose.source.dtypes import is_float, item_size
from mfs_decompose.source.folder import resolve_inside
from mfs_decompose.source.header import TensorInfo, TensorSpec

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Heads = Callable[[str, str], "npt.NDArray[np.float32] | None"]
"""(variant id or `base`, tensor) -> its first elements, flat; None where they cannot be read, as from afar."""

Cosine = Callable[[str, str], float | None]
"""(tensor of the base, tensor of the variant) -> cosine of their heads; None where that says nothing."""

LEAST_LIKENESS = 0.5  # as for lineage: matrices that were drawn apart are as good as orthogonal
BASE = "base"
_SAMPLED_TENSORS = 8
_SAMPLED_ELEMENTS = 2**14


def open_heads(base: Checkpoint | None, variants: Sequence[Checkpoint]) -> Heads:
    """Reads the first 2^14 elements of tensors of these checkpoints; nothing is read before it is asked for.

    `base` None stands for a mean base: its names are those of the first variant by id. What is not there, is no
    float, or is not the file whose header was read gives None: whoever needs those weights will say so.
    """
    ordered = sorted(variants, key=lambda checkpoint: checkpoint.id)
    sources = {BASE: base if base is not None else ordered[0]} | {one.id: one for one in ordered}

    def read(source: str, name: str) -> npt.NDArray[np.float32] | None:
        info = sources[source].tensors.get(name)
        return None if info is None else _read_head(sources[source], info)

    return read


def cosine_of(heads: Heads, base: str, variant: str) -> Cosine:
    """The cosine of a tensor of source `base` and one of source `variant`, over the elements that both heads have."""

    def cosine(one: str, other: str) -> float | None:
        import numpy as np

        left, right = heads(base, one), heads(variant, other)
        if left is None or right is None:
            return None
        common = min(left.size, right.size)
        a, b = left.reshape(-1)[:common].astype(np.float64), right.reshape(-1)[:common].astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            lengths = float(a @ a) * float(b @ b)
            product = float(a @ b)
        return product / math.sqrt(lengths) if 0 < lengths < math.inf else None

    return cosine


def likeness(pairs: Mapping[str, str], base: Mapping[str, TensorSpec], cosine: Cosine) -> float | None:
    """The median cosine over at most 8 pairs of float matrices, spread over all; None where none says anything.

    Vectors are not asked: norms are about ones in every model.
    """
    names = [name for name in sorted(pairs) if _is_matrix(base[name])]
    count = min(_SAMPLED_TENSORS, len(names))
    chosen = [names[index * len(names) // count] for index in range(count)]
    found = [value for name in chosen if (value := cosine(name, pairs[name])) is not None]
    return median(found) if found else None


def _is_matrix(spec: TensorSpec) -> bool:
    return is_float(spec.dtype) and len(spec.shape) >= 2 and spec.numel > 1


def _read_head(checkpoint: Checkpoint, info: TensorInfo) -> npt.NDArray[np.float32] | None:
    if not is_float(info.dtype):
        return None
    wanted = min(_SAMPLED_ELEMENTS, info.numel) * item_size(info.dtype)
    header = next((shard for shard in checkpoint.shards if shard.file == info.file), None)
    try:
        with open(resolve_inside(checkpoint.root, info.file), "rb", buffering=0) as stream:
            status = os.fstat(stream.fileno())
            if header is None or (status.st_size, status.st_mtime_ns) != (header.size, header.mtime_ns):
                return None
            data = os.pread(stream.fileno(), wanted, info.start)
    except (OSError, MfsError):
        return None
    return _floats(data, info.dtype) if len(data) == wanted else None


def _floats(data: bytes, dtype: str) -> npt.NDArray[np.float32]:
    import numpy as np

    if dtype == "BF16":  # the upper half of a float
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    with np.errstate(over="ignore"):
        return np.frombuffer(data, {"F64": "<f8", "F32": "<f4", "F16": "<f2"}[dtype]).astype(np.float32)
