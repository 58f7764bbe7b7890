"""Whether two tensors can be compared at all, judged by type and shape."""

from __future__ import annotations

from mfs_decompose.source.dtypes import is_float
from mfs_decompose.source.header import TensorSpec


def comparable(one: TensorSpec, other: TensorSpec) -> bool:
    """Whether a difference of the common rows of two tensors means something, or their bits can be compared."""
    if one.dtype != other.dtype and not (is_float(one.dtype) and is_float(other.dtype)):
        return False
    if one.shape == other.shape:
        return True
    # Vectors of other lengths are other things; matrices of other heights are grown or cut vocabularies.
    matrices = len(one.shape) >= 2 and len(other.shape) >= 2
    return matrices and one.shape[1:] == other.shape[1:] and min(one.numel, other.numel) > 0
