"""What adapter_config.json says was trained, held against what the adapter's file has."""

from __future__ import annotations

from collections.abc import Iterable

from mfs_decompose.source.adapter_attach import Attacher
from mfs_decompose.source.checkpoint import Checkpoint
from mfs_decompose.source.naming import first_few
from mfs_decompose.source.tying import vocabulary_role


def describe_incomplete(attached: Attacher, adapter: Checkpoint, base: Checkpoint) -> list[str]:
    """A sentence for each kind of tensor that was trained and is not in the file: what it would change stays as it is.

    Only what the base has is missed: lists of modules are often longer than a model.
    """
    found = (
        _biases(attached, base),
        _whole_modules(attached, base),
        _token_rows(attached),
        _targets(attached, adapter, base),
    )
    return [f"adapter: incomplete, its config says that {what}" for what in found if what]


def _biases(attached: Attacher, base: Checkpoint) -> str:
    """PEFT before 0.21.2 did not save those of bias="lora_only"."""
    bias = attached.config.bias
    if bias == "none" or any(name.endswith(".bias") for name in attached.keys.whole):
        return ""
    targets = {module for module, _ in attached.keys.factors}
    lacking = [name for name in base.tensors if name.endswith(".bias") and (bias == "all" or _is_of(name, targets))]
    if not lacking:
        return ""
    kept = f"{len(lacking)} keep the base's values: {first_few(lacking)}"
    return f"biases were trained (bias={bias!r}), and its file has none; {kept}"


def _is_of(name: str, modules: Iterable[str]) -> bool:
    module = name.removesuffix(".bias")
    return any(module == target or module.endswith("." + target) or target.endswith("." + module) for target in modules)


def _whole_modules(attached: Attacher, base: Checkpoint) -> str:
    there: set[str] = set()
    for name in attached.keys.whole:
        location = attached.names.locate(name)
        there |= {name} if location is None else {piece.tensor for piece in location.pieces}
    one_vocabulary = any(vocabulary_role(name) is not None for name in there)  # of two that may be tied
    lacking = [
        name
        for name in base.tensors
        if name.endswith((".weight", ".bias"))
        and name not in there
        and any(f".{module}." in f".{name}" for module in attached.config.modules_to_save)
        and not (one_vocabulary and vocabulary_role(name) is not None)
    ]
    if not lacking:
        return ""
    return (
        f"whole modules were trained (modules_to_save), and its file lacks {first_few(sorted(lacking))}: the base's "
        "values stay"
    )


def _token_rows(attached: Attacher) -> str:
    if not any(attached.config.tokens.values()) or attached.keys.tokens:
        return ""
    if any(vocabulary_role(name) is not None for name in attached.keys.whole):
        return ""
    return "rows of embeddings were trained (trainable_token_indices), and its file has none"


def _targets(attached: Attacher, adapter: Checkpoint, base: Checkpoint) -> str:
    """Of `target_modules` by name, those without a single pair of factors."""
    config = adapter.adapter or {}
    names = config.get("target_modules")
    if not isinstance(names, list) or config.get("exclude_modules"):
        return ""
    modules = [name.removesuffix(".weight") for name in base.tensors if name.endswith(".weight")]
    # Experts lie one by one in files whose model has them fused, and then are no modules to be targeted.
    apart = (".experts.", *(f".{saved}." for saved in attached.config.modules_to_save))
    modules = [module for module in modules if not any(part in f".{module}." for part in apart)]
    there = [module for module, _ in attached.keys.factors]
    lacking = [
        name
        for name in names
        if isinstance(name, str)
        and not any(_ends(module, name) for module in there)
        and any(_ends(module, name) and attached.config.rank(module) > 0 for module in modules)
    ]
    if not lacking:
        return ""
    return f"factors of {first_few(sorted(lacking))} were trained (target_modules), and its file has none"


def _ends(module: str, name: str) -> bool:
    return module == name or module.endswith("." + name)
