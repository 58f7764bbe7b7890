"""What a variant's cap must hold whatever allocation decides, and the refusal of a cap that does not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mfs_decompose.errors import UsageError
from mfs_decompose.recipe.values import Budget
from mfs_decompose.units import format_bytes, format_fraction

ENTRY_BYTES = 96
"""Header text of one entry of a shard: an upper bound, see artifact/shard.py."""

SHARD_BYTES = 256
"""Length field, metadata and padding of one shard: an upper bound."""


@dataclass(frozen=True)
class Need:
    """A variant, its cap or that of all together, and what must be stored exactly, headers included: at least `least`,
    for certain `most`.

    Before weights are read nobody knows which tensors equal the base's; afterwards the two are one.
    """

    variant: str
    checkpoint_bytes: int
    cap: int
    least: int
    most: int

    @property
    def held(self) -> bool:
        return self.least <= self.cap


def shard_overhead(entries: int, nbytes: int, shard_size: int) -> int:
    """What the headers of a variant's shards take beside its entries, at most: two in a row exceed `shard_size`."""
    return min(entries, 1 + 2 * nbytes // shard_size) * SHARD_BYTES


def smallest_cap(exact_bytes: int, entries: int, shard_size: int) -> int:
    """The smallest cap that holds `exact_bytes` and the headers of as many shards as it may be cut into."""
    cap = exact_bytes
    while (wanted := exact_bytes + shard_overhead(entries, cap, shard_size)) > cap:
        cap = wanted
    return cap


def check_caps(needs: Sequence[Need], budget: Budget) -> None:
    """Refuse a budget that what must be stored exactly exceeds.

    Raises:
        UsageError: naming the variant that needs the largest one, and the smallest budget that holds all.
    """
    short = [need for need in needs if not need.held]
    if not short:
        return
    worst = max(short, key=lambda need: need.most / need.checkpoint_bytes)
    wanted = [(need.least if need.held else need.most, need.checkpoint_bytes) for need in needs]
    # One byte more than the share says: the cap is rounded down.
    share = max((nbytes + 1) / total for nbytes, total in wanted if total)
    smallest = f"{math.ceil(share * 10**6) / 10**4:.4f}%" if budget.share is not None else f"{max(wanted)[0]}B"
    raise UsageError(
        f"the budget of {format_bytes(worst.cap)} for variant {worst.variant!r} does not hold what must be stored "
        f"exactly, {format_bytes(worst.least)} or {format_fraction(worst.least / worst.checkpoint_bytes)} "
        "of its checkpoint",
        hint=f"The smallest budget that holds is --budget {smallest}",
    )


def check_total(needs: Sequence[Need], budget: Budget) -> None:
    """Refuse a budget for all variants that what must be stored exactly exceeds.

    Raises:
        UsageError: with the smallest budget that holds.
    """
    least, most = sum(need.least for need in needs), sum(need.most for need in needs)
    if not needs or least <= needs[0].cap:
        return
    share = (most + 1) / max(sum(need.checkpoint_bytes for need in needs), 1)
    smallest = f"{math.ceil(share * 10**6) / 10**4:.4f}%" if budget.share is not None else f"{most}B"
    raise UsageError(
        f"the budget of {format_bytes(needs[0].cap)} for all variants does not hold what must be stored exactly, "
        f"{format_bytes(least)}",
        hint=f"The smallest budget that holds is --budget-total {smallest}",
    )
