"""Where each value of an effective recipe came from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mfs_decompose.recipe.explain import dotted
from mfs_decompose.recipe.schema import Recipe
from mfs_decompose.recipe.strict_yaml import Document, Path

DEFAULT = "default"
SET = "--set"

Origins = Mapping[str, str]
"""Dotted key of the effective recipe -> `default`, `recipe FILE:LINE`, `preset NAME:LINE`, `--set`, or an option."""


def flat(recipe: Recipe) -> dict[Path, Any]:
    """Every value of the effective recipe by its path, limits included where they are set; no schema, no prose."""
    values = recipe.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"about", "schema_"})
    return dict(_leaves(values, ()))


def trace(recipe: Recipe, document: Document, label: str, overrides: Mapping[Path, str]) -> dict[str, str]:
    """The origin of every value of `recipe`, in its order.

    `document` holds the values that were given, the overrides applied, with the lines of those from the recipe that
    `label` names; `overrides` says, in the order in which they were applied, which option set a path and all in it.
    """
    return {dotted(path): _origin(path, document, label, overrides) for path in flat(recipe)}


def _origin(path: Path, document: Document, label: str, overrides: Mapping[Path, str]) -> str:
    if not _is_given(document.data, path):
        return DEFAULT
    # Later ones win, and a wide one replaces the narrow ones before it.
    by = [option for target, option in overrides.items() if path[: len(target)] == target]
    return by[-1] if by else f"{label}:{document.line_of(path)}"


def _is_given(value: Any, path: Sequence[str | int]) -> bool:
    for part in path:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            return False
    return value is not None


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Values by path; a list of plain values, such as globs, is one value."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, (*path, key))
    elif isinstance(value, list) and any(isinstance(inner, Mapping) for inner in value):
        for at, inner in enumerate(value):
            yield from _leaves(inner, (*path, at))
    elif value != []:
        yield path, value
