"""Which variant each row of one step belongs to: made once a step on the CPU, read by every module of the model.

Rows are the tokens of a packed sequence [1, T, H]. The engine packs them variant by variant, so that each variant is
one range of rows and its delta one small product over a slice; nothing is gathered and nothing is synchronised.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from mfs_decompose.errors import UsageError

BASE = -1
"""The slot of the base: rows without a delta."""

ANY_ROWS = -1
"""The rows of a plan for one variant in whatever is passed: [B, S, H] of any B and S."""

FEW_ROWS = 64
"""Of a step whose variants are answered together: with more, each variant's own products are the faster way."""

_RECENT = 8  # plans kept


class Group(NamedTuple):
    """Rows start..stop of one variant slot, or of BASE."""

    variant: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The rows of one step.

    Attributes:
        variants: the distinct slots, rising; BASE among them where base rows are.
        groups: in the order of the rows, without gaps; one a variant where the rows are sorted by slot.
        rows: T, or ANY_ROWS.
        uniform: one variant, or the base, in all rows.
    """

    variants: tuple[int, ...]
    groups: tuple[Group, ...]
    rows: int
    uniform: bool

    @classmethod
    def for_rows(cls, row_variants: Sequence[int]) -> BatchPlan:
        """The plan of rows that belong to these slots, BASE for the base; each run of one slot becomes a group."""
        groups: list[Group] = []
        start = 0
        for variant, run in groupby(row_variants):
            assert variant >= BASE, f"slot {variant}"
            stop = start + sum(1 for _ in run)
            groups.append(Group(variant, start, stop))
            start = stop
        variants = tuple(sorted({group.variant for group in groups}))
        return cls(variants, tuple(groups), start, len(variants) <= 1)

    @classmethod
    def only(cls, variant: int, rows: int = ANY_ROWS) -> BatchPlan:
        """One slot, or BASE, for all rows; by default for tensors of any shape, such as padded batches."""
        assert variant >= BASE, f"slot {variant}"
        groups = () if rows <= 0 else (Group(variant, 0, rows),)
        return cls((variant,), groups, rows, True)

    def select(self, row_indices: Sequence[int]) -> BatchPlan:
        """The plan of these rows in this order, such as the rows whose logits are asked for."""
        if self.rows == ANY_ROWS:
            return self
        slots = self.row_variants
        return BatchPlan.for_rows([slots[row] for row in row_indices])

    @property
    def row_variants(self) -> tuple[int, ...]:
        """The slot of each row; nothing of a plan for ANY_ROWS."""
        return tuple(group.variant for group in self.groups for _ in range(group.stop - group.start))

    def over(self, rows: int) -> tuple[Group, ...]:
        """The groups of `rows` rows that reached a module: T of them, or any number where the plan is for ANY_ROWS."""
        if self.rows == ANY_ROWS:
            return (Group(self.variants[0], 0, rows),) if rows else ()
        assert rows == self.rows, f"{rows} rows reached a module under a plan for {self.rows}"
        return self.groups


class PlanSlot:
    """Where the modules of one loaded model find the plan of the step that runs; one step at a time, whoever asks."""

    def __init__(self) -> None:
        self._turn = threading.RLock()
        self._plan: BatchPlan | None = None
        self._logits: BatchPlan | None = None
        self._thread: int | None = None
        self._recent: dict[BatchPlan, BatchPlan] = {}
        self.resident: set[int] | None = None
        """The slots whose deltas are attached; None where that is all of them.  Rows of others would be the base's."""

    @contextmanager
    def alone(self) -> Iterator[None]:
        """No call of the model runs in another thread meanwhile: what modules hold may be changed."""
        with self._turn:
            yield

    @contextmanager
    def use(self, plan: BatchPlan, logits: BatchPlan | None = None) -> Iterator[None]:
        """Run model calls inside under `plan`; other threads wait.

        Args:
            logits: the plan of the rows that reach the head, where `logits_to_keep` leaves some out.
        """
        with self._turn:
            missing = () if self.resident is None else [v for v in plan.variants if v not in self.resident | {BASE}]
            assert not missing, f"slots {missing} are not attached"
            before = self._plan, self._logits, self._thread
            self._plan, self._logits = self._known(plan), None if logits is None else self._known(logits)
            self._thread = threading.get_ident()
            try:
                yield
            finally:
                self._plan, self._logits, self._thread = before

    def _known(self, plan: BatchPlan) -> BatchPlan:
        """The same plan as it was used before, with what was worked out for it: steps of decoding are alike."""
        if len(self._recent) > _RECENT:
            self._recent.clear()
        return self._recent.setdefault(plan, plan)

    @property
    def is_inside(self) -> bool:
        """Whether this thread is inside `use`."""
        return self._thread == threading.get_ident()

    @property
    def plan(self) -> BatchPlan:
        """The plan of all modules but the head.

        Raises:
            UsageError: the model is called outside of `use`.
        """
        if self._plan is None:
            raise UsageError(
                "expected a variant for every row of a call of the model, found none chosen",
                hint="call the model inside `with family.use(NAME):`",
            )
        return self._plan

    @property
    def logits_plan(self) -> BatchPlan:
        """The plan of the head; that of the other modules where none was given.  Raises as `plan` does."""
        return self.plan if self._logits is None else self._logits
