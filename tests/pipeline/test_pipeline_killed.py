"""Killed by SIGKILL at any moment and started again: the same bytes, and no work done twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Family
from pipeline_runs import asked, contents, record, run

from mfs_decompose.artifact.verify import verify
from mfs_decompose.pipeline.base_stage import base_units
from mfs_decompose.pipeline.prepare import Prepared, prepare
from mfs_decompose.plan.model import Unit
from mfs_decompose.source.checkpoint import TensorReader
from mfs_decompose.source.lineage import check_lineage

TEN = {
    "base: copy": 1,
    "base: digests": 1,
    "pass 1: read and factorise": 3,
    "pass 2: encode and measure": 3,
    "writing shards": 1,
    "publishing": 1,
}


LOWRANK = {"deltas.default.codec": "lowrank"}
"""A codec whose reads can be counted beforehand; kills while open tensors are sized: test_pipeline_auto.py."""


@pytest.fixture(scope="module")
def art(tmp_path_factory: pytest.TempPathFactory, family: Family) -> Path:
    out = tmp_path_factory.mktemp("killed") / "art"
    run(out, family.base, family.variants, LOWRANK)
    return out


def kill(root: Path, family: Family, picks: dict[str, int] | None, **changes: Any) -> list[Any]:
    """Kill a run of the family at the events picked; where each was, and what it left."""
    given = {
        "root": str(root),
        "base": str(family.base),
        "variants": {id: str(folder) for id, folder in family.variants.items()},
        "recipe": LOWRANK,
        "picks": picks,
        "overwrite": False,
        **changes,
    }
    script = Path(__file__).with_name("kill_runner.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(given)], check=True, env=environment, capture_output=True, cwd=root
    )
    kills = json.loads(done.stdout)["kills"]
    assert isinstance(kills, list)
    return kills


def journal(out: Path) -> list[tuple[str, Any]]:
    path = out.with_name(f"{out.name}.partial") / "journal.jsonl"
    lines = [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []
    return [(line["kind"], line["payload"]) for line in lines]


def cost_of_encoding(unit: Unit, art: Path) -> int:
    """Bytes that pass 2 reads for a unit, by what became of its items."""
    total = 0
    for item in unit.items:
        codec = record(art, item.variant)["tensors"][item.name]["tree"]["codec"]
        if codec == "raw":
            total += 2 * item.spec.nbytes  # to write it, and to measure it
        elif codec not in ("identical", "alias"):
            assert item.base is not None
            total += item.spec.nbytes + item.base.nbytes + item.tail_bytes
    return total


def lineage_bytes(prepared: Prepared) -> int:
    readers = [TensorReader(checkpoint) for checkpoint in prepared.variants]
    assert prepared.base is not None
    base = TensorReader(prepared.base)
    check_lineage(base, readers, prepared.alignment)
    return sum(reader.bytes_read for reader in (base, *readers))


def left_to_read(out: Path, prepared: Prepared, art: Path) -> int:
    """Bytes of the work that the journal of a killed run does not hold."""
    plan, lines = prepared.plan, journal(out)
    done = {kind: {payload["unit"] for k, payload in lines if k == kind} for kind in ("base", "survey", "encode")}
    units = base_units(plan)
    left = sum(spec.nbytes for unit in units if unit.number not in done["base"] for spec in unit.tensors)
    left += sum(unit.read_bytes for unit in plan.units if unit.number not in done["survey"])
    left += sum(cost_of_encoding(unit, art) for unit in plan.units if unit.number not in done["encode"])
    return left + (0 if len(lines) > 1 else lineage_bytes(prepared))


def resume_and_compare(root: Path, family: Family, art: Path, kills: list[Any]) -> list[int]:
    prepared = prepare(asked(root / "none", family.base, family.variants, LOWRANK))
    expected = contents(art)
    read: list[int] = []
    for killed in kills:
        out = Path(killed["out"])
        published, left = out.exists(), left_to_read(out, prepared, art)
        report = run(out, family.base, family.variants, LOWRANK)
        assert contents(out) == expected, killed
        finished = out.exists() and not report.written
        assert report.bytes_read == (0 if finished else left), killed
        assert report.written or published or killed["event"].startswith(("writing shards", "publishing")), killed
        assert not out.with_name(f"{out.name}.partial").exists()
        assert not out.with_name(f"{out.name}.lock").exists()
        assert not run(out, family.base, family.variants, LOWRANK).written
        read.append(report.bytes_read)
    return read


def test_the_bytes_that_a_run_reads_are_those_that_are_counted_here(tmp_path: Path, art: Path, family: Family) -> None:
    """Else the assertions below could not fail."""
    prepared = prepare(asked(tmp_path / "art", family.base, family.variants, LOWRANK))
    whole = json.loads((art / "run.json").read_bytes())["bytes_read"]
    assert left_to_read(tmp_path / "art", prepared, art) == whole


def test_killed_at_ten_moments(tmp_path: Path, family: Family, art: Path) -> None:
    kills = kill(tmp_path, family, TEN)
    assert len(kills) == 10
    assert len({killed["at"] for killed in kills}) == 10
    read = resume_and_compare(tmp_path, family, art, kills)
    assert read == sorted(read, reverse=True)  # the later it was killed, the less is left
    assert read[0] > read[4] > read[7] > read[-1] == 0


def test_killed_while_replacing_an_artifact(tmp_path: Path, family: Family, art: Path) -> None:
    """At every fsync around the two renames: the old artifact or the new one stands there, and the re-run ends well."""
    recipe = {"deltas.default.codec": "raw"}
    kills = kill(tmp_path, family, {"publishing": 3}, overwrite=True, before=recipe)
    expected = contents(art)
    for killed in kills:
        out = Path(killed["out"])
        if out.exists():
            assert verify(out).ok
        run(out, family.base, family.variants, LOWRANK, overwrite=True)
        assert contents(out) == expected
        assert [path.name for path in tmp_path.iterdir() if out.name in path.name] == [out.name]


@pytest.mark.slow
def test_killed_at_every_moment(tmp_path: Path, family: Family, art: Path) -> None:
    kills = kill(tmp_path, family, None)
    assert len(kills) > 200
    resume_and_compare(tmp_path, family, art, kills)
