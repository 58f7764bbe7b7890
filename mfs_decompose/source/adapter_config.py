"""What adapter_config.json says about the meaning of an adapter's tensors: LoRA as PEFT 0.21 writes and reads it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from mfs_decompose.errors import SourceIncompatible
from mfs_decompose.source.adapter_fields import HARMLESS, MEANT, REFUSED, SELF_CONTAINED_STARTS
from mfs_decompose.source.naming import first_few

_MAX_PATTERN = 256
_MAX_REPEATS = 4
_REPEATED_GROUP = re.compile(r"\)\s*[*+{]")
_TALK = re.compile(r"(?!.*(lora|rank|alpha|scal|init|dora|method|mode|type|variant)).*")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The fields that decide what an adapter computes; module names are those of transformers' modules.

    `tokens` maps the ending of a module's name, "" for the input embeddings, to the rows that are replaced.
    """

    r: int
    alpha: float
    use_rslora: bool
    use_dora: bool
    lora_bias: bool
    fan_in_fan_out: bool
    ensure_weight_tying: bool
    bias: str
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    modules_to_save: tuple[str, ...]
    target_parameters: tuple[str, ...]
    tokens: Mapping[str, tuple[int, ...]]
    trained_on: str

    def rank(self, module: str) -> int:
        """The rank at a module, or at a parameter that is targeted by itself."""
        return self.rank_pattern.get(_matching(self.rank_pattern, module), self.r)

    def scale(self, module: str) -> float:
        """What the product of the factors is multiplied with there; the rank must not be 0."""
        alpha = self.alpha_pattern.get(_matching(self.alpha_pattern, module), self.alpha)
        rank = self.rank(module)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def saves(self, module: str) -> bool:
        """Whether a module has a whole copy of its own in the adapter, so that whatever is tied to it stays."""
        return any(module.endswith(name) for name in self.modules_to_save)

    def token_rows(self, module: str, is_input: bool) -> tuple[int, ...] | None:
        """The rows of an embedding that the adapter replaces."""
        for name, rows in self.tokens.items():
            if name and (module == name or module.endswith("." + name)):
                return rows
        return self.tokens.get("") if is_input else None


def parse_adapter_config(config: Mapping[str, object], where: str) -> AdapterConfig:
    """The meaning of a parsed adapter_config.json; `where` names the adapter in messages.

    Raises:
        SourceIncompatible: another kind of adapter, a method that changes the base or cannot be merged, a field that
            this version does not know and that is set, or one of the wrong type.
    """
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise SourceIncompatible(
            f"expected a LoRA adapter in {where}, found peft_type {str(kind)[:40]!r}",
            hint="Merge it into its base in PEFT (merge_and_unload, save_pretrained) and give that folder.",
        )
    _refuse_methods(config, where)
    reader = _Reader(config, where)
    return AdapterConfig(
        r=reader.number("r", 8),
        alpha=reader.real("lora_alpha", 8),
        use_rslora=reader.flag("use_rslora"),
        use_dora=reader.flag("use_dora"),
        lora_bias=reader.flag("lora_bias"),
        fan_in_fan_out=reader.flag("fan_in_fan_out"),
        ensure_weight_tying=reader.flag("ensure_weight_tying"),
        bias=reader.choice("bias", ("none", "all", "lora_only")),
        rank_pattern={key: reader.as_number("rank_pattern", value) for key, value in reader.patterns("rank_pattern")},
        alpha_pattern={key: reader.as_real("alpha_pattern", value) for key, value in reader.patterns("alpha_pattern")},
        modules_to_save=reader.names("modules_to_save"),
        target_parameters=reader.names("target_parameters"),
        tokens=reader.tokens("trainable_token_indices"),
        trained_on=str(config.get("base_model_name_or_path") or ""),
    )


def _refuse_methods(config: Mapping[str, object], where: str) -> None:
    for name, why in REFUSED.items():
        if config.get(name):
            raise SourceIncompatible(
                f"the adapter in {where} uses {name}, {why}",
                hint="Give a plain LoRA, or merge it into its base in PEFT (merge_and_unload) and give that folder.",
            )
    start = config.get("init_lora_weights", True)
    is_plain = start is None or isinstance(start, bool) or (isinstance(start, str) and start in SELF_CONTAINED_STARTS)
    if not is_plain:
        raise SourceIncompatible(
            f"the adapter in {where} has init_lora_weights {str(start)[:40]!r}: its factors belong to a base that was "
            "changed when training began, not to the base as published",
            hint="Save it again with path_initial_model_for_weight_conversion, which makes a plain LoRA of it.",
        )
    known = MEANT | HARMLESS | REFUSED.keys()
    unknown = sorted(
        name
        for name, value in config.items()
        if name not in known and value and not (isinstance(value, str) and _TALK.fullmatch(name.lower()))
    )
    if unknown:
        raise SourceIncompatible(
            f"the adapter in {where} sets {first_few(unknown)}, which this version does not know and which could "
            "change what it computes",
            hint="Delete the field from adapter_config.json if it is only a note.",
        )


def _matching(patterns: Mapping[str, object], module: str) -> str:
    """The first pattern that fits, as PEFT looks for it, else the module itself."""
    return next((key for key in patterns if re.match(rf"(.*\.)?({key})$", module)), module)


@dataclass(frozen=True)
class _Reader:
    config: Mapping[str, object]
    where: str

    def number(self, name: str, default: int) -> int:
        value = self.config.get(name)
        return default if value is None else self.as_number(name, value)

    def as_number(self, name: str, value: object) -> int:
        if type(value) is not int or not 0 <= value <= 2**20:
            self._fail(name, "a whole number from 0 up", value)
        return value

    def real(self, name: str, default: float) -> float:
        value = self.config.get(name)
        return default if value is None else self.as_real(name, value)

    def as_real(self, name: str, value: object) -> float:
        if type(value) not in (int, float) or not abs(float(str(value))) < 2.0**64:
            self._fail(name, "a number", value)
        return float(str(value))

    def flag(self, name: str) -> bool:
        value = self.config.get(name)
        if value is not None and not isinstance(value, bool):
            self._fail(name, "true or false", value)
        return bool(value)

    def choice(self, name: str, allowed: tuple[str, ...]) -> str:
        value = self.config.get(name) or allowed[0]
        if value not in allowed:
            self._fail(name, " or ".join(allowed), value)
        return str(value)

    def names(self, name: str) -> tuple[str, ...]:
        value = self.config.get(name) or []
        if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
            self._fail(name, "a list of names", value)
        return tuple(value)

    def patterns(self, name: str) -> list[tuple[str, object]]:
        value = self.config.get(name) or {}
        if not isinstance(value, dict):
            self._fail(name, "an object", value)
        for pattern in value:
            self._check_pattern(name, pattern)
        return list(value.items())

    def tokens(self, name: str) -> dict[str, tuple[int, ...]]:
        value = self.config.get(name) or {}
        lists = {"": value} if isinstance(value, list) else value
        if not isinstance(lists, dict):
            self._fail(name, "a list of rows, or one for each embedding", value)
        for rows in lists.values():
            sound = isinstance(rows, list) and all(type(row) is int and 0 <= row < 2**31 for row in rows)
            if not sound or len(set(rows)) != len(rows):
                self._fail(name, "rows from 0 up, each once", rows)
        return {key: tuple(rows) for key, rows in lists.items()}

    def _check_pattern(self, name: str, pattern: str) -> None:
        """Patterns of strangers are regular expressions: refuse those that could run for ever."""
        try:
            sound = len(pattern) <= _MAX_PATTERN and re.compile(pattern) is not None
        except (re.error, RecursionError, OverflowError):
            sound = False
        repeats = len(re.findall(r"(?<!\\)[*+{]", pattern))
        if not sound or repeats > _MAX_REPEATS or _REPEATED_GROUP.search(pattern):
            self._fail(name, "simple patterns of module names", pattern)

    def _fail(self, name: str, expected: str, value: object) -> NoReturn:
        raise SourceIncompatible(
            f"expected {expected} for {name} in adapter_config.json of {self.where}, found {str(value)[:80]!r}",
            hint="Fetch or save the adapter again.",
        )
