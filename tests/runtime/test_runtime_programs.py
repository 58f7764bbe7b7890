"""Compiled kernels: what rows of several variants get from forms as they lie in memory, against fp64."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numba import carray
from numba.core.caching import IndexDataCacheFile

from mfs_decompose.runtime import nibbles
from mfs_decompose.runtime.nibbles import pack_nibbles
from mfs_decompose.runtime.ops import compiled, program, team
from mfs_decompose.runtime.ops.compiled import compile_kernel
from mfs_decompose.runtime.ops.dense import to_dense
from mfs_decompose.runtime.ops.program import Part, Program, Taken, takes
from mfs_decompose.runtime.ops.team import Team, torch_team
from mfs_decompose.runtime.resident_forms import Csr, Ell, Factor, LowRank, Packed, Rows

KINDS = ["int8", "small", "bfloat16", "float32"]
SCALES = ["none", "direction", "group", "halves", "halves of groups"]


def draw_factor(data: st.DataObject, rank: int, length: int, draw: torch.Generator) -> Factor:
    kind, scaled = data.draw(st.sampled_from(KINDS)), data.draw(st.sampled_from(SCALES))
    if kind in ("bfloat16", "float32"):
        codes = torch.randn(rank, length, generator=draw).to(getattr(torch, kind))
    else:
        limit = 128 if kind == "int8" else 8
        codes = torch.randint(-limit, limit, (rank, length), generator=draw, dtype=torch.int8)
    if scaled == "none":
        return Factor(codes)
    first = data.draw(st.sampled_from([0, 1, 17, 63])) if "group" in scaled else 0
    groups = -(-(first + length) // 64) if "group" in scaled else 1
    return Factor(codes, torch.rand(rank, groups, generator=draw), "halves" in scaled, first if groups > 1 else 0)


def draw_low_rank(data: st.DataObject, outputs: int, inputs: int, draw: torch.Generator) -> LowRank:
    rank = data.draw(st.sampled_from([0, 1, 2, 3, 5, 8, 13]))
    form = LowRank(draw_factor(data, rank, outputs, draw), draw_factor(data, rank, inputs, draw))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(nibbles, "LARGE", data.draw(st.sampled_from([0, 1 << 20])))
        packed = pack_nibbles(form)
    assert isinstance(packed, LowRank)
    return packed


def draw_entries(data: st.DataObject, outputs: int, inputs: int, draw: torch.Generator) -> Ell | Csr:
    short = data.draw(st.sampled_from([torch.uint16, torch.int32]))
    if data.draw(st.booleans()):
        there = torch.rand(outputs, inputs, generator=draw) < data.draw(st.sampled_from([0.0, 0.05, 0.6]))
        offsets = torch.nn.functional.pad(there.sum(dim=1).cumsum(0), (1, 0)).to(torch.int32)
        columns = there.nonzero()[:, 1].to(short)
        if data.draw(st.booleans()):
            return Csr(offsets, columns, torch.randn(columns.shape, generator=draw), None, inputs)
        levels = data.draw(st.sampled_from([1, 3, 256]))
        names = torch.randint(0, levels, columns.shape, generator=draw).to(torch.uint8)
        return Csr(offsets, columns, names, torch.randn(levels, generator=draw), inputs)
    each = data.draw(st.integers(1, inputs))
    columns = torch.stack([torch.randperm(inputs, generator=draw)[:each] for _ in range(outputs)]).to(short)
    kind = data.draw(st.sampled_from(KINDS[1:]))
    if kind != "small":
        return Ell(columns, torch.randn(outputs, each, generator=draw).to(getattr(torch, kind)), None, inputs)
    scales = torch.rand(-(-outputs // 64), each, generator=draw).to(torch.bfloat16)
    codes = torch.randint(-127, 128, (outputs, each), generator=draw, dtype=torch.int8)
    return Ell(columns, codes, scales, inputs)


def draw_form(data: st.DataObject, outputs: int, inputs: int, draw: torch.Generator) -> Taken:
    kind = data.draw(st.sampled_from([draw_low_rank, draw_low_rank, draw_entries]))
    return kind(data, outputs, inputs, draw)


def expect(parts: list[Part], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    wanted = y.double().clone()
    for form, first, last, start, stop in parts:
        if isinstance(form, LowRank):
            matrix = form.left.values().double().mT @ form.right.values().double()
        else:
            matrix = to_dense(form, stop - start).double()
        wanted[first:last, start:stop] += x[first:last].double() @ matrix.mT
    return wanted


def check(parts: list[Part], x: torch.Tensor, y: torch.Tensor) -> None:
    wanted = expect(parts, x, y)
    Program(parts).add(x, y)
    assert float((y - wanted).abs().max()) <= 2e-6 * (1 + float(wanted.abs().max()) + float(x.abs().max()))


@given(st.integers(1, 150), st.integers(1, 150), st.integers(1, 9), st.data())
def test_parts_of_several_groups(outputs: int, inputs: int, rows: int, data: st.DataObject) -> None:
    draw = torch.Generator().manual_seed(outputs * 1000 + inputs)
    x = torch.randn(rows, inputs, generator=draw)
    wide = torch.randn(rows, outputs + 9, generator=draw)
    before, parts = wide.clone(), []
    for _ in range(data.draw(st.integers(0, 4))):
        first = data.draw(st.integers(0, rows))
        last = data.draw(st.integers(first, rows))
        start = data.draw(st.integers(0, outputs - 1))
        stop = data.draw(st.integers(start + 1, outputs))
        parts.append(Part(draw_form(data, stop - start, inputs, draw), first, last, start, stop))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(team, "_FEW", data.draw(st.sampled_from([0, 1 << 20])))
        check(parts, x, wide[:, 4 : 4 + outputs])
    assert torch.equal(wide[:, :4], before[:, :4]) and torch.equal(wide[:, 4 + outputs :], before[:, 4 + outputs :])
    alone = {row for part in parts for row in range(part.first, part.last)}
    for row in set(range(rows)) - alone:
        assert torch.equal(wide[row], before[row])


def large_forms() -> list[Taken]:
    """Longer than a tile, of odd rank, and for more than one thread."""
    draw = torch.Generator().manual_seed(0)
    sides = [
        Factor(
            torch.randint(-128, 128, (31, n), generator=draw, dtype=torch.int8), torch.rand(31, 1, generator=draw), h
        )
        for n, h in ((2500, True), (1300, False))
    ]
    nibbled = pack_nibbles(LowRank(*(Factor(side.codes >> 4, side.scales, side.half) for side in sides)))
    assert isinstance(nibbled, LowRank) and nibbled.left.nibbles is not None
    columns = torch.stack([torch.randperm(1300, generator=draw)[:40] for _ in range(2500)]).to(torch.uint16)
    return [LowRank(*sides), nibbled, Ell(columns, torch.randn(2500, 40, generator=draw), None, 1300)]


@pytest.mark.parametrize("at", range(3))
def test_threads_and_other_rows_change_no_bit(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    form, other = large_forms()[at], large_forms()[at - 1]
    x = torch.randn(6, 1300)
    x[:, ::7] = 0.0

    def answer(parts: list[Part], few: int = 1 << 15) -> torch.Tensor:
        monkeypatch.setattr(team, "_FEW", few)
        y = torch.zeros(6, 2500)
        Program(parts).add(x, y)
        return y[2:5]

    own = Part(form, 2, 5, 0, 2500)
    found = answer([own])
    assert torch.equal(found, answer([own], few=1 << 40))
    for beside in ([(0, 2), (5, 6)], [(0, 1)], [(1, 2), (5, 6)]):
        others = [Part(other, first, last, 0, 2500) for first, last in beside]
        assert torch.equal(found, answer([*others[:1], own, *others[1:]]))


def test_large_forms_in_tiles() -> None:
    for form in large_forms():
        check([Part(form, 0, 3, 0, 2500), Part(form, 3, 4, 0, 2500)], torch.randn(4, 1300), torch.randn(4, 2500))


def test_what_is_not_finite_stays_in_its_row() -> None:
    for form in large_forms():
        x = torch.randn(3, 1300)
        y, bad = torch.zeros(3, 2500), torch.zeros(3, 2500)
        Program([Part(form, 0, 3, 0, 2500)]).add(x, y)
        x[1, 3] = torch.nan
        Program([Part(form, 0, 3, 0, 2500)]).add(x, bad)
        assert torch.equal(bad[[0, 2]], y[[0, 2]])
        assert bool(bad[1].isnan().any())
        if isinstance(form, LowRank):
            assert bool(bad[1].isnan().all())


def test_one_program_answers_step_after_step() -> None:
    form = large_forms()[1]
    asked = Program([Part(form, 0, 2, 0, 2500)])
    for rows in (2, 3, 2):
        x, y = torch.randn(rows, 1300), torch.zeros(rows, 2500)
        wanted = expect([Part(form, 0, 2, 0, 2500)], x, y)
        asked.add(x, y)
        assert float((y - wanted).abs().max()) < 1e-5 * float(wanted.abs().max())


def test_threads_of_python_may_call_at_once() -> None:
    form = large_forms()[0]
    x = torch.randn(4, 1300)
    wanted = torch.zeros(4, 2500)
    Program([Part(form, 0, 4, 0, 2500)]).add(x, wanted)

    def answer(_: int) -> bool:
        y, own = torch.zeros(4, 2500), Program([Part(form, 0, 4, 0, 2500)])
        for _ in range(5):
            own.add(x, y.zero_())
        return torch.equal(y, wanted)

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(answer, range(6)))


def test_what_is_taken() -> None:
    int8, none = torch.ones(2, 8, dtype=torch.int8), torch.ones(2, 8)
    assert takes(LowRank(Factor(int8), Factor(none)))
    assert not takes(LowRank(Factor(int8), Factor(none.half())))
    assert not takes(LowRank(Factor(int8.to(torch.int16)), Factor(none)))
    assert not takes(LowRank(Factor(int8), Factor(torch.ones(2, 9)[:, :8])))
    assert not takes(LowRank(Factor(int8), Factor(none)).__class__(Factor(int8.to("meta")), Factor(none)))
    assert not takes(Rows(None, none, None, False))
    assert not takes(Packed(int8.to(torch.uint8), 8, none[0], none[0, :1], 8))


def test_what_lies_otherwise_is_refused() -> None:
    asked = Program([Part(LowRank(Factor(torch.ones(1, 4)), Factor(torch.ones(1, 4))), 0, 2, 0, 4)])
    for x, y in (
        (torch.ones(4, 2).mT, torch.ones(2, 4)),
        (torch.ones(2, 4), torch.ones(4, 2).mT),
        (torch.ones(2, 4).half(), torch.ones(2, 4)),
    ):
        with pytest.raises(AssertionError):
            asked.add(x, y)


def test_what_does_not_fit_together_is_refused() -> None:
    """A kernel goes by addresses: what is too short must not reach it."""
    form = LowRank(Factor(torch.ones(2, 4)), Factor(torch.ones(2, 5)))
    entries = Csr(torch.tensor([0, 1], dtype=torch.int32), torch.zeros(1, dtype=torch.int32), torch.ones(1), None, 5)
    for wrong in (
        Part(form, 0, 1, 0, 3),
        Part(form, 2, 1, 0, 4),
        Part(form, 0, 1, -1, 3),
        Part(LowRank(form.left, Factor(torch.ones(3, 5))), 0, 1, 0, 4),
        Part(entries, 0, 1, 0, 2),
        Part(Ell(torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 2), None, 5), 0, 1, 0, 3),
    ):
        with pytest.raises(AssertionError):
            Program([wrong])
    asked = Program([Part(form, 0, 2, 1, 5), Part(entries, 0, 1, 0, 1)])
    asked.add(torch.ones(2, 5), torch.ones(2, 5))
    for x, y in (
        (torch.ones(1, 5), torch.ones(1, 5)),
        (torch.ones(2, 5), torch.ones(3, 5)),
        (torch.ones(2, 5), torch.ones(2, 4)),
        (torch.ones(2, 4), torch.ones(2, 5)),
    ):
        with pytest.raises(AssertionError):
            asked.add(x, y)


# The team.


def test_the_team_is_that_of_torch() -> None:
    """Each thread once: what they are asked to do is to count themselves."""
    found = torch_team()
    assert found.run is not None, "torch for Linux runs on OpenMP"
    counted = np.zeros(1, np.int64)
    numbers: list[int] = []
    number = ctypes.CFUNCTYPE(ctypes.c_int)(found.thread)

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def count(data: int) -> None:
        numbers.append(number())

    address = ctypes.cast(count, ctypes.c_void_p).value
    assert address is not None
    found.run(address, counted.ctypes.data, 3, 0)
    assert sorted(numbers) == [0, 1, 2]


def test_without_a_team_one_thread_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    form = large_forms()[0]
    x, y, alone = torch.randn(3, 1300), torch.zeros(3, 2500), torch.zeros(3, 2500)
    Program([Part(form, 0, 3, 0, 2500)]).add(x, y)
    monkeypatch.setattr(team, "torch_team", lambda: Team(0, 0, 0, None))
    monkeypatch.setattr(program, "torch_team", lambda: Team(0, 0, 0, None))
    Program([Part(form, 0, 3, 0, 2500)]).add(x, alone)
    assert torch.equal(y, alone)


def test_kernels_are_compiled_where_nothing_can_be_kept(tmp_path: Path) -> None:
    """As installed for all users, in a home that is not there."""
    code = (
        "from numba.core.caching import _CacheLocator\n"
        "from mfs_decompose.runtime.ops.compiled import compile_kernel\n"
        "from numba import carray\n"
        "import numpy as np\n"
        "def kernel(data):\n"
        "    carray(data, 1, np.int64)[0] += 7\n"
        "table = np.zeros(1, np.int64)\n"
        "compile_kernel(kernel).run(table, 1)\n"
        "assert table[0] == 7\n"
    )
    environment = {**os.environ, "NUMBA_CACHE_LOCATOR_CLASSES": ""}
    # Code without a file has no place: the same error as a folder that cannot be written to.
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, cwd=tmp_path)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), EOFError("Ran out of input")])
def test_kernels_are_compiled_where_the_cache_fails(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(IndexDataCacheFile, "load", fail)
    monkeypatch.setattr(IndexDataCacheFile, "save", fail)
    table = np.zeros(1, np.int64)
    compile_kernel(add_seven).run(table, 1)
    assert table[0] == 7


def add_seven(data: object) -> None:
    carray(data, 1, np.int64)[0] += 7


def test_a_kernel_that_was_kept_is_not_taken_for_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release that changes what kernels have from compiled.py alone finds those of the release before."""
    kept = []

    def load(file: IndexDataCacheFile, _: object) -> None:
        kept.append(file._index_path)

    monkeypatch.setattr(IndexDataCacheFile, "load", load)
    monkeypatch.setattr(IndexDataCacheFile, "save", lambda *_: None)
    for digest in ("before", "after", "after"):
        monkeypatch.setattr(compiled, "_used_by_kernels", lambda digest=digest: digest)
        compile_kernel(add_seven)
    assert kept[0] != kept[1] == kept[2]


def test_a_forked_process_of_one_thread_takes_a_program_of_several() -> None:
    """As torch itself does there; threads of the parent are not in the child, and would be waited for."""
    code = (
        "import os, signal, torch\n"
        "from mfs_decompose.runtime.ops.program import Part, Program\n"
        "from mfs_decompose.runtime.resident_forms import Factor, LowRank\n"
        "torch.set_num_threads(2)\n"
        "x, y = torch.randn(2, 3000), torch.zeros(2, 9000)\n"
        "form = LowRank(Factor(torch.randn(4, 9000)), Factor(torch.randn(4, 3000)))\n"
        "program = Program([Part(form, 0, 2, 0, 9000)])\n"
        "program.add(x, y)\n"
        "if not (child := os.fork()):\n"
        "    signal.alarm(20)\n"
        "    torch.set_num_threads(1)\n"
        "    program.add(x, y)\n"
        "    os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
