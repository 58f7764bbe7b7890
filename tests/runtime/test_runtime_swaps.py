"""Variants that do not all fit: they come and go between steps, and no answer shows it."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest
import torch
from checkpoints import fine_tune, make_llama
from engine_family import random_prompt, ties
from runtime_families import Stored, alone, check_logits, store, texts

from mfs_decompose.artifact.reader import Family as Artifact
from mfs_decompose.errors import UsageError
from mfs_decompose.runtime.batch_plan import BatchPlan
from mfs_decompose.runtime.engine import Engine
from mfs_decompose.runtime.handle import Handle
from mfs_decompose.runtime.open_engine import open_engine
from mfs_decompose.runtime.requests import Request, SamplingParams
from mfs_decompose.runtime.scheduler import Limits
from mfs_decompose.runtime.tiers import NotReady, TierLimits

IDS = ("base", "chat", "code", "math", "norms", "vocab")
KINDS = {"norms": "norms", "vocab": "vocab"}
REQUESTS = 36


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    root = tmp_path_factory.mktemp("swaps")
    base = make_llama(root / "base", seed=1)
    variants = {
        id: fine_tune(base, root / id, seed=at, kind=KINDS.get(id, "lowrank"))  # type: ignore[arg-type]
        for at, id in enumerate(IDS[1:], start=2)
    }
    return store(root, base, variants)


def limits_for(stored: Stored, largest: float, host: float | None = None, pinned: tuple[str, ...] = ()) -> TierLimits:
    """Room on the device for so many times the largest variant."""
    sizes = sizes_of(stored.artifact)
    most = max(sizes.values())
    return TierLimits(int(largest * most), None if host is None else int(host * most), pinned)


@cache
def sizes_of(artifact: Path) -> dict[str, int]:
    tiers = Stored(artifact, artifact, {}, artifact).load().tiers
    return {id: tiers._sizes[id] for id in IDS[1:]}


def asked(number: int) -> Request:
    """One of a fixed set of requests."""
    draw = random.Random(number)
    greedy = draw.random() < 0.6
    params = SamplingParams(
        max_tokens=draw.randint(1, 9), temperature=0.0 if greedy else 0.9, seed=number, ignore_stop_ids=True
    )
    return Request(draw.choice(IDS), random_prompt(number, draw.randint(1, 20), vocabulary=250), params)


def solo_answers(stored: Stored) -> list[list[int]]:
    """Each request in an engine by itself, all variants in memory; the greedy ones also as transformers answers."""
    family = stored.load()
    answers = []
    for number in range(REQUESTS):
        request = asked(number)
        engine = open_engine(family, kv_tokens=64, share_prefixes=False, check=False)
        answer = engine.generate([request])[0].tokens
        answers.append(answer)
        if request.params.greedy and number % 4 == 0:
            from engine_family import greedy_alone

            model = stored.restored(request.variant)
            with torch.inference_mode():
                expected = greedy_alone(model, list(request.prompt), request.params.max_tokens)
                ties(model, list(request.prompt), expected, answer)
    return answers


@pytest.fixture(scope="module")
def solo(stored: Stored) -> list[list[int]]:
    return solo_answers(stored)


def fuzz(stored: Stored, solo: list[list[int]], steps: int, seed: int) -> Engine:
    """Random arrivals, cancels, use of single variants, and swaps, in `steps` steps; then all that is left."""
    draw = random.Random(seed)
    pinned = tuple(draw.sample(IDS[1:], draw.choice([0, 0, 1])))
    # Widened, variants lie in stacks, which every swap lays out anew.
    room, host = draw.choice([1.0, 1.6, 2.4]), draw.choice([None, 0.0, 1.3])
    limits = limits_for(stored, room + len(pinned), host, pinned)
    family = stored.load(limits=limits)
    before = family.base_digest()
    step = Limits(
        tokens=draw.choice([5, 24]), sequences=draw.choice([3, 12]), variants=draw.choice([2, 8]),
        patience=draw.choice([2, 6]), uniform=draw.random() < 0.2,
    )  # fmt: skip
    engine = open_engine(family, limits=step, kv_tokens=draw.choice([160, 600]), block_size=4, check=False)
    handles: list[tuple[int, Handle]] = []
    for _ in range(steps):
        while draw.random() < 0.35 and sum(not handle.done for _, handle in handles) < 16:
            number = draw.randrange(REQUESTS)
            handles.append((number, engine.submit(asked(number))))
        if draw.random() < 0.05 and handles:
            draw.choice(handles)[1].cancel()
        if draw.random() < 0.04:
            id = draw.choice(IDS)
            with family.use(id) as model, torch.inference_mode():
                model(input_ids=torch.tensor([[7, 8]]), use_cache=False)
                assert id == "base" or family.tiers.is_resident(id)
        engine.step()
        stats = family.tiers.stats()
        assert stats.device_bytes <= (limits.device or 0) and set(pinned) <= set(stats.device)
        assert limits.host is None or stats.host_bytes <= limits.host
    engine.run_until_done()
    for number, handle in handles:
        assert handle.done and handle.error is None
        whole = solo[number]
        expected = whole[: len(handle.tokens)] if handle.finish_reason == "cancelled" else whole
        assert handle.tokens == expected, number
    assert family.base_digest() == before
    return engine


@pytest.mark.parametrize("seed", range(10))
def test_fifty_steps_of_swaps(stored: Stored, solo: list[list[int]], seed: int) -> None:
    fuzz(stored, solo, 50, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 120))
def test_ten_thousand_steps_of_swaps(stored: Stored, solo: list[list[int]], seed: int) -> None:
    fuzz(stored, solo, 500, seed)


def test_the_fuzz_swaps_and_reads_again(stored: Stored, solo: list[list[int]]) -> None:
    stats = [fuzz(stored, solo, 40, seed).stats() for seed in (3, 5, 8)]
    tiers = [one.tiers for one in stats if one.tiers is not None]
    assert len(tiers) == 3 and sum(one.swaps_out for one in tiers) > 20
    assert all(one.swap_seconds > 0 and one.longest_wait > 0 for one in tiers)
    assert sum(one.reads for one in tiers) > 0


def test_use_answers_as_the_restore_however_often_variants_were_exchanged(stored: Stored) -> None:
    family = stored.load(limits=limits_for(stored, 1.0, host=0.0))
    for text in texts(2, below=250):
        for id in IDS:
            with family.use(id) as model, torch.inference_mode():
                found = model(input_ids=torch.tensor([text]), use_cache=False).logits[0]
            check_logits(found, alone(stored.restored(id), text))
    stats = family.tiers.stats()
    assert stats.reads >= 2 * (len(IDS) - 1) - 2 and len(stats.device) >= 1


def test_rows_of_a_variant_that_is_not_there_are_never_the_bases(stored: Stored) -> None:
    family = stored.load(limits=limits_for(stored, 1.0))
    gone = next(id for id in IDS[1:] if not family.tiers.is_resident(id))
    with (
        pytest.raises(AssertionError, match="not attached"),
        family.slot.use(BatchPlan.only(family.variant(gone).slot)),
    ):
        pass


def test_memory_counts_what_is_held_in_either_tier(stored: Stored) -> None:
    everything = stored.load().memory()
    roomy = stored.load(limits=limits_for(stored, 1.0))
    assert roomy.memory() == everything
    tight = stored.load(limits=limits_for(stored, 1.0, host=0.0))
    assert tight.memory().variants.keys() == set(tight.tiers.stats().device)
    assert tight.memory().total < everything.total


def test_a_variant_whose_bytes_were_damaged_meanwhile_fails_alone(tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base", seed=1)
    variants = {id: fine_tune(base, tmp_path / id, seed=at) for at, id in enumerate(("code", "math"), start=2)}
    stored = store(tmp_path, base, variants)
    family = stored.load(limits=limits_of_one(stored))
    engine = open_engine(family, kv_tokens=128)
    (gone,) = (id for id in variants if not family.tiers.is_resident(id))
    (there,) = family.tiers.stats().device
    with Artifact.open(stored.artifact) as opened:
        for shard in opened.variant(gone).shards:
            (stored.artifact / shard).unlink()
    params = SamplingParams(max_tokens=3, ignore_stop_ids=True)
    good, bad, plain = engine.generate([Request(id, [5, 6], params) for id in (there, gone, "base")])
    assert good.error is None and plain.error is None and len(good.tokens) == 3
    assert bad.finish_reason == "error" and f"cannot load variant {gone!r}" in (bad.error or "")
    with pytest.raises(NotReady, match=f"cannot load variant {gone!r}"), family.use(gone):
        pass


def limits_of_one(stored: Stored) -> TierLimits:
    sizes = stored.load().tiers._sizes
    return TierLimits(device=max(sizes.values()), host=0)


def test_limits_below_the_largest_variant_are_refused_at_load(stored: Stored) -> None:
    with pytest.raises(UsageError, match="expected room for"):
        stored.load(limits=limits_for(stored, 0.9))
