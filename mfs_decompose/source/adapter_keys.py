"""The names of an adapter's tensors, in all spellings there have been, sorted by the module they belong to."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from mfs_decompose.errors import SourceIncompatible
from mfs_decompose.source.header import TensorSpec
from mfs_decompose.source.naming import first_few

Way = Literal["plain", "saved", "base"]
"""How a whole tensor stands in an adapter: in place of the base's, as a module's own copy, or under a LoRA."""

_PREFIXES = ("base_model.model.", "base_model.")
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_fsdp_wrapped_module|_orig_mod|_checkpoint_wrapped_module)\.")
_NAME = r"(?:\.(?P<adapter>(?!weight$|bias$)[^.]+))?"
_FACTOR = re.compile(rf"(?P<module>.+)\.lora_(?P<side>A|B){_NAME}\.weight")
_FACTOR_BIAS = re.compile(rf"(?P<module>.+)\.lora_B{_NAME}\.bias")
_EMBEDDING = re.compile(rf"(?P<module>.+)\.lora_embedding_(?P<side>A|B){_NAME}")
_MAGNITUDE = re.compile(rf"(?P<module>.+)\.lora_magnitude_vector{_NAME}(?:\.weight)?")
_TOKENS = re.compile(rf"(?P<module>.+)\.token_adapter\.trainable_tokens_delta{_NAME}")
_SAVED = re.compile(r"(?P<module>.+)\.modules_to_save\.(?:(?P<adapter>[^.]+)\.)?(?P<rest>(?:.+\.)?(?:weight|bias))")
_BASE = re.compile(r"(?P<module>.+?)\.(?:token_adapter\.)?base_layer\.(?P<rest>weight|bias)")
_COPY = re.compile(r".+\.(?:token_adapter\.trainable_tokens_original(?:\.[^.]+)?|original_module\..+)")


@dataclass
class Factors:
    """What an adapter holds for one module: all that is set belongs together.

    `nesting` counts the `base_layer`s behind the module's name: PEFT wraps parameters of one module around each other.
    """

    module: str
    nesting: int = 0
    a: TensorSpec | None = None
    b: TensorSpec | None = None
    bias: TensorSpec | None = None
    magnitude: TensorSpec | None = None
    is_embedding: bool = False

    @property
    def label(self) -> str:
        return self.module + ".base_layer" * self.nesting


@dataclass
class AdapterKeys:
    """Every tensor of an adapter's files in exactly one place.

    `factors` by module and nesting; `whole` by the name of the tensor that is replaced, `tokens` by module; `copies`
    are names of what some savers write beside: unchanged parts of the base, and tensors for a second time.
    """

    factors: dict[tuple[str, int], Factors] = field(default_factory=dict)
    whole: dict[str, tuple[TensorSpec, Way]] = field(default_factory=dict)
    tokens: dict[str, TensorSpec] = field(default_factory=dict)
    copies: list[str] = field(default_factory=list)


def sort_keys(tensors: Mapping[str, TensorSpec], where: str) -> AdapterKeys:
    """Sort an adapter's tensors; `where` names the adapter in messages.

    Raises:
        SourceIncompatible: tensors of a method that is not known, of several adapters, or twice the same.
    """
    found = AdapterKeys()
    adapters: set[str] = set()
    for key in sorted(tensors):
        spec = TensorSpec(key, tensors[key].dtype, tensors[key].shape)
        taken, adapter = _place(found, _strip(key), spec)
        if adapter:
            adapters.add(adapter)
        if not taken and len(adapters) < 2:
            raise SourceIncompatible(
                f"expected each tensor of {where} once, found {key[:200]!r} a second time under another spelling",
                hint="Save the adapter again with save_pretrained.",
            )
    if len(adapters) > 1:
        raise SourceIncompatible(
            f"expected one adapter in {where}, found {first_few(sorted(adapters))}",
            hint="Save each adapter in a folder of its own: save_pretrained(..., selected_adapters=[NAME]).",
        )
    return found


def _strip(key: str) -> str:
    key = _WRAPPERS.sub("", key)
    prefix = next((prefix for prefix in _PREFIXES if key.startswith(prefix)), "")
    return key.removeprefix(prefix)


def _place(found: AdapterKeys, key: str, spec: TensorSpec) -> tuple[bool, str | None]:
    """Put a tensor into its place: whether that was free, and the adapter's name if the key has one."""
    if _COPY.fullmatch(key):
        found.copies.append(spec.name)
        return True, None
    if match := _TOKENS.fullmatch(key):
        free = match["module"] not in found.tokens
        found.tokens[match["module"]] = spec
        return free, match["adapter"]
    for pattern in (_FACTOR, _FACTOR_BIAS, _EMBEDDING, _MAGNITUDE):
        if match := pattern.fullmatch(key):
            return _put_factor(found, match, spec), match["adapter"]
    if ".lora_" in key:
        raise SourceIncompatible(
            f"the adapter's tensor {spec.name[:200]!r} belongs to no method that this version knows",
            hint="Give a plain LoRA, or merge it into its base in PEFT (merge_and_unload) and give that folder.",
        )
    if match := _SAVED.fullmatch(key):
        return _put_whole(found, f"{match['module']}.{match['rest']}", spec, "saved"), match["adapter"]
    if match := _BASE.fullmatch(key):
        return _put_whole(found, f"{match['module']}.{match['rest']}", spec, "base"), None
    return _put_whole(found, key, spec, "plain"), None


def _put_factor(found: AdapterKeys, match: re.Match[str], spec: TensorSpec) -> bool:
    module, nesting = match["module"], 0
    while module.endswith(".base_layer"):
        module, nesting = module.removesuffix(".base_layer"), nesting + 1
    module = module.replace(".base_layer.", ".")
    part = found.factors.setdefault((module, nesting), Factors(module, nesting))
    if match.re is _MAGNITUDE:
        free, part.magnitude = part.magnitude is None, spec
    elif match.re is _FACTOR_BIAS:
        free, part.bias = part.bias is None, spec
    elif match["side"] == "A":
        free, part.a, part.is_embedding = part.a is None, spec, match.re is _EMBEDDING
    else:
        free, part.b = part.b is None, spec
    return free


def _put_whole(found: AdapterKeys, name: str, spec: TensorSpec, way: Way) -> bool:
    if name not in found.whole:
        found.whole[name] = (spec, way)
        return True
    # PEFT writes a module's own copy twice where the vocabulary was resized, and loads the one with the plain name.
    other, other_way = found.whole[name]
    used, copy = (spec, other) if way == "plain" else (other, spec)
    found.whole[name] = (used, "saved")
    found.copies.append(copy.name)
    return {way, other_way} == {"plain", "saved"} and used.shape == copy.shape
