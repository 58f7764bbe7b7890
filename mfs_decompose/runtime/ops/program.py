"""What a few rows of one layer get from the deltas of their variants, as one call of a compiled kernel or two.

The tables of the calls are laid out once for a plan. Codes stay where they lie, and are read as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from mfs_decompose.runtime.ops import entry_kernel, factor_kernel
from mfs_decompose.runtime.ops.compiled import Kernel, compile_kernel
from mfs_decompose.runtime.ops.team import team_for, torch_team
from mfs_decompose.runtime.resident_forms import Csr, Ell, Factor, Form, LowRank

_FACTORS = {torch.int8: factor_kernel.INT8, torch.float32: factor_kernel.FP32, torch.bfloat16: factor_kernel.BF16}
_ENTRIES = {
    torch.float32: entry_kernel.FP32,
    torch.bfloat16: entry_kernel.BF16,
    torch.int8: entry_kernel.INT8,
    torch.uint8: entry_kernel.NAMES,
}

Taken = LowRank | Ell | Csr
"""What a program may have."""


class Part(NamedTuple):
    """A form, the rows first..last that it is for, and the outputs start..stop that it adds to."""

    form: Taken
    first: int
    last: int
    start: int
    stop: int


class Program:
    """The parts of all groups of a step."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = tuple(parts)  # whose memory the tables name
        for part in parts:
            _check(part)
        # The least that x and y must have: kernels go by addresses.
        self._rows = max((part.last for part in parts), default=0)
        self._outputs = max((part.stop for part in parts), default=0)
        self._inputs = {_inputs(part.form) for part in parts}
        factors = [(part, part.form) for part in parts if isinstance(part.form, LowRank) and part.form.left.rank]
        entries = [(part, part.form) for part in parts if isinstance(part.form, Ell | Csr)]
        self._factors = _Factors(factors) if factors else None
        self._entries = _Entries(entries) if entries else None

    def add(self, x_TI: torch.Tensor, y_TO: torch.Tensor) -> None:
        """`y += x M^T` of each part's matrix M for its rows, fp32, in place; x lies row after row."""
        assert x_TI.shape[0] == y_TO.shape[0] >= self._rows and y_TO.shape[1] >= self._outputs
        assert self._inputs <= {x_TI.shape[1]}
        assert x_TI.is_contiguous() and y_TO.stride(1) == 1 and x_TI.dtype == y_TO.dtype == torch.float32
        if self._factors is not None:
            self._factors.add(x_TI, y_TO)
        if self._entries is not None:
            self._entries.add(x_TI, y_TO)


def takes(form: Form) -> bool:
    """Whether a program may have a form: on a CPU, and its codes of a kind that kernels read."""
    if any(one.device.type != "cpu" or not one.is_contiguous() for one in form.tensors()):
        return False
    if isinstance(form, LowRank):
        return all(side.codes.dtype in _FACTORS for side in (form.left, form.right))
    return isinstance(form, Ell | Csr) and form.codes.dtype in _ENTRIES


def _inputs(form: Taken) -> int:
    return form.right.codes.shape[1] if isinstance(form, LowRank) else form.width


def _check(part: Part) -> None:
    form, outputs = part.form, part.stop - part.start
    assert 0 <= part.first <= part.last and 0 <= part.start <= part.stop
    if isinstance(form, LowRank):
        assert form.left.rank == form.right.rank and form.left.codes.shape[1] == outputs
    elif isinstance(form, Csr):
        assert form.offsets.numel() == outputs + 1 and form.columns.shape == form.codes.shape
    else:
        assert form.columns.shape == form.codes.shape and form.columns.shape[0] == outputs


class _Factors:
    def __init__(self, parts: Sequence[tuple[Part, LowRank]]) -> None:
        to = factor_kernel
        self._threads = _threads_for(parts)
        self._hidden = sum(form.left.rank for _, form in parts)
        self._table = np.zeros(to.HEAD + len(parts) * to.FACTORS, np.int64)
        self._table[to.HIDDEN], self._table[to.ENTRIES] = self._hidden, len(parts)
        if self._threads > 1:
            team = torch_team()
            self._table[[to.THREAD, to.THREADS, to.BARRIER]] = team.thread, team.threads, team.barrier
        column = 0
        for at, (part, form) in enumerate(parts):
            words = self._table[to.HEAD + at * to.FACTORS :]
            _describe_side(words, form.right)
            _describe_side(words[to.SIDE :], form.left)
            words[[to.FIRST, to.LAST, to.START, to.COLUMN]] = part.first, part.last, part.start, column
            column += form.left.rank

    def add(self, x_TI: torch.Tensor, y_TO: torch.Tensor) -> None:
        table, to = self._table, factor_kernel
        hidden_TR = torch.empty(x_TI.shape[0], self._hidden)
        table[to.X], table[to.Y], table[to.H] = x_TI.data_ptr(), y_TO.data_ptr(), hidden_TR.data_ptr()
        table[to.ROWS], table[to.INPUTS] = x_TI.shape
        table[to.OUTPUTS], table[to.STRIDE] = y_TO.shape[1], y_TO.stride(0)
        _factor_kernel().run(table, self._threads)


class _Entries:
    def __init__(self, parts: Sequence[tuple[Part, Ell | Csr]]) -> None:
        to = entry_kernel
        self._threads = _threads_for(parts)
        self._table = np.zeros(to.HEAD + len(parts) * to.FORM, np.int64)
        self._table[to.ENTRIES] = len(parts)
        if self._threads > 1:
            team = torch_team()
            self._table[[to.THREAD, to.THREADS]] = team.thread, team.threads
        for at, (part, form) in enumerate(parts):
            words = self._table[to.HEAD + at * to.FORM :]
            words[[to.COLUMNS, to.CODES]] = form.columns.data_ptr(), form.codes.data_ptr()
            words[[to.SHORT, to.KIND]] = form.columns.dtype == torch.uint16, _ENTRIES[form.codes.dtype]
            if isinstance(form, Csr):
                words[to.OFFSETS] = form.offsets.data_ptr()
                words[to.SCALES] = 0 if form.levels is None else form.levels.data_ptr()
            else:
                words[to.EACH] = form.columns.shape[1]
                words[to.SCALES] = 0 if form.scales is None else form.scales.data_ptr()
            words[[to.FIRST, to.LAST]] = part.first, part.last
            words[[to.START, to.LENGTH]] = part.start, part.stop - part.start

    def add(self, x_TI: torch.Tensor, y_TO: torch.Tensor) -> None:
        table, to = self._table, entry_kernel
        table[to.X], table[to.Y] = x_TI.data_ptr(), y_TO.data_ptr()
        table[to.ROWS], table[to.INPUTS] = x_TI.shape
        table[to.OUTPUTS], table[to.STRIDE] = y_TO.shape[1], y_TO.stride(0)
        _entry_kernel().run(table, self._threads)


def _threads_for(parts: Sequence[tuple[Part, Taken]]) -> int:
    return team_for(sum(tensor.nbytes for _, form in parts for tensor in form.tensors()))


def _describe_side(words: np.ndarray, side: Factor) -> None:
    to = factor_kernel
    words[[to.KIND, to.HALF]] = _FACTORS[side.codes.dtype], side.half
    words[to.CODES], words[to.WHOLE], words[to.LENGTH] = side.codes.data_ptr(), *side.codes.shape
    if side.nibbles is not None:
        words[to.NIBBLES], words[to.PAIRS] = side.nibbles.data_ptr(), side.nibbles.shape[0]
    if side.scales is not None:
        words[to.SCALES], words[to.GROUPS] = side.scales.data_ptr(), side.scales.shape[1]
        words[to.BEFORE] = 0 if side.by_direction else side.first


@cache
def _factor_kernel() -> Kernel:
    return compile_kernel(factor_kernel.add_factors)


@cache
def _entry_kernel() -> Kernel:
    return compile_kernel(entry_kernel.add_entries)
