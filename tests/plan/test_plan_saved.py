"""A plan written, read back, and held against what its sources are now."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plan_cases import LLAMA, checkpoint, grown, plan_of

from mfs_decompose import __version__
from mfs_decompose.errors import MfsError, RecipeError, SourceIncompatible
from mfs_decompose.plan.estimate import estimate
from mfs_decompose.plan.saved import SavedPlan, check_outcome, check_sources, read_plan
from mfs_decompose.plan.summary import summarise
from mfs_decompose.recipe.load import load_recipe
from mfs_decompose.source.checkpoint import Checkpoint

BASE = checkpoint("base", LLAMA)
PAIR = (checkpoint("a", LLAMA), checkpoint("b", grown(LLAMA, 3)))
RULES = {"deltas.rules": [{"match": ["*norm*", "*.k_proj.*"], "codec": "raw"}, {"match": "*", "codec": "lowrank"}]}


def document(recipe: dict[str, object] | None = None, *, mean: bool = False) -> dict[str, Any]:
    plan = plan_of(*PAIR, base=None if mean else LLAMA, recipe=recipe)
    base = None if mean else BASE
    found = summarise(plan, estimate(plan, base, PAIR, 1), base, PAIR, Path("art"))
    return json.loads(json.dumps(found))  # type: ignore[no-any-return]


def saved(folder: Path, content: object) -> SavedPlan:
    path = folder / "plan.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return read_plan(path)


def moved(source: Checkpoint, **changes: Any) -> Checkpoint:
    """The same with its one shard changed, somewhere else."""
    return replace(source, root=Path("elsewhere"), shards=(replace(source.shards[0], **changes),))


@pytest.mark.parametrize(
    "recipe",
    [
        {},
        {"objective.budget": "7%"},
        {"objective.budget": "90kB"},
        {"objective.budget": "100%"},
        {"objective.rank": 3, "seed": 12, "output.shard_size": "64kB"},
        {"deltas.default.codec": "sparse", "objective.density": "2%", "deltas.default.values": "int8"},
        {"deltas.default.codec": "lossless"},
        {"base.mode": "known", "base.store": "hardlink"},
        RULES,
    ],
)
def test_a_plan_comes_back_as_it_was(tmp_path: Path, recipe: dict[str, object]) -> None:
    written = document(recipe)
    found = saved(tmp_path, written)
    assert found.recipe.canonical() == load_recipe(None, recipe).canonical()
    assert (found.version, found.base_mode, found.base_store) == (__version__, "known", "copy")
    assert list(found.variants) == ["a", "b"]
    assert found.base is not None
    assert found.base.ref == str((Path("nowhere") / "base").absolute())
    check_sources(found, BASE, PAIR)
    check_outcome(found, written)


def test_a_mean_has_no_base(tmp_path: Path) -> None:
    found = saved(tmp_path, document(mean=True))
    assert (found.base, found.base_mode) == (None, "mean")
    check_sources(found, None, PAIR)


def test_files_that_were_moved_or_touched_are_the_same(tmp_path: Path) -> None:
    found = saved(tmp_path, document())
    check_sources(found, moved(BASE), (moved(PAIR[0], mtime_ns=99), PAIR[1]))


@pytest.mark.parametrize(
    ("change", "file"),
    [
        ({"sha256": "another header"}, "model.safetensors"),
        ({"size": 3}, "model.safetensors"),
        ({"file": "a.safetensors"}, "a.safetensors"),
    ],
)
def test_a_source_that_changed_is_named(tmp_path: Path, change: dict[str, Any], file: str) -> None:
    found = saved(tmp_path, document())
    with pytest.raises(SourceIncompatible) as caught:
        check_sources(found, BASE, (PAIR[0], moved(PAIR[1], **change)))
    assert caught.value.message == (
        f"'b' is not what {tmp_path}/plan.json was made for: elsewhere/{file} differs in size or header"
    )
    with pytest.raises(SourceIncompatible) as caught:
        check_sources(found, moved(BASE, **change), (moved(PAIR[0], **change), PAIR[1]))
    assert caught.value.message.startswith("base and 'a' are not what ")
    assert caught.value.exit_code == 12


def test_a_file_more_or_less_is_a_change(tmp_path: Path) -> None:
    found = saved(tmp_path, document())
    more = replace(PAIR[0], shards=(*PAIR[0].shards, replace(PAIR[0].shards[0], file="more.safetensors")))
    with pytest.raises(SourceIncompatible, match=r"more\.safetensors differs"):
        check_sources(found, BASE, (more, PAIR[1]))
    with pytest.raises(SourceIncompatible, match=r"model\.safetensors differs"):
        check_sources(found, BASE, (replace(PAIR[0], shards=()), PAIR[1]))


def test_a_plan_that_would_come_out_otherwise_says_why(tmp_path: Path) -> None:
    written = document()
    edited = json.loads(json.dumps(written))
    edited["variants"][1]["max_bytes"] -= 1
    with pytest.raises(RecipeError, match="would come out otherwise now: it was edited"):
        check_outcome(saved(tmp_path, edited), written)
    edited["version"] = "0.0.0-before"
    with pytest.raises(RecipeError, match=rf"it is of version 0\.0\.0-before, and this is {__version__}"):
        check_outcome(saved(tmp_path, edited), written)


def test_what_belongs_to_the_machine_does_not_count(tmp_path: Path) -> None:
    written = document()
    other = written | {"disk_free": 1, "peak_ram": 2, "disk_bytes": 3, "recipe_origins": {}}
    check_outcome(saved(tmp_path, other), written)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"schema": "mfs.plan/2"}, "expected the schema mfs.plan/1, found 'mfs.plan/2'"),
    ({"schema": None}, "expected the schema mfs.plan/1, found 'None'"),
    ({"recipe": {"schema": "mfs.recipe/1", "sed": 1}}, "recipe.sed: extra inputs are not permitted"),
    ({"recipe": None}, "recipe: "),
    (
        {"base": {"mode": "refind", "store": "copy"}},
        "base.mode: input should be 'known', 'mean', 'refined' or 'shared'",
    ),
    ({"base": {"mode": "mean", "store": "copy"}}, "its sources are base, a, b, and its variants a, b"),
    ({"sources": []}, "its sources are , and its variants a, b"),
    ({"sources": [{"id": "a"}]}, "sources.0.ref: field required"),
    ({"variants": []}, "variants: "),
    ({"version": 3}, "version: input should be a valid string"),
    ({"coverage": 1}, "coverage: "),
]


@pytest.mark.parametrize(("change", "why"), WRONG)
def test_what_is_no_plan_is_refused_in_words(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    with pytest.raises(RecipeError) as caught:
        saved(tmp_path, document() | change)
    assert caught.value.message.startswith(f"{tmp_path}/plan.json is no plan of mfs: {why}")
    assert caught.value.hint == "Make the plan again: mfs decompose ... --dry-run --save-plan FILE"
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it is not JSON"),
        ("[1]", "expected a JSON object, found list"),
        ('{"schema": "mfs.plan/1", "schema": "mfs.plan/1"}', "the key 'schema' stands in it twice"),
        ('{"schema": "mfs.plan/1", "x": NaN}', "it holds NaN"),
        ('{"schema": "mfs.plan/1"}', "version: field required"),
    ],
)
def test_what_is_no_json_either(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(RecipeError, match="is no plan of mfs: ") as caught:
        saved(tmp_path, text)
    assert why in caught.value.message


def test_a_plan_that_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(RecipeError, match=f"cannot read the plan {path}: "):
            read_plan(path)


def test_a_source_given_twice_is_no_plan(tmp_path: Path) -> None:
    written = document()
    with pytest.raises(RecipeError, match="its sources are base, a, b"):
        saved(tmp_path, written | {"sources": [*written["sources"], written["sources"][1]]})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["id", "mode", "x"]), inner),
    max_leaves=4,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(key=st.sampled_from(["schema", "recipe", "base", "sources", "variants", "coverage", "version"]), value=JSON)
def test_whatever_stands_there_is_read_or_refused(tmp_path: Path, key: str, value: object) -> None:
    try:
        found = saved(tmp_path, document() | {key: value})
    except MfsError as error:
        assert error.exit_code == 10
    else:
        assert list(found.variants) == ["a", "b"]
