"""The commands of a card: what they set gives the very recipe, and nothing leaves its line."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfs_decompose.artifact.canonical import canonical_bytes, load_canonical
from mfs_decompose.artifact.commands import changed_keys, portable_ref, shell_line
from mfs_decompose.recipe.load import load_recipe, parse_set
from mfs_decompose.recipe.presets import preset_names
from mfs_decompose.recipe.schema import Recipe


def again(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The effective recipe that the pairs give, over a shell and back."""
    pairs = [shlex.split(shell_line([pair]))[0] for pair in changed_keys(recipe)]
    return load_recipe(None, parse_set(pairs)).canonical()


def test_the_default_recipe_needs_no_key() -> None:
    assert changed_keys(Recipe().canonical()) == []


@pytest.mark.parametrize("name", preset_names())
def test_presets_come_back(name: str) -> None:
    recipe = load_recipe(name).canonical()
    assert again(recipe) == recipe


RULES = [
    {"match": ["*.mlp.*", "odd \"quotes\" 'and' $(x) `y`"], "codec": "sparse", "values": "int8"},
    {"match": "*.\u00fc\U0001f600\u202e\n*", "codec": "lossless"},
    {"match": "model.embed*", "codec": "lowrank", "rank": 3},
]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            {"objective.rank": 16},
            ["deltas.default.codec=lowrank", "deltas.default.factors=int4", "objective.rank=16"],
        ),
        ({"objective.budget": "3%"}, ["objective.budget=0.03"]),
        ({"objective.budget": "1e-07"}, ["objective.budget=1e-07"]),
        ({"objective.budget": "100%"}, ["objective.budget=1.0"]),
        ({"objective.budget": "80MB"}, ["objective.budget=80000000B"]),
        ({"objective.budget": "7B"}, ["objective.budget=7B"]),
        ({"deltas.default.codec": "lossless"}, ["deltas.default.codec=lossless"]),
        (
            {"deltas.default.factors": "int8"},
            ["deltas.default.codec=lowrank", "deltas.default.factors=int8"],
        ),
        ({"base.mode": "mean", "seed": 2**62}, ["base.mode=mean", f"seed={2**62}"]),
        ({"output.shard_size": "5MB", "limits.max_ram": "1GB"}, ["output.shard_size=5000000"]),
        (
            {"deltas.default.codec": "sparse", "objective.density": "2%"},
            ["deltas.default.codec=sparse", "deltas.default.values=bf16", "objective.density=0.02"],
        ),
    ],
)
def test_changed_keys_come_back(overrides: dict[str, object], said: list[str]) -> None:
    recipe = load_recipe(None, overrides).canonical()
    assert changed_keys(recipe) == said
    assert again(recipe) == recipe


def test_rules_come_back_whatever_is_in_them() -> None:
    recipe = load_recipe(None, {"deltas.rules": RULES}).canonical()
    (pair,) = changed_keys(recipe)
    assert pair.startswith("deltas.rules=[{") and pair.isascii() and pair.isprintable()
    assert again(recipe) == recipe


def test_the_manifest_gives_the_same_pairs() -> None:
    recipe = load_recipe(None, {"deltas.rules": RULES, "seed": 3}).canonical()
    stored = load_canonical(canonical_bytes(recipe), "recipe", 10_000)
    assert changed_keys(stored) == changed_keys(recipe)


@given(st.text(min_size=1, max_size=12).filter(lambda text: not any("\ud800" <= one <= "\udfff" for one in text)))
def test_any_glob_comes_back(glob: str) -> None:
    recipe = load_recipe(None, {"deltas.rules": [{"match": [glob], "codec": "lossless"}]}).canonical()
    assert again(recipe) == recipe


@given(st.lists(st.text(max_size=20), min_size=1, max_size=4))
def test_a_line_is_one_line_and_its_words(words: list[str]) -> None:
    line = shell_line(words)
    assert line.isprintable()
    assert [len(word) for word in shlex.split(line)] == [len(word) for word in words]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("org/name", "org/name"),
        ("hf://org/name@main", "hf://org/name@main"),
        ("/home/me/secret", "PATH"),
        ("./math", "PATH"),
        ("org/name/deeper", "PATH"),
        ("https://elsewhere/x", "PATH"),
        ("", "PATH"),
    ],
)
def test_only_models_of_the_hub_are_named(text: str, shown: str) -> None:
    assert portable_ref(text) == shown


def test_a_folder_that_looks_like_a_model_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert portable_ref("org/name") == "PATH"
