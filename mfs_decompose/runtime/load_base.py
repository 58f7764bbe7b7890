"""The base in memory, once: a transformers model made without weights, and filled tensor by tensor."""

from __future__ import annotations

from typing import Any

import torch

from mfs_decompose.artifact.reader import Family
from mfs_decompose.errors import ResourceShortage, SourceIncompatible, UsageError
from mfs_decompose.runtime.load_checkpoints import Described
from mfs_decompose.source.quiet import quiet_transformers
from mfs_decompose.source.tensor_map import Parameter, assemble

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def build_model(family: Family, base: Described, config: Any, model_class: Any, dtype: str, device: str) -> Any:
    """The base as a transformers model in eval mode, weights in `dtype` on `device`, no gradients.

    Raises:
        SourceIncompatible: a parameter is made of the checkpoint by arithmetic.
        ResourceShortage: out of memory.
    """
    from accelerate import init_empty_weights

    with quiet_transformers(), init_empty_weights(include_buffers=False):
        model = model_class._from_config(config, dtype=DTYPES[dtype])
    model.eval().requires_grad_(False)
    state = model.state_dict()
    aliases = base.map.aliases
    filled: dict[str, torch.Tensor] = {}
    try:
        for name, parameter in base.map.parameters.items():
            if name in aliases or name not in state or name in base.map.initialised:
                continue
            filled[name] = _read(family, parameter, state[name].dtype).to(device)
        for name, owner in aliases.items():
            filled[name] = filled[owner]
        for name, value in filled.items():
            _put(model, name, value)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device.type != "meta":
                    module._buffers[name] = buffer.to(device)
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise ResourceShortage("not enough memory to load the base", hint="close other programs") from error
    left = [name for name, value in model.named_parameters() if value.device.type == "meta"]
    if left:
        raise SourceIncompatible(f"cannot serve the base: nothing fills {', '.join(left[:5])}")
    return model


def spread_layers(model: Any) -> None:
    """Place layers over all GPUs, whole layers only; hooks of accelerate carry what passes from one to the next."""
    from accelerate import dispatch_model

    dispatch_model(model, plan_devices(model), force_hooks=True)


def plan_devices(model: Any) -> dict[str, Any]:
    """Module path -> device."""
    from accelerate import infer_auto_device_map

    found: dict[str, Any] = infer_auto_device_map(model, no_split_module_classes=list(model._no_split_modules or ()))
    return found


def check_device(device: str) -> torch.device:
    """The device of a load.

    Raises:
        UsageError: it is none that the runtime serves on, or the process is one of several that share the model.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        world = torch.distributed.get_world_size()
        if world > 1:
            raise UsageError(
                f"expected one process, found {world} that would split the model between them (tensor parallelism)",
                hint="start one process without torchrun",
            )
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        found = "tensor parallelism" if kind in ("tp", "tensor_parallel") else repr(device)
        raise UsageError(f"expected cpu, cuda, cuda:N or auto as device, found {found}", hint="use --device cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UsageError("expected a GPU for device cuda, found none", hint="use --device cpu")
    return torch.device(device)


def _read(family: Family, parameter: Parameter, dtype: torch.dtype) -> torch.Tensor:
    tensors = family.manifest.base.tensors

    def read(name: str) -> torch.Tensor:
        shape = tensors[name].shape
        values = family.base_rows(name, 0, shape[0] if shape else 1)
        values = values.reshape(shape)
        return values.to(dtype) if values.is_floating_point() else values

    # Aligned as torch's own memory is: products may round otherwise at other alignments.
    return assemble(parameter, read).clone(memory_format=torch.contiguous_format)


def _put(model: Any, name: str, value: torch.Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if leaf in module._parameters:
        module._parameters[leaf] = torch.nn.Parameter(value, requires_grad=False)
    else:
        module._buffers[leaf] = value
