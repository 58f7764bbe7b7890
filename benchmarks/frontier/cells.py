"""The cells of both tables, and which text each variant is measured on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.frontier.treatment import AUTO, BASE, ROWS

SHORT, LONG = 1024, 4096


@dataclass(frozen=True)
class Cell:
    """One measurement. `budget` is a share of the checkpoint; the base itself has table and budget 0."""

    table: int
    variant: str
    budget: float
    tokens: int
    codec: str

    def __str__(self) -> str:
        return f"table {self.table}, {self.variant} {100 * self.budget:g}%, {self.codec}"

    def record(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Texts:
    """Of one variant: its folder in the family, and text that it is measured on and calibrated with (`FILE:fields`).

    `held_in` None is Python source of the standard library, which is what `code` was trained on.
    """

    folder: str
    held_out: str
    held_in: str | None


VARIANTS = {
    "code": Texts("code", "humaneval.jsonl:prompt+canonical_solution", None),
    "math": Texts("math", "gsm8k_test.jsonl:question+answer", "gsm8k_train.jsonl:question+answer"),
    "legal": Texts("legal", "licenses_test.txt", "licenses_train.txt"),
    "heavy": Texts("heavy", "wikitext2_test.txt", "wikitext2_valid.txt"),
    "lora": Texts("lora-merged", "gsm8k_test.jsonl:question+answer", "gsm8k_train.jsonl:question+answer"),
}
"""Files lie in --data-dir."""

ONLY_AT = {
    "BitDelta sign": (0.05,),
    "BitDelta sign, fitted scales": (0.05,),
    "mfs sign, a scale a row": (0.05,),
    "mfs ternary": (0.1,),
    "mfs deadzone": (0.05, 0.1, 0.2),
    "k-bit groups, plain": (0.05, 0.1, 0.2),
    "mfs kbit": (0.1, 0.2),
    "mfs lossless": (0.2,),
}
"""Codecs of few sizes, where their nearest one is near; all others are in every cell."""

_GRID = ((0.02, SHORT), (0.05, LONG), (0.1, SHORT), (0.2, SHORT))
_EVERYWHERE = ("code", "heavy", "lora")
_TABLE_TWO = (0.05, SHORT)


def all_cells(variants: Sequence[str] = tuple(VARIANTS)) -> Iterator[Cell]:
    """Variant by variant, the base first, then by budget, `auto` first."""
    for variant in variants:
        sizes = [(budget, tokens) for budget, tokens in _GRID if budget == 0.05 or variant in _EVERYWHERE]
        for tokens in sorted({tokens for _, tokens in sizes}):
            yield Cell(0, variant, 0.0, tokens, BASE)
        for budget, tokens in sizes:
            yield Cell(1, variant, budget, tokens, AUTO)
            for codec in ROWS:
                if budget in ONLY_AT.get(codec, (budget,)):
                    yield Cell(1, variant, budget, tokens, codec)
        if variant in _EVERYWHERE:
            yield Cell(2, variant, *_TABLE_TWO, AUTO)
            yield from (Cell(2, variant, *_TABLE_TWO, codec) for codec, row in ROWS.items() if row.ships)
