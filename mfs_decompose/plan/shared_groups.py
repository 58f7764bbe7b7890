"""Where variants may have something in common beside the base: tensors that several of them store by directions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mfs_decompose.errors import UsageError
from mfs_decompose.plan.model import Item, Plan
from mfs_decompose.plan.shared_sizes import MOST_SHARED
from mfs_decompose.plan.units import BLOCK_ELEMENTS, peak_bytes

_BY_DIRECTIONS = frozenset({"lowrank", "banded"})


@dataclass(frozen=True, slots=True)
class SharedGroup:
    """One base tensor, and of each variant that may share a delta of it the item, by sorted id.

    `matrix` is the whole base tensor as a codec sees it, `steps` the directions that are looked at.
    """

    number: int
    items: tuple[Item, ...]
    matrix: tuple[int, int]
    steps: int
    peak_bytes: int

    @property
    def name(self) -> str:
        """Of the base tensor."""
        assert self.items[0].base is not None
        return self.items[0].base.name

    @property
    def whole(self) -> bool:
        """Whether it is small enough to be worked on in one piece."""
        return self.matrix[0] * self.matrix[1] <= BLOCK_ELEMENTS

    @property
    def read_bytes(self) -> int:
        """Of weights, once."""
        base = self.items[0].base
        assert base is not None
        return base.nbytes + sum(item.common.nbytes for item in self.items)


def shared_groups(plan: Plan) -> tuple[SharedGroup, ...]:
    """All groups, by the names of their base tensors."""
    by_base: dict[str, dict[str, Item]] = defaultdict(dict)
    for item in sorted(plan.items(), key=lambda item: item.key):
        if _may_share(item):
            assert item.base is not None
            by_base[item.base.name].setdefault(item.variant, item)
    several = [(name, tuple(items.values())) for name, items in sorted(by_base.items()) if len(items) > 1]
    return tuple(_group(number, items) for number, (_, items) in enumerate(several))


def tied_twins(plan: Plan, group: SharedGroup) -> tuple[Item, ...]:
    """Items that differ from the group's base tensor only because the base ties what the variant stores twice."""
    return tuple(
        item
        for item in plan.items()
        if item.kind == "tied" and item.base is not None and item.base.name == group.name and _by_directions(item)
    )


def require_groups(plan: Plan) -> None:
    """Refuse a plan in which no tensor could have a shared delta.

    Raises:
        UsageError: saying what is missing.
    """
    whole = [variant.id for variant in plan.variants if not variant.adapter]
    if len(whole) < 2:
        adapters = " beside adapters, which are kept as they are" if len(whole) < len(plan.variants) else ""
        raise UsageError(
            f"the base mode 'shared' needs at least two variants, found {len(whole)}{adapters}",
            hint="Use --base-mode known.",
        )
    if not shared_groups(plan):
        raise UsageError(
            "the base mode 'shared' needs matrices that several variants store with the codec lowrank, found none",
            hint="Use --base-mode known, or --codec lowrank.",
        )


def without_shares(plan: Plan, shares: Mapping[str, int]) -> Plan:
    """The plan with what each variant answers for of the shared delta taken off its cap."""
    return replace(
        plan,
        variants=tuple(
            variant if variant.cap is None else replace(variant, cap=variant.cap - shares.get(variant.id, 0))
            for variant in plan.variants
        ),
    )


def _may_share(item: Item) -> bool:
    return item.kind in ("same", "resized") and _by_directions(item)


def _by_directions(item: Item) -> bool:
    if item.codec not in _BY_DIRECTIONS or item.stacked or item.matrix is None or item.base is None:
        return False
    # A tensor that lost rows has none for the last rows of a delta in common.
    return item.common_rows == item.base.rows


def _group(number: int, items: tuple[Item, ...]) -> SharedGroup:
    first = items[0]
    assert first.matrix is not None
    steps = max(item.steps for item in items)
    if all(item.fixed for item in items):  # also those that variants would have instead, see shared_sizes.py
        steps = min(MOST_SHARED * steps, min(first.matrix))
    sized = replace(first, steps=steps)
    large = first.matrix[0] * first.matrix[1] > BLOCK_ELEMENTS
    elements = BLOCK_ELEMENTS if large else first.matrix[0] * first.matrix[1]
    peak = peak_bytes("blocks" if large else "batch", (sized,)) + 3 * 8 * elements
    return SharedGroup(number, items, first.matrix, steps, peak)
