"""B58: answers computed from another variant's cached prompt, or from weights that went under the same name before.

vllm issues 30931 and 42125, llama.cpp issue 26207.  Right: keys and values are found again only for the weights that
made them.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from engine_family import DeltaLinear, EngineFamily, config_of, greedy_alone, make_engine_family, random_prompt, ties

from mfs_decompose.runtime.engine import Engine
from mfs_decompose.runtime.requests import Request, SamplingParams

PARAMS = SamplingParams(max_tokens=8, ignore_stop_ids=True)
SHARED = random_prompt(1, 70)


@functools.cache
def family() -> EngineFamily:
    return make_engine_family(config_of("llama"), variants=2)


def ask(engine: Engine, family: EngineFamily, id: str, prompt: list[int], answers_as: str) -> int:
    """Check one answer; how many of its tokens were found instead of computed."""
    (handle,) = engine.generate([Request(id, prompt, PARAMS)])
    ties(family.alone[answers_as], prompt, greedy_alone(family.alone[answers_as], prompt, 8), handle.tokens)
    return handle.cached_tokens


def test_variants_that_alternate_over_one_prompt() -> None:
    engine = family().engine()
    found = [ask(engine, family(), id, SHARED, id) for id in ("v0", "v1", "base") * 3]
    assert found == [0] * 3 + [68] * 6


def test_variants_over_one_prompt_in_one_batch() -> None:
    engine = family().engine()
    for _ in range(2):
        asked = [(id, [*SHARED, at]) for at in (5, 6) for id in ("v0", "base", "v1")]
        handles = engine.generate([Request(id, prompt, PARAMS) for id, prompt in asked])
        for handle, (id, prompt) in zip(handles, asked, strict=True):
            ties(family().alone[id], prompt, greedy_alone(family().alone[id], prompt, 8), handle.tokens)


def test_other_weights_under_the_same_name_and_slot() -> None:
    """The id and its slot stay, weights and digest change; then the first come back, and so do their prefixes."""
    loaded = make_engine_family(config_of("llama"), variants=2)
    engine = loaded.engine()
    assert ask(engine, loaded, "v0", SHARED, "v0") == 0

    def swap(digest: bytes) -> None:
        for module in loaded.model.modules():
            if isinstance(module, DeltaLinear):
                module.deltas_OI.reverse()
        engine.set_variant(replace(loaded.infos["v0"], digest=digest))

    swap(loaded.infos["v1"].digest)
    assert ask(engine, loaded, "v0", SHARED, "v1") == 0
    swap(loaded.infos["v0"].digest)
    assert ask(engine, loaded, "v0", SHARED, "v0") == 68


def test_one_set_of_weights_under_two_names() -> None:
    """The digest decides, not the name: what one computed the other finds."""
    engine = family().engine()
    engine.set_variant(replace(family().infos["v0"], id="also v0"))
    assert ask(engine, family(), "v0", SHARED, "v0") == 0
    assert ask(engine, family(), "also v0", SHARED, "v0") == 68


def test_the_check_would_see_a_cache_by_tokens_alone() -> None:
    """With one digest for all, answers are wrong: the tests above are not blind."""
    infos = [replace(info, digest=b"tokens alone") for info in family().infos.values()]
    engine = Engine(family().model, family().slot, infos, kv_tokens=1024, block_size=4, check=False)
    answers = [engine.generate([Request(id, SHARED, PARAMS)])[0].tokens for id in ("v0", "v1")]
    assert answers[0] == greedy_alone(family().alone["v0"], SHARED, 8)
    assert answers[1] != greedy_alone(family().alone["v1"], SHARED, 8)
