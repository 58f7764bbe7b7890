"""What a target asked for, and what was measured when the variants were cut to hold it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from mfs_decompose.artifact.records import Amount, Count, Record, VariantId


class HeldRecord(Record):
    """One variant: its drift as served over `tokens`, measured `evaluations` times in all until then.

    `ln_ppl` is the upper end of the 95 % interval of `|ln ppl ratio|`, null for too short a text. `smallest`: it holds
    with nothing stored but what must be exact. Without tokens every bit was kept, and nothing needed measuring.
    """

    kl: Amount
    ln_ppl: Amount | None
    tokens: Count
    evaluations: Count
    smallest: bool = False


class TargetRecord(Record):
    """The target as the recipe has it, and by id the variants that it was held against: adapters are kept as they are.

    `measured_on` tells the text and the settings from others.
    """

    asked: Annotated[str, Field(min_length=1, max_length=64)]
    measured_on: dict[str, Any]
    variants: dict[VariantId, HeldRecord]
