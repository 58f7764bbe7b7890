"""Recipe and alignment into a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

from mfs_decompose.codec.base import matrix_shape, slice_shape
from mfs_decompose.codec.sizes import max_steps
from mfs_decompose.codec.tree import Json
from mfs_decompose.errors import UsageError
from mfs_decompose.plan.cap import ENTRY_BYTES, SHARD_BYTES, Need, check_caps, check_total, smallest_cap
from mfs_decompose.plan.model import DIRECT, FITTED, BaseMode, BaseStore, Item, Options, Plan, VariantPlan
from mfs_decompose.plan.units import cut_units
from mfs_decompose.recipe.choose import choose, unmatched_rules
from mfs_decompose.recipe.schema import DeltaRule, Recipe
from mfs_decompose.source.adapter import Merge, MergedTensor
from mfs_decompose.source.align import Alignment, Member, TensorGroup
from mfs_decompose.source.checkpoint import Checkpoint
from mfs_decompose.source.dtypes import is_float
from mfs_decompose.source.header import TensorSpec
from mfs_decompose.source.quantised import find_quantised

_HEADROOM = 2  # allocation may give a tensor this many times the steps of an even split
_BANDED_HEADROOM = 4  # of 2 bits each, which the flat tail of a strong tensor goes on and on for
_TARGET_SHARE = 0.05  # of a checkpoint: open tensors under a target are fitted as for this budget


def build_plan(
    recipe: Recipe,
    alignment: Alignment,
    variants: Sequence[Checkpoint],
    base_tensors: Mapping[str, TensorSpec],
    base_mode: BaseMode,
    base_store: BaseStore,
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
    whole = sum(variant.tensor_bytes for variant in variants if variant.id not in (merges or {}))
    budget = recipe.objective.budget_total
    total = None if budget is None else (budget.cap(whole), whole)
    items: list[Item] = []
    plans: list[VariantPlan] = []
    needs: list[Need] = []
    for checkpoint in sorted(variants, key=lambda variant: variant.id):
        merge = (merges or {}).get(checkpoint.id)
        if merge is not None:
            items.extend(_merged_item(checkpoint.id, tensor) for tensor in merge.tensors.values())
            plans.append(_adapter_plan(checkpoint, sum(spec.nbytes for spec in base_tensors.values())))
            continue
        quantised = find_quantised(checkpoint.tensors).exact
        planned = [
            _item(group, member, rules[group.name], keep_exact=recipe.deltas.keep_exact, quantised=quantised)
            for group, member in _members(alignment, checkpoint.id)
        ]
        plan = _variant_plan(recipe, checkpoint, planned)
        even = _even_steps(planned, rules, plan, _planned_cap(recipe, plan, total))
        own = [_size(item, recipe, rules[item.name], even) for item in planned]
        items.extend(own)
        plans.append(plan)
        cap = plan.cap if total is None else total[0]
        if cap is not None:
            needs.append(_need(plan, cap, own, recipe.output.shard_size))
    if recipe.objective.budget is not None:
        check_caps(needs, recipe.objective.budget)
    if budget is not None:
        check_total(needs, budget)
    return Plan(
        recipe=recipe,
        base_mode=base_mode,
        base_store=base_store,
        base_tensors=base_tensors,
        variants=tuple(plans),
        units=cut_units(items),
        missing={plan.id: _missing(alignment, plan.id) for plan in plans},
        groups=len(alignment.groups),
        total_cap=None if total is None else total[0],
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


def _item(group: TensorGroup, member: Member, rule: DeltaRule, *, keep_exact: bool, quantised: Set[str]) -> Item:
    assert member.spec is not None
    spec = TensorSpec(member.spec.name, member.spec.dtype, member.spec.shape)
    comparable = member.kind != "only_in_variant" and group.base is not None
    base = group.base if comparable else None
    common_rows = member.common_rows if comparable else 0
    common = (common_rows, *spec.shape[1:]) if spec.shape else ()
    floats = base is not None and is_float(spec.dtype) and is_float(base.dtype)
    whole = matrix_shape(common) if floats else None
    # One residual is written for a whole tensor, and bits are shared out between whole matrices.
    slices = slice_shape(common) if floats and rule.residual is None else None
    codec = _codec(rule, spec, whole or slices, stacked=slices is not None, keep_exact=keep_exact)
    if spec.name in quantised and codec != "raw":  # codes are no numbers, and their scales mean nothing without them
        codec = "lossless"
    fitted = codec in FITTED
    params = {"factors": _factors(rule, codec)} if codec == "lowrank" else {"values": rule.values or "bf16"}
    return Item(
        variant=member.variant,
        kind=member.kind,
        spec=spec,
        base=base,
        common_rows=common_rows,
        codec=codec,
        params=params if codec in ("lowrank", "sparse") else {},
        matrix=(slices or whole) if fitted else None,
        auto=codec == "banded" and rule.codec == "auto",
        steps=0,
        fixed=False,
        stacked=fitted and slices is not None,
        options=_options(rule, codec),
        residual=_residual(rule) if codec == "lowrank" else None,
        keep_exact=keep_exact and (fitted or codec in DIRECT),
    )


def _codec(
    rule: DeltaRule, spec: TensorSpec, matrix: tuple[int, int] | None, *, stacked: bool, keep_exact: bool
) -> str:
    """What the rule comes to for one tensor."""
    if rule.codec in ("lossless", "raw"):
        return rule.codec
    if matrix is None:
        return "lossless" if rule.codec == "lora-exact" else "raw"
    if keep_exact and spec.dtype == "F64":  # which no correction is made for
        return "lossless"
    if rule.codec == "auto" or (rule.codec == "lowrank" and rule.factors == "banded"):
        return "lowrank" if stacked else "banded"
    if rule.codec == "sparse" and rule.select == "effect":
        return "significant"
    return rule.codec


def _factors(rule: DeltaRule, codec: str) -> str:
    """Slices of a stack have factors of one width: bits are not shared out between them."""
    assert codec == "lowrank"
    return "int4" if rule.factors in (None, "banded") else rule.factors


def _options(rule: DeltaRule, codec: str) -> Options:
    given: dict[str, Json] = {"scale": rule.scale, "bits": rule.bits, "step": rule.step, "rows": rule.rows}
    return _given(codec, given) if codec in DIRECT else ()


def _residual(rule: DeltaRule) -> tuple[str, Options] | None:
    if rule.residual is None:
        return None
    given: dict[str, Json] = {"scale": rule.residual.scale, "bits": rule.residual.bits}
    return rule.residual.codec, _given(rule.residual.codec, given)


def _given(codec: str, options: Mapping[str, Json]) -> Options:
    found = {key: value for key, value in options.items() if value is not None}
    if codec in ("kbit", "ternary"):
        found["fit"] = "mse"
    return tuple(found.items())


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
    if item.fitted or item.base is None:
        return item.beside_bytes if item.fitted else 0
    return item.tail_bytes


def _need(plan: VariantPlan, cap: int, items: Sequence[Item], shard_size: int) -> Need:
    """What a cap must hold: for certain, and at most, should no tensor be the base's."""
    entries = [item for item in items if item.fitted or item.spec.nbytes]
    certain = [item for item in entries if not item.fitted or item.fixed or item.beside_bytes]
    most = sum(_most_exact(item) + ENTRY_BYTES for item in certain)
    least = plan.unavoidable_bytes + (SHARD_BYTES if plan.unavoidable_bytes else 0)
    return Need(plan.id, plan.checkpoint_bytes, cap, least, smallest_cap(most, len(entries), shard_size))


def _most_exact(item: Item) -> int:
    if not item.fitted:
        return item.most_bytes
    fixed = item.steps if item.fixed else 0
    return item.beside_bytes + item.matrices * fixed * item.step_bytes


def _planned_cap(recipe: Recipe, plan: VariantPlan, total: tuple[int, int] | None) -> int | None:
    """The bytes that fits are made for.

    A target has no cap. What a finer one needs beyond these steps of an open tensor is coded, not factorised: more
    directions would cost a longer pass 1 and hardly save a byte. Of a budget for all (its bytes, and those of all
    checkpoints) a variant that needs more than the others may take twice its part.
    """
    if recipe.objective.target is not None:
        return int(_TARGET_SHARE * plan.checkpoint_bytes)
    if total is not None:
        return 2 * total[0] * plan.checkpoint_bytes // max(total[1], 1)
    return plan.cap


def _even_steps(items: Sequence[Item], rules: Mapping[str, DeltaRule], plan: VariantPlan, cap: int | None) -> float:
    """Steps every lossy tensor would get if the cap were spent evenly."""
    if cap is None:
        return 0.0
    shared = [item for item in items if item.fitted and rules[item.name].rank is None]
    cost = sum(item.matrices * item.step_bytes for item in shared)
    return max(cap - plan.unavoidable_bytes, 0) / cost if cost else 0.0


def headroom(codec: str) -> int:
    """How many times the steps of an even split a fit has under a budget."""
    return _BANDED_HEADROOM if codec == "banded" else _HEADROOM


def _size(item: Item, recipe: Recipe, rule: DeltaRule, even: float) -> Item:
    objective = recipe.objective
    if item.codec == "significant":
        assert objective.density is not None, "the schema saw to it"
        seen = matrix_shape(item.common.shape)
        assert seen is not None, "a plan gives direct codecs matrices alone"
        return replace(item, options=(("steps", max(1, round(objective.density * seen[1]))),))
    if item.matrix is None:
        return item
    if rule.rank is not None or objective.rank is not None:
        steps, fixed = min(rule.rank or objective.rank or 0, max_steps(item.codec, item.matrix)), True
    elif objective.density is not None:
        steps, fixed = max(1, round(objective.density * item.matrix[1])), True
    elif objective.target is not None and not item.auto:
        steps, fixed = item.worthwhile_steps, False  # the search may have to go to the end of what the codec can
    else:
        steps, fixed = min(item.worthwhile_steps, max(8, int(headroom(item.codec) * even) + 1)), False
    return replace(item, steps=steps, fixed=fixed)
