"""Where in the base's files the modules lie that an adapter names: exactly, under another prefix, or taken apart."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mfs_decompose.errors import SourceIncompatible
from mfs_decompose.source.checkpoint import Checkpoint
from mfs_decompose.source.header import TensorInfo, TensorSpec
from mfs_decompose.source.pieces import Pieces, whole
from mfs_decompose.source.tying import find_tied_partner, vocabulary_role

if TYPE_CHECKING:
    from mfs_decompose.source.tensor_map import TensorMap

LoadMap = Callable[[], "TensorMap"]
Way = Literal["exact", "renamed", "mapped"]


@dataclass(frozen=True, slots=True)
class Location:
    """Where a parameter of the model lies in the checkpoint.

    `whole` is the tensor that it is, None where it is made of several or a part of one; `base` is what that tensor
    starts from: itself, or for the head of a tied base the embeddings.
    """

    shape: tuple[int, ...]
    pieces: Pieces
    whole: str | None
    base: TensorSpec | None


@dataclass(frozen=True, slots=True)
class _Rule:
    """Names that begin with `old` begin with `new` in the base."""

    old: str
    new: str

    def apply(self, name: str) -> str | None:
        if self.old and not name.startswith(self.old + "."):
            return None
        rest = name.removeprefix(self.old + ".") if self.old else name
        return f"{self.new}.{rest}" if self.new else rest

    def __str__(self) -> str:
        return f"{self.old + '.' if self.old else ''}* is {self.new + '.' if self.new else ''}* in the base"


class Names:
    """Finds parameters of the model among the tensors of a base, and remembers how."""

    def __init__(self, base: Checkpoint, load_map: LoadMap | None) -> None:
        self.base = base
        self.ways: dict[str, Way] = {}
        self.rule: _Rule | None = None
        self._load_map = load_map
        self._map: TensorMap | None = None
        self._trouble: SourceIncompatible | None = None

    def learn(self, names: Iterable[str]) -> None:
        """Look for the one prefix under which the base has most of the names that it has not as they stand."""
        strange = [name for name in names if self._exact(name) is None]
        if not strange:
            return
        index: defaultdict[str, list[str]] = defaultdict(list)
        for name in self.base.tensors:
            parts = name.split(".")
            for at in range(len(parts) - 1):
                index[".".join(parts[at:])].append(".".join(parts[:at]))
        votes = Counter(rule for name in strange for rule in _rules(name, index))
        most = max(votes.values(), default=0)
        best = [rule for rule, count in votes.items() if count == most]
        self.rule = best[0] if len(best) == 1 else None

    def locate(self, name: str) -> Location | None:
        """A parameter's place in the base, None where it has none.

        Raises:
            SourceIncompatible: a map of the base is needed to tell, and there is none for its architecture.
        """
        way: Way = "exact"
        found = self._exact(name)
        if found is None and self.rule is not None and (renamed := self.rule.apply(name)) is not None:
            found, way = self._exact(renamed), "renamed"
        if found is None:
            found, way = self._mapped(name), "mapped"
        if found is not None:
            self.ways[name] = way
        return found

    def module_class(self, module: str) -> str | None:
        """The class of a module in transformers; None where it has no such module."""
        found = self._tensor_map()
        return None if found is None else found.modules.get(module)

    def order(self, parameters: Iterable[str]) -> list[str]:
        """Parameters in the order in which their module defines them, as far as a map of the base knows them."""
        found = self._tensor_map()
        if found is None:
            return []
        wanted = set(parameters)
        return [name for name in found.parameters if name in wanted]

    @property
    def trouble(self) -> str:
        """Why there is no map of the base; empty where there is, or was not asked for."""
        return self._trouble.message if self._trouble else ""

    def _exact(self, name: str) -> Location | None:
        info = self.base.tensors.get(name)
        if info is not None:
            return _as_it_is(info)
        partner = find_tied_partner(name, self.base.tensors, self.base.config)
        return _head_of(name, partner) if partner is not None and vocabulary_role(name) == "head" else None

    def _mapped(self, name: str) -> Location | None:
        found = self._tensor_map()
        parameter = None if found is None else found.parameters.get(name)
        if found is None or parameter is None or not parameter.pieces:
            return None
        info = self.base.tensors[parameter.pieces[0].tensor]
        if parameter.pieces != whole(info.name, parameter.shape) or info.shape != parameter.shape:
            return Location(parameter.shape, parameter.pieces, None, None)
        # What PEFT puts on a tied head leaves the embeddings alone, so the head gets a tensor of its own.
        return _head_of(name, info) if name in found.aliases else _as_it_is(info)

    def _tensor_map(self) -> TensorMap | None:
        if self._map is None and self._trouble is None and self._load_map is not None:
            try:
                self._map = self._load_map()
            except SourceIncompatible as error:
                self._trouble = error
        return self._map


def _as_it_is(info: TensorInfo) -> Location:
    return Location(info.shape, whole(info.name, info.shape), info.name, info.spec)


def _head_of(name: str, embeddings: TensorSpec) -> Location:
    """A tensor that the base has not, which starts as its embeddings."""
    spec = TensorSpec(embeddings.name, embeddings.dtype, embeddings.shape)
    return Location(spec.shape, whole(name, spec.shape), name, spec)


def _rules(name: str, index: defaultdict[str, list[str]]) -> set[_Rule]:
    """The prefixes under which the base has the longest ending of a name."""
    parts = name.split(".")
    for at in range(len(parts) - 1):
        rest = ".".join(parts[at:])
        if rest in index:
            return {_Rule(".".join(parts[:at]), new) for new in index[rest]}
    return set()
