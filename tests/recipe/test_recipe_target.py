"""A target in a recipe: two spellings, one canonical form."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfs_decompose.errors import UsageError
from mfs_decompose.recipe.load import change_recipe, load_recipe
from mfs_decompose.recipe.values import Target, read_target


@pytest.mark.parametrize(
    "value", ["kl=1e-3", "kl=0.001", " kl = 1.0e-3", {"kl": 1e-3}, {"kl": "1e-3"}, Target("kl", 0.001)]
)
def test_all_spellings_are_one(value: Any) -> None:
    assert read_target(value) == Target("kl", 0.001)
    recipe = load_recipe(None, {"objective.target": value})
    assert recipe.canonical()["objective"] == {"target": "kl=0.001"}
    assert change_recipe(recipe, {}).canonical() == recipe.canonical()
    assert (recipe.objective.kind, recipe.objective.capped) == ("target", True)


@pytest.mark.parametrize(
    "value", ["kl", "kl=", "kl=0", "kl=-1", "kl=nan", "kl=inf", "top1=0.9", 0.001, True, {}, {"kl": 1, "ppl": 1},
              {"kl": True}, {"kl": None}, ["kl=1"], "=1"],
)  # fmt: skip
def test_what_is_no_target(value: Any) -> None:
    with pytest.raises(ValueError, match=r"expected a target such as kl=1e-3 or ppl=0\.001"):
        read_target(value)
    with pytest.raises(UsageError, match="expected a target"):
        load_recipe(None, {"objective.target": value})


@given(st.sampled_from(["kl", "ppl"]), st.floats(min_value=5e-324, allow_infinity=False, allow_nan=False))
def test_what_is_written_reads_back(kind: Any, limit: float) -> None:
    assert read_target(Target(kind, limit).plain()) == Target(kind, limit)
