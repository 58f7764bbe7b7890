"""Factors of several variants side by side in one memory, which each variant's own tensors become views of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from mfs_decompose.runtime.resident_forms import LowRank


@dataclass(frozen=True, eq=False)
class Member:
    """A low-rank form of a variant, and those of its tensors that lie beside others': the very ones that it holds."""

    variant: int
    form: LowRank
    tensors: tuple[torch.Tensor, ...]

    @property
    def rank(self) -> int:
        return self.form.left.rank

    def own(self) -> None:
        """Take the tensors out of a memory that others lie in."""
        with torch.inference_mode():
            for tensor in self.tensors:
                if tensor.untyped_storage().nbytes() > tensor.nbytes:
                    _hold(tensor, tensor.clone())


@dataclass(eq=False)
class Layout:
    """Members whose deltas are of outputs start..stop.

    Attributes:
        joined: the tensors of all members, the first of each one after another, then the second of each.
    """

    start: int
    stop: int
    members: list[Member] = field(default_factory=list)
    variants: frozenset[int] = frozenset()
    joined: tuple[torch.Tensor, ...] = ()

    @property
    def rank(self) -> int:
        return sum(member.rank for member in self.members)

    def take(self, member: Member) -> None:
        """Let another lie beside them."""
        self.members.append(member)
        self._lay_out()

    def drop(self, variant: int) -> None:
        """Give a variant's tensors memory of their own again, and that of the others no longer hold them."""
        left = [member for member in self.members if member.variant != variant]
        alone = left if len(left) == 1 else []
        for member in (*alone, *(member for member in self.members if member.variant == variant)):
            member.own()
        self.members = left
        self._lay_out()

    def _lay_out(self) -> None:
        """Join the tensors of the members, which become views: nothing is held twice."""
        self.variants = frozenset(member.variant for member in self.members)
        if not self.members:
            return
        # Inside, tensors made under inference mode and others may be written to alike.
        with torch.inference_mode():
            self.joined = tuple(_join(tensors) for tensors in zip(*(one.tensors for one in self.members), strict=True))
        self.prepare()

    def prepare(self) -> None:
        """Make what depends on all members."""


def columns(y_TO: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Some columns, as a view; the tensor itself where they are all of it."""
    return y_TO if stop - start == y_TO.shape[1] else y_TO[:, start:stop]


def _join(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    if len(tensors) == 1:
        return tensors[0]
    joined, at = torch.cat(list(tensors)), 0
    for tensor in tensors:
        _hold(tensor, joined[at : (at := at + tensor.shape[0])])
    return joined


def _hold(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Let a tensor be what another is, for all who have it, and let go of the memory that it had."""
    tensor.set_(other.untyped_storage(), other.storage_offset(), other.size(), other.stride())
