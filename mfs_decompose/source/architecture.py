"""The model that a checkpoint's config describes: its class in transformers, and its modules without weights."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from mfs_decompose.errors import SourceIncompatible
from mfs_decompose.source.checkpoint import Checkpoint
from mfs_decompose.source.naming import first_few
from mfs_decompose.source.quiet import quiet_transformers

_HINT = "Give a checkpoint whose config.json transformers knows without code of its own."


def read_transformers_config(checkpoint: Checkpoint) -> Any:
    """The checkpoint's config.json as transformers' config object; no file is read and no foreign code run.

    Raises:
        SourceIncompatible: it names no architecture that transformers itself has, or cannot be read as one.
    """
    from transformers import CONFIG_MAPPING

    kind = checkpoint.config.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        found = f"model_type {kind!r}" if kind is not None else "no model_type"
        raise SourceIncompatible(
            f"expected an architecture of transformers in the config.json of {checkpoint.id!r}, found {found}",
            hint=_HINT,
        )
    try:
        with quiet_transformers():
            return CONFIG_MAPPING[kind].from_dict(dict(checkpoint.config))
    except Exception as error:  # configs of strangers fail in any way at all
        raise _unusable(checkpoint, error) from error


def released_class(checkpoint: Checkpoint, config: Any) -> Any:
    """The model class that the config's `architectures` names, else `language_model_class`.

    Raises:
        SourceIncompatible: there is neither.
    """
    import transformers

    named = checkpoint.config.get("architectures")
    for name in named if isinstance(named, list) else ():
        found = getattr(transformers, name, None) if isinstance(name, str) else None
        # Names come from strangers: only a model class made for just this config counts.
        is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
        if is_model and getattr(found, "config_class", None) is type(config):
            return found
    return language_model_class(checkpoint, config)


def language_model_class(checkpoint: Checkpoint, config: Any) -> Any:
    """The model class that answers text with logits: a causal language model, or what wraps one for images.

    Raises:
        SourceIncompatible: transformers has none for this config.
    """
    loader = language_model_loader(config)
    if loader is None:
        raise SourceIncompatible(
            f"expected a language model in {checkpoint.id!r}, found {type(config).__name__}, which answers no text",
            hint=_HINT,
        )
    found: Any = loader._model_mapping[type(config)]
    return found[0] if isinstance(found, tuple) else found


def language_model_loader(config: Any) -> Any:
    """What loads `language_model_class`: AutoModelForCausalLM or AutoModelForImageTextToText; None for neither."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    loaders: tuple[Any, ...] = (AutoModelForCausalLM, AutoModelForImageTextToText)
    return next((loader for loader in loaders if type(config) in loader._model_mapping), None)


def build_skeleton(checkpoint: Checkpoint, model_class: Any, config: Any) -> Any:
    """The model's modules with parameters on the meta device: shapes without data, as a load begins with.

    Raises:
        SourceIncompatible: the sizes in the config contradict each other.
    """
    import torch

    try:
        with ExitStack() as held:
            held.enter_context(quiet_transformers())
            for context in model_class.get_init_context(torch.float32, False, False, None):
                held.enter_context(context)
            return model_class(config)
    except Exception as error:  # configs of strangers fail in any way at all
        raise _unusable(checkpoint, error) from error


def module_classes(model: Any) -> Mapping[str, str]:
    """Every module by its path in the tree, with the name of its class. PEFT names its targets by these paths."""
    return {name: type(module).__name__ for name, module in model.named_modules()}


def _unusable(checkpoint: Checkpoint, error: Exception) -> SourceIncompatible:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return SourceIncompatible(
        f"transformers cannot build the architecture in the config.json of {checkpoint.id!r}: {first_few([reason])}",
        hint=_HINT,
    )
