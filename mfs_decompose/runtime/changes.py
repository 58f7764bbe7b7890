"""What a variant changes of the base's modules: read from the artifact, moved between memories, attached to modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import torch
from torch import nn

from mfs_decompose.runtime.resident_forms import Form, Placed, move

Kind = Literal["linear", "conv1d", "embedding", "experts", "rows"]


@dataclass(frozen=True)
class Delta:
    """What a variant changes of one parameter: forms, and whether they lie in it transposed.

    `rows` is how many rows the variant's own parameter has; more than the base's where its vocabulary grew.
    """

    placed: tuple[Placed, ...]
    rows: int
    transposed: bool = False

    def map(self, change: Callable[[Form], Form]) -> Delta:
        """The same of other forms."""
        placed = tuple(Placed(change(one.form), one.start, one.stop, one.slice) for one in self.placed)
        return Delta(placed, self.rows, self.transposed)


@dataclass
class Change:
    """What one variant changes of one module.

    Attributes:
        bias: what is added to the bias, fp32.
        stacks: stacked parameter [E, O, I] -> expert -> delta.
        whole: parameters that the variant has whole.
    """

    kind: Kind
    matrix: Delta | None = None
    bias: torch.Tensor | None = None
    stacks: dict[str, dict[int, Delta]] = field(default_factory=dict)
    whole: dict[str, torch.Tensor] = field(default_factory=dict)

    def map(self, change: Callable[[Form], Form]) -> Change:
        """The same of other forms; tensors are shared."""
        return replace(
            self,
            matrix=None if self.matrix is None else self.matrix.map(change),
            stacks={leaf: {at: delta.map(change) for at, delta in own.items()} for leaf, own in self.stacks.items()},
        )

    def to(self, device: torch.device) -> Change:
        """The same in another device's memory; tensors that are there are shared."""
        return replace(
            self.map(lambda form: move(form, device)),
            bias=None if self.bias is None else self.bias.to(device),
            whole={leaf: value.to(device) for leaf, value in self.whole.items()},
        )

    def placed(self) -> Iterator[Placed]:
        """All forms."""
        deltas = [] if self.matrix is None else [self.matrix]
        for own in self.stacks.values():
            deltas += own.values()
        return (one for delta in deltas for one in delta.placed)

    def tensors(self) -> Iterator[torch.Tensor]:
        """All whole parameters."""
        yield from self.whole.values()
        if self.bias is not None:
            yield self.bias


Changes = Mapping[str, Change]
"""All that a variant changes, by path of the module."""


def storages_of(changes: Changes) -> dict[int, int]:
    """Address -> bytes of the memory that changes take."""
    found: dict[int, int] = {}
    for change in changes.values():
        tensors = [tensor for one in change.placed() for tensor in one.form.tensors()]
        for tensor in (*tensors, *change.tensors()):
            storage = tensor.untyped_storage()
            if storage.nbytes():
                found[storage.data_ptr()] = storage.nbytes()
    return found


class ServesVariants(Protocol):
    """A module that stands for one of the base's; `original` is that, unchanged."""

    original: nn.Module

    def attach(self, variant: int, change: Change) -> None:
        """Answer rows of a variant slot with a change from now on; it lies on the module's device."""

    def detach(self, variant: int) -> None:
        """Forget what was attached."""
