"""Which rule of a recipe holds for a tensor."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from mfs_decompose.recipe.schema import DeltaRule, Recipe


def choose(recipe: Recipe, tensor_name: str) -> DeltaRule:
    """The first rule with a glob that fits the name, else the default as a rule for `*`."""
    for rule in recipe.deltas.rules:
        if any(fnmatchcase(tensor_name, glob) for glob in rule.match):
            return rule
    return recipe.deltas.fallback()


def unmatched_rules(recipe: Recipe, names: Iterable[str]) -> tuple[DeltaRule, ...]:
    """The rules that hold for none of the names, also where an earlier rule takes all that would fit."""
    chosen = {id(choose(recipe, name)) for name in names}
    return tuple(rule for rule in recipe.deltas.rules if id(rule) not in chosen)
