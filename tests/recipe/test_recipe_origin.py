"""Where each value of an effective recipe came from."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfs_decompose.errors import UsageError
from mfs_decompose.recipe.load import change_recipe, load_recipe, load_with_origins
from mfs_decompose.recipe.presets import preset_names, read_preset

MINE = """\
schema: mfs.recipe/1
about: prose
base:
  mode: mean
objective: {rank: 7}
deltas:
  default:
    codec: lowrank
    factors: int8
  rules:
    - match: ["*.q_proj.*", "*.k_proj.*"]
      codec: lowrank
    - {match: "*norm*", codec: raw}
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(MINE, encoding="utf-8")
    return path


def origins(source: object = None, overrides: dict[str, object] | None = None, **options: str) -> dict[str, str]:
    named = {key.replace("__", "."): option for key, option in options.items()}
    return dict(load_with_origins(source, overrides, named)[1])  # type: ignore[arg-type]


def test_without_a_recipe_all_is_default() -> None:
    assert set(origins().values()) == {"default"}
    assert list(origins()) == [
        "base.mode",
        "base.store",
        "objective.budget",
        "deltas.default.codec",
        "deltas.keep_exact",
        "output.shard_size",
        "seed",
    ]


def test_every_value_of_a_file_has_its_line(mine: Path) -> None:
    assert origins(mine) == {
        "base.mode": f"recipe {mine}:4",
        "base.store": "default",
        "objective.rank": f"recipe {mine}:5",
        "deltas.default.codec": f"recipe {mine}:8",
        "deltas.default.factors": f"recipe {mine}:9",
        "deltas.rules[0].codec": f"recipe {mine}:12",
        "deltas.rules[0].factors": "default",
        "deltas.rules[0].match": f"recipe {mine}:11",
        "deltas.rules[1].codec": f"recipe {mine}:13",
        "deltas.rules[1].match": f"recipe {mine}:13",
        "deltas.keep_exact": "default",
        "output.shard_size": "default",
        "seed": "default",
    }


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_is_named_with_lines_that_say_so(name: str) -> None:
    lines = read_preset(name).splitlines()
    recipe, found = load_with_origins(name)
    codec = found["deltas.default.codec"]
    assert codec.startswith(f"preset {name}:")
    assert lines[int(codec.rpartition(":")[2]) - 1].split() == ["codec:", recipe.deltas.default.codec]


def test_an_option_has_its_own_name_and_the_rest_is_set() -> None:
    found = origins(
        "lowrank-r16", {"seed": 3, "objective.budget": "4%", "limits.max_ram": "1GB"},
        objective__budget="--budget", limits__max_ram="--max-ram",
    )  # fmt: skip
    assert found["seed"] == "--set"
    assert found["objective.budget"] == "--budget"
    assert found["limits.max_ram"] == "--max-ram"
    assert found["deltas.default.factors"].startswith("preset lowrank-r16:")
    assert "objective.rank" not in found


def test_what_an_option_displaces_is_default_again() -> None:
    """Another codec drops the recipe's factors; what stands there then is the codec's own default."""
    found = origins("lowrank-r16", {"deltas.default.codec": "sparse", "objective.density": "2%"})
    assert found["deltas.default.values"] == "default"
    assert "deltas.default.factors" not in found
    back = {"deltas.default.codec": "lowrank", "objective.rank": 2}
    assert origins("sparse", back)["deltas.default.factors"] == "default"


def test_setting_a_mapping_sets_what_it_holds_and_no_more() -> None:
    found = origins("lowrank-r16", {"deltas": {"default": {"codec": "lowrank"}}})
    assert (found["deltas.default.codec"], found["deltas.default.factors"]) == ("--set", "default")


def test_of_two_overrides_the_last_counts(mine: Path) -> None:
    wide: dict[str, object] = {"deltas.default": {"codec": "lowrank", "factors": "bf16"}}
    narrow: dict[str, object] = {"deltas.default.factors": "int4"}
    first = origins(mine, wide | narrow, deltas__default__factors="--narrow")
    assert (first["deltas.default.codec"], first["deltas.default.factors"]) == ("--set", "--narrow")
    recipe, last = load_with_origins(mine, narrow | wide, {"deltas.default.factors": "--narrow"})
    assert (recipe.deltas.default.factors, last["deltas.default.factors"]) == ("bf16", "--set")


def test_an_override_that_takes_a_value_away_leaves_the_default(mine: Path) -> None:
    assert origins(mine, {"objective.rank": None})["objective.budget"] == "default"


CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "base.mode": st.sampled_from(["auto", "known", "mean", "refined", "shared"]),
        "base.store": st.sampled_from(["copy", "reference"]),
        "seed": st.integers(0, 9),
        "output.shard_size": st.sampled_from(["64kB", 5_000]),
        "deltas.default.factors": st.sampled_from(["int4", "int8", "bf16"]),
        "limits.max_disk": st.sampled_from(["1GB", 7_000]),
    },
)


@given(CHANGES, st.sampled_from([None, "lowrank-int4", "lowrank-r16"]))
def test_origins_cover_just_the_effective_recipe(changes: dict[str, object], source: str | None) -> None:
    """Oracle: what changes when an override is left out was given by it."""
    recipe, found = load_with_origins(source, changes)
    assert recipe == load_recipe(source, changes)
    assert {key for key, origin in found.items() if origin == "--set"} == set(changes)
    for key, origin in found.items():
        if origin == "default":
            assert load_with_origins(None)[1][key] == "default"
        elif origin != "--set":
            line = read_preset(str(source)).splitlines()[int(origin.rpartition(":")[2]) - 1]
            assert key.rpartition(".")[2] in line


# Changing a recipe that is there already.


@given(CHANGES)
def test_a_recipe_is_changed_as_it_would_have_been_loaded(changes: dict[str, object]) -> None:
    assert change_recipe(load_recipe("lowrank-r16"), changes).canonical() == load_recipe(
        "lowrank-r16", changes
    ).canonical()  # fmt: skip


def test_a_change_may_be_wrong() -> None:
    with pytest.raises(UsageError, match="the objective density needs the codec sparse"):
        change_recipe(load_recipe(), {"objective.density": "2%"})
    with pytest.raises(UsageError, match="did you mean 'seed'"):
        change_recipe(load_recipe(), {"sed": 2})
