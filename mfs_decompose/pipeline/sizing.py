"""Between the passes: what entropy-coded items would really take, counted and not written.

Each unit that was sized is a line in the journal, under a digest of what was chosen: a run that goes on asks for the
same again.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

from mfs_decompose.artifact.canonical import digest_of
from mfs_decompose.pipeline.encode import Choice, Encoder
from mfs_decompose.pipeline.passes import Job, fits_of
from mfs_decompose.pipeline.scheduler import Stop, run_units
from mfs_decompose.pipeline.surveyed import Surveyed
from mfs_decompose.plan.allocate import Key
from mfs_decompose.plan.model import Item, Unit


def size_all(job: Job, surveyed: Mapping[Key, Surveyed], choices: Mapping[Key, Choice]) -> dict[Key, int]:
    """Bytes of each choice beside what its item has anyway, see `Encoder.size`."""
    done = job.workspace.done.steps
    encoder = Encoder(job.sources, job.sink.advance)
    units = [unit for unit in job.plan.units if any(item.key in choices for item in unit.items)]
    stages = {unit.number: _stage(unit, choices) for unit in units}
    left = [unit for unit in units if (stages[unit.number], unit.number) not in done]

    def work(unit: Unit, stop: Stop) -> dict[str, int]:
        fits = fits_of(job, unit, surveyed, stop)
        found: dict[str, int] = {}
        with open(fits, "rb") if fits else nullcontext() as source:
            for item in _chosen(unit, choices):
                stop.check()
                size = encoder.size(item, surveyed[item.key], choices[item.key], source)
                found[_name(item)] = size
                job.sink.advance(item.spec.nbytes)
        return found

    def record(unit: Unit, found: dict[str, int]) -> None:
        job.workspace.record_step(stages[unit.number], unit.number, found)

    total = sum(item.spec.nbytes for unit in left for item in _chosen(unit, choices))
    job.sink.start("sizes: count what coding takes", total)
    run_units(left, work, record, job.threads, job.memory)
    job.sink.finish()
    return {
        item.key: done[stages[unit.number], unit.number][_name(item)]
        for unit in units
        for item in _chosen(unit, choices)
    }


def _chosen(unit: Unit, choices: Mapping[Key, Choice]) -> list[Item]:
    return [item for item in unit.items if item.key in choices]


def _stage(unit: Unit, choices: Mapping[Key, Choice]) -> str:
    asked = {
        _name(item): [choices[item.key].codec, [*choices[item.key].bands], choices[item.key].rest_step]
        for item in _chosen(unit, choices)
    }
    return f"size-{digest_of(asked)[:16]}"


def _name(item: Item) -> str:
    return f"{item.variant}/{item.name}"
