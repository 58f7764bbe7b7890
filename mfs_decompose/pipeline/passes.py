"""The two passes over the weights: unit by unit, side by side, each finished unit a line in the journal."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from mfs_decompose.artifact.atomic import shortage_named
from mfs_decompose.events import ProgressSink
from mfs_decompose.pipeline.assemble import Piece
from mfs_decompose.pipeline.encode import Choice, Encoded, Encoder
from mfs_decompose.pipeline.reading import Sources
from mfs_decompose.pipeline.scheduler import Stop, run_units
from mfs_decompose.pipeline.survey import Surveyor
from mfs_decompose.pipeline.surveyed import Surveyed
from mfs_decompose.pipeline.workspace import Workspace
from mfs_decompose.plan.allocate import Key
from mfs_decompose.plan.model import Plan, Unit


@dataclass(frozen=True)
class Job:
    """What both passes work with."""

    plan: Plan
    workspace: Workspace
    sources: Sources
    device: str
    threads: int
    memory: int
    sink: ProgressSink

    def surveyor(self) -> Surveyor:
        """What surveys a unit, in pass 1 and again in pass 2 where scratch has lost its fits."""
        recipe = self.plan.recipe
        return Surveyor(
            self.sources,
            recipe.seed,
            self.device,
            recipe.objective.capped,
            self.sink.advance,
            self.workspace.done.base_digests,
        )


def survey_all(job: Job) -> dict[Key, Surveyed]:
    """Pass 1: what allocation needs to know of every item; fits go to scratch."""
    done = job.workspace.done.surveyed
    left = [unit for unit in job.plan.units if unit.number not in done]
    surveyor = job.surveyor()

    def work(unit: Unit, stop: Stop) -> list[Surveyed]:
        return _write_fits(surveyor, unit, job.workspace.fits_path(unit.number), stop)

    def record(unit: Unit, found: list[Surveyed]) -> None:
        job.workspace.record_survey(unit.number, [item.to_json() for item in found])

    job.sink.start("pass 1: read and factorise", sum(unit.read_bytes for unit in left))
    run_units(left, work, record, job.threads, job.memory)
    job.sink.finish()
    return {
        item.key: Surveyed.from_json(facts)
        for unit in job.plan.units
        for item, facts in zip(unit.items, done[unit.number], strict=True)
    }


def encode_all(job: Job, surveyed: Mapping[Key, Surveyed], choices: Mapping[Key, Choice]) -> dict[Key, Piece]:
    """Pass 2: every item as it will stand in the artifact, its bytes in scratch."""
    done = job.workspace.done.encoded
    left = [unit for unit in job.plan.units if unit.number not in done]
    encoder = Encoder(job.sources, job.sink.advance)

    def work(unit: Unit, stop: Stop) -> list[Encoded]:
        fits, blobs = fits_of(job, unit, surveyed, stop), job.workspace.blobs_path(unit.number)
        with (
            shortage_named(blobs, sum(item.spec.nbytes for item in unit.items)),
            open(fits, "rb") if fits else nullcontext() as source,
            open(blobs, "w+b") as output,
        ):
            return [
                encoder.encode(item, surveyed[item.key], choices[item.key], source, output, stop) for item in unit.items
            ]

    def record(unit: Unit, found: list[Encoded]) -> None:
        job.workspace.record_encoding(unit.number, [item.to_json() for item in found])

    read_again = [item for unit in left for item in unit.items if not choices[item.key].costs_nothing(item)]
    job.sink.start("pass 2: encode and measure", sum(item.spec.nbytes for item in read_again))
    run_units(left, work, record, job.threads, job.memory)
    job.sink.finish()
    return {
        item.key: Piece(item, surveyed[item.key], Encoded.from_json(facts), job.workspace.blobs_path(unit.number))
        for unit in job.plan.units
        for item, facts in zip(unit.items, done[unit.number], strict=True)
    }


def fits_of(job: Job, unit: Unit, surveyed: Mapping[Key, Surveyed], stop: Stop) -> Path | None:
    """The fits that a unit is encoded from, made again where scratch has lost them."""
    if all(surveyed[item.key].fit is None for item in unit.items):
        return None
    path = job.workspace.fits_path(unit.number)
    if not job.workspace.has_fits(unit.number):
        _write_fits(job.surveyor(), unit, path, stop)
    return path


def _write_fits(surveyor: Surveyor, unit: Unit, path: Path, stop: Stop) -> list[Surveyed]:
    with shortage_named(path, sum(item.spec.nbytes for item in unit.items)), open(path, "wb") as scratch:
        found = surveyor.survey(unit, scratch, stop)
        empty = all(facts.fit is None for facts in found)  # a fit may have no bytes: that of a delta of zero
    if empty:
        path.unlink()
    return found
