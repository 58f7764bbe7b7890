"""Corrupted copies of a served checkpoint, which a measurement that can be believed must tell from the real one."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mfs_decompose.artifact.shard import Entry, library_order, write_shard
from mfs_decompose.artifact.values import row_bytes
from mfs_decompose.source.dtypes import item_size

if TYPE_CHECKING:
    import torch

# A tensor of the corrupted checkpoint from its name and the served one.
Change = Callable[[str, "torch.Tensor"], "torch.Tensor"]


class FloatFolder:
    """The tensors of a float32 checkpoint folder, read one at a time."""

    def __init__(self, folder: Path, held: ExitStack) -> None:
        from safetensors import safe_open

        self._files: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            file = held.enter_context(safe_open(path, framework="pt"))
            self._files |= dict.fromkeys(file.keys(), file)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(file.get_slice(name).get_shape()) for name, file in self._files.items()}

    def get(self, name: str) -> torch.Tensor | None:
        """One tensor, floats as float32; None where there is none of this name."""
        if name not in self._files:
            return None
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor.float() if tensor.is_floating_point() else tensor


def swap_layers(served: FloatFolder) -> Change | None:
    """The first and the last layer of the largest stack of equal layers change places; None without two layers."""
    stacks: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    layers: dict[tuple[str, str], list[tuple[str, tuple[int, ...]]]] = defaultdict(list)
    for name, shape in served.shapes.items():
        place = _layer_of(name)
        if place is not None:
            layers[place[:2]].append((place[2], shape))
    for (prefix, number), tensors in layers.items():
        stacks[(prefix, *sorted(tensors))].append(number)
    alike = [(len(numbers) * (len(key) - 1), key[0], numbers) for key, numbers in stacks.items() if len(numbers) > 1]
    if not alike:
        return None
    _, stack, numbers = max(alike, key=lambda one: one[0])
    first, *_, last = sorted(numbers, key=int)
    other = {first: last, last: first}

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        place = _layer_of(name)
        if place is None or place[0] != stack or place[1] not in other:
            return tensor
        found = served.get(".".join(filter(None, (stack, other[place[1]], place[2]))))
        assert found is not None
        return found

    return change


def double_delta(base: FloatFolder) -> Change:
    """Every float tensor at twice its distance from the base; rows that the base lacks stay."""

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return _with_rows_of(base.get(name), tensor, lambda own, foreign: 2 * own - foreign)

    return change


def borrow_delta(other: FloatFolder) -> Change:
    """Base plus another variant's delta, which is that variant as served; rows that it lacks stay."""

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return _with_rows_of(other.get(name), tensor, lambda own, foreign: foreign)

    return change


def write_corrupted(served: Path, out: Path, change: Change) -> bool:
    """Copy a float32 checkpoint folder, each tensor changed as it passes; whether any of them did change.

    At most a tensor or two are in memory.
    """
    from safetensors import safe_open

    out.mkdir(parents=True)
    changed: list[str] = []
    for path in sorted(served.iterdir()):
        if path.suffix != ".safetensors":
            shutil.copyfile(path, out / path.name)
            continue
        with safe_open(path, framework="pt") as file:
            entries = library_order([_entry(file, name) for name in file.keys()])  # noqa: SIM118 (not a dict)
            write_shard(out / path.name, entries, _changed_bytes(file, entries, change, changed), {})
    return bool(changed)


def _layer_of(name: str) -> tuple[str, str, str] | None:
    """(stack, number, rest) of a name such as model.layers.12.mlp.experts.3.up_proj.weight: the first number counts."""
    parts = name.split(".")
    at = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    return None if at is None else (".".join(parts[:at]), parts[at], ".".join(parts[at + 1 :]))


def _changed_bytes(file: Any, entries: list[Entry], change: Change, changed: list[str]) -> Iterator[memoryview]:
    for entry in entries:
        before: torch.Tensor = file.get_tensor(entry.name)
        after = change(entry.name, before) if before.is_floating_point() else before
        assert after.shape == before.shape and after.dtype == before.dtype, f"{entry.name} changed its form"
        if not before.equal(after):
            changed.append(entry.name)
        yield row_bytes(after)


def _with_rows_of(
    foreign: torch.Tensor | None,
    own: torch.Tensor,
    combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Combine the leading rows that both have; a variant may have added or dropped tokens."""
    if foreign is None or foreign.shape[1:] != own.shape[1:] or foreign.dim() != own.dim():
        return own
    if own.dim() == 0:
        return combine(own, foreign)
    rows = min(own.shape[0], foreign.shape[0])
    found = own.clone()
    found[:rows] = combine(own[:rows], foreign[:rows])
    return found


def _entry(file: Any, name: str) -> Entry:
    part = file.get_slice(name)
    shape = tuple(part.get_shape())
    count = 1
    for length in shape:
        count *= length
    return Entry(name, part.get_dtype(), shape, count * item_size(part.get_dtype()))
