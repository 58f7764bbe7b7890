"""Between the passes: what pass 1 found out, turned into how every tensor is stored."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from mfs_decompose.codec.sizes import step_bytes
from mfs_decompose.pipeline.encode import Choice
from mfs_decompose.pipeline.survey import Surveyed
from mfs_decompose.plan.allocate import Candidate, Key, allocate
from mfs_decompose.plan.build import ENTRY_BYTES, SHARD_BYTES, check_cap
from mfs_decompose.plan.model import Item, Plan


def choose_all(plan: Plan, surveyed: Mapping[Key, Surveyed]) -> dict[Key, Choice]:
    """How every item is stored: identical, alias, exact, or lossy at a size that keeps its variant under its cap.

    Raises:
        UsageError: what must be exact exceeds the budget of a variant.
    """
    items = {item.key: item for item in plan.items()}
    choices: dict[Key, Choice] = {}
    for variant in plan.variants:
        own = [items[key] for key in sorted(items) if key[0] == variant.id]
        found = _settle(own, surveyed)
        open_items = [item for item in own if item.key not in found]
        if variant.cap is not None:
            fixed = _exact_bytes(own, found, surveyed) + _tails(open_items) + _fixed_bytes(open_items, surveyed)
            shards = 1 + variant.cap // max(plan.recipe.output.shard_size, 1)
            check_cap(variant.id, variant.checkpoint_bytes, variant.cap, fixed + shards * SHARD_BYTES)
            candidates = [_candidate(item, surveyed[item.key]) for item in open_items if not item.fixed]
            steps = allocate(candidates, variant.cap - fixed - shards * SHARD_BYTES)
        else:
            steps = {}
        for item in open_items:
            fitted = len(surveyed[item.key].explained)
            found[item.key] = Choice(item.codec, min(steps.get(item.key, fitted), fitted))
        choices.update(found)
    return choices


def _settle(items: list[Item], surveyed: Mapping[Key, Surveyed]) -> dict[Key, Choice]:
    """Items that leave nothing to decide: the base's own bits, the bits of a sibling, or all bits."""
    found: dict[Key, Choice] = {}
    first: dict[tuple[object, ...], str] = {}
    for item in items:  # sorted by name, so the first of equal tensors holds the bytes
        facts = surveyed[item.key]
        if facts.identical:
            found[item.key] = Choice("identical")
            continue
        likeness = (facts.sha256, item.spec.dtype, item.spec.shape, item.codec, tuple(sorted(item.params.items())))
        if item.spec.nbytes and likeness in first:
            found[item.key] = Choice("alias", of=first[likeness])
            continue
        first[likeness] = item.name
        if item.lossy and facts.fit is None:
            found[item.key] = Choice("lossless")
        elif not item.lossy:
            found[item.key] = Choice(item.codec)
    return found


def _exact_bytes(items: list[Item], found: Mapping[Key, Choice], surveyed: Mapping[Key, Surveyed]) -> int:
    sizes: dict[str, int] = defaultdict(int)
    for item in items:
        choice = found.get(item.key)
        if choice is not None and choice.codec in ("raw", "lossless"):
            forced = surveyed[item.key].exact_bytes
            sizes[item.name] = (item.spec.nbytes if forced is None else forced) + ENTRY_BYTES
    return sum(sizes.values())


def _tails(items: list[Item]) -> int:
    return sum(item.tail_bytes + ENTRY_BYTES for item in items if item.tail_bytes)


def _fixed_bytes(items: list[Item], surveyed: Mapping[Key, Surveyed]) -> int:
    """Bytes of tensors whose size the recipe fixes, beside a budget for the others."""
    total = 0
    for item in items:
        if item.fixed and item.matrix is not None:
            steps = len(surveyed[item.key].explained)
            total += steps * step_bytes(item.codec, item.matrix, item.params) + (0 if item.tail_bytes else ENTRY_BYTES)
    return total


def _candidate(item: Item, facts: Surveyed) -> Candidate:
    assert item.matrix is not None
    # Rows stored raw have an entry already, so the first step costs no header.
    entry = 0 if item.tail_bytes else ENTRY_BYTES
    return Candidate(item.key, facts.explained, step_bytes(item.codec, item.matrix, item.params), entry)
