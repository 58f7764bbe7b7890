"""Between the passes: what pass 1 found out, turned into how every tensor is stored."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from mfs_decompose.linalg.bands import Bands
from mfs_decompose.pipeline.choose_coded import Sizes, choose_coded
from mfs_decompose.pipeline.encode import Choice
from mfs_decompose.pipeline.surveyed import Surveyed
from mfs_decompose.plan.allocate import Candidate, Key, MatrixKey
from mfs_decompose.plan.cap import ENTRY_BYTES, Need, check_caps, check_total, shard_overhead, smallest_cap
from mfs_decompose.plan.drift import DriftWeights
from mfs_decompose.plan.mixes import MixCandidate
from mfs_decompose.plan.model import DIRECT, Item, Plan, VariantPlan
from mfs_decompose.plan.share import BandedCandidate, as_banded, beside_mixes, share_out


def choose_all(
    plan: Plan, surveyed: Mapping[Key, Surveyed], weights: Mapping[str, DriftWeights], sizes: Sizes
) -> dict[Key, Choice]:
    """How every item is stored: identical, alias, exact, or lossy at a size that keeps its variant under its cap.

    `weights` say for each variant how much drift a unit of missing energy makes, where.

    Raises:
        UsageError: what must be exact exceeds the budget of a variant.
    """
    items = {item.key: item for item in plan.items()}
    needs: list[Need] = []
    settled: dict[str, dict[Key, Choice]] = {}
    for variant in plan.variants:
        own = [items[key] for key in sorted(items) if key[0] == variant.id]
        settled[variant.id] = _settle(own, surveyed)
        cap = variant.cap if plan.total_cap is None or variant.adapter else plan.total_cap
        if cap is not None:
            exact, entries = _exact(own, settled[variant.id], surveyed)
            least = smallest_cap(exact, entries, plan.recipe.output.shard_size)
            needs.append(Need(variant.id, variant.checkpoint_bytes, cap, least, least))
    if plan.recipe.objective.budget is not None:
        check_caps(needs, plan.recipe.objective.budget)
    if plan.recipe.objective.budget_total is not None and plan.total_cap is not None:
        check_total(needs, plan.recipe.objective.budget_total)
    choices: dict[Key, Choice] = {}
    for group in _groups(plan):
        own = [items[key] for key in sorted(items) if key[0] in {variant.id for variant in group}]
        found = {key: choice for variant in group for key, choice in settled[variant.id].items()}
        cap = group[0].cap if len(group) == 1 and plan.total_cap is None else plan.total_cap
        cap = None if group[0].adapter else cap
        choices.update(_share_out(plan, cap, own, found, surveyed, weights, sizes))
    return choices


def _groups(plan: Plan) -> list[tuple[VariantPlan, ...]]:
    """Variants that share a cap: each by itself, or all that are no adapters."""
    if plan.total_cap is None:
        return [(variant,) for variant in plan.variants]
    together = tuple(variant for variant in plan.variants if not variant.adapter)
    return [*([together] if together else []), *((variant,) for variant in plan.variants if variant.adapter)]


def _share_out(
    plan: Plan,
    cap: int | None,
    own: list[Item],
    found: dict[Key, Choice],
    surveyed: Mapping[Key, Surveyed],
    weights: Mapping[str, DriftWeights],
    sizes: Sizes,
) -> dict[Key, Choice]:
    """Give what is left of a cap to the items that are not settled; `own` are those of all variants that share it."""
    open_items = [item for item in own if item.key not in found]
    steps: dict[MatrixKey, int] = {}
    bands: dict[Key, Bands] = {}
    if cap is not None:
        left = cap
        for variant in sorted({item.variant for item in own}):
            exact, entries = _exact([item for item in own if item.variant == variant], found, surveyed)
            left -= exact + shard_overhead(entries, cap, plan.recipe.output.shard_size)
        left -= _stack_entries(open_items, surveyed)
        sized = [item for item in open_items if not item.fixed and item.codec != "banded"]
        candidates = [one for item in sized for one in _candidates(item, surveyed[item.key])]
        fixed = {
            item.key: _banded(item, surveyed[item.key])
            for item in open_items
            if item.codec == "banded" and not item.auto
        }
        mixes = {
            item.key: mix_candidate(item, surveyed[item.key], weights.get(item.variant, DriftWeights()).of(item.name))
            for item in open_items
            if item.auto
        }
        own_bytes = left - beside_mixes(candidates, fixed, mixes, left)
        coded, taken_bytes = choose_coded(mixes, own_bytes, sizes) if mixes else ({}, 0)
        found = found | coded
        banded = fixed | {key: as_banded(one) for key, one in mixes.items() if key not in coded}
        steps, bands = share_out(candidates, banded, left - taken_bytes)
        open_items = [item for item in open_items if item.key not in coded]
    chosen = dict(found)
    for item in open_items:
        if item.codec == "banded":
            chosen[item.key] = Choice("banded", sum(bands[item.key]), bands=bands[item.key])
            continue
        fitted = [len(curve) for curve in surveyed[item.key].curves]
        taken = [steps.get((*item.key, at), most) for at, most in enumerate(fitted)]
        chosen[item.key] = Choice(item.codec, sum(taken), slices=tuple(taken) if item.stacked else ())
    return chosen


def mix_candidate(item: Item, facts: Surveyed, weight: float) -> MixCandidate:
    """What allocation knows of a banded or open item, at a weight of its missing energy."""
    assert item.matrix is not None
    found = facts.open
    return MixCandidate(
        shape=item.matrix,
        energy=facts.energy if found is None else found.energy,
        explained=facts.explained,
        curves=() if found is None else found.curves,
        exact_bytes=None if found is None else found.exact_bytes,
        entry_bytes=0 if item.beside_bytes else ENTRY_BYTES,
        weight=weight,
        peeled=None if found is None else found.peeled,
    )


def _stack_entries(items: list[Item], surveyed: Mapping[Key, Surveyed]) -> int:
    """Headers that the slices of open stacks share: no slice can be asked to pay for it alone."""
    return sum(ENTRY_BYTES for item in items if item.stacked and not item.fixed and not _beside(item, surveyed))


def _exact(items: list[Item], found: Mapping[Key, Choice], surveyed: Mapping[Key, Surveyed]) -> tuple[int, int]:
    """Bytes of a variant that allocation cannot change, and how many entries its shards may have."""
    open_items = [item for item in items if item.key not in found]
    nbytes = _exact_bytes(items, found, surveyed) + _fixed_bytes(open_items, surveyed)
    nbytes += sum(_beside(item, surveyed) + ENTRY_BYTES for item in open_items if _beside(item, surveyed))
    free = [item for item in items if item.key in found and found[item.key].costs_nothing(item)]
    return nbytes, len(items) - len(free)


def _settle(items: list[Item], surveyed: Mapping[Key, Surveyed]) -> dict[Key, Choice]:
    """Items that leave nothing to decide: the base's own bits, the bits of a sibling, or all bits."""
    found: dict[Key, Choice] = {}
    holders = _holders(items, surveyed)
    for item in items:
        facts, holder = surveyed[item.key], holders.get(item.key)
        if item.codec == "adapter":
            found[item.key] = Choice("adapter")
        elif facts.identical and not item.tail_bytes:
            found[item.key] = Choice("identical")
        elif holder is not None:
            found[item.key] = Choice("alias", of=holder)
        elif facts.identical:
            found[item.key] = Choice("identical")  # but for its new rows
        elif (item.fitted and facts.fit is None) or (item.direct and not facts.finite):
            found[item.key] = Choice("lossless")
        elif not item.fitted:
            found[item.key] = Choice(item.codec)
    return found


def _holders(items: list[Item], surveyed: Mapping[Key, Surveyed]) -> dict[Key, str]:
    """Of equal tensors of a variant that are stored alike, who holds the bytes for the others.

    Where a base unties what the variant ties, one of two equal tensors lies nearer to its base: that one holds them.
    """
    alike: dict[tuple[object, ...], list[Item]] = defaultdict(list)
    for item in items:
        if item.spec.nbytes and item.codec != "adapter":
            how = (
                item.codec,
                item.auto,
                tuple(sorted(item.params.items())),
                item.options,
                item.residual,
                item.keep_exact,
            )
            alike[surveyed[item.key].sha256, item.spec.dtype, item.spec.shape, how].append(item)
    holders: dict[Key, str] = {}
    for equal in alike.values():
        best = min(equal, key=lambda item: (*_distance(item, surveyed[item.key]), item.name))
        holders.update({item.key: best.name for item in equal if item is not best})
    return holders


def _distance(item: Item, facts: Surveyed) -> tuple[int, float]:
    """How much there is to store: nothing, some rows, or a delta of that energy; without a base, all of it."""
    if facts.identical:
        return (0 if not item.tail_bytes else 1, 0.0)
    return (2 if item.base is not None and item.common_rows else 3, facts.energy)


def _exact_bytes(items: list[Item], found: Mapping[Key, Choice], surveyed: Mapping[Key, Surveyed]) -> int:
    sizes: dict[str, int] = defaultdict(int)
    for item in items:
        choice = found.get(item.key)
        if choice is not None and choice.codec == "identical" and item.tail_bytes:
            sizes[item.name] = item.tail_bytes + ENTRY_BYTES
        if choice is not None and (choice.codec in ("raw", "lossless", "lora-exact") or choice.codec in DIRECT):
            forced = surveyed[item.key].exact_bytes
            sizes[item.name] = (item.spec.nbytes if forced is None else forced) + ENTRY_BYTES
    return sum(sizes.values())


def _beside(item: Item, surveyed: Mapping[Key, Surveyed]) -> int:
    """Bytes of an open item beside its fits: new rows, a residual, and slices that no fit can hold."""
    return item.beside_bytes + (surveyed[item.key].exact_bytes or 0)


def _fixed_bytes(items: list[Item], surveyed: Mapping[Key, Surveyed]) -> int:
    """Bytes of tensors whose size the recipe fixes, beside a budget for the others."""
    total = 0
    for item in items:
        if item.fixed:
            steps = sum(len(curve) for curve in surveyed[item.key].curves)
            total += steps * item.step_bytes + (0 if _beside(item, surveyed) else ENTRY_BYTES)
    return total


def _banded(item: Item, facts: Surveyed) -> BandedCandidate:
    assert item.matrix is not None
    return BandedCandidate(facts.explained, item.matrix, 0 if item.beside_bytes else ENTRY_BYTES)


def _candidates(item: Item, facts: Surveyed) -> list[Candidate]:
    # What is stored exactly beside it has an entry already, so the first step costs no header; nor in a stack.
    entry = 0 if item.beside_bytes or item.stacked else ENTRY_BYTES
    return [Candidate((*item.key, at), curve, item.step_bytes, entry) for at, curve in enumerate(facts.curves)]
