"""Between the passes: what pass 1 found out, turned into how every tensor is stored."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from mfs_decompose.codec.sizes import step_bytes
from mfs_decompose.pipeline.encode import Choice
from mfs_decompose.pipeline.survey import Surveyed
from mfs_decompose.plan.allocate import Candidate, Key, allocate
from mfs_decompose.plan.cap import ENTRY_BYTES, Need, check_caps, shard_overhead, smallest_cap
from mfs_decompose.plan.model import Item, Plan, VariantPlan


def choose_all(plan: Plan, surveyed: Mapping[Key, Surveyed]) -> dict[Key, Choice]:
    """How every item is stored: identical, alias, exact, or lossy at a size that keeps its variant under its cap.

    Raises:
        UsageError: what must be exact exceeds the budget of a variant.
    """
    items = {item.key: item for item in plan.items()}
    needs: list[Need] = []
    settled: dict[str, dict[Key, Choice]] = {}
    for variant in plan.variants:
        own = [items[key] for key in sorted(items) if key[0] == variant.id]
        settled[variant.id] = _settle(own, surveyed)
        if variant.cap is not None:
            exact, entries = _exact(own, settled[variant.id], surveyed)
            least = smallest_cap(exact, entries, plan.recipe.output.shard_size)
            needs.append(Need(variant.id, variant.checkpoint_bytes, variant.cap, least, least))
    if plan.recipe.objective.budget is not None:
        check_caps(needs, plan.recipe.objective.budget)
    choices: dict[Key, Choice] = {}
    for variant in plan.variants:
        own = [items[key] for key in sorted(items) if key[0] == variant.id]
        choices.update(_share_out(plan, variant, own, settled[variant.id], surveyed))
    return choices


def _share_out(
    plan: Plan, variant: VariantPlan, own: list[Item], found: dict[Key, Choice], surveyed: Mapping[Key, Surveyed]
) -> dict[Key, Choice]:
    """Give what is left of the cap to the items that are not settled."""
    open_items = [item for item in own if item.key not in found]
    steps: dict[Key, int] = {}
    if variant.cap is not None:
        exact, entries = _exact(own, found, surveyed)
        left = variant.cap - exact - shard_overhead(entries, variant.cap, plan.recipe.output.shard_size)
        steps = allocate([_candidate(item, surveyed[item.key]) for item in open_items if not item.fixed], left)
    chosen = dict(found)
    for item in open_items:
        fitted = len(surveyed[item.key].explained)
        chosen[item.key] = Choice(item.codec, min(steps.get(item.key, fitted), fitted))
    return chosen


def _exact(items: list[Item], found: Mapping[Key, Choice], surveyed: Mapping[Key, Surveyed]) -> tuple[int, int]:
    """Bytes of a variant that allocation cannot change, and how many entries its shards may have."""
    open_items = [item for item in items if item.key not in found]
    nbytes = _exact_bytes(items, found, surveyed) + _tails(open_items) + _fixed_bytes(open_items, surveyed)
    free = [item for item in items if item.key in found and found[item.key].costs_nothing(item)]
    return nbytes, len(items) - len(free)


def _settle(items: list[Item], surveyed: Mapping[Key, Surveyed]) -> dict[Key, Choice]:
    """Items that leave nothing to decide: the base's own bits, the bits of a sibling, or all bits."""
    found: dict[Key, Choice] = {}
    first: dict[tuple[object, ...], str] = {}
    for item in items:  # sorted by name, so the first of equal tensors holds the bytes
        facts = surveyed[item.key]
        if facts.identical and not item.tail_bytes:
            found[item.key] = Choice("identical")
            continue
        likeness = (facts.sha256, item.spec.dtype, item.spec.shape, item.codec, tuple(sorted(item.params.items())))
        if item.spec.nbytes and likeness in first:
            found[item.key] = Choice("alias", of=first[likeness])
            continue
        first[likeness] = item.name
        if facts.identical:
            found[item.key] = Choice("identical")  # but for its new rows
        elif item.lossy and facts.fit is None:
            found[item.key] = Choice("lossless")
        elif not item.lossy:
            found[item.key] = Choice(item.codec)
    return found


def _exact_bytes(items: list[Item], found: Mapping[Key, Choice], surveyed: Mapping[Key, Surveyed]) -> int:
    sizes: dict[str, int] = defaultdict(int)
    for item in items:
        choice = found.get(item.key)
        if choice is not None and choice.codec == "identical" and item.tail_bytes:
            sizes[item.name] = item.tail_bytes + ENTRY_BYTES
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
