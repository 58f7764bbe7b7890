"""Attention of single rows over keys and values in blocks, read where they lie: none is gathered first."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from mfs_decompose.runtime.ops.compiled import FLAGS, ask, fetch, pointer

# Of a call: addresses of queries fp32 [ROWS, HEADS * GROUPS, SIZE], of answers alike, of keys and values fp32 (blocks
# of BLOCK tokens, each [HEADS, SIZE]), of tables int64 [ROWS, WIDTH] of blocks, and of spans int64 [ROWS, 2], the first
# key of each row and the one behind its last; the bits of the fp32 that scores are multiplied by; C functions that tell
# a thread its number and how many there are, 0 where one works alone; and addresses of a new key and value of each row
# and head, to be written to the last place of the row first, 0 for none, with their strides by row and by head.
QUERY, ANSWER, KEYS, VALUES, TABLES, SPANS = range(6)
ROWS, HEADS, GROUPS, SIZE, BLOCK, WIDTH, SCALE, THREAD, THREADS = range(6, 15)
NEW_KEY, KEY_ROW, KEY_HEAD, NEW_VALUE, VALUE_ROW, VALUE_HEAD = range(15, 21)
WORDS = 21

_AHEAD, _LINE = 8, 64  # keys, bytes


def attend_pages(data: Any) -> None:
    """Softmax of a row's scores over its own keys, times their values; each head of keys serves GROUPS of queries."""
    head = carray(data, WORDS, np.int64)
    thread, threads = ask(head[THREAD], 0), ask(head[THREADS], 1)
    # All heads of a key lie side by side, and are read together; apart only where there are fewer rows than threads.
    parts = 1 if head[ROWS] >= threads else min(head[HEADS], threads)
    # In turn, as rows differ in length.
    for at in range(thread, head[ROWS] * parts, threads):
        row, part = at // parts, at % parts
        _attend(head, row, head[HEADS] * part // parts, head[HEADS] * (part + 1) // parts)


@njit(**FLAGS)
def _attend(head: Any, row: Any, first_head: Any, last_head: Any) -> None:
    rows, heads, groups, size, block = head[ROWS], head[HEADS], head[GROUPS], head[SIZE], head[BLOCK]
    table = carray(pointer(head[TABLES]), (rows, head[WIDTH]), np.int64)[row]
    first, last = carray(pointer(head[SPANS]), (rows, 2), np.int64)[row]
    slots = (table[: (last + block - 1) // block].max() + 1) * block
    keys = carray(pointer(head[KEYS]), (slots, heads, size), np.float32)
    values = carray(pointer(head[VALUES]), (slots, heads, size), np.float32)
    query = carray(pointer(head[QUERY]), (rows, heads, groups, size), np.float32)[row]
    answer = carray(pointer(head[ANSWER]), (rows, heads, groups, size), np.float32)[row]
    if head[NEW_KEY]:
        newest = table[(last - 1) // block] * block + (last - 1) % block
        for key_head in range(first_head, last_head):
            at_key, at_value = row * head[KEY_ROW] + key_head * head[KEY_HEAD], row * head[VALUE_ROW]
            at_value += key_head * head[VALUE_HEAD]
            keys[newest, key_head, :] = carray(pointer(head[NEW_KEY] + 4 * at_key), size, np.float32)
            values[newest, key_head, :] = carray(pointer(head[NEW_VALUE] + 4 * at_value), size, np.float32)
    scale = np.uint32(head[SCALE]).view(np.float32)
    scores = np.empty((last_head - first_head, groups, last - first), np.float32)
    for at in range(first, last):
        slot = table[at // block] * block + at % block
        ahead = min(at + _AHEAD, last - 1)
        _fetch(head, KEYS, table[ahead // block] * block + ahead % block, first_head, last_head)
        _fetch(head, VALUES, slot, first_head, last_head)
        for key_head in range(first_head, last_head):
            own = scores[key_head - first_head, :, at - first]
            for group in range(0, groups, 2):
                after = min(group + 1, groups - 1)
                a, b = _dots(query[key_head, group], query[key_head, after], keys[slot, key_head])
                own[after], own[group] = scale * b, scale * a
    for key_head in range(first_head, last_head):
        for group in range(groups):
            _softmax(scores[key_head - first_head, group])
            answer[key_head, group, :] = np.float32(0.0)
    for at in range(first, last):
        slot = table[at // block] * block + at % block
        for key_head in range(first_head, last_head):
            own = scores[key_head - first_head, :, at - first]
            for group in range(groups):
                _add(answer[key_head, group], own[group], values[slot, key_head])


@njit(**FLAGS)
def _fetch(head: Any, pages: Any, slot: Any, first_head: Any, last_head: Any) -> None:
    """Begin to bring a token's keys or values: blocks lie here and there, and no cache foresees the next one."""
    width = 4 * head[SIZE]
    start = head[pages] + slot * head[HEADS] * width
    for place in range(start + first_head * width, start + last_head * width, _LINE):
        fetch(place)


@njit(**FLAGS)
def _dots(one: Any, two: Any, key: Any) -> Any:
    a = b = np.float32(0.0)
    for k in range(key.shape[0]):
        a += one[k] * key[k]
        b += two[k] * key[k]
    return a, b


@njit(**FLAGS)
def _add(into: Any, times: Any, values: Any) -> None:
    for k in range(into.shape[0]):
        into[k] += times * values[k]


@njit(**FLAGS)
def _softmax(scores: Any) -> None:
    peak = scores[0]
    for k in range(scores.shape[0]):
        peak = max(peak, scores[k])
    total = np.float32(0.0)
    for k in range(scores.shape[0]):
        scores[k] = _exp(scores[k] - peak)
        total += scores[k]
    for k in range(scores.shape[0]):
        scores[k] /= total


@njit(**FLAGS)
def _exp(value: Any) -> Any:
    """e^value of a value up to 0, to 2e-7 of it; the C library's takes one at a time.

    2^n e^r with r within half of ln 2: the series to r^6 leaves less than an fp32 holds (Cody and Waite, 1980).
    """
    bounded = max(value, np.float32(-87.0))
    n = np.floor(bounded * np.float32(1.442695041) + np.float32(0.5))
    r = (bounded - n * np.float32(0.693359375)) + n * np.float32(2.12194440e-4)
    series = np.float32(1.0 / 720.0)
    series = series * r + np.float32(1.0 / 120.0)
    series = series * r + np.float32(1.0 / 24.0)
    series = series * r + np.float32(1.0 / 6.0)
    series = series * r + np.float32(0.5)
    series = series * r + np.float32(1.0)
    series = series * r + np.float32(1.0)
    power = np.uint32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    return series * power
