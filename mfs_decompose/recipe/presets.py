"""The recipes that ship with the package: found in the wheel's data, or in the checkout while developing."""

from __future__ import annotations

import importlib.resources
from difflib import get_close_matches
from importlib.resources.abc import Traversable
from pathlib import Path

from mfs_decompose.errors import RecipeError


def recipes_folder() -> Traversable:
    """The folder that holds the shipped recipes."""
    packaged = importlib.resources.files("mfs_decompose") / "_data" / "recipes"
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / "recipes"


def preset_names() -> tuple[str, ...]:
    """The names of the shipped recipes, sorted."""
    files = (entry.name for entry in recipes_folder().iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in files if name.endswith(".yaml")))


def read_preset(name: str) -> str:
    """The text of a shipped recipe.

    Raises:
        RecipeError: there is none of that name.
    """
    names = preset_names()
    if name not in names:
        near = get_close_matches(name, names, n=1)
        guess = f"; did you mean {near[0]!r}?" if near else ""
        raise RecipeError(
            f"there is no recipe named {name!r}{guess}",
            hint=f"name one of {', '.join(names)}, or a file that ends in .yaml",
        )
    return (recipes_folder() / f"{name}.yaml").read_text(encoding="utf-8")
