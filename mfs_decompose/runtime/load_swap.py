"""Modules of a loaded base exchanged for those that serve its variants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from mfs_decompose.errors import SourceIncompatible
from mfs_decompose.runtime.batch_plan import PlanSlot
from mfs_decompose.runtime.changes import Change, Changes, Kind, ServesVariants
from mfs_decompose.runtime.load_trial import see_rows
from mfs_decompose.runtime.modules import FamilyEmbedding, FamilyRows, shallow_copy
from mfs_decompose.runtime.modules_experts import FamilyExperts
from mfs_decompose.runtime.modules_linear import FamilyLinear
from mfs_decompose.runtime.modules_rotary import FamilyRotary
from mfs_decompose.runtime.ops.dispatch import Ops

_HINT = "use `mfs restore`: this architecture cannot be served with such variants"
_PROBED = 5  # rows


def swap_modules(
    model: Any, kinds: Mapping[str, Kind], rows: Mapping[str, int], slot: PlanSlot, ops: Ops
) -> dict[str, Any]:
    """Exchange every module that some variant changes, by path and kind; what stands for each, nothing attached yet.

    Args:
        rows: most rows that any variant's matrix has, by path: a head gives as many logits.

    Raises:
        SourceIncompatible: naming a module whose code does something else than its kind does.
    """
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    tables = [path for path, kind in kinds.items() if kind == "embedding"]
    axes = see_rows(model, [path for path in kinds if path not in tables])
    for path in tables:
        if model.get_submodule(path) is not table:
            see_rows(model, [path])
    exchanged: dict[str, Any] = {}
    for path, kind in kinds.items():
        module, hook = _without_hook(model.get_submodule(path))
        if kind == "embedding":
            served: nn.Module = FamilyEmbedding(module, slot, ops)
        elif kind in ("linear", "conv1d"):
            in_out = kind == "conv1d"
            _check_linear(path, module, in_out)
            served = FamilyLinear(
                module, slot, ops, stored_in_out=in_out, head=module is head, outputs=rows.get(path, 0)
            )
        elif kind == "experts":
            served = FamilyExperts(module, slot, ops, axes[path])
        else:
            _check_rows(path, module)
            single = len(axes[path].inputs) == len(axes[path].outputs) == 1
            served = FamilyRows(module, slot, axes[path], by_row=ops.together and single and _takes_rows(module))
        _put(model, path, served, hook)
        exchanged[path] = served
    return exchanged


def attach(modules: Mapping[str, ServesVariants], variant: int, changes: Changes) -> dict[str, Change]:
    """Let the exchanged modules answer rows of a slot with these changes; what they hold now, on their devices."""
    found = {path: _fit(change, modules[path].original) for path, change in changes.items()}
    for path, change in found.items():
        modules[path].attach(variant, change)
    return found


def detach(modules: Mapping[str, ServesVariants], variant: int, changes: Changes) -> None:
    """Take from the exchanged modules what was attached."""
    for path in changes:
        modules[path].detach(variant)


def swap_rotary(model: Any, configs: Mapping[int, tuple[str, Any]], slot: PlanSlot) -> list[str]:
    """Give variants whose angles are not the base's their own rotary embeddings; the paths of those exchanged.

    Args:
        configs: variant slot -> id and config of every variant.

    Raises:
        SourceIncompatible: naming a variant whose rotary embedding cannot be made.
    """
    exchanged = []
    for path, module in list(model.named_modules()):
        if not any(name.endswith("inv_freq") for name in module._buffers):
            continue
        own: dict[int, nn.Module] = {}
        for variant, (id, config) in configs.items():
            chosen = config if type(config) is type(getattr(module, "config", None)) else config.get_text_config()
            try:
                made: nn.Module = type(module)(chosen)
            except Exception as error:  # the classes' own, of any kind
                raise SourceIncompatible(
                    f"cannot serve variant {id!r}: its rotary embedding {path} cannot be made ({error})", hint=_HINT
                ) from error
            if not _same_angles(module, made):
                own[variant] = made.to(next(iter(module._buffers.values())).device)
        if own:
            module, hook = _without_hook(module)
            _put(model, path, FamilyRotary(module, slot, own), hook)
            exchanged.append(path)
    return exchanged


def _same_angles(one: nn.Module, other: nn.Module) -> bool:
    buffers = [dict(module._buffers) for module in (one, other)]
    if buffers[0].keys() != buffers[1].keys():
        return False
    for name, value in buffers[0].items():
        theirs = buffers[1][name]
        if value is None or theirs is None:
            if value is not theirs:
                return False
        elif not torch.equal(value.cpu(), theirs.cpu()):
            return False
    numbers = [{k: v for k, v in module.__dict__.items() if isinstance(v, float)} for module in (one, other)]
    return numbers[0] == numbers[1]


def _fit(change: Change, module: nn.Module) -> Change:
    """A change on the device of a module, whole parameters in its dtype: its code would widen its answers otherwise."""
    moved = change.to(_device(module))
    moved.whole = {leaf: value.to(_like(module, leaf)) for leaf, value in moved.whole.items()}
    return moved


def _check_linear(path: str, module: nn.Module, in_out: bool) -> None:
    """Subclasses may do what they like in `forward`."""
    weight, bias = module.weight, module.bias
    assert isinstance(weight, torch.Tensor) and (bias is None or isinstance(bias, torch.Tensor))
    x = _probe(weight.shape[0 if in_out else 1], weight)
    with torch.inference_mode():
        plain = functional.linear(x, weight.mT if in_out else weight, bias)
        found = module(x.unsqueeze(0))
    if not isinstance(found, torch.Tensor) or found.shape[1:] != plain.shape or not _close(found[0], plain):
        raise SourceIncompatible(f"expected x W^T + b from {path} ({type(module).__name__}), found other", hint=_HINT)


def _check_rows(path: str, module: nn.Module) -> None:
    """Whether each row's answer is that row's alone."""
    weight = next((value for value in module._parameters.values() if value is not None and value.dim()), None)
    if weight is None:
        raise SourceIncompatible(f"expected weights in {path} ({type(module).__name__}), found none", hint=_HINT)
    x = _probe(weight.shape[-1], weight)
    try:
        with torch.inference_mode():
            together, alone = module(x), [module(x[at : at + 1]) for at in range(_PROBED)]
    except Exception as error:  # the classes' own, of any kind
        raise SourceIncompatible(
            f"expected {path} ({type(module).__name__}) to work row by row, found that it fails: {error}", hint=_HINT
        ) from error
    pairs = (
        [(together, alone)]
        if isinstance(together, torch.Tensor)
        else zip(together, zip(*alone, strict=True), strict=True)
    )
    for whole, parts in pairs:
        if not _close(whole, torch.cat(list(parts))):
            raise SourceIncompatible(
                f"expected {path} ({type(module).__name__}) to work row by row, found that rows mix", hint=_HINT
            )


def _takes_rows(module: nn.Module) -> bool:
    """Whether the module's code gives each row what its own parameters give, where they come as rows."""
    found = {leaf: value for leaf, value in module._parameters.items() if value is not None}
    if module._modules or any(value.dim() != 1 for value in found.values()):
        return False
    try:
        own = {leaf: at + _probe(value.numel(), value).flip(0) for at, (leaf, value) in enumerate(found.items())}
        first = next(iter(found.values()))
        x = _probe(first.numel(), first)
        with torch.inference_mode():
            together = shallow_copy(module, own)(x)
            for at in range(_PROBED):
                alone = shallow_copy(module, {leaf: value[at] for leaf, value in own.items()})(x[at : at + 1])
                if not torch.equal(together[at : at + 1], alone):
                    return False
    except Exception:  # the classes' own, of any kind
        return False
    return True


def _probe(width: int, like: torch.Tensor) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(_PROBED, width, generator=draw).to(like.device, like.dtype)


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    tolerance = 1e-4 if one.dtype == torch.float32 else 3e-2
    return one.shape == other.shape and torch.allclose(one.float(), other.float(), rtol=tolerance, atol=tolerance)


def _device(module: nn.Module) -> torch.device:
    return next(value.device for value in module._parameters.values() if value is not None)


def _like(module: nn.Module, leaf: str) -> torch.dtype:
    found = getattr(module, leaf)
    assert isinstance(found, torch.Tensor)
    return found.dtype


def _without_hook(module: nn.Module) -> tuple[Any, Any]:
    """A module without accelerate's hook, which moves inputs to its device, and that hook, or None."""
    hook = getattr(module, "_hf_hook", None)
    if hook is not None:
        from accelerate.hooks import remove_hook_from_module

        remove_hook_from_module(module)
    return module, hook


def _put(model: Any, path: str, module: nn.Module, hook: Any) -> None:
    if hook is not None:
        from accelerate.hooks import add_hook_to_module

        add_hook_to_module(module, hook)
    parent, _, leaf = path.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)
