"""B59: the base answers otherwise once a variant has been used, from a mapping of rows that an earlier batch left.

vllm issue 42008, on a path for experts.  Right: a request for the base has the bits it has on a fresh engine, after and
beside requests for any variant, for every architecture.
"""

from __future__ import annotations

import hashlib

import pytest
from engine_family import EngineFamily, config_of, make_engine_family, random_prompt

from mfs_decompose.runtime.engine import Engine
from mfs_decompose.runtime.requests import Request, SamplingParams, TokenLogprobs

PARAMS = SamplingParams(max_tokens=6, ignore_stop_ids=True, logprobs=8)


EXPERTS = ("mixtral", "qwen3_moe")


def answer(engine: Engine, id: str, beside: list[str]) -> list[TokenLogprobs]:
    """Eight log probabilities a token of the first request; the neighbours have prompts of one length."""
    prompts = [random_prompt(1, 11)] + [random_prompt(2 + at, 11) for at in range(len(beside))]
    requests = [Request(name, prompt, PARAMS) for name, prompt in zip([id, *beside], prompts, strict=True)]
    return engine.generate(requests)[0].logprobs


def base_digest(family: EngineFamily) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(family.model.state_dict().items()):
        digest.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3_text", "mixtral", "qwen3_moe"])
def test_the_base_before_after_and_beside_variants(architecture: str) -> None:
    family = make_engine_family(config_of(architecture), variants=3)
    before = base_digest(family)
    fresh = answer(family.engine(share_prefixes=False), "base", [])
    beside = answer(family.engine(share_prefixes=False), "base", ["base", "base"])
    engine = family.engine(share_prefixes=False)
    for variant in ("v0", "v1", "v2", "v1"):
        assert answer(engine, variant, []) != fresh
        assert answer(engine, "base", []) == fresh
        again = answer(engine, "base", [variant, "v2"])
        if architecture in EXPERTS:
            # How many rows one expert gets depends on all rows, and products of other sizes may round otherwise.
            assert [token.chosen for token in again] == pytest.approx([token.chosen for token in beside], abs=1e-4)
        else:
            assert again == beside
        assert answer(engine, variant, ["base", "v0"])
    assert base_digest(family) == before
