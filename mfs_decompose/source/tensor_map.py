"""Which parameter of the transformers model each checkpoint tensor becomes, found out from headers and config alone.

transformers renames prefixes, stacks experts, joins and cuts projections, and ties weights while it loads. Whoever
speaks of both sides, measuring, serving, exporting, or resolving an adapter, reads this one map.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from mfs_decompose.errors import SourceIncompatible
from mfs_decompose.source.checkpoint import Checkpoint
from mfs_decompose.source.naming import first_few
from mfs_decompose.source.pieces import Piece, Pieces

if TYPE_CHECKING:
    import torch


class Part(NamedTuple):
    """A whole checkpoint tensor in its place in a parameter, in the words of adapters and exports.

    It makes up matrix `expert` of a stacked parameter [E, O, I], or lies in the parameter itself where that is None;
    there it fills rows `rows`, (start, stop), or all where that is None. A `transposed` tensor is [I, O] where the
    parameter is [O, I].
    """

    tensor: str
    expert: int | None
    rows: tuple[int, int] | None
    transposed: bool


@dataclass(frozen=True, slots=True)
class Parameter:
    """One entry of a model's state dict, parameter or buffer.

    `pieces` tile it, in the order in which they are joined; there are none where nothing fills it. Where it is made in
    a way that is no cutting and joining (rows in another order, arithmetic), `pieces` is empty and `computed_from`
    names the checkpoint tensors it is made from.
    """

    name: str
    shape: tuple[int, ...]
    pieces: Pieces = ()
    computed_from: tuple[str, ...] = ()

    @property
    def tensors(self) -> tuple[str, ...]:
        """The checkpoint tensors it is made from."""
        return self.computed_from or tuple(dict.fromkeys(piece.tensor for piece in self.pieces))

    def parts(self) -> tuple[Part, ...]:
        """The checkpoint tensors that make this parameter, in order.

        Raises:
            SourceIncompatible: nothing fills it, or it is not made of whole tensors, stacked and one below the other.
        """
        found = [_part(piece, self.shape) for piece in self.pieces]
        parts = tuple(part for part in found if part is not None)
        if not parts or len(parts) != len(found):
            what = f"parts of {first_few(self.tensors)}" if self.tensors else "nothing"
            raise SourceIncompatible(
                f"expected parameter {self.name} to be made of whole checkpoint tensors, found it made of {what}",
                hint="Give the checkpoint as the installed transformers saves it.",
            )
        return parts


class Mismatch(NamedTuple):
    """A parameter whose checkpoint tensors, joined, have another shape than the config gives it."""

    parameter: str
    found: tuple[int, ...]
    expected: tuple[int, ...]
    tensors: tuple[str, ...]


class Failure(NamedTuple):
    """A parameter whose checkpoint tensors cannot be joined."""

    parameter: str
    reason: str
    tensors: tuple[str, ...]


@dataclass(frozen=True)
class TensorMap:
    """Both sides of a load, and what is left over on either.

    Every checkpoint tensor makes a parameter or stands in `unused`, `ignored`, `shadowed`, `mismatched` or `failed`.
    Every parameter is made, or stands in `unfilled`, `initialised`, `mismatched` or `failed`, or is tied to such a one.

    Attributes:
        architecture: the class in transformers.
        parameters: the model's state dict, by name.
        aliases: tied name -> the name whose tensor it is; both stand in `parameters`, with the same pieces. A name that
            the config ties and that has a tensor of its own is no alias.
        modules: every module's path -> its class. PEFT names what an adapter targets by these paths, not by the
            checkpoint's names.
        unused: checkpoint tensors that the architecture has no place for.
        ignored: checkpoint tensors that the architecture leaves out by intention (old buffers, heads for training).
        shadowed: checkpoint tensor -> the parameter that another tensor fills; transformers drops it without a word.
        unfilled: parameters that nothing fills: transformers would draw them at random.
        initialised: parameters that nothing fills and that the architecture has values for.
    """

    architecture: str
    parameters: Mapping[str, Parameter]
    aliases: Mapping[str, str]
    modules: Mapping[str, str]
    unused: tuple[str, ...]
    ignored: tuple[str, ...]
    shadowed: Mapping[str, str]
    unfilled: tuple[str, ...]
    initialised: tuple[str, ...]
    mismatched: tuple[Mismatch, ...]
    failed: tuple[Failure, ...]

    @cached_property
    def places(self) -> Mapping[str, tuple[tuple[str, Piece], ...]]:
        """Checkpoint tensor -> the parameters it lies in, tied names included, and the piece of each."""
        found: defaultdict[str, list[tuple[str, Piece]]] = defaultdict(list)
        for name, parameter in self.parameters.items():
            for piece in parameter.pieces:
                found[piece.tensor].append((name, piece))
        return {tensor: tuple(uses) for tensor, uses in found.items()}


def load_tensor_map(checkpoint: Checkpoint, model_class: Any = None) -> TensorMap:
    """Match a checkpoint's headers with the model that its config describes; no weight is read, no foreign code run.

    Args:
        model_class: a model class of transformers; by default the one that the config names in `architectures`.

    Raises:
        SourceIncompatible: the config is not of an architecture that transformers has, or says that the weights are
            quantised.
    """
    from mfs_decompose.source.architecture import build_skeleton, read_transformers_config, released_class
    from mfs_decompose.source.matching import match_tensors

    config = read_transformers_config(checkpoint)
    if getattr(config, "quantization_config", None) is not None:
        raise SourceIncompatible(
            f"expected plain weights in {checkpoint.id!r}, found a config.json with a quantization_config",
            hint="Give the checkpoint before it was quantised.",
        )
    chosen = released_class(checkpoint, config) if model_class is None else model_class
    return match_tensors(checkpoint, build_skeleton(checkpoint, chosen, config))


def assemble(parameter: Parameter, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """A parameter's values out of checkpoint tensors, which `read` gives by name: the parameter's shape, their dtype.

    A parameter of a single piece is a view of what `read` gave.

    Raises:
        SourceIncompatible: the parameter is computed, or nothing fills it.
    """
    import torch

    if not parameter.pieces:
        what = f"computed from {first_few(parameter.computed_from)}" if parameter.computed_from else "filled by nothing"
        raise SourceIncompatible(f"expected pieces of checkpoint tensors for {parameter.name}, found it {what}")
    result: torch.Tensor | None = None
    for piece in parameter.pieces:
        box = read(piece.tensor)[tuple(slice(start, stop) for start, stop in piece.origin)]
        kept = [axis for axis in piece.axes if axis is not None]
        lost = [axis for axis in range(box.dim()) if axis not in kept]
        box = box.permute([*kept, *lost]).reshape([stop - start for start, stop in piece.place])
        if len(parameter.pieces) == 1:
            return box
        if result is None:
            result = torch.empty(parameter.shape, dtype=box.dtype)
        result[tuple(slice(start, stop) for start, stop in piece.place)] = box
    assert result is not None
    return result


def _part(piece: Piece, shape: tuple[int, ...]) -> Part | None:
    """A piece of a parameter of that shape as a Part; None where it is more than that."""
    stacked = bool(piece.axes) and piece.axes[0] is None
    first = 1 if stacked else 0
    axes, spans, sizes = piece.axes[first:], piece.place[first:], shape[first:]
    transposed = axes == (1, 0)
    full = [span == (0, size) for span, size in zip(spans, sizes, strict=True)]
    if not (piece.takes_all and all(full[1:]) and (transposed or axes == tuple(range(len(axes))))):
        return None
    rows = None if all(full) else spans[0]
    return Part(piece.tensor, piece.place[0][0] if stacked else None, rows, transposed)
