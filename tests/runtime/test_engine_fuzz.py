"""Random arrivals, cancels, preemptions and evictions: every answer is that of a solo run, and nothing is left over."""

from __future__ import annotations

import functools
import random

import pytest
from engine_family import EngineFamily, config_of, greedy_alone, make_engine_family, random_prompt, ties

from mfs_decompose.runtime.engine import Engine, Handle
from mfs_decompose.runtime.requests import Request, SamplingParams
from mfs_decompose.runtime.scheduler import Limits
from mfs_decompose.runtime.stats import EngineStats


@functools.cache
def family() -> EngineFamily:
    """Two layers that see everything or 16 tokens."""
    return make_engine_family(config_of("gemma3_text"), variants=4)


@functools.cache
def asked(number: int) -> Request:
    """One of a fixed set of requests, many of them with a long beginning in common."""
    draw = random.Random(number)
    prompt = random_prompt(number, draw.randint(1, 30))
    if draw.random() < 0.5:
        prompt = random_prompt(draw.randint(900, 902), draw.choice([16, 35, 70])) + prompt
    greedy = draw.random() < 0.7
    params = SamplingParams(
        max_tokens=draw.randint(1, 14),
        temperature=0.0 if greedy else draw.choice([0.5, 1.0]),
        top_p=1.0 if greedy else draw.choice([1.0, 0.9]),
        repetition_penalty=draw.choice([1.0, 1.0, 1.2]),
        seed=number,
        ignore_stop_ids=True,
    )
    return Request(draw.choice([*family().infos]), prompt, params)


@functools.cache
def solo(number: int) -> list[int]:
    """In an engine of its own, in one piece; the greedy ones are also those of transformers."""
    request = asked(number)
    engine = family().engine(kv_tokens=512, limits=Limits(tokens=256), share_prefixes=False)
    answer = engine.generate([request])[0].tokens
    if request.params.greedy and not request.params.penalised:
        model = family().alone[request.variant]
        ties(model, list(request.prompt), greedy_alone(model, list(request.prompt), request.params.max_tokens), answer)
    return answer


def accounts_are_sound(engine: Engine, running: int) -> None:
    held = [sequence.kv for sequence in engine._scheduler.running]
    assert engine.stats().running == len(held) <= running
    for at, group in enumerate(engine.kv.groups):
        blocks = [block for kv in held for block in kv.tables[at] if block]
        assert group.pool.used == len(set(blocks))
        assert all(group.pool.users(block) == blocks.count(block) for block in set(blocks))


@functools.cache
def fuzz(steps: int, seed: int) -> EngineStats:
    draw = random.Random(seed)
    limits = Limits(
        tokens=draw.choice([1, 5, 16, 48]),
        sequences=draw.choice([2, 6, 12]),
        variants=draw.choice([1, 2, 8]),
        patience=draw.choice([2, 8]),
        uniform=draw.random() < 0.15,
    )
    engine = family().engine(kv_tokens=draw.choice([132, 200, 600]), limits=limits)
    handles: list[tuple[int, Handle]] = []
    for _ in range(steps):
        while draw.random() < 0.35 and sum(not handle.done for _, handle in handles) < 20:
            number = draw.randrange(40)
            handles.append((number, engine.submit(asked(number))))
        if draw.random() < 0.05 and handles:
            draw.choice(handles)[1].cancel()
        if draw.random() < 0.01:
            engine.forget_prefixes()
        engine.step()
        accounts_are_sound(engine, limits.sequences)
    engine.run_until_done()
    for number, handle in handles:
        assert handle.done and handle.error is None
        if handle.finish_reason == "cancelled":
            assert handle.tokens == solo(number)[: len(handle.tokens)], number
        else:
            assert handle.tokens == solo(number), number
    stats = engine.stats()
    assert stats.kv_bytes_used == 0 and stats.running == stats.waiting == 0
    assert stats.finished + stats.cancelled == len(handles) and stats.failed == 0
    engine.forget_prefixes()
    assert all(group.pool.available == group.pool.blocks - 1 for group in engine.kv.groups)
    return stats


@pytest.mark.parametrize("seed", range(10))
def test_fifty_steps_and_all_they_began(seed: int) -> None:
    fuzz(50, seed)


def test_the_fuzz_reaches_what_it_is_for() -> None:
    """Preemptions, prefixes found, cancels and full caps do happen in it."""
    stats = [fuzz(50, seed) for seed in range(4)]
    assert sum(s.preemptions for s in stats) > 3
    assert sum(s.cached_tokens for s in stats) > 100
    assert sum(s.cancelled for s in stats) > 3


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 120))
def test_ten_thousand_steps(seed: int) -> None:
    fuzz(500, seed)
