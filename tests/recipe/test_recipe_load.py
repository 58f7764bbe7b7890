from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mfs_decompose.errors import RecipeError, UsageError
from mfs_decompose.recipe.choose import choose
from mfs_decompose.recipe.load import load_recipe, parse_set
from mfs_decompose.recipe.presets import preset_names, read_preset
from mfs_decompose.recipe.schema import Recipe

WRONG = """\
schema: mfs.recipe/1
bas: {mode: known}
base: {mode: refind, store: copi}
objective: {budget_total: 3%, budgt: 2, rank: x}
deltas:
  default: {codec: sparse, factors: int4}
  rules:
    - {match: "*n*", codec: identical}
    - {codec: raw, rnk: 2}
    - match: []
      codec: losles
limits: {max_ram: lots}
seed: -1
seed: 2
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def refused(source: Any, overrides: dict[str, object] | None = None, *, kind: type[Exception] = RecipeError) -> Any:
    with pytest.raises(kind) as caught:
        load_recipe(source, overrides)
    return caught.value


def test_no_recipe_is_the_preset_of_the_default_behaviour() -> None:
    assert load_recipe() == Recipe()
    assert load_recipe("balanced").canonical() == load_recipe(None).canonical()


def test_every_preset_loads_and_opens_with_what_and_when() -> None:
    assert preset_names() == (
        "balanced", "lora-exact", "lossless", "lowrank-int4", "lowrank-r16", "near-lossless", "serving", "sign-1bit",
        "smallest", "sparse",
    )  # fmt: skip
    for name in preset_names():
        what, when = read_preset(name).splitlines()[:2]
        assert what.startswith("# What: ")
        assert when.startswith("# When: ")
        assert load_recipe(name).about


def test_presets_say_what_their_names_say() -> None:
    assert load_recipe("lossless").deltas.default.codec == "lossless"
    assert load_recipe("lowrank-r16").objective.rank == 16
    assert load_recipe("sparse").objective.density == pytest.approx(0.02)


VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # vllm/config/lora.py, MaxLoRARanks above 1


def test_presets_for_allocation_and_for_serving() -> None:
    balanced, smallest = load_recipe("balanced"), load_recipe("smallest")
    assert balanced.deltas.default.codec == smallest.deltas.default.codec == "auto"
    assert balanced.objective.budget is not None and smallest.objective.budget is not None
    assert (balanced.objective.budget.share, smallest.objective.budget.share) == (0.05, 0.02)
    serving = load_recipe("serving")
    assert serving.objective.rank in VLLM_RANKS
    assert serving.deltas.default.factors == "bf16"  # what a LoRA runtime computes with
    for name in ("model.layers.3.self_attn.q_proj.weight", "model.embed_tokens.weight", "lm_head.weight"):
        assert choose(serving, name).codec == "lowrank"  # a head of its own would cost a step more than all layers
    for name in ("balanced", "smallest", "serving"):
        assert read_preset(name).splitlines()[2].startswith("# Expect: ")
        assert all(len(line) <= 140 for line in read_preset(name).splitlines())
    assert str(VLLM_RANKS)[1:-1] in read_preset("serving")


def test_presets_are_found_in_the_wheel_before_anything_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packaged = tmp_path / "_data" / "recipes"
    packaged.mkdir(parents=True)
    (packaged / "only.yaml").write_text("schema: mfs.recipe/1\nseed: 5\n", encoding="utf-8")
    monkeypatch.setattr("importlib.resources.files", lambda package: tmp_path)
    assert preset_names() == ("only",)
    assert load_recipe("only").seed == 5


def test_an_unknown_preset_is_guessed() -> None:
    error = refused("lowrnk-int4")
    assert error.message == "there is no recipe named 'lowrnk-int4'; did you mean 'lowrank-int4'?"
    assert ", ".join(preset_names()) in error.hint
    assert "did you mean" not in refused("zzz").message


def test_a_file_is_a_path_or_ends_in_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "schema: mfs.recipe/1\nseed: 9\n")
    assert load_recipe(path).seed == load_recipe(str(path)).seed == 9
    monkeypatch.chdir(tmp_path)
    assert load_recipe("mine.yaml").seed == 9
    path.rename("mine")
    assert load_recipe("mine").seed == 9
    assert refused("other.yaml").message == "expected a recipe at other.yaml, found nothing there"
    assert "found nothing" in refused("./lossless").message
    assert refused(tmp_path).message.startswith("cannot read the recipe")
    path.write_bytes(b"\xff\xfe")
    assert "UTF-8" in refused(path).message


def test_every_mistake_is_named_with_its_line(tmp_path: Path) -> None:
    path = write(tmp_path, WRONG)
    lines = refused(path).message.splitlines()
    assert lines[0] == f"13 mistakes in {path}:"
    assert [line.removeprefix(f"  {path}:") for line in lines[1:]] == [
        "2: bas: unknown key; did you mean 'base'?",
        "3: base.mode: expected default, known, mean, refined, shared or auto, found 'refind'; did you mean 'refined'?",
        "3: base.store: expected auto, copy, reference or hardlink, found 'copi'; did you mean 'copy'?",
        "4: objective.rank: expected a whole number, found 'x'",
        "4: objective.budgt: unknown key; did you mean 'budget'?",
        "6: deltas.default.factors: factors is an option of lowrank, and the codec is sparse",
        "8: deltas.rules[0].codec: identical is chosen by itself where a tensor equals the base; name another codec",
        "9: deltas.rules[1].match: is missing",
        "9: deltas.rules[1].rnk: unknown key; did you mean 'rank'?",
        "10: deltas.rules[2].match: expected a glob or a list of globs, found []",
        "11: deltas.rules[2].codec: expected auto, lowrank, sparse, sign, ternary, kbit, deadzone, rowsparse, "
        "lossless, lora-exact or raw, "
        "found 'losles'; did you mean 'lossless'?",
        "12: limits.max_ram: expected an amount of bytes such as 80MB or 1.5GiB, found 'lots'",
        "14: seed: given twice, first on line 13",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("schema: mfs.recipe/1\nobjective: {rank: 2, density: 1%}\n", ":2: objective.density: expected one objective"),
        ("schema: mfs.recipe/2\n", ":1: schema: expected mfs.recipe/1, found 'mfs.recipe/2'"),
        ("seed: 1\n", ":1: expected the line `schema: mfs.recipe/1`"),
        ("", ":1: expected a mapping"),
        ("a: [\n", ": not YAML"),
        ("schema: mfs.recipe/1\nobjective: {max_rel_error: 0.1}\n", ":2: objective.max_rel_error: not in this version"),
        ("schema: mfs.recipe/1\nobjective: {target: kl}\n", ":2: objective.target: expected a target such as kl=1e-3"),
        ("schema: mfs.recipe/1\nobjective: 3\n", ":2: objective: expected a mapping of keys to values, found 3"),
        ("schema: mfs.recipe/1\ndeltas: {rules: 3}\n", ":2: deltas.rules: expected a list, found 3"),
        ("schema: mfs.recipe/1\nseed: 9223372036854775808\n", ":2: seed: expected less than 9223372036854775808"),
        ("schema: mfs.recipe/1\n<<: {seed: 1}\n", ":2: <<: unknown key"),
    ],
)
def test_one_mistake_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    error = refused(path)
    assert message in error.message
    assert error.message.startswith(f"{path}:")
    assert "\n" not in error.message
    assert error.exit_code == 10


def test_the_hint_lists_the_keys_that_go_there(tmp_path: Path) -> None:
    assert refused(write(tmp_path, "schema: mfs.recipe/1\nbase: {mod: x}\n")).hint == "base takes mode, store"
    text = "schema: mfs.recipe/1\ndeltas: {rules: [{match: a, codec: raw, x: 1}]}\n"
    assert refused(write(tmp_path, text)).hint == (
        "deltas.rules[0] takes codec, factors, residual, values, select, scale, bits, step, rows, match, rank"
    )


# What the command line changes.


def test_options_change_single_values(tmp_path: Path) -> None:
    path = write(tmp_path, "schema: mfs.recipe/1\nseed: 1\nbase: {mode: mean, store: copy}\n")
    made = load_recipe(path, {"base.store": "reference", "limits.max_ram": "1GB"})
    assert (made.base.mode, made.base.store, made.seed, made.limits.max_ram) == ("mean", "reference", 1, 10**9)


def test_an_option_can_give_a_falsy_value(tmp_path: Path) -> None:
    path = write(tmp_path, "schema: mfs.recipe/1\nseed: 3\nlimits: {max_ram: 1GB}\n")
    made = load_recipe(path, {"seed": 0, "limits.max_ram": None})
    assert (made.seed, made.limits.max_ram) == (0, None)


def test_an_objective_from_the_command_line_replaces_the_one_of_the_recipe() -> None:
    made = load_recipe("lowrank-r16", {"objective.budget": "80MB"})
    assert (made.objective.kind, made.deltas.default.factors) == ("budget", "bf16")


def test_a_codec_from_the_command_line_drops_the_options_of_the_other() -> None:
    assert load_recipe("lowrank-int4", {"deltas.default.codec": "sparse"}).deltas.default.values == "bf16"
    assert load_recipe("lowrank-r16", {"deltas.default.codec": "lowrank"}).deltas.default.factors == "bf16"
    made = load_recipe(
        "sparse", {"deltas.default.codec": "lowrank", "deltas.default.factors": "int8", "objective.rank": 5}
    )
    assert (made.deltas.default.factors, made.objective.rank) == ("int8", 5)
    assert load_recipe(None, {"deltas.default.codec": "lossless"}).objective.kind is None
    assert load_recipe("lossless", {"deltas.default.codec": "lowrank"}).objective.kind == "budget"


@pytest.mark.parametrize(
    ("source", "overrides", "message"),
    [
        (None, {"objective.budget": "5%", "objective.rank": 3}, "expected one objective, found budget and rank"),
        (None, {"objective": {"budget": "5%", "rank": 3}}, "expected one objective, found budget and rank"),
        (None, {"deltas.default.codec": "raw", "objective.rank": 3}, "the codec raw takes no objective, found rank"),
        ("sparse", {"deltas.default.codec": "lowrank"}, "the objective density needs the codec sparse"),
        ("sparse", {"deltas.default.factors": "int8"}, "factors is an option of lowrank"),
        (None, {"objective.budget": "5"}, "objective.budget: expected a budget such as 5% or 80MB, found '5'"),
        (None, {"objectiv.budget": "5%"}, "objectiv: unknown key; did you mean 'objective'?"),
        (None, {"deltas.defalt.codec": "raw"}, "deltas.defalt: unknown key; did you mean 'default'?"),
        (None, {"deltas.rules.0.codec": "raw"}, "deltas.rules: expected a list"),
        (None, {"seed": 1, "seed.x": 1}, "seed holds no keys; set it as a whole"),
        (None, {"deltas": 3}, "deltas: expected a mapping"),
        (None, {"deltas.default": None}, "deltas.default: expected a mapping"),
        (None, {"schema": "mfs.recipe/2"}, "schema: expected mfs.recipe/1"),
    ],
)
def test_a_wrong_option_is_a_mistake_of_usage(source: str | None, overrides: dict[str, object], message: str) -> None:
    error = refused(source, overrides, kind=UsageError)
    assert message in error.message
    assert error.exit_code == 2


def test_a_wrong_file_is_blamed_even_with_wrong_options(tmp_path: Path) -> None:
    path = write(tmp_path, "schema: mfs.recipe/1\nsed: 1\n")
    assert "sed: unknown key" in refused(path, {"objective.rank": "x"}).message


def test_overrides_are_left_as_they_were() -> None:
    overrides: dict[str, object] = {"deltas": {"default": {"codec": "raw"}}}
    load_recipe(None, overrides)
    assert overrides == {"deltas": {"default": {"codec": "raw"}}}
    both: dict[str, object] = {"base": {"mode": "known"}, "base.store": "reference"}
    assert load_recipe(None, both).base.store == "reference"
    assert both["base"] == {"mode": "known"}


def test_set_pairs_are_yaml() -> None:
    assert parse_set(["objective.budget=5%", "seed=3", "base.mode=mean", "limits.max_ram=", "about=a=b"]) == {
        "objective.budget": "5%", "seed": 3, "base.mode": "mean", "limits.max_ram": None, "about": "a=b",
    }  # fmt: skip


@pytest.mark.parametrize("pair", ["seed", "=3", "seed.=3", ".seed=3", "a..b=3", "seed=[1", "seed=1\nx: 2"])
def test_a_wrong_set_pair_is_a_mistake_of_usage(pair: str) -> None:
    with pytest.raises(UsageError, match="--set"):
        parse_set([pair])


def test_a_key_set_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="--set gives seed twice"):
        parse_set(["seed=1", "seed=2"])
