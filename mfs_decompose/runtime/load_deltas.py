"""Every stored tensor of a variant, led to the parameter that it changes, or refused by name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from mfs_decompose.artifact.reader import Family
from mfs_decompose.errors import SourceIncompatible
from mfs_decompose.runtime.changes import Change, Changes, Delta, Kind
from mfs_decompose.runtime.load_checkpoints import Described
from mfs_decompose.runtime.resident import (
    Resident,
    SharedForms,
    dense_difference,
    make_resident,
    own_resident,
    resolve_alias,
    served_whole,
)
from mfs_decompose.runtime.resident_forms import Placed
from mfs_decompose.source.tensor_map import Parameter, Part, assemble

_HINT = "use `mfs restore` for it, and leave it out here"


def kind_of(module: nn.Module) -> Kind:
    """How a module is served."""
    from transformers.pytorch_utils import Conv1D

    if isinstance(module, Conv1D):
        return "conv1d"
    if isinstance(module, nn.Linear):
        return "linear"
    if isinstance(module, nn.Embedding):
        return "embedding"
    stacked = any(value.dim() == 3 for value in module._parameters.values() if value is not None)
    return "experts" if stacked else "rows"


@dataclass(frozen=True)
class Places:
    """The base's own modules by path, whatever stands for them later, and which of them have a row for each token."""

    modules: Mapping[str, nn.Module]
    vocabulary: frozenset[int]

    @classmethod
    def of(cls, model: Any) -> Places:
        """Of a model in which nothing was exchanged."""
        tables = (model.get_input_embeddings(), model.get_output_embeddings())
        return cls(
            dict(model.named_modules(remove_duplicate=False)),
            frozenset(id(module) for module in tables if module is not None),
        )


class Router:
    """Leads the tensors of one variant to the modules of the base's model."""

    def __init__(self, family: Family, places: Places, base: Described, own: Described, shared: SharedForms) -> None:
        self._family, self._places, self._base, self._own = family, places, base, own
        self._changes: dict[str, Change] = {}
        self._resident = cache(lambda tensor: make_resident(family, own.id, tensor, shared))
        self._owned = cache(lambda tensor: own_resident(family, own.id, tensor))
        self.accounts: dict[str, str] = dict.fromkeys(own.map.ignored, "left out by the architecture")

    def lead(self) -> Changes:
        """What the variant changes, in the CPU's memory; `accounts` then says how each of its tensors is served.

        Raises:
            SourceIncompatible: naming a parameter that cannot be served.
        """
        lacking = [name for name in self._base.map.parameters if name not in self._own.map.parameters]
        if lacking:
            raise self._refused(f"it lacks {', '.join(lacking[:5])}, which the base has")
        for name, parameter in self._own.map.parameters.items():
            if parameter.tensors:
                self._lead(name, parameter)
        left = [name for name in self._family.variant(self._own.id).tensors if name not in self.accounts]
        if left:
            raise self._refused(f"nothing would serve its tensors {', '.join(left[:5])}")
        return self._changes

    def _lead(self, name: str, parameter: Parameter) -> None:
        if parameter.computed_from:
            raise self._refused(f"its parameter {name} is made of {', '.join(parameter.tensors[:3])} by arithmetic")
        path, _, leaf = name.rpartition(".")
        module = self._places.modules.get(path)
        if module is None:
            raise self._refused(f"it has the parameter {name}, and the base no such module")
        kind = kind_of(module)
        shape = self._base.map.parameters[name].shape if name in self._base.map.parameters else None
        grows = shape is not None and shape[1:] == parameter.shape[1:] and id(module) in self._places.vocabulary
        if shape is not None and shape != parameter.shape and not (leaf == "weight" and grows):
            raise self._refused(f"its {name} is {list(parameter.shape)} and the base's {list(shape)}")
        if leaf == "weight" and kind in ("linear", "conv1d", "embedding") and shape is not None:
            placed, transposed = self._matrix(name, parameter, kind == "conv1d")
            if placed or shape != parameter.shape:
                rows = parameter.shape[0]
                self._of(path, kind).matrix = Delta(placed, rows, transposed)
        elif kind == "experts" and len(parameter.shape) == 3 and shape is not None:
            self._stack(path, leaf, name, parameter)
        elif leaf == "bias" and kind in ("linear", "conv1d"):
            self._bias(path, kind, name, parameter)
        elif shape is not None:
            own, known = self._served(parameter), self._known(name)
            if not torch.equal(own.to(known.dtype), known) or not torch.equal(own, known.to(own.dtype)):
                self._of(path, kind).whole[leaf] = own
        else:
            raise self._refused(f"it has the parameter {name}, which the base has not")
        self._account(name, parameter)

    def _matrix(self, name: str, parameter: Parameter, in_out: bool) -> tuple[tuple[Placed, ...], bool]:
        parts, known = self._parts(name, parameter)
        if len(parts) == 1 and parts[0].rows is None:
            resident = self._resident_of(parts[0], known)
            if resident is not None and not (resident.replaces and in_out != parts[0].transposed):
                return resident.placed, parts[0].transposed
        if parts and not any(part.transposed for part in parts) and not in_out:
            residents = [self._resident_of(part, known) for part in parts]
            found: list[Placed] = []
            for part, resident in zip(parts, residents, strict=True):
                first = 0 if part.rows is None else part.rows[0]
                for one in () if resident is None else resident.placed:
                    found.append(Placed(one.form, one.start + first, one.stop + first))
            return tuple(found), False
        difference = dense_difference(self._served(parameter), self._known(name))
        return (() if difference is None else (Placed(difference, 0, parameter.shape[0]),)), False

    def _stack(self, path: str, leaf: str, name: str, parameter: Parameter) -> None:
        parts, known = self._parts(name, parameter)
        deltas: dict[int, Delta] = {}
        rows = parameter.shape[1]
        in_out = bool(getattr(self._places.modules[path], "is_transposed", False))
        if self._goes_part_by_part(parts, known, in_out):
            found: defaultdict[tuple[int, bool], list[Placed]] = defaultdict(list)
            for part in parts:
                resident = self._resident_of(part, known)
                first = 0 if part.rows is None else part.rows[0]
                for one in () if resident is None else resident.placed:
                    expert = one.slice if part.expert is None else part.expert
                    assert expert is not None
                    placed = Placed(one.form, one.start + first, one.stop + first)
                    found[(expert, part.transposed)].append(placed)
            deltas = {expert: Delta(tuple(placed), rows, flipped) for (expert, flipped), placed in found.items()}
        else:
            own, base = self._served(parameter), self._known(name)
            for expert in range(parameter.shape[0]):
                difference = dense_difference(own[expert], base[expert])
                if difference is not None:
                    deltas[expert] = Delta((Placed(difference, 0, rows),), rows)
        if deltas:
            self._of(path, "experts").stacks[leaf] = deltas

    def _goes_part_by_part(self, parts: tuple[Part, ...], known: Mapping[Part, str], in_out: bool) -> bool:
        """Whether the forms of the checkpoint's tensors can be used as they are, in one orientation an expert."""
        if not parts or (any(part.transposed for part in parts) and any(part.rows is not None for part in parts)):
            return False
        if len({part.transposed for part in parts}) > 1:
            return False
        residents = [self._resident_of(part, known) for part in parts]
        flipped = in_out != parts[0].transposed
        return not (flipped and any(one is not None and one.replaces for one in residents))

    def _parts(self, name: str, parameter: Parameter) -> tuple[tuple[Part, ...], Mapping[Part, str]]:
        """The parts of a variant's parameter, none where it has no such, and which tensor of the base lies in each."""
        try:
            parts = parameter.parts()
            theirs = self._base.map.parameters[name].parts()
        except SourceIncompatible:
            return (), {}
        by_place = {(part.expert, _first(part), part.transposed): part.tensor for part in theirs}
        places = {part: (part.expert, _first(part), part.transposed) for part in parts}
        return parts, {part: by_place[place] for part, place in places.items() if place in by_place}

    def _resident_of(self, part: Part, known: Mapping[Part, str]) -> Resident | None:
        """The forms of a checkpoint tensor over what the base has in its place; None where nothing differs."""
        tensor = resolve_alias(self._family, self._own.id, part.tensor)
        record = self._family.variant(self._own.id).tensors[tensor]
        if record.base_name is None or record.base_name != known.get(part):
            found: Resident = self._owned(tensor)
            return found
        resident: Resident = self._resident(tensor)
        return resident if resident.placed else None

    def _bias(self, path: str, kind: Kind, name: str, parameter: Parameter) -> None:
        own = self._served(parameter).to(torch.float32)
        if name in self._base.map.parameters:
            own = (own.to(torch.float64) - self._known(name).to(torch.float64)).to(torch.float32)
        if bool(own.any()):
            self._of(path, kind).bias = own

    def _served(self, parameter: Parameter) -> torch.Tensor:
        return assemble(parameter, lambda tensor: served_whole(self._family, self._own.id, tensor)).contiguous()

    def _known(self, name: str) -> torch.Tensor:
        """The base's parameter in the dtype of the artifact."""
        tensors = self._family.manifest.base.tensors

        def read(tensor: str) -> torch.Tensor:
            shape = tensors[tensor].shape
            return self._family.base_rows(tensor, 0, shape[0] if shape else 1).reshape(shape)

        return assemble(self._base.map.parameters[name], read)

    def _of(self, path: str, kind: Kind) -> Change:
        return self._changes.setdefault(path, Change(kind))

    def _account(self, name: str, parameter: Parameter) -> None:
        for tensor in parameter.tensors:
            self.accounts.setdefault(tensor, name)

    def _refused(self, why: str) -> SourceIncompatible:
        return SourceIncompatible(f"cannot serve variant {self._own.id!r} beside the base: {why}", hint=_HINT)


def _first(part: Part) -> int:
    return 0 if part.rows is None else part.rows[0]
