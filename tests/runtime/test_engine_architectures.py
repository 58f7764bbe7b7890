"""Greedy answers of mixed batches are those of every variant alone in transformers, token for token."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
from engine_family import (
    EngineFamily,
    config_of,
    greedy_alone,
    make_engine_family,
    random_prompt,
    ties,
)

from mfs_decompose.errors import SourceIncompatible
from mfs_decompose.runtime.batch_plan import BASE, PlanSlot
from mfs_decompose.runtime.engine import Engine
from mfs_decompose.runtime.requests import Request, SamplingParams, VariantInfo
from mfs_decompose.runtime.scheduler import Limits

ALL = [
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3_text",
    "gpt2",
    "gpt_neox",
    "phi3",
    "mixtral",
    "qwen3_moe",
]
TOKENS = 9
LENGTHS = (1, 2, 5, 17, 41, 64, 3, 30, 16, 9)


@functools.cache
def family(architecture: str) -> EngineFamily:
    return make_engine_family(config_of(architecture))


@functools.cache
def prompts(architecture: str) -> list[tuple[str, list[int], list[int]]]:
    """Prompts of unlike lengths, two for each of base and four variants, and a long beginning that all share."""
    shared = random_prompt(99, 70)
    asked = [(id, random_prompt(at, LENGTHS[at])) for at, id in enumerate([*family(architecture).infos] * 2)]
    asked += [(id, [*shared, *random_prompt(200 + at, 1 + at)]) for at, id in enumerate(family(architecture).infos)]
    random.Random(3).shuffle(asked)
    return [(id, prompt, greedy_alone(family(architecture).alone[id], prompt, TOKENS)) for id, prompt in asked]


def run(architecture: str, **options: Any) -> tuple[Engine, int]:
    """The engine after all prompts, and the number of ties; answers that part elsewhere fail."""
    engine = family(architecture).engine(check=True, **options)
    params = SamplingParams(max_tokens=TOKENS, ignore_stop_ids=True)
    handles = engine.generate([Request(id, prompt, params) for id, prompt, _ in prompts(architecture)])
    assert [handle.error for handle in handles] == [None] * len(handles)
    found = 0
    for handle, (id, prompt, expected) in zip(handles, prompts(architecture), strict=True):
        found += ties(family(architecture).alone[id], prompt, expected, handle.tokens)
    return engine, found


@pytest.mark.parametrize("architecture", ALL)
@pytest.mark.parametrize("budget", [7, 64])
def test_mixed_batches_answer_as_each_variant_alone(architecture: str, budget: int) -> None:
    engine, ties_found = run(architecture, limits=Limits(tokens=budget, variants=3, patience=4))
    assert ties_found <= 1
    stats = engine.stats()
    assert max(stats.variants_per_step) == 3
    assert stats.kv_bytes_used == 0 and stats.blocks[0] == 0


@pytest.mark.parametrize("architecture", ALL)
def test_the_answers_are_worth_comparing(architecture: str) -> None:
    """Flat models repeat one token, and variants that answer alike would hide a mix-up."""
    answers = [answer for _, _, answer in prompts(architecture)]
    assert len({token for answer in answers for token in answer}) > 20
    by_shared = {tuple(greedy_alone(model, random_prompt(99, 70), 5)) for model in family(architecture).alone.values()}
    assert len(by_shared) == 5


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 16, 33])
def test_any_token_budget(budget: int) -> None:
    run("llama", limits=Limits(tokens=budget, patience=4))


@pytest.mark.parametrize("architecture", ["mistral", "gemma3_text"])
@pytest.mark.parametrize(
    "options", [{"share_prefixes": False}, {"block_size": 16}, {"block_size": 1}, {"kv_tokens": 128}]
)
def test_any_paging(architecture: str, options: dict[str, Any]) -> None:
    """With 128 tokens of room most sequences give way now and then and are computed again."""
    engine, _ = run(architecture, **options)
    assert (engine.stats().preemptions > 0) == ("kv_tokens" in options)


def test_one_variant_a_step() -> None:
    engine, _ = run("llama", limits=Limits(tokens=16, uniform=True))
    assert set(engine.stats().variants_per_step) <= {0, 1}


def test_attention_sinks() -> None:
    """gpt-oss scores one key more in each head."""
    from transformers import GptOssConfig

    config = GptOssConfig(
        vocab_size=301, hidden_size=40, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4, head_dim=12,
        num_key_value_heads=2, num_local_experts=5, num_experts_per_tok=2, sliding_window=16, bos_token_id=1,
        eos_token_id=2, pad_token_id=0, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    sinks = make_engine_family(config, variants=2)
    for name, parameter in sinks.model.named_parameters():
        if name.endswith("sinks"):
            parameter.fill_(1.5)
    for model in sinks.alone.values():
        model.set_attn_implementation("eager")
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.fill_(1.5)
    asked = [(id, random_prompt(at, 5 + 9 * at)) for at, id in enumerate([*sinks.infos] * 2)]
    params = SamplingParams(max_tokens=TOKENS, ignore_stop_ids=True)
    handles = sinks.engine().generate([Request(id, prompt, params) for id, prompt in asked])
    for handle, (id, prompt) in zip(handles, asked, strict=True):
        assert handle.error is None
        ties(sinks.alone[id], prompt, greedy_alone(sinks.alone[id], prompt, TOKENS), handle.tokens)


def refused(config: Any) -> str:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(SourceIncompatible) as caught:
        Engine(model, PlanSlot(), [VariantInfo("base", BASE, b"b")], kv_tokens=64)
    return caught.value.message


def test_attention_outside_the_registry_is_refused() -> None:
    assert "FalconForCausalLM" in refused(config_of("falcon"))


def test_recurrent_layers_are_refused() -> None:
    """Their rows would run from one sequence into the next."""
    from transformers import MambaConfig, RecurrentGemmaConfig

    sizes = {"vocab_size": 301, "hidden_size": 40, "num_hidden_layers": 3}
    assert "MambaForCausalLM" in refused(MambaConfig(**sizes, state_size=4))
    hybrid = RecurrentGemmaConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=1, intermediate_size=56, lru_width=40, head_dim=10
    )
    assert "RecurrentGemma" in refused(hybrid)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_that_looks_at_the_longest_sequence_is_refused(kind: str) -> None:
    config = config_of("llama")
    factors = {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6, "original_max_position_embeddings": 64}
    config.rope_parameters = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0, **factors}
    assert kind in refused(config)


def test_an_ordinary_call_is_what_it_was() -> None:
    """Before, between and after steps the model is causal and its own (transformers issue 48296)."""
    model = make_engine_family(config_of("mistral")).alone["v1"]
    ids = torch.tensor([random_prompt(1, 30), random_prompt(2, 30)])
    before = model(ids).logits
    engine = Engine(model, PlanSlot(), [VariantInfo("base", BASE, b"b")], kv_tokens=256)
    assert torch.equal(model(ids).logits, before)
    engine.submit(Request("base", random_prompt(3, 20)))
    engine.step()
    assert torch.equal(model(ids).logits, before)
    assert model.config._attn_implementation == "sdpa"
    engine.run_until_done()
    assert torch.equal(model(ids).logits, before)


def test_two_engines_at_a_time() -> None:
    """On one model and on two: each has its own keys, and steps may alternate."""
    one, other = family("llama"), family("gemma3_text")
    engines = [one.engine(), one.engine(), other.engine()]
    params = SamplingParams(max_tokens=TOKENS, ignore_stop_ids=True)
    asked = [("v1", random_prompt(at, 20 + at)) for at in range(3)]
    handles = [engine.submit(Request(id, prompt, params)) for engine, (id, prompt) in zip(engines, asked, strict=True)]
    while sum(engine.step() for engine in engines):
        pass
    for handle, (id, prompt), owner in zip(handles, asked, (one, one, other), strict=True):
        ties(owner.alone[id], prompt, greedy_alone(owner.alone[id], prompt, TOKENS), handle.tokens)
