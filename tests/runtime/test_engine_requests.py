"""What the engine promises to one request: streams, stops, cancels, errors that stay its own, and sound accounts."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_family import CONTEXT, EngineFamily, config_of, greedy_alone, make_engine_family, random_prompt, ties

from mfs_decompose.errors import SourceIncompatible, UsageError
from mfs_decompose.runtime.batch_plan import BASE, PlanSlot
from mfs_decompose.runtime.engine import Engine
from mfs_decompose.runtime.requests import Request, SamplingParams, TokenEvent, VariantInfo
from mfs_decompose.runtime.sampling import NO_NUMBERS
from mfs_decompose.runtime.scheduler import Limits

FREE = SamplingParams(max_tokens=8, ignore_stop_ids=True)


@functools.cache
def family() -> EngineFamily:
    return make_engine_family(config_of("llama"), variants=3)


def as_text(tokens: Sequence[int]) -> str:
    return "".join(f" {token}" for token in tokens)


def alone(id: str, prompt: list[int], tokens: int = 8) -> list[int]:
    return greedy_alone(family().alone[id], prompt, tokens)


# Answers.


def test_a_stream_is_the_answer() -> None:
    events: list[TokenEvent] = []
    prompt = random_prompt(1, 9)
    request = Request("v1", prompt, replace(FREE, logprobs=2), on_token=events.append, detokenize=as_text)
    (handle,) = family().engine().generate([request])
    assert [event.token for event in events] == handle.tokens == alone("v1", prompt)
    assert "".join(event.text for event in events) == handle.text == as_text(handle.tokens)
    assert [event.finish_reason for event in events] == [None] * 7 + ["length"]
    assert [event.logprobs for event in events] == handle.logprobs
    logits = family().alone["v1"](torch.tensor([prompt])).logits[0, -1]
    assert handle.logprobs[0].chosen == pytest.approx(float(logits.log_softmax(0).max()), abs=1e-4)


def test_stop_ids_of_the_variant_and_of_the_request() -> None:
    prompt = random_prompt(2, 7)
    answer = alone("v0", prompt)
    third = answer[2]
    at = answer.index(third) + 1
    infos = [replace(info, stop_ids=frozenset({third})) if id == "v0" else info for id, info in family().infos.items()]
    engine = Engine(family().model, family().slot, infos, kv_tokens=512, check=False)
    by_variant, ignored, by_request, other = engine.generate(
        [
            Request("v0", prompt, SamplingParams(max_tokens=8), detokenize=as_text),
            Request("v0", prompt, FREE),
            Request("v1", prompt, SamplingParams(max_tokens=8, stop_ids=(alone("v1", prompt)[0],))),
            Request("base", prompt, SamplingParams(max_tokens=8)),
        ]
    )
    assert by_variant.tokens == answer[:at] and by_variant.finish_reason == "stop" and by_variant.stopped_by == third
    assert by_variant.text == as_text(answer[: at - 1])
    assert ignored.tokens == answer and ignored.finish_reason == "length" and ignored.stopped_by is None
    assert by_request.tokens == alone("v1", prompt)[:1] and by_request.finish_reason == "stop"
    assert other.tokens == alone("base", prompt)


def test_a_stop_text_ends_the_answer() -> None:
    prompt = random_prompt(3, 7)
    answer = alone("v2", prompt)
    stop = f"{answer[3]} {answer[4]}"
    request = Request("v2", prompt, replace(FREE, stop=(stop,)), detokenize=as_text)
    (handle,) = family().engine().generate([request])
    assert handle.finish_reason == "stop" and handle.stopped_by == stop
    assert handle.text == as_text(answer[:3]) + " "
    assert handle.tokens == answer[:5]


def test_the_context_ends_an_answer() -> None:
    prompt = random_prompt(4, CONTEXT - 3)
    (handle,) = family().engine().generate([Request("base", prompt, replace(FREE, max_tokens=50))])
    assert len(handle.tokens) == 3 and handle.finish_reason == "length"


def test_a_seed_gives_one_answer() -> None:
    """Alone, beside others, under another budget, computed anew, and whatever came before."""
    params = replace(FREE, max_tokens=20, temperature=1.0, top_p=0.95, seed=11)
    request = Request("v1", random_prompt(5, 33), params)
    (first,) = family().engine().generate([request])
    crowd = [Request(f"v{at % 3}", random_prompt(50 + at, 20), replace(params, seed=at)) for at in range(7)]
    for options in ({}, {"limits": Limits(tokens=3, patience=3)}, {"kv_tokens": 150}, {"block_size": 2}):
        engine = family().engine(**options)
        engine.generate(crowd[:2])
        handles = engine.generate([*crowd[2:5], request, *crowd[5:]])
        assert handles[3].tokens == first.tokens
        assert (engine.stats().preemptions > 0) == ("kv_tokens" in options)
    (other,) = family().engine().generate([replace(request, params=replace(params, seed=12))])
    assert other.tokens != first.tokens


def test_without_a_seed_the_engine_draws_one() -> None:
    request = Request("base", random_prompt(6, 5), replace(FREE, temperature=1.0))
    engines = [family().engine(seed=seed) for seed in (1, 1, 2)]
    answers = [[handle.tokens for handle in engine.generate([request, request])] for engine in engines]
    assert answers[0] == answers[1]
    assert len({tuple(answer) for answer in [*answers[0], *answers[2]]}) == 4


# Rows and their neighbours.


def test_a_request_has_the_same_bits_whoever_its_neighbours_are() -> None:
    """One packed shape, the other rows with other variants and other tokens: not one bit changes."""
    own = random_prompt(7, 10)
    params = replace(FREE, logprobs=5)
    runs = []
    for others in (["base", "v0", "v1"], ["v2", "v2", "base"], ["base", "base", "base"]):
        engine = family().engine(limits=Limits(tokens=64), share_prefixes=False)
        requests = [Request(id, random_prompt(60 + at + len(runs), 10), FREE) for at, id in enumerate(others)]
        runs.append(engine.generate([Request("base", own, params), *requests])[0].logprobs)
    assert runs[0] == runs[1] == runs[2]


def test_the_prefix_that_was_found_is_counted() -> None:
    engine = family().engine()
    shared = random_prompt(8, 42)
    first = engine.generate([Request(id, shared, FREE) for id in ("v0", "v1")])
    again = engine.generate([Request(id, [*shared, 5], FREE) for id in ("v1", "v2", "v0")])
    assert [handle.cached_tokens for handle in first] == [0, 0]
    assert [handle.cached_tokens for handle in again] == [40, 0, 40]
    assert engine.stats().cached_tokens == 80
    for handle in again:
        id = handle.request.variant
        ties(family().alone[id], [*shared, 5], alone(id, [*shared, 5]), handle.tokens)
    engine.forget_prefixes()
    assert engine.stats().blocks == (0, 0, 512)


# Cancels.


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_a_cancel_frees_blocks_at_once(steps: int) -> None:
    engine = family().engine(limits=Limits(tokens=16, sequences=2))
    handles = [engine.submit(Request("v0", random_prompt(at, 30), FREE)) for at in range(3)]
    for _ in range(steps):
        engine.step()
    for handle in handles:
        handle.cancel()
        assert handle.finish_reason == "cancelled" and handle.done
        handle.cancel()
    stats = engine.stats()
    assert stats.kv_bytes_used == 0 and stats.running == stats.waiting == 0 and stats.cancelled == 3
    assert not engine.step()


def test_a_callback_may_cancel_and_submit() -> None:
    engine = family().engine()
    prompt = random_prompt(9, 6)
    late: list[Any] = []

    def once(event: TokenEvent) -> None:
        if not late:
            late.append(engine.submit(Request("v1", prompt, FREE)))
            first.cancel()

    first = engine.submit(Request("v0", prompt, FREE, on_token=once))
    engine.run_until_done()
    assert first.finish_reason == "cancelled" and len(first.tokens) == 1
    assert late[0].tokens == alone("v1", prompt)


def test_a_finished_request_stays_finished() -> None:
    (handle,) = family().engine().generate([Request("v0", random_prompt(1, 3), FREE)])
    handle.cancel()
    assert handle.finish_reason == "length"


def test_other_threads_submit_wait_and_cancel() -> None:
    engine = family().engine()
    stop = threading.Event()
    answers: dict[int, tuple[str, list[int], Any]] = {}

    def ask(number: int) -> None:
        id, prompt = f"v{number % 3}", random_prompt(number, 4 + number)
        handle = engine.submit(Request(id, prompt, FREE))
        if number == 3:
            handle.cancel()
        assert handle.wait(timeout=60)
        answers[number] = (id, prompt, handle)

    def serve() -> None:
        while not stop.is_set():
            engine.step()

    server = threading.Thread(target=serve)
    server.start()
    clients = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    stop.set()
    server.join()
    assert len(answers) == 8
    for number, (id, prompt, handle) in answers.items():
        if handle.finish_reason != "cancelled":
            ties(family().alone[id], prompt, alone(id, prompt), handle.tokens)
        else:
            assert number == 3


# Errors.


def run_beside(engine: Engine, bad: Request) -> tuple[Any, list[Any]]:
    good = [Request(id, random_prompt(at, 12), FREE) for at, id in enumerate(["base", "v0", "v2"])]
    handles = engine.generate([good[0], good[1], bad, good[2]])
    for handle, request in zip([handles[0], handles[1], handles[3]], good, strict=True):
        ties(
            family().alone[request.variant],
            list(request.prompt),
            alone(request.variant, list(request.prompt)),
            handle.tokens,
        )
    stats = engine.stats()
    assert stats.failed == 1 and stats.finished == 3 and stats.kv_bytes_used == 0
    return handles[2], good


def test_a_callback_that_raises_ends_its_own_request() -> None:
    def broken(event: TokenEvent) -> None:
        raise OSError("the client is gone")

    handle, _ = run_beside(family().engine(), Request("v1", random_prompt(1, 5), FREE, on_token=broken))
    assert handle.finish_reason == "error" and handle.error == "the client is gone" and len(handle.tokens) == 1


def test_a_tokenizer_that_raises_ends_its_own_request() -> None:
    def broken(tokens: Sequence[int]) -> str:
        raise KeyError(5)

    handle, _ = run_beside(family().engine(), Request("v1", random_prompt(1, 5), FREE, detokenize=broken))
    assert handle.finish_reason == "error" and handle.error == "5"


def with_a_broken_v1(value: float | None) -> EngineFamily:
    """v1 gives `value` in every row of one layer, or raises where it is None."""
    broken = make_engine_family(config_of("llama"), variants=3)
    layer = broken.model.model.layers[1].mlp.down_proj
    plain = layer.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = plain(x)
        for variant, start, stop in broken.slot.plan.over(x.shape[1]):
            if variant == 1:
                if value is None:
                    raise RuntimeError("a tensor of v1 is gone")
                out[:, start:stop] = value
        return out

    layer.forward = forward
    return broken


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_variant_without_numbers_ends_its_own_requests(value: float) -> None:
    engine = with_a_broken_v1(value).engine()
    events: list[TokenEvent] = []
    handle, good = run_beside(engine, Request("v1", random_prompt(1, 40), FREE, on_token=events.append))
    assert events == [TokenEvent(None, "", None, "error")]
    assert handle.finish_reason == "error" and handle.error == NO_NUMBERS
    # Its blocks are used again by others.
    again = engine.generate(good * 3)
    for handle in again:
        id, prompt = handle.request.variant, list(handle.request.prompt)
        ties(family().alone[id], prompt, alone(id, prompt), handle.tokens)


def test_a_variant_whose_call_fails_ends_its_own_requests() -> None:
    handle, _ = run_beside(with_a_broken_v1(None).engine(), Request("v1", random_prompt(1, 40), FREE))
    assert handle.finish_reason == "error" and handle.error == "a tensor of v1 is gone"


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request("v9", [1]), "expected one of base, v0, v1, v2, found 'v9'"),
        (Request("v0", []), "at least one token"),
        (Request("v0", [5, 301]), "ids of v0 in 0..300, found 301"),
        (Request("v0", [5, -1]), "found -1"),
        (Request("v0", [5] * CONTEXT), f"context of {CONTEXT} tokens, found {CONTEXT}"),
        (Request("v0", [5], SamplingParams(stop=("x",))), "detokenize"),
        (Request("v0", [5] * 40, SamplingParams(max_tokens=100)), "at most 100 tokens, found 140"),
    ],
)
def test_what_cannot_be_answered_is_refused_at_once(request_: Request, message: str) -> None:
    engine = family().engine(kv_tokens=100)
    with pytest.raises(UsageError, match=message):
        engine.submit(request_)
    assert not engine.step()


def test_generate_runs_all_or_none() -> None:
    engine = family().engine()
    with pytest.raises(UsageError, match="v9"):
        engine.generate([Request("v0", [5], FREE), Request("v9", [5], FREE)])
    assert engine.stats().cancelled == 1 and not engine.step()


def test_ids_of_a_smaller_vocabulary() -> None:
    infos = [replace(family().infos["v0"], vocabulary=290), family().infos["base"]]
    engine = Engine(family().model, family().slot, infos, kv_tokens=512, check=False)
    with pytest.raises(UsageError, match=r"ids of v0 in 0\.\.289, found 295"):
        engine.submit(Request("v0", [295]))
    handles = engine.generate(
        [Request("v0", random_prompt(at, 6, 290), replace(FREE, max_tokens=30)) for at in range(4)]
    )
    assert all(token < 290 for handle in handles for token in handle.tokens)
    assert not engine.generate([Request("base", [295], FREE)])[0].error


def test_a_variant_is_replaced_only_when_idle() -> None:
    engine = family().engine()
    handle = engine.submit(Request("v0", random_prompt(1, 3), FREE))
    for busy in (lambda: engine.set_variant(family().infos["v0"]), lambda: engine.remove_variant("v0")):
        with pytest.raises(UsageError, match="no unfinished request of v0, found 1"):
            busy()
    handle.cancel()
    engine.remove_variant("v0")
    with pytest.raises(UsageError, match="expected one of base, v1, v2, found 'v0'"):
        engine.remove_variant("v0")
    engine.set_variant(VariantInfo("new", 0, b"digest of v0"))
    prompt = random_prompt(2, 9)
    assert engine.generate([Request("new", prompt, FREE)])[0].tokens == alone("v0", prompt)


def test_a_model_without_logits_to_keep_is_refused() -> None:
    with pytest.raises(SourceIncompatible, match="takes logits_to_keep, found LlamaModel"):
        Engine(family().alone["base"].model, PlanSlot(), [VariantInfo("base", BASE, b"b")])


def test_stats_add_up() -> None:
    engine = family().engine(limits=Limits(tokens=16, variants=2))
    prompts = [random_prompt(at, 10 + at) for at in range(6)]
    engine.generate([Request(["base", "v0", "v1", "v2"][at % 4], prompt, FREE) for at, prompt in enumerate(prompts)])
    stats = engine.stats()
    assert stats.prompt_tokens == sum(len(prompt) for prompt in prompts)
    assert stats.generated_tokens == 6 * 8 and stats.finished == 6
    assert sum(stats.variants_per_step.values()) == stats.steps and max(stats.variants_per_step) == 2
    assert stats.tokens_per_second == pytest.approx(48 / stats.seconds)
    assert stats.kv_bytes_reserved == 2 * (512 + 1) * 4 * 2 * 2 * 12 * 4
