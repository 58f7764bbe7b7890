"""One call of the model for one step: many sequences, packed variant by variant."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from mfs_decompose.errors import SourceIncompatible
from mfs_decompose.runtime.attention import PackedModel, PagedStep
from mfs_decompose.runtime.batch_plan import BatchPlan, PlanSlot
from mfs_decompose.runtime.kv import KvCache
from mfs_decompose.runtime.scheduler import Scheduled
from mfs_decompose.runtime.step_layout import Segment, StepLayout


def refuse_without_logits_to_keep(model: Any) -> None:
    """Raises SourceIncompatible where a model makes the logits of all rows or of none."""
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise SourceIncompatible(
            f"expected a causal language model that takes logits_to_keep, found {type(model).__name__}",
            hint="load the model with its language modelling head",
        )


def forward(packed: PackedModel, slot: PlanSlot, kv: KvCache, scheduled: Sequence[Scheduled]) -> torch.Tensor:
    """Write keys and values of the scheduled tokens; the logits [n, vocabulary] behind the last token of each sequence
    whose tokens end here, in order, in fp32.

    `scheduled` comes in order of slot, so that each variant is one range of rows. The call may be repeated: the same
    keys go to the same places.
    """
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    ends: list[int] = []
    segments: list[Segment] = []
    for sequence, count in scheduled:
        past = sequence.computed
        segments.append(Segment(sequence.kv, len(ids), count, past))
        ids += sequence.tokens[past : past + count]
        positions += range(past, past + count)
        slots += [sequence.info.slot] * count
        if count == sequence.remaining:
            ends.append(len(ids) - 1)
    # A head over no rows is a case that nobody tests: where no sequence ends, one row is made and dropped.
    rows = ends or [len(ids) - 1]
    plan = BatchPlan.for_rows(slots)
    model = packed.model
    device = model.device
    kv.clean()
    step = PagedStep(kv, StepLayout(kv, segments))
    with torch.inference_mode(), slot.use(plan, plan.select(rows)), packed.running(step):
        logits: torch.Tensor = model(
            input_ids=torch.tensor([ids], device=device),
            position_ids=torch.tensor([positions], device=device),
            use_cache=False,
            # 0 is all rows, as they are: a list of them would be a copy.
            logits_to_keep=0 if len(rows) == len(ids) else torch.tensor(rows, device=device),
        ).logits
    return logits[0, : len(ends)].float()
