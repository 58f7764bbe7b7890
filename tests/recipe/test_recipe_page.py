"""docs/recipe.md names every key, value and codec of the schema, and nothing else as a key."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from mfs_decompose.recipe import schema
from mfs_decompose.recipe.load import load_recipe

PAGE = (Path(__file__).parents[2] / "docs" / "recipe.md").read_text(encoding="utf-8")
WORDS = set(re.findall(r"`([^`]+)`", PAGE))


def keys(model: type[BaseModel], prefix: str = "") -> set[str]:
    found: set[str] = set()
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            found |= keys(inner, f"{prefix}{name}.")
        else:
            found.add(f"{prefix}{field.alias or name}")
    return found


def test_every_key_is_named() -> None:
    own = {key for key in keys(schema.Recipe) if not key.startswith("deltas.default.") and key != "schema"}
    assert own - WORDS == set()
    assert {*schema.OPTIONS, "codec", "match", "rank"} - WORDS == set()
    assert "schema: mfs.recipe/1" in WORDS


def test_every_key_on_the_page_is_one() -> None:
    known = keys(schema.Recipe)
    dotted = {word for word in WORDS if re.fullmatch(r"(base|objective|deltas|output|limits)\.[a-z_.]+", word)}
    assert dotted - known - {"deltas.default", "deltas.default.codec"} == set()


def test_every_value_is_named() -> None:
    kinds: tuple[Any, ...] = (
        schema.CodecName, schema.FactorType, schema.ValueType, schema.Selection, schema.ScaleType,
        schema.BaseMode, schema.BaseStore,
    )  # fmt: skip
    assert {value for kind in kinds for value in get_args(kind)} - WORDS == set()


def test_its_example_of_a_key_works() -> None:
    (pair,) = re.findall(r"--set (deltas\.default\.bits=\d)", PAGE)
    key, _, value = pair.partition("=")
    assert load_recipe(None, {"deltas.default.codec": "kbit", key: int(value)}).deltas.default.bits == 3


def test_defaults_are_those_of_the_page() -> None:
    recipe = load_recipe()
    assert (recipe.base.mode, recipe.base.store, recipe.seed) == ("default", "auto", 0)
    assert recipe.output.shard_size == 2_000_000_000
    assert str(recipe.objective.budget) == "5 %"
    assert (recipe.deltas.default.codec, recipe.deltas.default.factors) == ("auto", None)
