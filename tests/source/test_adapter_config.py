"""adapter_config.json: every field of PEFT's LoraConfig is decided, and scales and ranks are PEFT's own."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from adapter_kinds import BASES, KINDS
from hypothesis import given
from hypothesis import strategies as st

from mfs_decompose.errors import SourceIncompatible
from mfs_decompose.source.adapter_config import AdapterConfig, parse_adapter_config
from mfs_decompose.source.adapter_fields import HARMLESS, MEANT, REFUSED


def parse(**fields: Any) -> AdapterConfig:
    return parse_adapter_config({"peft_type": "LORA", "r": 4, "lora_alpha": 6, **fields}, "here")


def refuse(**fields: Any) -> SourceIncompatible:
    with pytest.raises(SourceIncompatible) as caught:
        parse(**fields)
    assert caught.value.exit_code == 12
    assert "here" in caught.value.message
    assert caught.value.hint
    return caught.value


def test_each_field_of_peft_is_decided_once() -> None:
    from peft import LoraConfig

    fields = {field.name for field in dataclasses.fields(LoraConfig)}
    decided = [*MEANT, *HARMLESS, *REFUSED]
    assert len(decided) == len(set(decided))
    assert fields <= set(decided)
    assert set(decided) - fields == {"merge_weights", "enable_lora"}  # of earlier versions


def test_what_peft_saves_by_default_is_read() -> None:
    from peft import LoraConfig

    saved = json.loads(json.dumps(LoraConfig(r=5, lora_alpha=3, target_modules=["q"]).to_dict(), default=sorted))
    found = parse_adapter_config(saved, "here")
    assert (found.rank("m.q"), found.scale("m.q"), found.bias) == (5, 0.6, "none")


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", ["patterns", "rslora_patterns"])
def test_ranks_and_scales_are_those_of_peft(name: str) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    fields = KINDS[name].fields
    config = parse_adapter_config(dict(fields), "here")
    model = get_peft_model(AutoModelForCausalLM.from_config(BASES["llama"]()), LoraConfig(**fields))
    seen = set()
    for module, layer in model.base_model.model.named_modules():
        if hasattr(layer, "lora_A"):
            assert (config.rank(module), config.scale(module)) == (layer.r["default"], layer.scaling["default"])
            seen.add(layer.scaling["default"])
    assert len(seen) >= 4


@given(rank=st.integers(1, 512), alpha=st.floats(0.1, 1024))
def test_the_scale_is_the_quotient_correctly_rounded(rank: int, alpha: float) -> None:
    assert parse(r=rank, lora_alpha=alpha).scale("m") == alpha / rank
    assert parse(r=rank, lora_alpha=alpha, use_rslora=True).scale("m") == alpha / math.sqrt(rank)


def test_the_first_pattern_that_fits_wins_and_fits_at_the_end() -> None:
    found = parse(rank_pattern={"q": 1, "layers.1.q": 2, r"layers\.\d+\.v": 3})
    assert [found.rank(name) for name in ("layers.1.q", "x.q", "xq", "q.x", "a.layers.12.v")] == [1, 1, 4, 4, 3]


@pytest.mark.parametrize("kind", ["LOHA", "IA3", "PREFIX_TUNING", "ADALORA", "", None, 3])
def test_other_methods_are_refused_by_name(kind: object) -> None:
    error = refuse(peft_type=kind)
    assert repr(str(kind)) in error.message
    assert "merge_and_unload" in (error.hint or "")


@pytest.mark.parametrize("field", REFUSED)
def test_fields_that_are_refused_when_set(field: str) -> None:
    assert field in refuse(**{field: {"a": 1}}).message
    for unset in (None, False, [], {}):
        parse(**{field: unset})


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga", "unheard_of", 3])
def test_factors_that_belong_to_a_changed_base(start: object) -> None:
    error = refuse(init_lora_weights=start)
    assert str(start) in error.message
    assert "path_initial_model_for_weight_conversion" in (error.hint or "")


@pytest.mark.parametrize("start", [True, False, None, "gaussian", "orthogonal", "eva", "mica"])
def test_starts_that_leave_the_base_alone(start: object) -> None:
    assert parse(init_lora_weights=start).r == 4


@pytest.mark.parametrize(
    ("field", "value"),
    [("scaling_law", 3.0), ("use_xlora", True), ("lora_variant", "other"), ("extra", {"a": 1}), ("gain", [1])],
)
def test_a_field_that_is_not_known_and_set(field: str, value: object) -> None:
    assert field in refuse(**{field: value}).message


@pytest.mark.parametrize(
    ("field", "value"), [("license", "mit"), ("_comment", "x"), ("use_xlora", False), ("gain", None), ("library", "p")]
)
def test_notes_and_features_that_are_off(field: str, value: object) -> None:
    assert parse(**{field: value}).r == 4


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("r", "8"),
        ("r", -1),
        ("r", True),
        ("r", 2**30),
        ("lora_alpha", "16"),
        ("lora_alpha", float("nan")),
        ("lora_alpha", float("inf")),
        ("use_rslora", "yes"),
        ("use_dora", 1),
        ("bias", "some"),
        ("modules_to_save", "lm_head"),
        ("modules_to_save", [1]),
        ("target_parameters", "x"),
        ("rank_pattern", ["q"]),
        ("rank_pattern", {"q": 1.5}),
        ("alpha_pattern", {"q": None}),
        ("trainable_token_indices", [1, 1]),
        ("trainable_token_indices", [-1]),
        ("trainable_token_indices", {"embed_tokens": 3}),
        ("trainable_token_indices", 7),
    ],
)
def test_values_of_the_wrong_kind(field: str, value: object) -> None:
    error = refuse(**{field: value})
    assert field in error.message


@pytest.mark.parametrize("pattern", ["(a+)+", "(a|b)*c", "(", "[", "a" * 257, ".*.*.*.*.*", "(x){2,9}"])
def test_patterns_that_could_run_for_ever_or_are_none(pattern: str) -> None:
    assert "simple patterns" in refuse(rank_pattern={pattern: 2}).message
    assert "simple patterns" in refuse(alpha_pattern={pattern: 2}).message


def test_tokens_of_one_embedding_or_several() -> None:
    assert parse(trainable_token_indices=[5, 3]).token_rows("m.embed_tokens", is_input=True) == (5, 3)
    assert parse(trainable_token_indices=[5, 3]).token_rows("lm_head", is_input=False) is None
    found = parse(trainable_token_indices={"embed_tokens": [1], "lm_head": [2]})
    assert found.token_rows("model.embed_tokens", is_input=True) == (1,)
    assert found.token_rows("lm_head", is_input=False) == (2,)
    assert found.token_rows("other", is_input=True) is None


@pytest.mark.parametrize("start", [["pissa"], {"a": 1}, 1, 0, 0.5, "pissa", [True]])
def test_a_start_of_any_type_that_is_not_known_is_refused(start: object) -> None:
    assert "init_lora_weights" in refuse(init_lora_weights=start).message


_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(sorted(MEANT | HARMLESS | REFUSED.keys())), _ANYTHING, max_size=4))
def test_any_json_is_understood_or_refused(fields: dict[str, Any]) -> None:
    try:
        found = parse_adapter_config(fields, "here")
    except SourceIncompatible as error:
        assert "\n" not in error.message
        return
    assert found.r >= 0
    assert math.isfinite(found.alpha)
