"""Recipe and alignment into a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from mfs_decompose.codec.base import matrix_shape, slice_shape
from mfs_decompose.codec.sizes import max_steps
from mfs_decompose.errors import UsageError
from mfs_decompose.plan.cap import ENTRY_BYTES, SHARD_BYTES, Need, check_caps, smallest_cap
from mfs_decompose.plan.model import Item, Plan, VariantPlan
from mfs_decompose.plan.units import cut_units
from mfs_decompose.recipe.choose import choose, unmatched_rules
from mfs_decompose.recipe.schema import DeltaRule, Recipe
from mfs_decompose.source.adapter import Merge, MergedTensor
from mfs_decompose.source.align import Alignment, Member, TensorGroup
from mfs_decompose.source.checkpoint import Checkpoint
from mfs_decompose.source.dtypes import is_float
from mfs_decompose.source.header import TensorSpec

_HEADROOM = 2  # allocation may give a tensor this many times the steps of an even split


def build_plan(
    recipe: Recipe,
    alignment: Alignment,
    variants: Sequence[Checkpoint],
    base_tensors: Mapping[str, TensorSpec],
    base_mode: Literal["known", "mean"],
    base_store: Literal["copy", "reference", "hardlink"],
    merges: Mapping[str, Merge] | None = None,
) -> Plan:
    """Decide for every tensor of every variant how it will be stored, and what is worked on together.

    `merges` says of each variant that is an adapter what it makes of the base: it is kept as it is.

    Raises:
        UsageError: a rule fits no tensor, or what must be exact exceeds the budget.
    """
    names = sorted({group.name for group in alignment.groups})
    for rule in unmatched_rules(recipe, names):
        raise UsageError(
            f"the rule for {', '.join(rule.match)} fits none of the {len(names)} tensors",
            hint="Give a glob that fits; `mfs decompose --dry-run` says what there is.",
        )
    rules = {name: choose(recipe, name) for name in names}
    items: list[Item] = []
    plans: list[VariantPlan] = []
    needs: list[Need] = []
    for checkpoint in sorted(variants, key=lambda variant: variant.id):
        merge = (merges or {}).get(checkpoint.id)
        if merge is not None:
            items.extend(_merged_item(checkpoint.id, tensor) for tensor in merge.tensors.values())
            plans.append(_adapter_plan(checkpoint, sum(spec.nbytes for spec in base_tensors.values())))
            continue
        planned = [_item(group, member, rules[group.name]) for group, member in _members(alignment, checkpoint.id)]
        plan = _variant_plan(recipe, checkpoint, planned)
        even = _even_steps(planned, rules, plan)
        own = [_size(item, recipe, rules[item.name], even) for item in planned]
        items.extend(own)
        plans.append(plan)
        if plan.cap is not None:
            needs.append(_need(plan, plan.cap, own, recipe.output.shard_size))
    if recipe.objective.budget is not None:
        check_caps(needs, recipe.objective.budget)
    return Plan(
        recipe=recipe,
        base_mode=base_mode,
        base_store=base_store,
        base_tensors=base_tensors,
        variants=tuple(plans),
        units=cut_units(items),
        missing={plan.id: _missing(alignment, plan.id) for plan in plans},
        groups=len(alignment.groups),
    )


def _members(alignment: Alignment, variant: str) -> list[tuple[TensorGroup, Member]]:
    return [
        (group, member)
        for group in alignment.groups
        for member in group.members
        if member.variant == variant and member.spec is not None
    ]


def _missing(alignment: Alignment, variant: str) -> tuple[str, ...]:
    return tuple(
        group.name
        for group in alignment.groups
        for member in group.members
        if member.variant == variant and member.kind == "missing_in_variant"
    )


def _item(group: TensorGroup, member: Member, rule: DeltaRule) -> Item:
    assert member.spec is not None
    spec = TensorSpec(member.spec.name, member.spec.dtype, member.spec.shape)
    comparable = member.kind != "only_in_variant" and group.base is not None
    base = group.base if comparable else None
    common_rows = member.common_rows if comparable else 0
    common = (common_rows, *spec.shape[1:]) if spec.shape else ()
    floats = base is not None and is_float(spec.dtype) and is_float(base.dtype)
    slices = slice_shape(common) if floats else None
    matrix = slices or (matrix_shape(common) if floats else None)
    codec = rule.codec
    if codec in ("lowrank", "sparse") and matrix is None:
        codec = "raw"
    options = {"factors": rule.factors, "values": rule.values}
    params = {key: value for key, value in options.items() if value is not None}
    lossy = codec in ("lowrank", "sparse")
    return Item(
        variant=member.variant,
        kind=member.kind,
        spec=spec,
        base=base,
        common_rows=common_rows,
        codec=codec,
        params=params if lossy else {},
        matrix=matrix if lossy else None,
        steps=0,
        fixed=False,
        stacked=lossy and slices is not None,
    )


def _merged_item(variant: str, tensor: MergedTensor) -> Item:
    """A tensor of an adapter's merge: nothing is chosen, and its bytes are the adapter's own."""
    return Item(
        variant=variant,
        kind=tensor.kind,
        spec=tensor.spec,
        base=tensor.base,
        common_rows=tensor.common_rows,
        codec="identical" if tensor.params is None else "adapter",
        params={},
        matrix=None,
        steps=0,
        fixed=False,
        merged=tensor.params,
    )


def _adapter_plan(adapter: Checkpoint, base_bytes: int) -> VariantPlan:
    # A budget says how far a delta is compressed; an adapter is kept as it is, so none holds for it.
    return VariantPlan(adapter.id, base_bytes, None, adapter.tensor_bytes + len(adapter.tensors) * ENTRY_BYTES, True)


def _variant_plan(recipe: Recipe, checkpoint: Checkpoint, items: Sequence[Item]) -> VariantPlan:
    total = checkpoint.tensor_bytes
    budget = recipe.objective.budget
    cap = None if budget is None else budget.cap(total)
    exact = [_surely_exact(item) for item in items]
    return VariantPlan(checkpoint.id, total, cap, sum(nbytes + ENTRY_BYTES for nbytes in exact if nbytes))


def _surely_exact(item: Item) -> int:
    """Bytes that are stored exactly whatever is read: a tensor unlike the base's in shape or type is no copy of it."""
    if item.codec == "raw" and not item.comparable_bits:
        return item.spec.nbytes
    return item.tail_bytes if item.base is not None else 0


def _need(plan: VariantPlan, cap: int, items: Sequence[Item], shard_size: int) -> Need:
    """What a cap must hold: for certain, and at most, should no tensor be the base's."""
    entries = [item for item in items if item.lossy or item.spec.nbytes]
    most = sum(_most_exact(item) + ENTRY_BYTES for item in entries if not item.lossy or item.fixed or item.tail_bytes)
    least = plan.unavoidable_bytes + (SHARD_BYTES if plan.unavoidable_bytes else 0)
    return Need(plan.id, plan.checkpoint_bytes, cap, least, smallest_cap(most, len(entries), shard_size))


def _most_exact(item: Item) -> int:
    if not item.lossy:
        return item.spec.nbytes
    fixed = item.steps if item.fixed else 0
    return item.tail_bytes + item.matrices * fixed * item.step_bytes


def _even_steps(items: Sequence[Item], rules: Mapping[str, DeltaRule], plan: VariantPlan) -> float:
    """Steps every lossy tensor would get if the cap were spent evenly."""
    if plan.cap is None:
        return 0.0
    shared = [item for item in items if item.lossy and rules[item.name].rank is None]
    cost = sum(item.matrices * item.step_bytes for item in shared)
    return max(plan.cap - plan.unavoidable_bytes, 0) / cost if cost else 0.0


def _size(item: Item, recipe: Recipe, rule: DeltaRule, even: float) -> Item:
    if item.matrix is None:
        return item
    objective = recipe.objective
    if rule.rank is not None or objective.rank is not None:
        steps, fixed = min(rule.rank or objective.rank or 0, max_steps(item.codec, item.matrix)), True
    elif objective.density is not None:
        steps, fixed = max(1, round(objective.density * item.matrix[1])), True
    else:
        steps, fixed = min(item.worthwhile_steps, max(8, int(_HEADROOM * even) + 1)), False
    return replace(item, steps=steps, fixed=fixed)
