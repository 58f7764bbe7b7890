"""Bytes in memory, by part: the base, and what each variant adds in which form."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

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


def count_memory(base: Iterable[torch.Tensor], variants: Mapping[str, Held]) -> Memory:
    """Count the bytes of a base, and of forms and whole parameters by variant."""
    sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in base}
    owners: dict[int, tuple[str, int]] = {}
    users: defaultdict[int, list[str]] = defaultdict(list)
    for id, (placed, tensors) in variants.items():
        named = [(one.form.name, tensor) for one in placed for tensor in one.form.tensors()]
        for form, tensor in [*named, *((WHOLE, tensor) for tensor in tensors)]:
            storage = tensor.untyped_storage()
            if storage.nbytes() and id not in users[storage.data_ptr()]:
                owners.setdefault(storage.data_ptr(), (form, storage.nbytes()))
                users[storage.data_ptr()].append(id)
    shared: defaultdict[str, int] = defaultdict(int)
    own: dict[str, defaultdict[str, int]] = {id: defaultdict(int) for id in variants}
    for place, (form, nbytes) in owners.items():
        part = shared if len(users[place]) > 1 else own[users[place][0]]
        part[form] += nbytes
    return Memory(sum(sizes.values()), _sorted(shared), {id: _sorted(forms) for id, forms in own.items()})


def _sorted(forms: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(forms.items()))
