"""A trial run of the base: which axis of each module's inputs and outputs runs along the tokens.

Seen rather than assumed: norms of heads lie behind a transpose in some architectures, and a module that sees other rows
than the tokens of the batch, or none at all, cannot be served from a plan of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from mfs_decompose.errors import SourceIncompatible
from mfs_decompose.runtime.modules import RowAxes

_LENGTHS = (7, 11)  # no size of a model that is not a coincidence in one of them is one in both
_HINT = "use `mfs restore`: this architecture cannot be served with such variants"

Shapes = tuple[tuple[tuple[int, ...] | None, ...], tuple[tuple[int, ...] | None, ...]]


def see_rows(model: Any, paths: Sequence[str]) -> dict[str, RowAxes]:
    """The row axes of the modules at `paths`, from two short calls of the model.

    Raises:
        SourceIncompatible: naming a module that was not called, or not with one row for each token.
    """
    runs = [_shapes(model, paths, length) for length in _LENGTHS]
    found: dict[str, RowAxes] = {}
    for path in paths:
        seen = [run.get(path) for run in runs]
        if seen[0] is None or seen[1] is None:
            raise SourceIncompatible(f"expected text to pass through {path}, found that it does not", hint=_HINT)
        inputs, outputs = (tuple(map(_axis, *pair)) for pair in zip(seen[0], seen[1], strict=True))
        if inputs[:1] == (None,) or all(axis is None for axis in outputs):
            shapes = [list(shape) for shape in seen[0][0] if shape is not None]
            raise SourceIncompatible(
                f"expected one row for each of {_LENGTHS[0]} tokens at {path}, found {shapes}", hint=_HINT
            )
        found[path] = RowAxes(inputs, outputs)
    return found


def _call(model: Any, length: int) -> None:
    with torch.inference_mode():
        ids = torch.zeros(1, length, dtype=torch.long, device=model.device)
        positions = torch.arange(length, device=model.device).unsqueeze(0)
        model(input_ids=ids, position_ids=positions, use_cache=False)


def _shapes(model: Any, paths: Sequence[str], length: int) -> dict[str, Shapes]:
    seen: dict[str, Shapes] = {}

    def watch(path: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], outputs: Any) -> None:
            if named:
                raise SourceIncompatible(
                    f"expected {path} to be called without names, found {sorted(named)}", hint=_HINT
                )
            given = outputs if isinstance(outputs, tuple) else (outputs,)
            shapes = tuple(map(_shape, inputs)), tuple(map(_shape, given))
            if seen.setdefault(path, shapes) != shapes:
                raise SourceIncompatible(f"expected one kind of call of {path}, found two", hint=_HINT)

        return hook

    hooks = [model.get_submodule(path).register_forward_hook(watch(path), with_kwargs=True) for path in paths]
    try:
        _call(model, length)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def _axis(one: tuple[int, ...] | None, other: tuple[int, ...] | None) -> int | None:
    """The only axis that is as long as the text in both runs."""
    if one is None or other is None or len(one) != len(other):
        return None
    axes = [at for at, sizes in enumerate(zip(one, other, strict=True)) if sizes == _LENGTHS]
    return axes[0] if len(axes) == 1 else None
