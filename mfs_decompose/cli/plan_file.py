"""`--save-plan` and `--plan` of `mfs decompose`: what of the command line a plan decides, and what it leaves open."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mfs_decompose.errors import OutputBusy, RecipeError, UsageError

if TYPE_CHECKING:
    from mfs_decompose.plan.saved import SavedPlan
    from mfs_decompose.recipe.schema import Recipe

OTHER_FILE = "Choose another file for --save-plan."


def check_place(path: Path) -> None:
    """Refuse, before any work, a place where no plan can be written; an older plan may be there.

    Raises:
        OutputBusy: something else has the name, or the folder is not there or not to be written to.
    """
    from mfs_decompose.plan.saved import read_plan

    folder = path.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise OutputBusy(f"{folder} is not a folder that can be written to", hint=OTHER_FILE)
    if not os.path.lexists(path):
        return
    try:
        read_plan(path)
    except RecipeError:
        raise OutputBusy(f"expected no file or a plan at {path}, found something else", hint=OTHER_FILE) from None


def save_plan(path: Path, document: Mapping[str, Any]) -> None:
    """Write the plan document, whole or not at all."""
    from mfs_decompose.artifact.atomic import write_file

    write_file(path, (json.dumps(document, indent=2, allow_nan=False) + "\n").encode())


def planned_recipe(
    saved: SavedPlan, recipe: str | None, overrides: Mapping[str, object], options: Mapping[str, str]
) -> tuple[Recipe, dict[str, str]]:
    """The plan's recipe with the limits of this machine, and the origin of each value.

    `overrides` are dotted keys, `options` names the option behind each.

    Raises:
        UsageError: --recipe, an option or --set contradicts the plan.
    """
    from mfs_decompose.recipe.explain import dotted
    from mfs_decompose.recipe.load import change_recipe, load_recipe
    from mfs_decompose.recipe.origin import SET, flat

    wanted = saved.recipe.canonical()
    wrong = [
        options.get(key, f"{SET} {key}") for key, value in overrides.items() if _contradicts(saved, wanted, key, value)
    ]
    if recipe is not None and load_recipe(recipe, overrides).canonical() != wanted:
        wrong.append("--recipe")
    if wrong:
        raise UsageError(
            f"{' and '.join(wrong)} {'contradicts' if len(wrong) == 1 else 'contradict'} the plan {saved.path}",
            hint="Leave it out, or make another plan with --dry-run --save-plan FILE",
        )
    limits = {key: value for key, value in overrides.items() if key.split(".")[0] == "limits"}
    effective = change_recipe(saved.recipe, limits)
    by = {key: options.get(key, SET) for key in limits}
    origins = {dotted(path): f"plan {saved.path}" for path in flat(effective)}
    return effective, origins | {key: option for key, option in by.items() if key in origins}


def planned_refs(saved: SavedPlan, base: str | None, variants: Mapping[str, str]) -> tuple[str | None, dict[str, str]]:
    """Where the plan's base and variants are: as the plan has it, or where the command line says they are now.

    Raises:
        UsageError: the plan has no such variant, or no base.
    """
    if base is not None and saved.base is None:
        raise UsageError(f"--base contradicts the plan {saved.path}, which has no base", hint="Leave --base out.")
    for id in variants:
        if id not in saved.variants:
            near = get_close_matches(id, saved.variants, n=1)
            guess = f"; did you mean {near[0]!r}?" if near else ""
            raise UsageError(
                f"the plan {saved.path} has no variant {id!r}{guess}",
                hint=f"It has {', '.join(saved.variants)}: --variants ID=REF says where one is now",
            )
    place = base if base is not None or saved.base is None else saved.base.ref
    return place, {id: variants.get(id, source.ref) for id, source in saved.variants.items()}


def shown_origins(recipe: Recipe, origins: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Rows of (key, value, origin), in the order of the recipe."""
    from mfs_decompose.recipe.explain import dotted
    from mfs_decompose.recipe.origin import flat

    for path, value in flat(recipe).items():
        text = value if isinstance(value, str) else json.dumps(value)
        yield dotted(path), text, origins[dotted(path)]


def _contradicts(saved: SavedPlan, wanted: Mapping[str, Any], key: str, value: object) -> bool:
    from mfs_decompose.recipe.load import change_recipe

    resolved = {"base.mode": saved.base_mode, "base.store": saved.base_store}
    if value == resolved.get(key, object()):
        return False  # the recipe may say auto, of which the plan made just this
    return change_recipe(saved.recipe, {key: value}).canonical() != wanted
