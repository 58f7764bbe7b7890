"""Blocks are counted, shared only under one digest, given back, and given up least recently used first."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from engine_family import random_prompt
from hypothesis import given, settings
from hypothesis import strategies as st

from mfs_decompose.errors import ResourceShortage, UsageError
from mfs_decompose.runtime.kv import NOTHING, BlockPool, KvCache, LayerShape, SequenceKv
from mfs_decompose.runtime.prefix import PrefixIndex, extend_links, first_link, next_link

BLOCK = 4


def shapes(windows: Mapping[int, int | None]) -> dict[int, LayerShape]:
    cpu = torch.device("cpu")
    return {at: LayerShape(2, 3 + at, 5, window, torch.float32, cpu) for at, window in windows.items()}


def cache(windows: Mapping[int, int | None] | None = None, tokens: int = 64, **options: int) -> KvCache:
    return KvCache(shapes(windows or {0: None, 1: None}), tokens=tokens, block_size=BLOCK, **options)


def fill(kv: KvCache, digest: bytes, tokens: list[int], chunk: int = 7) -> SequenceKv:
    """A sequence computed in pieces, its full blocks known."""
    sequence = kv.open()
    computed = kv.adopt(sequence, digest, tokens)
    while computed < len(tokens):
        computed = min(computed + chunk, len(tokens))
        assert kv.reserve(sequence, computed)
        kv.publish(sequence, digest, tokens, computed)
    return sequence


def used(kv: KvCache) -> list[int]:
    return [group.pool.used for group in kv.groups]


# Names of blocks.


def test_a_name_holds_the_digest_and_every_token_before() -> None:
    tokens = list(range(12))
    names = []
    for digest, prompt in [(b"a", tokens), (b"b", tokens), (b"a", [9, *tokens[1:]]), (b"a", [*tokens[:11], 0])]:
        links: list[bytes] = []
        extend_links(links, digest, prompt, BLOCK)
        names.append(links)
    plain, other_digest, other_first, other_last = names
    assert len(plain) == 3 and len(set(plain)) == 3
    assert not set(plain) & set(other_digest)
    assert not set(plain) & set(other_first)
    assert plain[:2] == other_last[:2] and plain[2] != other_last[2]


def test_names_do_not_run_together() -> None:
    """Neither digests of unlike lengths, nor tokens of several bytes."""
    assert first_link(b"a") != first_link(b"a\0")
    assert next_link(b"x", [1, 256]) != next_link(b"x", [256, 1])
    assert next_link(b"x", [258]) != next_link(b"x", [2, 1])
    assert next_link(first_link(b""), []) != first_link(b"")


def test_names_are_appended_to() -> None:
    links: list[bytes] = []
    for stop in (3, 4, 9, 16):
        extend_links(links, b"a", list(range(stop)), BLOCK)
    at_once: list[bytes] = []
    extend_links(at_once, b"a", list(range(16)), BLOCK)
    assert links == at_once


def test_the_index_gives_up_what_rested_longest() -> None:
    index = PrefixIndex()
    for block, name in enumerate([b"x", b"y", b"z"], start=1):
        index.add(name, block)
        index.rest(block)
    index.wake(1)
    index.rest(1)
    assert [index.give_up() for _ in range(3)] == [2, 3, 1]
    assert index.find(b"x") is None and index.idle == 0
    with pytest.raises(KeyError):
        index.give_up()


def test_a_second_block_of_one_name_is_not_found() -> None:
    index = PrefixIndex()
    index.add(b"x", 1)
    index.add(b"x", 2)
    assert index.find(b"x") == 1 and not index.knows(2)


# The pool, against a list of who holds what.


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["take", "share", "release", "name"]), st.integers(0, 30)), max_size=120))
def test_a_block_belongs_to_whoever_holds_it(actions: list[tuple[str, int]]) -> None:
    pool = BlockPool(8)
    held: list[int] = []
    named: dict[bytes, int] = {}
    for action, number in actions:
        if action == "take" and pool.available:
            block = pool.take()
            assert block not in held and 0 < block < 8
            named = {name: other for name, other in named.items() if other != block}
            held.append(block)
        elif action == "share" and named:
            block = list(named.values())[number % len(named)]
            pool.share(block)
            held.append(block)
        elif action == "release" and held:
            pool.release(held.pop(number % len(held)))
        elif action == "name" and held:
            block = held[number % len(held)]
            if not pool.index.knows(block):
                named[b"%d" % len(named) + b"%d" % number] = block
                pool.index.add(list(named)[-1], block)
        assert pool.used == len(set(held)) == 7 - pool.available
        assert all(pool.users(block) == held.count(block) for block in range(8))
        named = {name: block for name, block in named.items() if pool.index.find(name) == block}
        assert all(pool.index.find(name) == block for name, block in named.items())


def test_releasing_twice_is_a_mistake() -> None:
    pool = BlockPool(3)
    block = pool.take()
    pool.release(block)
    with pytest.raises(AssertionError, match="too often"):
        pool.release(block)


# Prefixes of sequences.


def test_a_shared_beginning_inside_one_variant() -> None:
    kv = cache()
    tokens = random_prompt(1, 30)
    first = fill(kv, b"v0", tokens)
    second = kv.open()
    assert kv.adopt(second, b"v0", [*tokens[:18], 1, 2, 3]) == 16
    assert second.tables[0] == first.tables[0][:4]
    assert kv.reserve(second, 21) and second.tables[0][4] not in first.tables[0]
    assert used(kv) == [8 + 2]
    kv.close(first)
    assert used(kv) == [6]
    kv.close(second)
    assert used(kv) == [0]


def test_no_block_is_shared_between_variants() -> None:
    """70 tokens in common, one digest each: vllm issues 3264, 30931 and 42125."""
    kv = cache(tokens=256)
    tokens = random_prompt(2, 70)
    sequences = {digest: fill(kv, digest, tokens) for digest in (b"base", b"v0", b"v1")}
    blocks = [set(sequence.tables[0]) for sequence in sequences.values()]
    assert not blocks[0] & blocks[1] and not blocks[0] & blocks[2] and not blocks[1] & blocks[2]
    for sequence in sequences.values():
        kv.close(sequence)
    assert kv.adopt(kv.open(), b"v2", tokens) == 0
    again = kv.open()
    assert kv.adopt(again, b"v1", tokens) == 68
    assert set(again.tables[0]) < blocks[2]


def test_the_last_token_is_always_computed() -> None:
    """Its logits are needed: a prompt of whole blocks that are all known leaves one block to compute."""
    kv = cache()
    tokens = random_prompt(3, 16)
    kv.close(fill(kv, b"v0", tokens))
    assert kv.adopt(kv.open(), b"v0", tokens) == 12


def test_nothing_is_shared_when_switched_off() -> None:
    kv = KvCache(shapes({0: None}), tokens=64, block_size=BLOCK, share_prefixes=False)
    tokens = random_prompt(4, 16)
    kv.close(fill(kv, b"v0", tokens))
    assert kv.adopt(kv.open(), b"v0", tokens) == 0
    assert kv.groups[0].pool.index.idle == 0


def test_what_is_asked_for_again_is_kept() -> None:
    """Ends are given up before beginnings, and old prompts before new ones."""
    kv = cache(tokens=40)
    old, new = random_prompt(5, 16), random_prompt(6, 16)
    kv.close(fill(kv, b"v", old))
    kv.close(fill(kv, b"v", new))
    third = fill(kv, b"v", random_prompt(7, 12))  # two free blocks, and one given up
    for prompt, known in ((old, 12), (new, 16)):
        probe = kv.open()
        assert kv.adopt(probe, b"v", [*prompt, 1]) == known
        kv.close(probe)
    kv.close(third)


def test_reserving_takes_all_or_nothing() -> None:
    kv = cache(tokens=20)
    sequence = kv.open()
    assert not kv.reserve(sequence, 21)
    assert sequence.tables == [[]] and used(kv) == [0]
    assert kv.missing(sequence, 21) == 1
    assert kv.reserve(sequence, 20) and used(kv) == [5]
    with pytest.raises(UsageError, match="at most 20 tokens, found 21"):
        kv.check_fits(21)
    kv.check_fits(20)


def test_bytes_are_those_of_the_tensors() -> None:
    kv = cache({0: None, 1: None, 2: 6}, tokens=64)
    assert kv.bytes_reserved == sum(s.keys.nbytes + s.values.nbytes for s in kv.layers.values())
    assert kv.bytes_used == 0
    sequence = kv.open()
    assert kv.reserve(sequence, 9)
    per_token = sum(2 * (3 + layer + 5) * 4 for layer in range(3))
    assert kv.bytes_used == 3 * BLOCK * per_token


def test_more_room_than_there_is_memory() -> None:
    wide = LayerShape(2, 1 << 45, 5, None, torch.float32, torch.device("cpu"))
    with pytest.raises(ResourceShortage, match="expected memory on cpu for 17 blocks"):
        KvCache({0: wide}, tokens=64, block_size=BLOCK)


# Sliding windows.


def test_a_window_gives_back_what_it_left_behind() -> None:
    kv = cache({0: None, 1: 6}, tokens=256, chunk=7)
    tokens = random_prompt(8, 100)
    sequence = fill(kv, b"v", tokens)
    whole, sliding = sequence.tables
    assert len(whole) == len(sliding) == 25 and NOTHING not in whole
    kept = [at for at, block in enumerate(sliding) if block != NOTHING]
    assert kept == list(range((100 - 6 + 1) // BLOCK, 25))
    assert used(kv) == [25, len(kept)]
    kv.close(sequence)
    assert used(kv) == [0, 0]


def test_a_window_needs_a_bounded_number_of_blocks() -> None:
    kv = cache({0: 6}, tokens=4096, sequences=2, chunk=7)
    assert kv.groups[0].pool.blocks - 1 == 2 * 5
    one, other = fill(kv, b"v", random_prompt(9, 500)), fill(kv, b"w", random_prompt(9, 500))
    assert used(kv)[0] <= 10
    kv.close(one)
    kv.close(other)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 20), st.integers(1, 60), st.integers(1, 9), st.integers(1, 50))
def test_a_prefix_under_a_window_has_all_that_can_be_seen(window: int, length: int, chunk: int, common: int) -> None:
    kv = cache({0: None, 1: window}, tokens=512, chunk=16)
    tokens = random_prompt(10, length)
    kv.close(fill(kv, b"v", tokens, chunk))
    again = kv.open()
    asked = [*tokens[:common], *random_prompt(11, 8)]
    computed = kv.adopt(again, b"v", asked)
    assert computed % BLOCK == 0 and computed <= common
    whole, sliding = again.tables
    assert len(whole) == len(sliding) == computed // BLOCK
    for position in range(max(0, computed - window + 1), computed):
        assert sliding[position // BLOCK] != NOTHING
    kv.close(again)
    assert used(kv) == [0, 0]


def test_a_prefix_that_a_window_forgot_is_shorter() -> None:
    """The beginning is known to the full layers, but the window's blocks of the middle were given up."""
    kv = cache({0: None, 1: 6}, tokens=256, chunk=7)
    tokens = random_prompt(12, 64)
    kv.close(fill(kv, b"v", tokens))
    sliding = kv.groups[1].pool
    sliding.forget()
    assert kv.adopt(kv.open(), b"v", [*tokens, 1]) == 0
