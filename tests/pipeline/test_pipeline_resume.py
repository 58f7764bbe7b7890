"""A run that ended early goes on where it was, or says why it cannot."""

from __future__ import annotations

import json
import os
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from checkpoints import EMBEDDING, Family
from interruptions import PASS_1, PASS_2, Interrupting, interrupted, partial, rewritten, touched
from pipeline_runs import contents, copied, run, toys

from mfs_decompose.errors import MfsError, OutputBusy, ResourceShortage, ResumeRefused, SourceIncompatible

RANK = {"objective.rank": 3}


def kinds(out: Path) -> list[str]:
    return [json.loads(line)["kind"] for line in (partial(out) / "journal.jsonl").read_bytes().splitlines()]


@pytest.mark.parametrize(
    ("stage", "advance", "threads", "resumed"),
    [
        ("base: copy", 1, 1, False),
        (PASS_1, 0, 1, True),  # in the main thread
        (PASS_1, 30, 1, True),  # in a worker
        (PASS_1, 30, 3, True),
        (PASS_2, 20, 2, True),
        ("writing shards", 1, 1, True),
    ],
)
def test_ctrl_c_leaves_what_was_done(
    tmp_path: Path, art: Path, family: Family, stage: str, advance: int, threads: int, resumed: bool
) -> None:
    out = tmp_path / "art"
    sink = interrupted(out, family, stage, advance, threads=threads)
    assert (sink.thread is threading.main_thread()) == (advance == 0 or stage in ("base: copy", "writing shards"))
    assert partial(out).exists() == resumed  # nothing done, nothing left
    before = kinds(out) if resumed else []
    report = run(out, family.base, family.variants)
    assert report.resumed_units == sum(kind in ("base", "survey", "step", "encode") for kind in before)
    assert contents(out) == contents(art)
    assert not partial(out).exists()


def test_interrupted_again_and_again(tmp_path: Path, art: Path, family: Family) -> None:
    out = tmp_path / "art"
    units = []
    for stage, advance in ((PASS_1, 5), (PASS_1, 20), (PASS_2, 3), (PASS_2, 3), ("writing shards", 2)):
        interrupted(out, family, stage, advance)
        units.append(len(kinds(out)))
    assert units == sorted(units)
    assert units[0] < units[-1]
    run(out, family.base, family.variants)
    assert contents(out) == contents(art)


def test_another_recipe_is_refused_by_name(tmp_path: Path, art: Path, family: Family) -> None:
    out = tmp_path / "art"
    interrupted(out, family, PASS_2)
    with pytest.raises(ResumeRefused, match=r"was started from something else; what differs: the recipe") as caught:
        run(out, family.base, family.variants, {"objective.budget": "7%"})
    assert caught.value.exit_code == 15
    assert caught.value.hint is not None and "--no-resume" in caught.value.hint
    assert kinds(out)
    run(out, family.base, family.variants, {"limits.max_ram": "3GB"})  # which changes no byte
    assert contents(out) == contents(art)


def _configured(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": 256}\n')


@pytest.mark.parametrize("change", [touched, _configured])
def test_another_source_is_refused_by_name(tmp_path: Path, family: Family, change: Callable[[Path], None]) -> None:
    out, math = tmp_path / "art", copied(family.variants["math"], tmp_path / "math")
    variants = {**family.variants, "math": math}
    with pytest.raises(KeyboardInterrupt):
        run(out, family.base, variants, sink=Interrupting(PASS_2))
    change(math)
    with pytest.raises(ResumeRefused, match=r"something else; what differs: variant 'math'"):
        run(out, family.base, variants)
    with pytest.raises(ResumeRefused, match=r"something else; what differs: the variants, variant 'math'"):
        run(out, family.base, {id: folder for id, folder in variants.items() if id != "math"})
    report = run(out, family.base, variants, resume=False)
    assert (report.written, report.resumed_units) == (True, 0)


def test_starting_over(tmp_path: Path, art: Path, family: Family) -> None:
    out = tmp_path / "art"
    interrupted(out, family, PASS_2)
    report = run(out, family.base, family.variants, resume=False)
    assert report.resumed_units == 0
    assert contents(out) == contents(art)


def _deleted(path: Path) -> None:
    path.unlink()


def _flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [_deleted, _flipped, _cut_off])
@pytest.mark.parametrize("name", ["p1-000000.bin", "p1-*.bin", "p2-*.bin"])
def test_damaged_scratch_is_made_again(
    tmp_path: Path, art: Path, family: Family, name: str, damage: Callable[[Path], None]
) -> None:
    out = tmp_path / "art"
    interrupted(out, family, *((PASS_2, 0) if name.startswith("p1") else ("writing shards", 1)))
    paths = list((partial(out) / "scratch").glob(name))
    assert paths
    for path in paths:
        damage(path)
    run(out, family.base, family.variants)
    assert contents(out) == contents(art)


def test_fits_lost_after_they_were_used(tmp_path: Path, art: Path, family: Family) -> None:
    """Pass 2 deletes fits as it goes; where its own result is lost, both are made again."""
    out = tmp_path / "art"
    interrupted(out, family, PASS_2, 60)
    encoded = sorted((partial(out) / "scratch").glob("p2-*.bin"))
    assert encoded
    _flipped(encoded[0])
    run(out, family.base, family.variants)
    assert contents(out) == contents(art)


@pytest.mark.parametrize("damage", [_deleted, _flipped, _cut_off])
def test_damaged_scratch_of_a_mean_base(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    _, variants = toys(tmp_path, "one", "two")
    run(tmp_path / "undisturbed", None, variants, RANK)
    out = tmp_path / "art"
    with pytest.raises(KeyboardInterrupt):
        run(out, None, variants, RANK, Interrupting("base: mean", 3))
    assert not partial(out).exists()

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mfs_decompose.pipeline.base_stage.write_shard", stop)
        with pytest.raises(KeyboardInterrupt):
            run(out, None, variants, RANK)
    (scratch,) = (partial(out) / "scratch").glob("b-*.bin")
    damage(scratch)
    run(out, None, variants, RANK)
    assert contents(out) == contents(tmp_path / "undisturbed")


def test_a_shard_that_was_cut_off_is_written_again(tmp_path: Path, art: Path, family: Family) -> None:
    out = tmp_path / "art"
    interrupted(out, family, "publishing")
    (partial(out) / "artifact" / "run.json").unlink()
    for name in ("v0002-00001.safetensors", "base-00001-of-00001.safetensors"):
        _cut_off(partial(out) / "artifact" / name)
    run(out, family.base, family.variants)
    assert contents(out) == contents(art)


def test_a_journal_with_a_torn_end(tmp_path: Path, art: Path, family: Family) -> None:
    out = tmp_path / "art"
    interrupted(out, family, PASS_2, 30)
    path = partial(out) / "journal.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:40])
    report = run(out, family.base, family.variants)
    assert report.resumed_units == sum(b'"kind":"file"' not in line for line in lines[1:-1])
    assert contents(out) == contents(art)


def test_a_journal_that_is_gone_costs_the_work_and_nothing_else(tmp_path: Path, art: Path, family: Family) -> None:
    out = tmp_path / "art"
    interrupted(out, family, "writing shards", 1)
    (partial(out) / "journal.jsonl").unlink()
    report = run(out, family.base, family.variants)
    assert report.resumed_units == 0
    assert contents(out) == contents(art)


def test_two_runs_at_once(tmp_path: Path, art: Path, family: Family) -> None:
    out = tmp_path / "art"
    refused: list[MfsError] = []

    def second() -> None:
        with pytest.raises(OutputBusy, match=rf"found process {os.getpid()} on \S+ working on it") as caught:
            run(out, family.base, family.variants)
        refused.append(caught.value)

    run(out, family.base, family.variants, sink=Interrupting(PASS_2, 4, second))
    assert [error.exit_code for error in refused] == [14]
    assert contents(out) == contents(art)


@pytest.mark.parametrize("keep_time", [False, True])
@pytest.mark.parametrize("stage", [PASS_1, PASS_2])
def test_a_source_that_changes_meanwhile(tmp_path: Path, family: Family, stage: str, keep_time: bool) -> None:
    if stage == PASS_1 and keep_time:
        pytest.skip("nobody has read it yet")
    out, math = tmp_path / "art", copied(family.variants["math"], tmp_path / "math")
    variants = {**family.variants, "math": math}
    sink = Interrupting(stage, 1, lambda: rewritten(math, EMBEDDING, keep_time))
    with pytest.raises(SourceIncompatible, match="changed while it was being read") as caught:
        run(out, family.base, variants, sink=sink)
    assert caught.value.exit_code == 12
    assert not out.exists()
    with pytest.raises((ResumeRefused, SourceIncompatible)):
        run(out, family.base, variants)
    assert run(out, family.base, variants, resume=False).written


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """The kernel itself refuses to let any file of this process grow further."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("stage", ["base: copy", "base: digests", PASS_1, PASS_2, "writing shards"])
@pytest.mark.parametrize("nbytes", [0, 2500])
def test_a_disk_that_fills_up(tmp_path: Path, art: Path, family: Family, stage: str, nbytes: int) -> None:
    out, room = tmp_path / "art", files_of_at_most(nbytes)
    sink = Interrupting(stage, 0, room.__enter__)
    try:
        with pytest.raises(ResourceShortage, match="expected room for") as caught:
            run(out, family.base, family.variants, sink=sink)
    finally:
        room.__exit__(None, None, None)
    assert caught.value.exit_code == 13
    assert not out.exists()
    report = run(out, family.base, family.variants)
    assert (report.resumed_units > 0) == (stage in (PASS_1, PASS_2, "writing shards"))
    assert contents(out) == contents(art)


@pytest.mark.parametrize("nbytes", [0, 1000])
def test_a_disk_that_fills_up_under_a_mean(tmp_path: Path, nbytes: int) -> None:
    _, variants = toys(tmp_path, "one", "two")
    room = files_of_at_most(nbytes)
    try:
        with pytest.raises(ResourceShortage):
            run(tmp_path / "art", None, variants, RANK, Interrupting("base: mean", 0, room.__enter__))
    finally:
        room.__exit__(None, None, None)
    assert not partial(tmp_path / "art").exists()
    assert run(tmp_path / "art", None, variants, RANK).written
