"""Which base a run has, as far as arguments and headers decide it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mfs_decompose.errors import UsageError
from mfs_decompose.plan.model import BaseMode, BaseStore, Plan
from mfs_decompose.plan.shared_groups import require_groups, shared_groups
from mfs_decompose.plan.weigh import PLAIN
from mfs_decompose.recipe.schema import Recipe
from mfs_decompose.source.checkpoint import Checkpoint

GIVEN: frozenset[BaseMode] = frozenset({"known", "shared"})
"""Modes whose base is the one that was given."""


def choose_base(
    recipe: Recipe, base: Checkpoint | None, variants: Sequence[Checkpoint]
) -> tuple[BaseMode, BaseStore, bool]:
    """Mode and store of the base, and whether the weights may still decide for the plain mode instead.

    Raises:
        UsageError: the mode needs a base, or the base as made cannot be stored so.
    """
    wanted = recipe.base.mode
    auto = wanted == "auto"
    mode: BaseMode
    if wanted == "default":
        mode = "mean" if base is None else "known"
    elif wanted == "auto":
        mode = "refined" if base is None else "shared"
        if base is not None and sum(variant.adapter is None for variant in variants) < 2:
            mode, auto = "known", False
    else:
        mode = wanted
    if mode in GIVEN and base is None:
        raise UsageError(f"the base mode {mode!r} needs a base, found none", hint="Add --base FOLDER.")
    # A pinned commit of the Hub can be had again by anyone; a folder of this machine cannot.
    remote = mode in GIVEN and base is not None and base.repo is not None
    automatic: BaseStore = "reference" if remote else "copy"
    store = automatic if recipe.base.store == "auto" else recipe.base.store
    if mode not in GIVEN and store != "copy":
        raise UsageError(
            f"a {mode} base exists nowhere else, so it cannot be stored by {store}", hint="Leave --base-store out."
        )
    return mode, store, auto


def settle_plan(plan: Plan, *, auto: bool) -> Plan:
    """The plan with what is left to the weights; the plain mode where there is nothing to weigh.

    Raises:
        UsageError: a shared delta was asked for, and no tensor could have one.
    """
    if plan.base_mode == "shared" and not auto:
        require_groups(plan)
    if auto and plan.base_mode == "shared" and not shared_groups(plan):
        return replace(plan, base_mode=PLAIN["shared"])
    return replace(plan, base_auto=True) if auto else plan


def say_base(plan: Plan) -> tuple[str, ...]:
    """What headers cannot tell of the base, in words."""
    if plan.base_auto:
        plain = PLAIN[plan.base_mode]
        return (f"base mode auto: {plain} or {plan.base_mode}, whichever takes fewer bytes; only the weights can tell",)
    if plan.base_mode == "shared":
        count = len(shared_groups(plan))
        return (
            f"a shared delta is possible in {count} tensors; its bytes are known once the weights are read, and count "
            "within the caps of the variants that use it",
        )
    return ()
