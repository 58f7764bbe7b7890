"""The table of bytes against drift, `mfs` beside every delta codec.

    python -m benchmarks.frontier --family DIR --data-dir DIR --out benchmarks/results/frontier.json

Run it from the root of the repository. DIR of --family holds `base` and the variants' folders, that of --data-dir the
texts (cells.py names both). Finished cells are kept in OUT's .jsonl, beside what they were made from: a later run goes
on from there, and measures again what has changed since. Beside the result a plot (.svg) and, with --markdown, a page.
Exit 0 whatever was measured; the promises that hold and those that do not are printed, and are in the result.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.frontier.cells import VARIANTS, Cell, all_cells
from benchmarks.frontier.checks import check
from benchmarks.frontier.journal import Journal, digest_of_weights, fingerprint
from benchmarks.frontier.markdown import page
from benchmarks.frontier.plot import draw
from benchmarks.frontier.result import SCHEMA, tabulate
from benchmarks.frontier.treatment import AUTO
from benchmarks.frontier.variant import Setup, measure_cells, read_held_in, variants_of
from benchmarks.measure import machine, say, versions
from mfs_decompose.fidelity.text import read_corpus

PACKAGES = ("mfs_decompose", "torch", "transformers", "safetensors", "numpy", "constriction")


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse(argv)
    torch.set_num_threads(args.threads)
    journal = Journal(args.out.with_suffix(".jsonl"))
    about = {"machine": machine(), "versions": versions(Path(sys.executable), PACKAGES)}
    if args.mergekit is not None:
        about["versions_mergekit"] = versions(args.mergekit, ("mergekit", "torch"))
    wanted = [cell for cell in all_cells(args.variants) if all(word in str(cell) for word in args.only)]
    for cells in variants_of(wanted).values():
        with tempfile.TemporaryDirectory(prefix="frontier-", dir=args.scratch) as scratch:
            _measure_variant(args, cells, journal, Path(scratch))
    write(args, journal, about)


def _measure_variant(args: argparse.Namespace, cells: Sequence[Cell], journal: Journal, scratch: Path) -> None:
    setup = _setup(args, cells[0].variant, scratch)
    prints = _fingerprints(args, setup, cells)
    pending = [cell for cell in cells if journal.get(cell, prints[cell]) is None]
    if args.report or not pending:
        return
    say(f"{cells[0].variant}: {len(pending)} of {len(cells)} cells to measure")

    def done(cell: Cell, result: dict[str, Any]) -> None:
        journal.add(cell, prints[cell], result)
        if "left_out" in result:
            say(f"{cell}: left out")
            return
        seconds = f"{result['seconds_encode']:.1f} + {result['seconds_measure']:.1f} s"
        say(f"{cell}: {result['bytes'] / result['checkpoint_bytes']:.4f}, KL {result['kl']:.3e}, {seconds}")

    measure_cells(setup, pending, done)


def _setup(args: argparse.Namespace, variant: str, scratch: Path) -> Setup:
    texts = VARIANTS[variant]
    return Setup(
        base=args.family / "base",
        variant=args.family / texts.folder,
        held_out=read_corpus(str(args.data_dir / texts.held_out)),
        held_in=read_held_in(None if texts.held_in is None else str(args.data_dir / texts.held_in)),
        scratch=scratch,
        embedding_share=args.embedding_share,
        auto_codec=args.auto_codec,
        auto_options=dict(args.auto_set),
        mergekit=args.mergekit,
        distill_steps=args.distill_steps,
    )


def _fingerprints(args: argparse.Namespace, setup: Setup, cells: Sequence[Cell]) -> dict[Cell, str]:
    inputs = {
        "base": digest_of_weights(setup.base),
        "variant": digest_of_weights(setup.variant),
        "held_out": setup.held_out.identity(),
        "held_in": setup.held_in.identity(),
        "embedding_share": setup.embedding_share,
    }
    extra = {
        AUTO: [setup.auto_codec, setup.auto_options],
        "low rank bf16": setup.mergekit is not None,
        "BitDelta sign, fitted scales": setup.distill_steps,
    }
    return {cell: fingerprint(cell, inputs, extra) for cell in cells}


def write(args: argparse.Namespace, journal: Journal, about: dict[str, Any]) -> None:
    """Result, plot and page of every cell that the journal holds."""
    rows = tabulate({cell: one for cell in all_cells() if (one := journal.latest(cell)) is not None})
    checks = check(rows)
    settings = {"embedding_share": args.embedding_share, "auto_codec": args.auto_codec, "threads": args.threads}
    document = {"schema": SCHEMA, **about, "settings": settings, "checks": [c.record() for c in checks], "rows": rows}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    args.out.with_suffix(".svg").write_bytes(draw(rows))
    if args.markdown is not None:
        args.markdown.write_text(page(document), encoding="utf-8")
    for said in checks:
        word = {True: "holds", False: "FAILS", None: "unknown"}[said.holds]
        failing = "".join(f"    {cell}\n" for cell in said.failing)
        sys.stdout.write(f"{word}: {said.promise} ({said.found})\n{failing}")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mergekit = os.environ.get("MERGEKIT_PYTHON")
    parser.add_argument("--family", type=Path, required=True)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/frontier.json"))
    parser.add_argument("--markdown", type=Path, help="write the page here (docs/frontier.md)")
    parser.add_argument("--variants", nargs="+", choices=tuple(VARIANTS), default=tuple(VARIANTS))
    parser.add_argument("--only", nargs="+", default=[], help="words that a cell's name must hold, such as 'code 5%%'")
    parser.add_argument("--report", action="store_true", help="measure nothing, write what is there")
    parser.add_argument("--mergekit", type=Path, default=mergekit and Path(mergekit), help="a python that has mergekit")
    parser.add_argument("--distill-steps", type=int, default=0, help="train BitDelta's scales; default: a closed form")
    parser.add_argument("--auto-codec", default="auto", help="what stands for auto; banded while there is none")
    parser.add_argument("--auto-set", nargs="+", type=_pair, default=[], metavar="KEY=VALUE", help="of auto's recipe")
    parser.add_argument("--embedding-share", type=float, default=0.125, help="of the budget, in table one")
    parser.add_argument("--scratch", type=Path, help="folder for logits and artifacts, 1.5 GB")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args(argv)


def _pair(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, found {text!r}")
    return key, yaml.safe_load(value)


if __name__ == "__main__":
    main()
