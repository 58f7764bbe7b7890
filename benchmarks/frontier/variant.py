"""All cells of one variant: what they share is read, factored and asked for once."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.frontier.auto import auto, without_tables
from benchmarks.frontier.cells import Cell
from benchmarks.frontier.distill import WINDOW, distill_scales
from benchmarks.frontier.foretold import Foretold
from benchmarks.frontier.judge import Judge
from benchmarks.frontier.mergekit import extract
from benchmarks.frontier.treatment import (
    AUTO,
    BASE,
    ROWS,
    Served,
    base_alone,
    table_one,
    table_two,
    tables_alike,
    with_tables,
)
from benchmarks.frontier.work import Work, read_work
from mfs_decompose.fidelity.text import Corpus, read_corpus

HELD_IN_TOKENS = 2048


@dataclass(frozen=True)
class Setup:
    """How all cells of one variant are made; `mergekit` is an interpreter that has it."""

    base: Path
    variant: Path
    held_out: Corpus
    held_in: Corpus
    scratch: Path
    embedding_share: float
    auto_codec: str
    auto_options: Mapping[str, Any] = field(default_factory=dict)
    mergekit: Path | None = None
    distill_steps: int = 0


def read_held_in(spec: str | None) -> Corpus:
    """A text, or Python source of the standard library where none is named."""
    if spec is not None:
        return read_corpus(spec)
    import argparse
    import dataclasses

    modules = (textwrap, dataclasses, argparse)
    return Corpus("stdlib", tuple(Path(str(module.__file__)).read_text(encoding="utf-8") for module in modules))


def measure_cells(setup: Setup, cells: Sequence[Cell], done: Callable[[Cell, dict[str, Any]], None]) -> None:
    """Measure cells of one variant, in order; `done` takes each result."""
    if not cells:
        return
    judge = Judge(setup.variant, setup.scratch)
    work = read_work(setup.base, setup.variant)
    for tokens in sorted({cell.tokens for cell in cells}):
        judge.learn(setup.held_out, tokens)
    if any(cell.codec in ("Delta-CoMe", "ImPart-Qt", "BitDelta sign, fitted scales") for cell in cells):
        windows = judge.cut(setup.held_in, HELD_IN_TOKENS).windows
        work.grams.update(judge.grams(windows, work.linears))
    if setup.distill_steps and any(cell.codec == "BitDelta sign, fitted scales" for cell in cells):
        windows = judge.cut(setup.held_in, HELD_IN_TOKENS, WINDOW).windows
        distill_scales(work, setup.variant, windows, setup.distill_steps)
    if setup.mergekit is not None and any(cell.codec == "low rank bf16" for cell in cells):
        extract(work, setup, max(cell.budget for cell in cells))
    for cell in cells:
        started = time.perf_counter()
        served = _serve(setup, work, cell)
        if served is None:
            done(cell, {"left_out": "its sizes are far from this one"})
            continue
        foretold = Foretold(work)
        nbytes = judge.put(foretold.watch(served.weights)) + served.extra_bytes
        encoded = time.perf_counter()
        found = asdict(judge.measure(cell.tokens))
        ended = time.perf_counter()
        done(
            cell,
            {
                "bytes": nbytes,
                "checkpoint_bytes": work.checkpoint_bytes,
                "knobs": dict(served.knobs),
                "predicted_kl": foretold.kl,
                "seconds_encode": round(encoded - started, 1),
                "seconds_measure": round(ended - encoded, 1),
                **found,
            },
        )


def _serve(setup: Setup, work: Work, cell: Cell) -> Served | None:
    budget = int(cell.budget * work.checkpoint_bytes)
    if cell.codec == BASE:
        return base_alone(work)
    if cell.codec == AUTO:
        return _auto(setup, work, budget, alike=cell.table == 1)
    with torch.no_grad():
        if cell.table == 1:
            return table_one(work, ROWS[cell.codec], budget, setup.embedding_share)
        return table_two(work, ROWS[cell.codec], budget)


def _auto(setup: Setup, work: Work, budget: int, *, alike: bool) -> Served:
    out, codec = setup.scratch / "artifact", (setup.auto_codec, setup.auto_options)
    if not alike:
        return auto(setup.base, setup.variant, out, budget, *codec)
    with torch.no_grad():
        tables = tables_alike(work, budget, setup.embedding_share)
    own = without_tables(work, setup.variant, setup.scratch / "variant")
    left = budget - sum(one.nbytes for one in tables)
    return with_tables(work, tables, auto(setup.base, own, out, left, *codec))


def variants_of(cells: Iterable[Cell]) -> dict[str, list[Cell]]:
    """Cells by variant, in their order."""
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        found.setdefault(cell.variant, []).append(cell)
    return found
