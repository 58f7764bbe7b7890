"""Bytes in memory, by part: the base, and what each variant adds in which form."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from mfs_decompose.runtime.resident_forms import Placed

WHOLE = "whole parameters"
"""The form of vectors and other parameters that a variant has whole."""


@dataclass(frozen=True)
class Memory:
    """Tensor bytes that are held as long as a family is loaded; memory that two names share counts once.

    Attributes:
        base: parameters and buffers of the base.
        shared: form -> bytes of what several variants use.
        variants: variant -> form -> bytes of what it alone uses.
    """

    base: int
    shared: Mapping[str, int]
    variants: Mapping[str, Mapping[str, int]]

    @property
    def total(self) -> int:
        return self.base + sum(self.shared.values()) + sum(sum(forms.values()) for forms in self.variants.values())


Held = tuple[Sequence[Placed], Sequence[torch.Tensor]]
"""What a variant holds: forms, and whole parameters."""


class _Use(NamedTuple):
    """One tensor of a variant: where it lies, and how large it and all of its memory are."""

    variant: str
    form: str
    start: int
    nbytes: int
    storage: int


def count_memory(base: Iterable[torch.Tensor], variants: Mapping[str, Held]) -> Memory:
    """Count the bytes of a base, and of forms and whole parameters by variant."""
    sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in base}
    uses: defaultdict[int, list[_Use]] = defaultdict(list)
    for id, (placed, tensors) in variants.items():
        named = [(one.form.name, tensor) for one in placed for tensor in one.form.tensors()]
        for form, tensor in [*named, *((WHOLE, tensor) for tensor in tensors)]:
            storage = tensor.untyped_storage()
            if storage.nbytes():
                uses[storage.data_ptr()].append(
                    _Use(id, form, tensor.data_ptr(), min(tensor.nbytes, storage.nbytes()), storage.nbytes())
                )
    shared: defaultdict[str, int] = defaultdict(int)
    own: dict[str, defaultdict[str, int]] = {id: defaultdict(int) for id in variants}
    for found in uses.values():
        if len({use.variant for use in found}) == 1:
            own[found[0].variant][found[0].form] += found[0].storage
            continue
        # A stack: each variant has its part. What several use, and what nobody's part is, is of all.
        parts = {(use.start, use.nbytes): use for use in reversed(found)}
        for place, use in parts.items():
            users = {other.variant for other in found if (other.start, other.nbytes) == place}
            (own[use.variant] if len(users) == 1 else shared)[use.form] += use.nbytes
        left = found[0].storage - sum(use.nbytes for use in parts.values())
        if left > 0:
            shared[found[0].form] += left
    return Memory(sum(sizes.values()), _sorted(shared), {id: _sorted(forms) for id, forms in own.items()})


def _sorted(forms: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(forms.items()))
