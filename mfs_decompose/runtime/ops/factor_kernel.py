"""Low-rank deltas of a few rows: codes are read once, as they are stored, and meet fp32 in registers.

A step of decoding reads much and computes little, so what a delta costs is its bytes. Each row's numbers are summed in
an order that depends on the form and on the rows of its own group alone: not on neighbours, and not on threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from mfs_decompose.linalg.shapes import GROUP
from mfs_decompose.runtime.ops.compiled import FLAGS, ask, high_half, low_half, pointer, widen

# Of a call: addresses of x fp32 [T, INPUTS], y fp32 (rows STRIDE apart), h fp32 [T, HIDDEN], and of C functions that
# tell a thread its number, how many there are, and when all have come as far as it; 0 where one works alone.
X, Y, H, ROWS, INPUTS, OUTPUTS, STRIDE, HIDDEN, ENTRIES, THREAD, THREADS, BARRIER = range(12)
HEAD = 16

# Of a side, right (after 0) or left (after SIDE): kind of its codes, address and number of whole directions, address of
# nibbles and number of their rows; address of scales (0 for none) and how many a direction has; what lies before its
# first value in a group; whether codes lack 1/2; length of a direction.
KIND, CODES, WHOLE, NIBBLES, PAIRS, SCALES, GROUPS, BEFORE, HALF, LENGTH = range(10)
SIDE = 10
# Then rows of the group, place among outputs, and first column of h.
FIRST, LAST, START, COLUMN = range(2 * SIDE, 2 * SIDE + 4)
FACTORS = 2 * SIDE + 4

INT8, FP32, BF16 = range(3)
"""Kinds of codes."""

_TILE = 1024  # columns of y at a time: those of two rows stay in the nearest cache


def add_factors(data: Any) -> None:
    """`y += (x right^T) left` of all entries of a table of factors; run by every thread of a team."""
    head = carray(data, HEAD, np.int64)
    count = head[ENTRIES]
    table = carray(data, HEAD + count * FACTORS, np.int64)
    thread, threads = ask(head[THREAD], 0), ask(head[THREADS], 1)
    for entry in range(count):
        _shrink(head, table[HEAD + entry * FACTORS : HEAD + (entry + 1) * FACTORS], thread, threads)
    ask(head[BARRIER], 0)
    outputs = head[OUTPUTS]
    units = (outputs + GROUP - 1) // GROUP
    first, last = units * thread // threads * GROUP, min(units * (thread + 1) // threads * GROUP, outputs)
    for entry in range(count):
        _expand(head, table[HEAD + entry * FACTORS : HEAD + (entry + 1) * FACTORS], first, last)


# First factor: a direction and two rows at a time. What a pair of rows gets is summed alike for both.


@njit(**FLAGS)
def _shrink(head: Any, entry: Any, thread: Any, threads: Any) -> None:
    """h of an entry's rows, scaled by both factors where those have one scale a direction."""
    if entry[KIND] == INT8:
        codes = carray(pointer(entry[CODES]), (entry[WHOLE], entry[LENGTH]), np.int8)
        _shrink_codes(head, entry, codes, thread, threads)
    elif entry[KIND] == FP32:
        wide = carray(pointer(entry[CODES]), (entry[WHOLE], entry[LENGTH]), np.float32)
        _shrink_codes(head, entry, wide, thread, threads)
    else:
        short = carray(pointer(entry[CODES]), (entry[WHOLE], entry[LENGTH]), np.uint16)
        _shrink_codes(head, entry, short, thread, threads)


@njit(**FLAGS)
def _shrink_codes(head: Any, entry: Any, codes: Any, thread: Any, threads: Any) -> None:
    x = carray(pointer(head[X]), (head[ROWS], head[INPUTS]), np.float32)
    h = carray(pointer(head[H]), (head[ROWS], head[HIDDEN]), np.float32)
    whole, pairs, length, column = entry[WHOLE], entry[PAIRS], entry[LENGTH], entry[COLUMN]
    nibbles = carray(pointer(entry[NIBBLES]), (pairs, length), np.int8)
    groups, before = entry[GROUPS], entry[BEFORE]
    half = np.float32(0.5) if entry[HALF] else np.float32(0.0)
    scales = carray(pointer(entry[SCALES]), (whole + 2 * pairs, groups), np.float32)
    grouped = groups > 1
    for row in range(entry[FIRST], entry[LAST], 2):
        after = min(row + 1, entry[LAST] - 1)
        one, two = x[row], x[after]
        for at_code in range(whole * thread // threads, whole * (thread + 1) // threads):
            scale = _scale(entry, at_code)
            if grouped:
                a, b = _dot_grouped(codes[at_code], one, two, scales[at_code], before, half)
            else:
                a, b = _dot(codes[at_code], one, two, half)
            h[after, column + at_code] = b * scale
            h[row, column + at_code] = a * scale
        for at_pair in range(pairs * thread // threads, pairs * (thread + 1) // threads):
            lower, upper = whole + at_pair, whole + pairs + at_pair
            if grouped:
                a, b, c, d = _dots_grouped(nibbles[at_pair], one, two, scales[lower], scales[upper], before, half)
            else:
                a, b, c, d = _dots(nibbles[at_pair], one, two, half)
            scale_lower, scale_upper = _scale(entry, lower), _scale(entry, upper)
            h[after, column + lower] = b * scale_lower
            h[row, column + lower] = a * scale_lower
            h[after, column + upper] = d * scale_upper
            h[row, column + upper] = c * scale_upper


@njit(**FLAGS)
def _scale(entry: Any, direction: Any) -> Any:
    """What scales a whole direction, on both sides."""
    scale = np.float32(1.0)
    for side in (0, SIDE):
        if entry[side + SCALES] and entry[side + GROUPS] == 1:
            scale *= carray(pointer(entry[side + SCALES]), direction + 1, np.float32)[direction]
    return scale


@njit(**FLAGS)
def _dot(code: Any, one: Any, two: Any, half: Any) -> Any:
    a = b = np.float32(0.0)
    for k in range(code.shape[0]):
        wide = widen(code[k]) + half
        a += wide * one[k]
        b += wide * two[k]
    return a, b


@njit(**FLAGS)
def _dots(code: Any, one: Any, two: Any, half: Any) -> Any:
    a = b = c = d = np.float32(0.0)
    for k in range(code.shape[0]):
        low, high = low_half(code[k]) + half, high_half(code[k]) + half
        a += low * one[k]
        b += low * two[k]
        c += high * one[k]
        d += high * two[k]
    return a, b, c, d


@njit(**FLAGS)
def _dot_grouped(code: Any, one: Any, two: Any, scales: Any, before: Any, half: Any) -> Any:
    a = b = np.float32(0.0)
    for group in range(scales.shape[0]):
        start, stop = max(group * GROUP - before, 0), min((group + 1) * GROUP - before, code.shape[0])
        part_a, part_b = _dot(code[start:stop], one[start:stop], two[start:stop], half)
        a += part_a * scales[group]
        b += part_b * scales[group]
    return a, b


@njit(**FLAGS)
def _dots_grouped(code: Any, one: Any, two: Any, low_scales: Any, high_scales: Any, before: Any, half: Any) -> Any:
    a = b = c = d = np.float32(0.0)
    for group in range(low_scales.shape[0]):
        start, stop = max(group * GROUP - before, 0), min((group + 1) * GROUP - before, code.shape[0])
        part_a, part_b, part_c, part_d = _dots(code[start:stop], one[start:stop], two[start:stop], half)
        a += part_a * low_scales[group]
        b += part_b * low_scales[group]
        c += part_c * high_scales[group]
        d += part_d * high_scales[group]
    return a, b, c, d


# Second factor: four directions and two rows at a time, over columns that stay in the cache.


@njit(**FLAGS)
def _expand(head: Any, entry: Any, first: Any, last: Any) -> None:
    """Add what h of an entry comes to in outputs first..last."""
    side = entry[SIDE : 2 * SIDE]
    if side[KIND] == INT8:
        codes = carray(pointer(side[CODES]), (side[WHOLE], side[LENGTH]), np.int8)
        _expand_codes(head, entry, side, codes, first, last)
    elif side[KIND] == FP32:
        wide = carray(pointer(side[CODES]), (side[WHOLE], side[LENGTH]), np.float32)
        _expand_codes(head, entry, side, wide, first, last)
    else:
        short = carray(pointer(side[CODES]), (side[WHOLE], side[LENGTH]), np.uint16)
        _expand_codes(head, entry, side, short, first, last)


@njit(**FLAGS)
def _expand_codes(head: Any, entry: Any, side: Any, codes: Any, first: Any, last: Any) -> None:
    y = carray(pointer(head[Y]), (head[ROWS], head[STRIDE]), np.float32)
    h = carray(pointer(head[H]), (head[ROWS], head[HIDDEN]), np.float32)
    whole, pairs, length = side[WHOLE], side[PAIRS], side[LENGTH]
    nibbles = carray(pointer(side[NIBBLES]), (pairs, length), np.int8)
    groups, before = side[GROUPS], side[BEFORE]
    scales = carray(pointer(side[SCALES]), (whole + 2 * pairs, groups), np.float32)
    grouped = groups > 1
    half = np.float32(0.5) if side[HALF] else np.float32(0.0)
    start, column = entry[START], entry[COLUMN]
    times = np.empty(8, np.float32)
    begin, end = max(first - start, 0), min(last - start, length)
    while begin < end:
        group = (before + begin) // GROUP if grouped else 0
        stop = min(end, (group + 1) * GROUP - before if grouped else begin + _TILE)
        for row in range(entry[FIRST], entry[LAST], 2):
            after = row + 1
            alone = after == entry[LAST]
            one = y[row, start + begin : start + stop]
            two = y[row if alone else after, start + begin : start + stop]
            lacking_one = lacking_two = np.float32(0.0)
            for at_code in range(0, whole, 4):
                for part in range(4):
                    known = at_code + part < whole
                    direction = min(at_code + part, whole - 1)
                    scale = scales[direction, group] if grouped else np.float32(1.0)
                    times[part] = h[row, column + direction] * scale if known else np.float32(0.0)
                    times[4 + part] = h[after, column + direction] * scale if known and not alone else np.float32(0.0)
                    lacking_one += times[part]
                    lacking_two += times[4 + part]
                a = codes[at_code, begin:stop]
                b = codes[min(at_code + 1, whole - 1), begin:stop]
                c = codes[min(at_code + 2, whole - 1), begin:stop]
                d = codes[min(at_code + 3, whole - 1), begin:stop]
                if alone:
                    _add_one(a, b, c, d, one, times)
                else:
                    _add_two(a, b, c, d, one, two, times)
            for at_pair in range(0, pairs, 2):
                for part in range(4):
                    pair = at_pair + part // 2
                    known = pair < pairs
                    direction = whole + min(pair, pairs - 1) + part % 2 * pairs
                    scale = scales[direction, group] if grouped else np.float32(1.0)
                    times[part] = h[row, column + direction] * scale if known else np.float32(0.0)
                    times[4 + part] = h[after, column + direction] * scale if known and not alone else np.float32(0.0)
                    lacking_one += times[part]
                    lacking_two += times[4 + part]
                a = nibbles[at_pair, begin:stop]
                b = nibbles[min(at_pair + 1, pairs - 1), begin:stop]
                if alone:
                    _add_nibbles_one(a, b, one, times)
                else:
                    _add_nibbles_two(a, b, one, two, times)
            if side[HALF]:
                _add_all(one, half * lacking_one)
                if not alone:
                    _add_all(two, half * lacking_two)
        begin = stop


@njit(**FLAGS)
def _add_all(row: Any, value: Any) -> None:
    for k in range(row.shape[0]):
        row[k] += value


@njit(**FLAGS)
def _add_one(a: Any, b: Any, c: Any, d: Any, one: Any, times: Any) -> None:
    t0, t1, t2, t3 = times[0], times[1], times[2], times[3]
    for k in range(one.shape[0]):
        one[k] += t0 * widen(a[k]) + t1 * widen(b[k]) + t2 * widen(c[k]) + t3 * widen(d[k])


@njit(**FLAGS)
def _add_two(a: Any, b: Any, c: Any, d: Any, one: Any, two: Any, times: Any) -> None:
    t0, t1, t2, t3 = times[0], times[1], times[2], times[3]
    u0, u1, u2, u3 = times[4], times[5], times[6], times[7]
    for k in range(one.shape[0]):
        wide_a, wide_b, wide_c, wide_d = widen(a[k]), widen(b[k]), widen(c[k]), widen(d[k])
        one[k] += t0 * wide_a + t1 * wide_b + t2 * wide_c + t3 * wide_d
        two[k] += u0 * wide_a + u1 * wide_b + u2 * wide_c + u3 * wide_d


@njit(**FLAGS)
def _add_nibbles_one(a: Any, b: Any, one: Any, times: Any) -> None:
    t0, t1, t2, t3 = times[0], times[1], times[2], times[3]
    for k in range(one.shape[0]):
        one[k] += t0 * low_half(a[k]) + t1 * high_half(a[k]) + t2 * low_half(b[k]) + t3 * high_half(b[k])


@njit(**FLAGS)
def _add_nibbles_two(a: Any, b: Any, one: Any, two: Any, times: Any) -> None:
    t0, t1, t2, t3 = times[0], times[1], times[2], times[3]
    u0, u1, u2, u3 = times[4], times[5], times[6], times[7]
    for k in range(one.shape[0]):
        low_a, high_a, low_b, high_b = low_half(a[k]), high_half(a[k]), low_half(b[k]), high_half(b[k])
        one[k] += t0 * low_a + t1 * high_a + t2 * low_b + t3 * high_b
        two[k] += u0 * low_a + u1 * high_a + u2 * low_b + u3 * high_b
