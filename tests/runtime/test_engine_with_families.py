"""The engine over the runtime's own modules: answers of a stored family are those of its fp32 restores."""

from __future__ import annotations

import pytest
import torch
from engine_family import greedy_alone, random_prompt, ties
from runtime_families import Stored, store_architecture

from mfs_decompose.runtime.open_engine import open_engine
from mfs_decompose.runtime.requests import Request, SamplingParams
from mfs_decompose.runtime.scheduler import Limits

PARAMS = SamplingParams(max_tokens=6, ignore_stop_ids=True)
IDS = ("base", "chat", "words")


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2", "qwen3", "mistral", "qwen3_moe")]


@pytest.fixture(scope="module", params=["llama", "gemma3_text", "gpt2", "mixtral", *SLOW])
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Stored:
    return store_architecture(tmp_path_factory.mktemp("engine"), request.param)


def test_mixed_batches_answer_as_each_restore(stored: Stored) -> None:
    family = stored.load()
    before = family.base_digest()
    engine = open_engine(family, limits=Limits(tokens=9), kv_tokens=512, block_size=4)
    asked = [(id, random_prompt(at, 3 + 5 * at)) for at, id in enumerate(IDS * 2)]
    asked += [(id, random_prompt(9, 33)) for id in IDS]
    asked += [("words", [301, 303, 302, 5])]
    handles = engine.generate([Request(id, prompt, PARAMS) for id, prompt in asked])
    restored = {id: stored.restored(id) for id in IDS}
    with torch.inference_mode():
        for handle, (id, prompt) in zip(handles, asked, strict=True):
            assert handle.error is None
            ties(restored[id], prompt, greedy_alone(restored[id], prompt, 6), handle.tokens)
    assert engine.stats().kv_bytes_used == 0
    assert family.base_digest() == before


def test_a_thousand_requests_keep_the_base(stored: Stored) -> None:
    family = stored.load()
    before = family.base_digest()
    engine = open_engine(family, limits=Limits(tokens=128, sequences=48), kv_tokens=2048, block_size=4)
    params = SamplingParams(max_tokens=2, ignore_stop_ids=True)
    asked = [Request(IDS[at % 3], random_prompt(at, 2 + at % 4), params) for at in range(1000)]
    handles = engine.generate(asked)
    assert all(handle.error is None and len(handle.tokens) == 2 for handle in handles)
    assert family.base_digest() == before


def test_stop_ids_and_vocabularies_are_the_variants_own(stored: Stored) -> None:
    family = stored.load()
    infos = open_engine(family, kv_tokens=64).variants
    assert {id: info.vocabulary for id, info in infos.items()} == {"base": 301, "chat": 301, "words": 304}
    assert all(info.stop_ids == {2} for info in infos.values())
    assert len({info.digest for info in infos.values()}) == 3
