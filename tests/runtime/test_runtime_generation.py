"""A loaded family under the engine: greedy answers of a mixed batch are those of fp32 restores in transformers."""

from __future__ import annotations

import pytest
import torch
from runtime_families import Stored, store_architecture, texts

from mfs_decompose.runtime.engine import Engine
from mfs_decompose.runtime.requests import Request, SamplingParams

IDS = ("words", "base", "chat", "words", "chat", "base")
NEW = 6


@pytest.fixture(scope="module", params=["gemma3_text", "qwen3_moe"])
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Stored:
    return store_architecture(tmp_path_factory.mktemp("generation"), request.param)


def test_mixed_answers_are_those_of_each_variant_alone(stored: Stored) -> None:
    family = stored.load()
    engine = Engine(family.model, family.slot, family.infos())
    wanted = SamplingParams(max_tokens=NEW, ignore_stop_ids=True)
    asked = texts(len(IDS))
    handles = [engine.submit(Request(id, list(text), wanted)) for id, text in zip(IDS, asked, strict=True)]
    engine.run_until_done()
    models = {id: stored.restored(id) for id in set(IDS)}
    for id, text, handle in zip(IDS, asked, handles, strict=True):
        tokens = list(text)
        with torch.inference_mode():
            for found in handle.tokens:
                logits = models[id](input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
                best = logits.topk(2).values
                assert int(logits.argmax()) == found or float(best[0] - best[1]) < 1e-4
                tokens.append(found)
        assert len(tokens) == len(text) + NEW


def test_transformers_generates_through_a_family(stored: Stored) -> None:
    family = stored.load()
    text = torch.tensor([list(texts(1)[0])])
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for id in ("chat", "base"):
        wanted = stored.restored(id).generate(text, **options)
        with family.use(id):
            assert torch.equal(family.model.generate(text, **options), wanted)
