"""`mfs recipe`: the shipped recipes, and checking one's own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mfs_decompose.cli.options import output_of
from mfs_decompose.errors import OutputBusy, UsageError

if TYPE_CHECKING:
    from mfs_decompose.cli.out import Output

Action = Literal["ls", "show", "cp", "check", "schema"]


def command(
    ctx: typer.Context,
    action: Annotated[Action, typer.Argument(show_default=False, help="ls, show, cp, check or schema.")],
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME|FILE]", show_default=False, help="A shipped recipe, or a file.")
    ] = None,
    target: Annotated[
        Path | None, typer.Argument(metavar="[TARGET]", show_default=False, help="With cp: the file to write.")
    ] = None,
) -> None:
    """List, show, copy and check recipes; `schema` prints their JSON schema.

    Examples:
      mfs recipe ls
      mfs recipe show lossless
      mfs recipe cp lowrank-int4 mine.yaml
      mfs recipe check mine.yaml
    """
    output = output_of(ctx)
    needed = {"ls": 0, "schema": 0, "show": 1, "check": 1, "cp": 2}[action]
    given = [one for one in (name, target) if one is not None]
    if len(given) != needed:
        words = {0: "nothing more", 1: "a recipe", 2: "a recipe and a file to write"}[needed]
        raise UsageError(
            f"mfs recipe {action}: expected {words}, found {len(given)} arguments", hint="see mfs recipe --help"
        )
    match action:
        case "ls":
            _list(output)
        case "schema":
            _schema(output)
        case "show":
            _show(output, str(name))
        case "check":
            _check(output, str(name))
        case "cp":
            _copy(output, str(name), target or Path())


def _list(output: Output) -> None:
    from mfs_decompose.recipe.load import load_recipe
    from mfs_decompose.recipe.presets import preset_names

    recipes = {name: load_recipe(name) for name in preset_names()}
    output.document(
        {"schema": "mfs.recipes/1", "recipes": [{"name": name, **r.canonical()} for name, r in recipes.items()]}
    )
    output.table(
        ("recipe", "codec", "objective", "what"),
        [
            (name, r.deltas.default.codec, _objective(r.objective.model_dump(exclude_none=True)), _about(r.about))
            for name, r in recipes.items()
        ],
    )


def _objective(values: dict[str, object]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items()) or "-"


def _about(about: object) -> str:
    if isinstance(about, dict):
        return str(about.get("what", ""))
    return " ".join(str(about or "").split())


def _schema(output: Output) -> None:
    import json

    from mfs_decompose.recipe.schema import Recipe

    schema = Recipe.model_json_schema(by_alias=True)
    output.document({"schema": "mfs.recipe-schema/1", "json_schema": schema})
    output.line(json.dumps(schema, indent=2))


def _show(output: Output, name: str) -> None:
    from mfs_decompose.recipe.load import load_recipe
    from mfs_decompose.recipe.presets import preset_names, read_preset

    recipe = load_recipe(name)
    text = read_preset(name) if name in preset_names() else Path(name).read_text(encoding="utf-8")
    output.document({"schema": "mfs.recipe-text/1", "name": name, "text": text, "effective": recipe.canonical()})
    output.line(text.rstrip("\n"))


def _check(output: Output, name: str) -> None:
    from mfs_decompose.recipe.load import load_recipe

    recipe = load_recipe(name)
    output.document({"schema": "mfs.recipe-check/1", "name": name, "ok": True, "effective": recipe.canonical()})
    output.line(f"{name} is a valid recipe")


def _copy(output: Output, name: str, target: Path) -> None:
    from mfs_decompose.artifact.atomic import write_file
    from mfs_decompose.recipe.presets import read_preset

    if target.exists() or target.is_symlink():
        raise OutputBusy(f"expected no file {target}, found one", hint="Choose another name.")
    if not target.absolute().parent.is_dir():
        raise OutputBusy(f"{target.absolute().parent} is no folder", hint="Make it first, or choose another place.")
    write_file(target, read_preset(name).encode())
    output.document({"schema": "mfs.recipe-copy/1", "name": name, "file": str(target)})
    output.say(f"wrote {target}: edit it, then mfs recipe check {target}")
