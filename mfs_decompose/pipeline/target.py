"""`--target`: every variant as small as a drift allows that is measured, as it will be served, on text.

Allocations are measured as they are foretold: their drift is what counts, and what coding takes is known well enough
to go by. The one that is chosen is written just as it was measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, Final

from mfs_decompose.artifact.canonical import digest_of
from mfs_decompose.artifact.target_record import HeldRecord, TargetRecord
from mfs_decompose.errors import GateFailed, UsageError
from mfs_decompose.pipeline.allocation import Allocator
from mfs_decompose.pipeline.encode import Choice
from mfs_decompose.pipeline.gauge import Drift, Gauge, Gauges
from mfs_decompose.pipeline.passes import Job
from mfs_decompose.pipeline.prober import Prober
from mfs_decompose.pipeline.target_search import LOST, Road, Size, Trial, search, smallest_held
from mfs_decompose.plan.allocate import Key
from mfs_decompose.plan.forecast import DriftCurve
from mfs_decompose.recipe.values import Target
from mfs_decompose.source.checkpoint import Checkpoint
from mfs_decompose.units import format_bytes

_EXACT: Final = frozenset({"identical", "alias", "raw", "lossless", "lora-exact", "adapter"})
_ALL: Final = 1 << 62  # bytes: a cap that everything fits under
_GUESS: Final = 0.1  # KL of a variant that has only what must be exact, before anything is known of it
_TOKENS: Final = 4096  # where nobody counted


@dataclass(frozen=True)
class Reached:
    """How all items are stored, what the manifest says of it, and by variant what was measured on the way."""

    choices: Mapping[Key, Choice]
    record: TargetRecord
    trials: Mapping[str, list[dict[str, Any]]]


def check_text(target: Target | None, gauges: Gauges | None, variants: Sequence[Checkpoint]) -> None:
    """Refuse a target that nothing can be held against, before hours of work.

    Raises:
        UsageError: there is no text, or one too short for an interval of the perplexity.
    """
    if target is None:
        return
    if gauges is None:
        raise UsageError(
            f"the target {target} needs text to measure drift on, found none",
            hint="Add --text FILE.jsonl:field or --text FILE.txt",
        )
    for checkpoint in variants:
        if checkpoint.adapter is not None or gauges.count is None:
            continue
        amount = gauges.count(checkpoint)
        if target.kind == "ppl" and amount.tokens < amount.needed:
            raise UsageError(
                f"the target {target} needs about {amount.needed:,} tokens of text for an interval, found "
                f"{amount.tokens:,} for variant {checkpoint.id!r}",
                hint=f"Give more text, or --max-tokens {amount.needed}; a target kl=X takes any text",
            )


def reach_target(
    job: Job,
    allocator: Allocator,
    gauges: Gauges,
    variants: Sequence[Checkpoint],
    curves: Mapping[str, DriftCurve],
) -> Reached:
    """Search each variant for the smallest allocation that holds the recipe's target, one model in memory at a time.

    `curves` are the drift to expect of a score, where that was measured.

    Raises:
        GateFailed: a codec cannot come that near to the original.
    """
    target = job.plan.recipe.objective.target
    assert target is not None
    choices: dict[Key, Choice] = {}
    held: dict[str, HeldRecord] = {}
    trials: dict[str, list[dict[str, Any]]] = {}
    for number, checkpoint in enumerate(variants):
        own = allocator.of(checkpoint.id)
        if checkpoint.adapter is not None:
            choices.update(own.choose())
            continue
        seeker = _Seeker(job, own, gauges, checkpoint, number, curves.get(checkpoint.id))
        found, held[checkpoint.id], tried = seeker.seek(target)
        choices.update(found)
        trials[checkpoint.id] = [{**asdict(trial.size), **asdict(trial.drift)} for trial in tried]
    return Reached(choices, TargetRecord(asked=str(target), measured_on=dict(gauges.identity), variants=held), trials)


class _Seeker:
    """The search for one variant. What it measures is journalled under a digest of what was measured."""

    def __init__(
        self,
        job: Job,
        allocator: Allocator,
        gauges: Gauges,
        checkpoint: Checkpoint,
        number: int,
        curve: DriftCurve | None,
    ) -> None:
        self._job, self._allocator, self._gauges = job, allocator, gauges
        self._checkpoint, self._number, self._curve = checkpoint, number, curve
        self._prober = Prober(job, allocator.surveyed)
        self._looked: dict[int, tuple[Size, dict[Key, Choice]]] = {}
        self._in_place: dict[Key, Choice] = {}
        self._gauge: Gauge | None = None

    def seek(self, target: Target) -> tuple[dict[Key, Choice], HeldRecord, list[Trial]]:
        lowest, highest = self._look(0), self._look(_ALL)
        if _keeps_all(self._choices(lowest)):
            return self._choices(lowest), HeldRecord(kl=0.0, ln_ppl=0.0, tokens=0, evaluations=0, smallest=True), []
        exact = _keeps_all(self._choices(highest))
        road = Road(lowest, highest, exact, self._look, self._prior(lowest))
        amount = None if self._gauges.count is None else self._gauges.count(self._checkpoint)
        with ExitStack() as stack:
            trials = search(
                target, road, _TOKENS if amount is None else amount.tokens, lambda size: self._measured(size, stack)
            )
        best = smallest_held(target, trials)
        if best is not None:
            record = HeldRecord(
                **asdict(best.drift), evaluations=len(trials), smallest=best.size.nbytes == lowest.nbytes
            )
            return self._choices(best.size), record, trials
        if exact:
            return self._choices(highest), HeldRecord(kl=0.0, ln_ppl=0.0, tokens=0, evaluations=len(trials)), trials
        raise self._out_of_reach(target, trials)

    def _out_of_reach(self, target: Target, trials: Sequence[Trial]) -> GateFailed:
        nearest = min(trials, key=lambda trial: trial.value(target.kind))
        of = "" if target.kind == "kl" else f" and |ln ppl ratio| up to {nearest.value(target.kind):.3g}"
        return GateFailed(
            f"the target {target} is out of reach for variant {self._checkpoint.id!r}: the best of {len(trials)} sizes "
            f"has KL {nearest.drift.kl:.3g}{of} at {format_bytes(nearest.size.nbytes)}",
            hint=f"Use --codec auto, which can keep every bit, or --target {target.kind}="
            f"{_rounded_up(nearest.value(target.kind))}",
        )

    def _look(self, cap: int) -> Size:
        if cap not in self._looked:
            choices = self._allocator.foretell({self._checkpoint.id: cap})
            outlook = self._allocator.outlook(self._checkpoint.id, choices)
            size = Size(cap if 0 < cap < _ALL else outlook.nbytes, outlook.nbytes, outlook.score)
            self._looked[cap] = self._looked[size.cap] = size, choices
        return self._looked[cap][0]

    def _choices(self, size: Size) -> dict[Key, Choice]:
        return self._looked[size.cap][1]

    def _prior(self, lowest: Size) -> Any:
        curve = self._curve
        if curve is None:
            return lambda score: _GUESS * score / lowest.score
        middle = math.sqrt(curve.points[0][0] * curve.points[-1][0])
        # Where the curve is flat a search would not know which way to go.
        return lambda score: curve.kl(score) * (score / middle) ** 0.05

    def _measured(self, size: Size, stack: ExitStack) -> Drift:
        workspace, choices = self._job.workspace, self._choices(size)
        stage = f"target-{_digest(choices)[:16]}"
        if (stage, self._number) not in workspace.done.steps:
            drift = self._measure(choices, stack)
            workspace.record_step(stage, self._number, {**asdict(size), **asdict(drift)})
        found = workspace.done.steps[stage, self._number]
        drift = Drift(float(found["kl"]), found["ln_ppl"], int(found["tokens"]))
        self._job.sink.note(
            f"{self._checkpoint.id}: {format_bytes(size.nbytes)} leave a KL of {drift.kl:.3g}"
            + ("" if drift.ln_ppl is None else f", |ln ppl ratio| up to {drift.ln_ppl:.3g}")
        )
        return drift

    def _measure(self, choices: Mapping[Key, Choice], stack: ExitStack) -> Drift:
        """Put what differs from what is in memory in its place, and measure."""
        sink = self._job.sink
        sink.start(f"target: measure {self._checkpoint.id}", None)
        if self._gauge is None:
            self._gauge = stack.enter_context(self._gauges.open(self._checkpoint))
        changed = {key[1] for key, choice in choices.items() if self._differs(key, choice)}
        self._prober.put(self._gauge, self._checkpoint.id, choices, changed)
        self._in_place = dict(choices)
        drift = self._gauge.measure()
        sink.finish()
        kl = drift.kl if math.isfinite(drift.kl) else LOST
        return Drift(max(kl, 0.0), drift.ln_ppl, drift.tokens)

    def _differs(self, key: Key, choice: Choice) -> bool:
        """At first the original is in memory, whose bits exact codecs keep."""
        if self._in_place:
            return self._in_place[key] != choice
        return choice.codec not in _EXACT


def _keeps_all(choices: Mapping[Key, Choice]) -> bool:
    return all(choice.codec in _EXACT for choice in choices.values())


def _digest(choices: Mapping[Key, Choice]) -> str:
    return digest_of({f"{variant}/{name}": asdict(choice) for (variant, name), choice in sorted(choices.items())})


def _rounded_up(value: float) -> str:
    """Two digits, never less than the value: what a hint offers must hold."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return f"{math.ceil(value / unit) * unit:.2g}"
