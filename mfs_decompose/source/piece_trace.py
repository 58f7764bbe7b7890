"""Watch operations on meta tensors, and say of each result which boxes of which sources it consists of.

transformers cuts and joins checkpoint tensors while it loads them. Its own operations are run here on tensors without
data, and every call that reaches torch is followed: so no layout is known twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mfs_decompose.source import pieces as boxes
from mfs_decompose.source.pieces import Pieces


class PieceTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which what is made of watched tensors is watched too.

    What an operation does that is not followed here, arithmetic or a reshape of rows for instance, has no pieces; after
    a write in place nothing has.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Tensors are kept, or another one could get the id of one that is gone.
        self._known: dict[int, tuple[torch.Tensor, Pieces]] = {}
        self._written = False

    def watch(self, tensor: torch.Tensor, name: str) -> None:
        """Follow a source from here on."""
        self._known[id(tensor)] = (tensor, boxes.whole(name, tensor.shape))

    def pieces_of(self, tensor: torch.Tensor) -> Pieces | None:
        """What a tensor consists of; None where that is not known."""
        known = self._known.get(id(tensor))
        return None if known is None or self._written else known[1]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._written |= func._schema.is_mutable
        follow = _FOLLOWED.get(func.overloadpacket.__name__)
        if follow is not None:
            inputs = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            known = [self.pieces_of(tensor) for tensor in inputs]
            if None not in known:
                outputs = list(result) if isinstance(result, (list, tuple)) else [result]
                for output, found in zip(outputs, follow(known, inputs, outputs, *args[1:]), strict=True):
                    if found is not None:
                        self._known[id(output)] = (output, found)
        return result


_Known = Sequence[Pieces]
_Tensors = Sequence[torch.Tensor]
_Found = Sequence[Pieces | None]


def _same(known: _Known, _: _Tensors, __: _Tensors, *___: Any) -> _Found:
    return known


def _cat(known: _Known, inputs: _Tensors, _: _Tensors, dim: int = 0) -> _Found:
    dim %= inputs[0].dim()
    lengths = [tensor.shape[dim] for tensor in inputs]
    return [boxes.concatenate(zip(known, lengths, strict=True), dim)]


def _stack(known: _Known, _: _Tensors, outputs: _Tensors, dim: int = 0) -> _Found:
    dim %= outputs[0].dim()
    return [boxes.concatenate([(boxes.insert(pieces, dim), 1) for pieces in known], dim)]


def _split(known: _Known, _: _Tensors, outputs: _Tensors, __: Any, dim: int = 0) -> _Found:
    start, found = 0, []
    for output in outputs:
        stop = start + output.shape[dim]
        found.append(boxes.narrow(known[0], dim % output.dim(), start, stop))
        start = stop
    return found


def _unbind(known: _Known, inputs: _Tensors, outputs: _Tensors, dim: int = 0) -> _Found:
    return [boxes.select(known[0], dim % inputs[0].dim(), index) for index in range(len(outputs))]


def _select(known: _Known, inputs: _Tensors, _: _Tensors, dim: int, index: int) -> _Found:
    dim %= inputs[0].dim()
    return [boxes.select(known[0], dim, index % inputs[0].shape[dim])]


def _slice(
    known: _Known,
    inputs: _Tensors,
    _: _Tensors,
    dim: int = 0,
    start: int | None = None,
    stop: int | None = None,
    step: int = 1,
) -> _Found:
    if step != 1:
        return [None]
    dim %= inputs[0].dim()
    first, last, _step = slice(start, stop).indices(inputs[0].shape[dim])
    return [boxes.narrow(known[0], dim, first, last)]


def _transpose(known: _Known, inputs: _Tensors, _: _Tensors, dim0: int, dim1: int) -> _Found:
    order = list(range(inputs[0].dim()))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return [boxes.permute(known[0], order)]


def _t(known: _Known, inputs: _Tensors, _: _Tensors) -> _Found:
    return [boxes.permute(known[0], list(reversed(range(inputs[0].dim()))))]


def _permute(known: _Known, inputs: _Tensors, _: _Tensors, dims: Sequence[int]) -> _Found:
    return [boxes.permute(known[0], [dim % inputs[0].dim() for dim in dims])]


def _reshape(known: _Known, inputs: _Tensors, outputs: _Tensors, *_: Any) -> _Found:
    return [boxes.reshape_units(known[0], inputs[0].shape, outputs[0].shape)]


_FOLLOWED: Mapping[str, Callable[..., _Found]] = {
    **dict.fromkeys(("alias", "clone", "detach", "_to_copy", "lift_fresh"), _same),
    **dict.fromkeys(("split", "split_with_sizes"), _split),
    **dict.fromkeys(("view", "_unsafe_view", "squeeze", "unsqueeze", "expand"), _reshape),
    "cat": _cat,
    "stack": _stack,
    "unbind": _unbind,
    "select": _select,
    "slice": _slice,
    "transpose": _transpose,
    "t": _t,
    "permute": _permute,
}
