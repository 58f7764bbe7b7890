from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from mfs_decompose.recipe.choose import choose, unmatched_rules
from mfs_decompose.recipe.schema import Delta, Objective, Recipe
from mfs_decompose.recipe.values import Budget

NORMS = {"match": ["*norm*", "*.bias"], "codec": "raw"}
HEAD = {"match": "lm_head*", "codec": "lowrank", "rank": 32, "factors": "bf16"}


def recipe(**data: Any) -> Recipe:
    return Recipe.model_validate(data)


def mistakes(**data: Any) -> list[tuple[tuple[str | int, ...], str]]:
    with pytest.raises(ValidationError) as caught:
        Recipe.model_validate(data)
    return [(e["loc"], e.get("ctx", {}).get("text", e["msg"])) for e in caught.value.errors()]


def test_nothing_given_is_the_default_behaviour() -> None:
    assert recipe().canonical() == {
        "schema": "mfs.recipe/1",
        "base": {"mode": "default", "store": "auto"},
        "objective": {"budget": 0.05},
        "deltas": {"default": {"codec": "auto"}, "rules": []},
        "output": {"shard_size": 2_000_000_000},
        "seed": 0,
    }


def test_every_key_can_be_given() -> None:
    data = {
        "schema": "mfs.recipe/1",
        "about": {"what": "all of it"},
        "base": {"mode": "mean", "store": "hardlink"},
        "objective": {"budget": "80MB"},
        "deltas": {"default": {"codec": "lowrank", "factors": "int8"}, "rules": [NORMS, HEAD]},
        "output": {"shard_size": "1MiB"},
        "limits": {"max_ram": "1.5GB", "max_disk": None},
        "seed": 7,
    }
    made = Recipe.model_validate(data)
    assert made.objective == Objective(budget=Budget(nbytes=80_000_000))
    assert made.deltas.rules[0].match == ("*norm*", "*.bias")
    assert (made.deltas.rules[1].rank, made.deltas.rules[1].factors) == (32, "bf16")
    assert (made.output.shard_size, made.limits.max_ram, made.limits.max_disk) == (2**20, 1_500_000_000, None)
    assert (made.base.mode, made.base.store, made.seed, made.about) == ("mean", "hardlink", 7, {"what": "all of it"})


def test_a_canonical_recipe_is_json_and_reads_back() -> None:
    made = recipe(objective={"budget": "7.5%"}, deltas={"rules": [NORMS, HEAD]}, seed=2**63 - 1)
    text = json.dumps(made.canonical(), allow_nan=False)
    assert Recipe.model_validate(json.loads(text)) == made


def test_limits_and_prose_stay_out_of_the_canonical_recipe() -> None:
    assert recipe(limits={"max_ram": "1GB"}, about="mine").canonical() == recipe().canonical()
    assert recipe(seed=1).canonical() != recipe().canonical()


def test_a_recipe_is_frozen_and_hashes_nothing_mutable() -> None:
    made = recipe()
    with pytest.raises(ValidationError):
        made.seed = 3
    with pytest.raises(ValidationError):
        made.deltas.default.codec = "raw"
    assert isinstance(made.deltas.rules, tuple)


@pytest.mark.parametrize(
    ("codec", "factors", "values"),
    [
        ("auto", None, None),
        ("lowrank", "int4", None),
        ("sparse", None, "bf16"),
        ("raw", None, None),
        ("lossless", None, None),
    ],
)
def test_each_codec_has_its_own_option(codec: str, factors: str | None, values: str | None) -> None:
    delta = Delta.model_validate({"codec": codec})
    assert (delta.factors, delta.values) == (factors, values)


@pytest.mark.parametrize(
    ("default", "objective", "codec"),
    [
        ({}, {}, "auto"),
        ({}, {"budget": "3%"}, "auto"),
        ({}, {"rank": 16}, "lowrank"),
        ({}, {"density": "2%"}, "sparse"),
        ({"factors": "banded"}, {}, "lowrank"),
        ({"values": "int8"}, {"density": "2%"}, "sparse"),
        ({"scale": "row"}, {}, "sign"),
        ({"step": 1e-4}, {}, "deadzone"),
    ],
)
def test_an_option_or_an_objective_stands_for_its_codec(
    default: dict[str, Any], objective: dict[str, Any], codec: str
) -> None:
    made = recipe(deltas={"default": default}, objective=objective)
    assert made.deltas.default.codec == codec
    assert Recipe.model_validate(made.canonical()) == made


def test_a_codec_that_is_named_is_the_one() -> None:
    found = mistakes(deltas={"default": {"codec": "auto"}}, objective={"rank": 16})
    assert [message for _, message in found] == ["the objective rank needs the codec lowrank, found auto"]
    assert "factors is an option of lowrank" in mistakes(deltas={"default": {"codec": "auto", "factors": "int8"}})[0][1]


@pytest.mark.parametrize(
    ("delta", "blamed"),
    [
        ({"codec": "sparse", "factors": "int4"}, "factors is an option of lowrank"),
        ({"codec": "raw", "factors": "int4"}, "factors is an option of lowrank"),
        ({"codec": "lowrank", "values": "bf16"}, "values is an option of sparse"),
        ({"codec": "lossless", "values": "int8"}, "values is an option of sparse"),
    ],
)
def test_an_option_of_another_codec_is_refused(delta: dict[str, str], blamed: str) -> None:
    for place in ({"default": delta}, {"rules": [{"match": "*", **delta}]}):
        assert any(blamed in message for _, message in mistakes(deltas=place))


def test_a_rank_in_a_rule_needs_lowrank() -> None:
    found = mistakes(deltas={"rules": [{"match": "*", "codec": "sparse", "rank": 3}]})
    assert "rank is an option of lowrank" in found[0][1]


@pytest.mark.parametrize(
    "two", [{"budget": "5%", "rank": 8}, {"rank": 8, "density": "2%"}, {"budget": 0.1, "density": 0.1}]
)
def test_two_objectives_are_refused(two: dict[str, Any]) -> None:
    assert mistakes(objective=two) == [(("objective",), f"expected one objective, found {' and '.join(two)}")]


@pytest.mark.parametrize(
    ("default", "rules", "objective", "kind"),
    [
        ("auto", [], {}, "budget"),
        ("auto", [NORMS, HEAD], {"budget": "9%"}, "budget"),
        ("lowrank", [], {}, "budget"),
        ("sparse", [], {}, "budget"),
        ("lossless", [], {}, None),
        ("raw", [], {}, None),
        ("lossless", [HEAD], {}, None),  # its rank is fixed: nothing is left to an objective
        ("lossless", [{"match": "a", "codec": "lowrank"}], {}, "budget"),
        ("lowrank", [NORMS], {"rank": 4}, "rank"),
        ("sparse", [NORMS], {"density": "2%"}, "density"),
        ("sparse", [HEAD], {"density": "2%"}, "density"),
        ("sparse", [], {"budget": "9%"}, "budget"),
    ],
)
def test_an_objective_is_there_exactly_where_something_needs_it(
    default: str, rules: list[Any], objective: dict[str, Any], kind: str | None
) -> None:
    made = recipe(objective=objective, deltas={"default": {"codec": default}, "rules": rules})
    assert made.objective.kind == kind
    assert Recipe.model_validate(made.canonical()) == made


@pytest.mark.parametrize(
    ("default", "rules", "objective", "message"),
    [
        ("lossless", [], {"budget": "5%"}, "the codec lossless takes no objective, found budget"),
        ("raw", [NORMS], {"rank": 4}, "the codec raw takes no objective, found rank"),
        ("lossless", [HEAD], {"rank": 4}, "takes no objective"),
        ("lowrank", [], {"density": "2%"}, "the objective density needs the codec sparse, found lowrank"),
        ("sparse", [], {"rank": 4}, "the objective rank needs the codec lowrank, found sparse"),
        ("lowrank", [{"match": "a", "codec": "sparse"}], {"rank": 4}, "needs the codec lowrank, found sparse"),
    ],
)
def test_an_objective_that_fits_no_codec_is_refused(
    default: str, rules: list[Any], objective: dict[str, Any], message: str
) -> None:
    found = mistakes(objective=objective, deltas={"default": {"codec": default}, "rules": rules})
    assert len(found) == 1
    assert message in found[0][1]


@pytest.mark.parametrize(
    "data",
    [
        {"objectve": {}},
        {"base": {"mod": "known"}},
        {"deltas": {"default": {"codec": "lowrank", "rank": 4}}},
        {"deltas": {"rules": [{"match": "*", "codec": "raw", "density": "2%"}]}},
        {"limits": {"threads": 2}},
        {"schema": "mfs.recipe/2"},
        {"objective": {"rank": True}},
        {"objective": {"rank": 0}},
        {"objective": {"rank": 2.0}},
        {"objective": {"rank": "2"}},
        {"seed": -1},
        {"seed": 2**63},
        {"seed": True},
        {"output": {"shard_size": 0}},
        {"deltas": {"rules": {"match": "*", "codec": "raw"}}},
        {"deltas": {"rules": [{"codec": "raw"}]}},
        {"deltas": {"rules": [{"match": "*"}]}},
        {"deltas": {"rules": [{"match": [], "codec": "raw"}]}},
        {"deltas": {"rules": [{"match": ["a", 3], "codec": "raw"}]}},
        {"deltas": {"rules": [{"match": "", "codec": "raw"}]}},
        {"about": [1]},
    ],
)
def test_what_the_schema_does_not_know_is_refused(data: dict[str, Any]) -> None:
    assert mistakes(**data)


RULES = recipe(
    deltas={
        "rules": [
            {"match": "model.layers.0.*", "codec": "lossless"},
            {"match": ["*norm.weight", "*.bias"], "codec": "raw"},
            {"match": "model.layers.[12].*", "codec": "lowrank", "rank": 3},
        ]
    }
)


@pytest.mark.parametrize(
    ("name", "codec", "rank"),
    [
        ("model.layers.0.norm.weight", "lossless", None),  # the first match wins
        ("model.layers.1.norm.weight", "raw", None),
        ("model.layers.1.q_proj.bias", "raw", None),
        ("model.layers.2.q_proj.weight", "lowrank", 3),
        ("model.layers.12.q_proj.weight", "auto", None),
        ("MODEL.LAYERS.0.X", "auto", None),  # names are compared as they are written
        ("lm_head.weight", "auto", None),
    ],
)
def test_the_first_rule_that_fits_is_chosen(name: str, codec: str, rank: int | None) -> None:
    rule = choose(RULES, name)
    assert (rule.codec, rule.rank) == (codec, rank)


def test_the_default_is_chosen_as_a_rule_for_everything() -> None:
    rule = choose(RULES, "lm_head.weight")
    assert (rule.match, rule.codec, rule.factors) == (("*",), "auto", None)


def test_rules_that_hold_for_nothing_are_found() -> None:
    first, second, third = RULES.deltas.rules
    assert unmatched_rules(RULES, []) == (first, second, third)
    assert unmatched_rules(RULES, ["model.layers.0.a", "model.layers.1.b"]) == (second,)
    assert unmatched_rules(RULES, ["model.layers.0.a", "x.bias", "model.layers.2.b", "other"]) == ()


def test_a_rule_behind_another_one_holds_for_nothing() -> None:
    made = recipe(deltas={"rules": [{"match": "*", "codec": "raw"}, {"match": "a*", "codec": "lossless"}]})
    assert unmatched_rules(made, ["a", "b"]) == (made.deltas.rules[1],)
