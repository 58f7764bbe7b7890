"""Attention of single rows over keys and values in blocks, read where they lie: none is gathered first."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import carray, njit

from mfs_decompose.runtime.ops.compiled import FLAGS, ask, pointer

# Of a call: addresses of queries fp32 [ROWS, HEADS * GROUPS, SIZE], of answers alike, of keys and values fp32 (blocks
# of BLOCK tokens, each [HEADS, SIZE]), of tables int64 [ROWS, WIDTH] of blocks, and of spans int64 [ROWS, 2], the first
# key of each row and the one behind its last; the bits of the fp32 that scores are multiplied by; and C functions that
# tell a thread its number and how many there are, 0 where one works alone.
QUERY, ANSWER, KEYS, VALUES, TABLES, SPANS = range(6)
ROWS, HEADS, GROUPS, SIZE, BLOCK, WIDTH, SCALE, THREAD, THREADS = range(6, 15)
WORDS = 16


def attend_pages(data: Any) -> None:
    """Softmax of a row's scores over its own keys, times their values; each head of keys serves GROUPS of queries."""
    head = carray(data, WORDS, np.int64)
    thread, threads = ask(head[THREAD], 0), ask(head[THREADS], 1)
    # In turn, as rows differ in length.
    for at in range(thread, head[ROWS] * head[HEADS], threads):
        _attend(head, at // head[HEADS], at % head[HEADS])


@njit(**FLAGS)
def _attend(head: Any, row: Any, key_head: Any) -> None:
    rows, heads, groups, size, block = head[ROWS], head[HEADS], head[GROUPS], head[SIZE], head[BLOCK]
    table = carray(pointer(head[TABLES]), (rows, head[WIDTH]), np.int64)[row]
    first, last = carray(pointer(head[SPANS]), (rows, 2), np.int64)[row]
    slots = (table[: (last + block - 1) // block].max() + 1) * block
    keys = carray(pointer(head[KEYS]), (slots, heads, size), np.float32)
    values = carray(pointer(head[VALUES]), (slots, heads, size), np.float32)
    query = carray(pointer(head[QUERY]), (rows, heads, groups, size), np.float32)[row, key_head]
    answer = carray(pointer(head[ANSWER]), (rows, heads, groups, size), np.float32)[row, key_head]
    scale = np.uint32(head[SCALE]).view(np.float32)
    scores = np.empty((groups, last - first), np.float32)
    for at in range(first, last):
        key = keys[table[at // block] * block + at % block, key_head]
        for group in range(groups):
            scores[group, at - first] = scale * _dot(query[group], key)
    for group in range(groups):
        _softmax(scores[group])
        answer[group, :] = np.float32(0.0)
    for at in range(first, last):
        value = values[table[at // block] * block + at % block, key_head]
        for group in range(groups):
            _add(answer[group], scores[group, at - first], value)


@njit(**FLAGS)
def _dot(one: Any, two: Any) -> Any:
    total = np.float32(0.0)
    for k in range(one.shape[0]):
        total += one[k] * two[k]
    return total


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
        scores[k] = math.exp(scores[k] - peak)
        total += scores[k]
    for k in range(scores.shape[0]):
        scores[k] /= total
