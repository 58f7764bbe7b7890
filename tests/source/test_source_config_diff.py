from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfs_decompose.source.config_diff import NOISE, Change, compare_configs, compare_objects, plain

LEAVES = st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.5, 1.0, math.inf, math.nan, "x", "1"])
OBJECTS = st.recursive(
    st.dictionaries(st.sampled_from("abcd"), LEAVES | st.lists(LEAVES, max_size=2), max_size=3),
    lambda inner: st.dictionaries(st.sampled_from("abcd"), LEAVES | inner, max_size=3),
    max_leaves=8,
)


def changes(a: dict[str, Any], b: dict[str, Any]) -> dict[str, tuple[object, object]]:
    return {one.key: (one.a, one.b) for one in compare_configs(a, b).changes}


def text(value: object) -> str:
    """What makes two JSON values the same: numbers by value, so 1 and 1.0 are, and true is neither."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{text(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(text(one) for one in value) + "]"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"number {float(value)}"
    return json.dumps(value)


@given(OBJECTS, OBJECTS)
def test_a_difference_is_found_exactly_where_there_is_one(a: dict[str, Any], b: dict[str, Any]) -> None:
    found = compare_objects(a, b)
    assert (found == []) == (text(a) == text(b))
    assert [one.key for one in found] == [one.key for one in compare_objects(b, a)]
    patched = json.loads(json.dumps(a))
    for one in found:  # the changes turn A into B
        *way, last = one.key.split(".")
        place = patched
        for key in way:
            place = place[key]
        if one.kind == "only_a":
            del place[last]
        else:
            place[last] = _original(b, one.key)
    assert text(patched) == text(b)
    json.dumps([(one.a, one.b) for one in found], allow_nan=False)


def _original(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = config[part]
    return config


def test_a_key_on_one_side_is_told_from_a_null() -> None:
    found = compare_objects({"a": None, "b": 1}, {"b": None, "c": None})
    assert found == [
        Change("a", "only_a", None, None),
        Change("b", "changed", 1, None),
        Change("c", "only_b", None, None),
    ]


def test_nested_keys_are_dotted_and_lists_are_one_value() -> None:
    a = {"text_config": {"hidden_size": 64, "layers": [1, 2]}, "x": {"y": 1}}
    b = {"text_config": {"hidden_size": 96, "layers": [1, 3]}, "x": 3}
    assert changes(a, b) == {
        "text_config.hidden_size": (64, 96),
        "text_config.layers": ([1, 2], [1, 3]),
        "x": ({"y": 1}, 3),
    }


@pytest.mark.parametrize("key", sorted(NOISE))
def test_keys_of_origin_are_noise_at_any_depth(key: str) -> None:
    found = compare_configs({key: "a", "text_config": {key: 1}}, {key: "b", "text_config": {"vocab_size": 5}})
    assert [one.key for one in found.changes] == ["text_config.vocab_size"]
    assert sorted(found.noise) == sorted([key, f"text_config.{key}"])


def test_two_spellings_of_the_dtype_are_one() -> None:
    found = compare_configs({"torch_dtype": "bfloat16"}, {"dtype": "torch.bfloat16"})
    assert (found.changes, found.noise) == ((), ("dtype", "torch_dtype"))
    assert changes({"torch_dtype": "bfloat16"}, {"dtype": "float32"}) == {"dtype": ("bfloat16", "float32")}
    same = compare_configs({"torch_dtype": "bfloat16"}, {"torch_dtype": "float32"})
    assert ([one.key for one in same.changes], same.noise) == (["dtype"], ())


def test_true_is_not_one_and_nan_is_itself() -> None:
    assert (
        compare_objects({"a": 1, "n": math.nan, "l": [math.nan, 1]}, {"a": 1.0, "n": math.nan, "l": [math.nan, 1.0]})
        == []
    )
    assert [one.key for one in compare_objects({"a": 1, "l": [True]}, {"a": True, "l": [1]})] == ["a", "l"]


def test_what_json_cannot_hold_is_spelled_out() -> None:
    (found,) = compare_objects({"a": [math.inf, {"b": -math.inf}]}, {"a": math.nan})
    assert (found.a, found.b) == (["inf", {"b": "-inf"}], "nan")


def test_depth_is_no_trap() -> None:
    """Nested as deep as the JSON reader lets pass: compared or called different, never a crash."""
    deep = json.loads('{"a":' * 900 + "1" + "}" * 900)
    other = json.loads('{"a":' * 900 + "2" + "}" * 900)
    listed = json.loads('{"a":' + "[" * 900 + "]" * 900 + "}")
    assert compare_configs(deep, json.loads('{"a":' * 900 + "1" + "}" * 900)).changes == ()
    for a, b in ((deep, other), (deep, listed), (listed, deep), ({}, deep)):
        found = compare_configs(a, b).changes
        assert len(found) == 1
        json.dumps([found[0].a, found[0].b])
    assert plain({"a": 1}) == {"a": 1}


def test_rope_is_compared_by_meaning() -> None:
    old = {"rope_theta": 10000.0, "rope_scaling": None, "hidden_size": 3}
    new = {"rope_parameters": {"rope_theta": 10000, "rope_type": "default"}, "hidden_size": 3}
    found = compare_configs(old, new)
    assert (found.changes, found.noise) == ((), ("rope_parameters", "rope_scaling", "rope_theta"))
    other = {**old, "rope_theta": 500000.0}
    assert changes(other, new) == {"rope_parameters.rope_theta": (500000.0, 10000)}
    assert changes(old, other) == {"rope_parameters.rope_theta": (10000.0, 500000.0)}
    assert compare_configs(old, other).noise == ()
    nested = compare_configs({"text_config": old}, {"text_config": {**new, "rope_parameters": {"rope_theta": 7}}})
    assert [one.key for one in nested.changes] == ["text_config.rope_parameters.rope_theta"]
    assert nested.noise == ()
