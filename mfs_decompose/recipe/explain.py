"""Mistakes in a recipe in words: what was expected, what was found, which word was probably meant."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from mfs_decompose.recipe.schema import Recipe
from mfs_decompose.recipe.strict_yaml import Mistake, Path
from mfs_decompose.recipe.values import shown

# Words of the format that this version does not do: refused by name, so that nobody takes them for a typo.
_LATER_KEYS: frozenset[Path] = frozenset({("objective", "max_rel_error")})
_LATER_VALUES: Mapping[str, frozenset[str]] = {}
_AUTOMATIC = "identical is chosen by itself where a tensor equals the base; name another codec"


def explain(error: ValidationError) -> list[Mistake]:
    """One mistake for each thing that the schema refused, without lines."""
    return [Mistake(_blamed(detail), _sentence(detail)) for detail in error.errors(include_url=False)]


def keys_at(path: Path) -> tuple[str, ...]:
    """The keys that the schema knows in the mapping at `path`; none where it is not a mapping of the schema."""
    model = _model_at(path)
    if model is None:
        return ()
    return tuple(field.alias or name for name, field in model.model_fields.items())


def dotted(path: Path) -> str:
    """`("deltas", "rules", 0, "codec")` as `deltas.rules[0].codec`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


def _model_at(path: Path) -> type[BaseModel] | None:
    model: type[BaseModel] | None = Recipe
    for part in path:
        if isinstance(part, int):
            continue
        assert model is not None
        field = model.model_fields.get(part)
        inner = [field.annotation, *get_args(field.annotation)] if field else []
        model = next((a for a in inner if isinstance(a, type) and issubclass(a, BaseModel)), None)
        if model is None:
            return None
    return model


def _blamed(detail: ErrorDetails) -> Path:
    key = detail.get("ctx", {}).get("key", ()) if detail["type"] == "conflict" else ()
    return (*detail["loc"], *key)


def _sentence(detail: ErrorDetails) -> str:
    path, found = detail["loc"], detail["input"]
    context: dict[str, Any] = detail.get("ctx", {})
    match detail["type"]:
        case "extra_forbidden":
            return _unknown_key(path)
        case "literal_error":
            return _unknown_word(path, found, context["expected"])
        case "value_error":
            return str(context["error"])
        case "missing":
            return "is missing"
        case "int_type":
            return f"expected a whole number, found {shown(found)}"
        case "greater_than_equal":
            return f"expected at least {context['ge']}, found {shown(found)}"
        case "less_than_equal":
            return f"expected at most {context['le']}, found {shown(found)}"
        case "less_than":
            return f"expected less than {context['lt']}, found {shown(found)}"
        case "model_type":
            return f"expected a mapping of keys to values, found {shown(found)}"
        case "tuple_type":
            return f"expected a list, found {shown(found)}"
        case _:
            return detail["msg"]


def _unknown_key(path: Path) -> str:
    if path in _LATER_KEYS:
        return "not in this version"
    near = get_close_matches(str(path[-1]), keys_at(path[:-1]), n=1)
    return f"unknown key; did you mean {near[0]!r}?" if near else "unknown key"


def _unknown_word(path: Path, found: object, expected: str) -> str:
    if found in _LATER_VALUES.get(str(path[-1]), frozenset()):
        return f"{found!r} is not in this version"
    if found == "identical" and path[-1] == "codec":
        return _AUTOMATIC
    # pydantic quotes the words: "'a', 'b' or 'c'"
    words = [part for i, part in enumerate(expected.split("'")) if i % 2]
    near = get_close_matches(found, words, n=1) if isinstance(found, str) and len(words) > 1 else []
    guess = f"; did you mean {near[0]!r}?" if near else ""
    listed = f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]
    return f"expected {listed}, found {shown(found)}{guess}"
