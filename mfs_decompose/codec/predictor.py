"""A tensor's elements as words, and what a base tensor predicts them to be."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mfs_decompose.codec.lossless_chunk import Layout
from mfs_decompose.errors import ArtifactInvalid
from mfs_decompose.linalg.words import Words, word_type
from mfs_decompose.source.dtypes import is_float, item_size, torch_dtype
from mfs_decompose.source.header import TensorSpec

if TYPE_CHECKING:
    import torch

_EXPONENTS = {"BF16": 8, "F16": 5, "F32": 8, "F64": 11}


def layout_of(dtype: str) -> Layout:
    """How elements of a dtype are laid out."""
    return Layout(item_size(dtype), _EXPONENTS.get(dtype, 0))


def words_of(values: torch.Tensor) -> Words:
    """The bits of a tensor's elements, row-major."""
    import torch

    size = values.element_size()
    flat = values.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().view(word_type(size)) if flat.numel() else np.empty(0, word_type(size))


def tensor_of(words: Words, spec: TensorSpec, rows: int) -> torch.Tensor:
    """`rows` rows of a tensor of which these are the bits; a tensor without dimensions stays without."""
    import torch

    shape = (rows, *spec.shape[1:]) if spec.shape else ()
    if not words.size:
        return torch.empty(shape, dtype=torch_dtype(spec.dtype))
    own = words if words.flags.writeable else words.copy()
    return torch.from_numpy(own.view(np.uint8)).view(torch_dtype(spec.dtype)).reshape(shape)


def can_predict(base: torch.Tensor, spec: TensorSpec) -> bool:
    """Whether a base tensor's elements can be brought to the dtype of `spec` with the same bits on every machine."""
    own = torch_dtype(spec.dtype)
    if base.dtype == own:
        return True
    wide = base.is_floating_point() and base.element_size() >= 2
    return is_float(spec.dtype) and wide and (base.element_size() <= 4 or own.itemsize == 8)


def predicted_words(base: torch.Tensor, spec: TensorSpec) -> Words:
    """The words that a base tensor predicts: its own, or those of its values rounded to the dtype of `spec`.

    A NaN that would have to be converted predicts 0: what becomes of its payload differs between machines.

    Raises:
        ArtifactInvalid: this base does not predict such a tensor.
    """
    if not can_predict(base, spec):
        raise ArtifactInvalid(f"tensor {spec.name!r} of {spec.dtype} cannot be coded against a base of {base.dtype}")
    own = torch_dtype(spec.dtype)
    if base.dtype == own:
        return words_of(base)
    return words_of(base.to(own).masked_fill(base.isnan(), 0))
