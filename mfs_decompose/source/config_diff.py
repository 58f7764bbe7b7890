"""Two configs compared key by key, by what they mean."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from mfs_decompose.source.rope_spelling import PARAMETERS, ROPE_KEYS, join_rope

NOISE = frozenset(
    {
        "_name_or_path",
        "_commit_hash",
        "transformers_version",
        "peft_version",
        "_attn_implementation_autoset",
        "_from_model_config",
    }
)
"""Keys that say where a file came from, and nothing of the model."""

_MAX_DEPTH = 32


@dataclass(frozen=True, slots=True)
class Change:
    """One key that differs, dotted where it is nested; `a` or `b` is None on the side that has no such key.

    The values are JSON: what JSON cannot hold is spelled out, and what lies very deep cut.
    """

    key: str
    kind: Literal["changed", "only_a", "only_b"]
    a: object
    b: object


@dataclass(frozen=True, slots=True)
class ConfigDiff:
    """Changes of meaning, and the keys that differ without one: of origin, or spelled in another way."""

    changes: tuple[Change, ...]
    noise: tuple[str, ...]


def compare_configs(a: Mapping[str, object], b: Mapping[str, object]) -> ConfigDiff:
    """Compare two config.json or generation_config.json.

    The spellings of rotary embeddings (`rope_theta` and `rope_scaling`, or `rope_parameters`) and of the dtype
    (`torch_dtype`, or `dtype`) are joined first. A key that is null and one that is absent are not the same: a class
    may have a default.
    """
    changes = compare_objects(_normal(a, 0), _normal(b, 0))
    meant = {change.key for change in changes}
    noise = [change.key for change in compare_objects(a, b, skipped=()) if not _is_told(change.key, meant)]
    return ConfigDiff(tuple(changes), tuple(noise))


def compare_objects(
    a: Mapping[str, object], b: Mapping[str, object], *, skipped: Collection[str] = NOISE
) -> list[Change]:
    """Every key that differs, sorted; objects are compared key by key, lists and all else as a whole."""
    found: list[Change] = []
    _compare(a, b, "", skipped, found, 0)
    return found


def _compare(
    a: Mapping[str, object], b: Mapping[str, object], at: str, skipped: Collection[str], found: list[Change], depth: int
) -> None:
    for key in sorted(a.keys() | b.keys()):
        if key in skipped:
            continue
        if key not in a:
            found.append(Change(at + key, "only_b", None, plain(b[key])))
        elif key not in b:
            found.append(Change(at + key, "only_a", plain(a[key]), None))
        elif isinstance(one := a[key], Mapping) and isinstance(two := b[key], Mapping) and depth < _MAX_DEPTH:
            _compare(one, two, f"{at}{key}.", skipped, found, depth + 1)
        elif not _same(a[key], b[key]):
            found.append(Change(at + key, "changed", plain(a[key]), plain(b[key])))


def plain(value: object, depth: int = 0) -> object:
    """A value as strict JSON: NaN and infinities as words, what is nested above the limit as dots."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if not isinstance(value, Mapping | list):
        return value
    if depth >= _MAX_DEPTH:
        return "..."
    if isinstance(value, Mapping):
        return {str(key): plain(inner, depth + 1) for key, inner in value.items()}
    return [plain(inner, depth + 1) for inner in value]


def _same(a: object, b: object) -> bool:
    """Equal as JSON: 1 and 1.0 are, 1 and true are not, and NaN is itself. No depth is too much."""
    pairs = [(a, b)]
    while pairs:
        x, y = pairs.pop()
        if isinstance(x, list) and isinstance(y, list):
            if len(x) != len(y):
                return False
            pairs += zip(x, y, strict=True)
        elif isinstance(x, Mapping) and isinstance(y, Mapping):
            if x.keys() != y.keys():
                return False
            pairs += [(value, y[key]) for key, value in x.items()]
        elif isinstance(x, Mapping | list | bool) or isinstance(y, Mapping | list | bool):
            if x is not y:
                return False
        elif not (x == y or (x != x and y != y)):
            return False
    return True


def _normal(config: Mapping[str, object], depth: int) -> dict[str, object]:
    joined = join_rope(config)
    if "torch_dtype" in joined:
        joined.setdefault("dtype", joined["torch_dtype"])
        del joined["torch_dtype"]
    if isinstance(name := joined.get("dtype"), str):
        joined["dtype"] = name.removeprefix("torch.")
    if depth < _MAX_DEPTH:
        for key, value in joined.items():
            if isinstance(value, Mapping) and key != PARAMETERS:
                joined[key] = _normal(value, depth + 1)
    return joined


def _is_told(key: str, meant: set[str]) -> bool:
    """Whether a key that differs as written is behind one of the changes of meaning."""
    outer, _, last = key.rpartition(".")
    prefix = f"{outer}." if outer else ""
    if last == "torch_dtype" and f"{prefix}dtype" in meant:
        return True
    start, _, _ = key.partition(f"{PARAMETERS}.")
    if last in ROPE_KEYS or PARAMETERS in key:
        level = start if PARAMETERS in key else prefix
        if any(one == f"{level}{PARAMETERS}" or one.startswith(f"{level}{PARAMETERS}.") for one in meant):
            return True
    return any(one == key or one.startswith(f"{key}.") for one in meant)
