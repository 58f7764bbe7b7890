"""Sparse deltas of a few rows: each output takes its entries, as they are stored, from the row of x."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit, types
from numba.extending import overload

from mfs_decompose.linalg.shapes import GROUP
from mfs_decompose.runtime.ops.compiled import FLAGS, ask, pointer, widen

# Of a call: addresses of x fp32 [T, INPUTS] and y fp32 (rows STRIDE apart), and of C functions that tell a thread its
# number and how many there are; 0 where one works alone.
X, Y, ROWS, INPUTS, OUTPUTS, STRIDE, ENTRIES, THREAD, THREADS = range(9)
HEAD = 16

# Of a form: address of offsets (0 where each output has EACH entries); of columns, and whether they are uint16; kind
# and address of codes; address of their scales (bf16, one for GROUP outputs) or levels (fp32), 0 for none; rows of the
# group, place among outputs, and how many outputs.
OFFSETS, EACH, COLUMNS, SHORT, KIND, CODES, SCALES, FIRST, LAST, START, LENGTH = range(11)
FORM = 12

FP32, BF16, INT8, NAMES = range(4)
"""Kinds of codes: int8 has scales, names are uint8 and have levels."""


def add_entries(data: Any) -> None:
    """`y += x M^T` of all sparse matrices M of a table; run by every thread of a team."""
    head = carray(data, HEAD, np.int64)
    count = head[ENTRIES]
    table = carray(data, HEAD + count * FORM, np.int64)
    thread, threads = ask(head[THREAD], 0), ask(head[THREADS], 1)
    # Whole groups of outputs each: which thread has them changes nothing.
    units = (head[OUTPUTS] + GROUP - 1) // GROUP
    first, last = units * thread // threads * GROUP, min(units * (thread + 1) // threads * GROUP, head[OUTPUTS])
    for at in range(count):
        form = table[HEAD + at * FORM : HEAD + (at + 1) * FORM]
        begin, end = max(first - form[START], 0), min(last - form[START], form[LENGTH])
        if begin >= end:
            continue
        if form[SHORT]:
            _by_kind(head, form, carray(pointer(form[COLUMNS]), _stop(form, end), np.uint16), begin, end)
        else:
            _by_kind(head, form, carray(pointer(form[COLUMNS]), _stop(form, end), np.int32), begin, end)


@njit(**FLAGS)
def _stop(form: Any, output: Any) -> Any:
    """The first entry of an output, which is the last but one before it."""
    if form[OFFSETS]:
        return np.int64(carray(pointer(form[OFFSETS]), output + 1, np.int32)[output])
    return np.int64(form[EACH] * output)


def _value(code: Any, extra: Any, scale: Any) -> Any:
    """A code in fp32: int8 times extra[scale], uint8 as a name of extra, others as they are."""


@overload(_value, inline="always")
def _value_of(code: Any, extra: Any, scale: Any) -> Any:
    def scaled(code: Any, extra: Any, scale: Any) -> Any:
        return widen(code) * widen(extra[scale])

    def named(code: Any, extra: Any, scale: Any) -> Any:
        return extra[np.int64(code)]

    def plain(code: Any, extra: Any, scale: Any) -> Any:
        return widen(code)

    return scaled if code == types.int8 else named if code == types.uint8 else plain


@njit(**FLAGS)
def _by_kind(head: Any, form: Any, columns: Any, begin: Any, end: Any) -> None:
    count, scales = columns.shape[0], (form[LENGTH] // GROUP + 1) * form[EACH]
    levels = carray(pointer(form[SCALES]), 256, np.float32)
    if form[KIND] == FP32:
        _add(head, form, columns, carray(pointer(form[CODES]), count, np.float32), levels, begin, end)
    elif form[KIND] == BF16:
        _add(head, form, columns, carray(pointer(form[CODES]), count, np.uint16), levels, begin, end)
    elif form[KIND] == NAMES:
        _add(head, form, columns, carray(pointer(form[CODES]), count, np.uint8), levels, begin, end)
    else:
        own = carray(pointer(form[SCALES]), scales, np.uint16)
        _add(head, form, columns, carray(pointer(form[CODES]), count, np.int8), own, begin, end)


@njit(**FLAGS)
def _add(head: Any, form: Any, columns: Any, codes: Any, extra: Any, begin: Any, end: Any) -> None:
    x = carray(pointer(head[X]), (head[ROWS], head[INPUTS]), np.float32)
    y = carray(pointer(head[Y]), (head[ROWS], head[STRIDE]), np.float32)
    for output in range(begin, end):
        start, stop = _stop(form, output), _stop(form, output + 1)
        scale = form[EACH] * (output // GROUP) - start
        for row in range(form[FIRST], form[LAST], 2):
            after = min(row + 1, form[LAST] - 1)
            a = b = np.float32(0.0)
            for k in range(start, stop):
                value, column = _value(codes[k], extra, scale + k), np.int64(columns[k])
                a += value * x[row, column]
                b += value * x[after, column]
            y[row, form[START] + output] += a
            if after > row:
                y[after, form[START] + output] += b
