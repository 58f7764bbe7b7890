"""A recipe from a preset or a file, with what the command line changes in it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path as FilePath
from typing import Any

from pydantic import ValidationError

from mfs_decompose.errors import RecipeError, UsageError
from mfs_decompose.recipe.explain import dotted, explain, keys_at
from mfs_decompose.recipe.origin import SET, Origins, trace
from mfs_decompose.recipe.presets import preset_names, read_preset
from mfs_decompose.recipe.schema import OPTIONS, SCHEMA, Recipe
from mfs_decompose.recipe.strict_yaml import Document, Mistake, Path, read_document, read_scalar


def load_recipe(source: str | os.PathLike[str] | None = None, overrides: Mapping[str, object] | None = None) -> Recipe:
    """The effective recipe of a preset's name, a file, or the defaults, changed by `overrides`.

    `overrides` has dotted keys (`"deltas.default.codec"`). An objective there replaces the one of the recipe, and a
    codec there drops the options of the codec it replaces.

    Raises:
        RecipeError: the recipe is not found or is wrong; every mistake is named with its line.
        UsageError: the overrides are wrong, or ask for something that the recipe excludes.
    """
    return load_with_origins(source, overrides)[0]


def load_with_origins(
    source: str | os.PathLike[str] | None = None,
    overrides: Mapping[str, object] | None = None,
    options: Mapping[str, str] | None = None,
) -> tuple[Recipe, Origins]:
    """As load_recipe, and where each value of the effective recipe came from.

    `options` names the option that gave an override, such as `{"objective.budget": "--budget"}`; others are of --set.

    Raises:
        RecipeError, UsageError: as load_recipe.
    """
    name, text = _read(source)
    document = Document(data={"schema": SCHEMA}) if text is None else read_document(text)
    if text is not None and not document.mistakes and "schema" not in document.data:
        document.mistakes.append(Mistake((), f"expected the line `schema: {SCHEMA}`", 1))
    recipe, mistakes = _validate(document)
    if recipe is None:
        raise RecipeError(_message(mistakes, name), hint=_hint(mistakes))
    if overrides:
        _apply(document.data, overrides)
        recipe, mistakes = _validate(document)
    if recipe is None:  # the recipe by itself was right, so the command line is to blame
        raise UsageError(_message(mistakes, None), hint=_hint(mistakes))
    # A preset is called "recipe NAME" in messages: the same word as for a file would hide that it is none.
    label = f"preset {source}" if name == f"recipe {source}" else f"recipe {name}"
    given: dict[Path, str] = {tuple(key.split(".")): (options or {}).get(key, SET) for key in overrides or {}}
    return recipe, trace(recipe, document, label, given)


def change_recipe(recipe: Recipe, overrides: Mapping[str, object]) -> Recipe:
    """An effective recipe (without its limits and prose) changed by dotted keys, as load_recipe does.

    Raises:
        UsageError: the overrides are wrong, or ask for something that the recipe excludes.
    """
    document = Document(data=recipe.canonical())
    _apply(document.data, overrides)
    changed, mistakes = _validate(document)
    if changed is None:
        raise UsageError(_message(mistakes, None), hint=_hint(mistakes))
    return changed


def parse_set(pairs: Sequence[str]) -> dict[str, object]:
    """Read the values of `--set KEY=VALUE`: dotted keys, YAML values.

    Raises:
        UsageError: a pair has no `=`, a value is not YAML, or a key comes twice.
    """
    values: dict[str, object] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not all(key.split(".")):
            raise UsageError(f"expected --set KEY=VALUE, found {pair!r}", hint="for example --set objective.budget=3%")
        if key in values:
            raise UsageError(f"--set gives {key} twice")
        try:
            values[key] = read_scalar(text)
        except ValueError as error:
            raise UsageError(f"--set {key}: {error}") from None
    return values


def _read(source: str | os.PathLike[str] | None) -> tuple[str, str | None]:
    if source is None:
        return "the default recipe", None
    name = os.fspath(source)
    path = FilePath(name)
    is_file_name = os.sep in name or path.suffix in (".yaml", ".yml")
    if name in preset_names() or not (is_file_name or path.is_file()):
        return f"recipe {name}", read_preset(name)
    try:
        return name, path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RecipeError(f"expected a recipe at {name}, found nothing there") from None
    except UnicodeDecodeError:
        raise RecipeError(f"expected text in UTF-8 in {name}, found other bytes") from None
    except OSError as error:
        raise RecipeError(f"cannot read the recipe {name}: {error.strerror}") from None


def _apply(data: dict[str, Any], overrides: Mapping[str, object]) -> None:
    paths: list[Path] = [tuple(key.split(".")) for key in overrides]
    objectives = [path for path in paths if path[0] == "objective" and len(path) > 1]
    if len(objectives) > 1:
        words = " and ".join(str(path[1]) for path in objectives)
        raise UsageError(f"expected one objective, found {words}", hint="give only one of them")
    if objectives:
        data.pop("objective", None)
    codec: Path = ("deltas", "default", "codec")
    before = _get(data, codec)
    for path, value in zip(paths, overrides.values(), strict=True):
        _put(data, path, deepcopy(value))  # a later override may reach into it, and it is the caller's
    default = _get(data, codec[:-1])
    if isinstance(default, dict) and default.get("codec") != before:
        for option in OPTIONS:
            if ("deltas", "default", option) not in paths:
                default.pop(option, None)


def _get(data: Mapping[str, Any], path: Path) -> object:
    value: object = data
    for part in path:
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _put(data: dict[str, Any], path: Path, value: object) -> None:
    here = data
    for depth, part in enumerate(path[:-1], start=1):
        inner = here.setdefault(str(part), {})
        if not isinstance(inner, dict):
            raise UsageError(f"{dotted(path)}: {dotted(path[:depth])} holds no keys; set it as a whole")
        here = inner
    here[str(path[-1])] = value


def _validate(document: Document) -> tuple[Recipe | None, list[Mistake]]:
    """The recipe, or everything that is wrong with it."""
    mistakes = list(document.mistakes)
    if not document.data:
        return None, mistakes
    try:
        recipe = Recipe.model_validate(document.data)
    except ValidationError as error:
        known = {mistake.path for mistake in mistakes}
        new = (Mistake(m.path, m.message, document.line_of(m.path)) for m in explain(error) if m.path not in known)
        return None, sorted([*mistakes, *new], key=lambda m: m.line or 0)
    return (None if mistakes else recipe), mistakes


def _message(mistakes: Sequence[Mistake], file: str | None) -> str:
    lines = [_line(mistake, file) for mistake in mistakes]
    if len(lines) == 1:
        return lines[0]
    where = f" in {file}" if file else ""
    return "\n  ".join([f"{len(lines)} mistakes{where}:", *lines])


def _line(mistake: Mistake, file: str | None) -> str:
    where = [dotted(mistake.path)] if mistake.path else []
    if file is not None:
        where.insert(0, file if mistake.line is None else f"{file}:{mistake.line}")
    return ": ".join([*where, mistake.message])


def _hint(mistakes: Sequence[Mistake]) -> str | None:
    """The keys that go where the first unknown one stands."""
    unknown = next((m for m in mistakes if m.message.startswith("unknown key")), None)
    if unknown is None:
        return None
    around = dotted(unknown.path[:-1])
    keys = keys_at(unknown.path[:-1])
    if not keys:
        return None
    return f"{f'{around} takes' if around else 'a recipe takes'} {', '.join(keys)}"
