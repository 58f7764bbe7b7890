from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from fidelity_models import RecordingSink

from mfs_decompose.artifact.lock import exclusive_lock
from mfs_decompose.errors import OutputBusy
from mfs_decompose.events import NullSink
from mfs_decompose.fidelity.result import DriftResult
from mfs_decompose.fidelity.result_log import discard_result_log, open_result_log

BINDING = {"artifact": "ab" * 32, "window": 64, "texts": {"prose": {"sha256": "cd", "limit": None}}}
ROW = DriftResult(
    variant="math",
    through="served",
    corpus="prose",
    tokens=4000,
    ppl_original=13.123456789012345,
    ppl_x=13.2,
    ppl_base=None,
    ppl_ratio=1.0000000000000002,
    ppl_ratio_ci=(0.99, 1.01),
    kl_base=None,
    kl_mean=1e-300,
    kl_p99=0.1,
    top1=0.5,
    recovered=None,
    kl_ci=(0.0, 5e-324),
    units=77,
    noise_kl=0.0,
    text={"sha256": "cd", "documents": 3, "bytes": 9, "max_tokens": 5},
    bos="<s>",
    notes=("said",),
)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "drift.json"


def test_what_was_added_is_there_again(out: Path) -> None:
    other = replace(ROW, variant="code", notes=())
    with open_result_log(out, BINDING, NullSink()) as log:
        assert log.finished() == {}
        log.add("math", [ROW, replace(ROW, through="restored")])
        log.add("code", [other])
    sink = RecordingSink()
    with open_result_log(out, json.loads(json.dumps(BINDING)), sink) as log:
        assert log.finished() == {"math": [ROW, replace(ROW, through="restored")], "code": [other]}
    assert sink.notes == []
    assert [path.name for path in out.parent.iterdir()] == ["drift.json.partial"]
    discard_result_log(out)
    discard_result_log(out)
    assert list(out.parent.iterdir()) == []


def test_each_variant_is_on_disk_before_the_run_ends(out: Path) -> None:
    with open_result_log(out, BINDING, NullSink()) as log:
        log.add("math", [ROW])
        assert b'"id":"math"' in (out.parent / "drift.json.partial" / "journal.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("change", "named"),
    [({"artifact": "00" * 32}, "artifact"), ({"window": 65}, "window"), ({"texts": {}, "extra": 1}, "extra and texts")],
)
def test_results_of_something_else_are_thrown_away_by_name(out: Path, change: dict[str, object], named: str) -> None:
    with open_result_log(out, BINDING, NullSink()) as log:
        log.add("math", [ROW])
    sink = RecordingSink()
    with open_result_log(out, {**BINDING, **change}, sink) as log:
        assert log.finished() == {}
        log.add("math", [replace(ROW, tokens=1)])
    assert sink.notes == [f"{out}.partial was measured with another {named}: measured anew"]
    with open_result_log(out, {**BINDING, **change}, NullSink()) as log:
        assert log.finished()["math"][0].tokens == 1


def test_a_torn_last_line_costs_that_variant_only(out: Path) -> None:
    with open_result_log(out, BINDING, NullSink()) as log:
        log.add("math", [ROW])
        log.add("code", [ROW])
    journal = out.parent / "drift.json.partial" / "journal.jsonl"
    journal.write_bytes(journal.read_bytes()[:-7])
    with open_result_log(out, BINDING, NullSink()) as log:
        assert list(log.finished()) == ["math"]


def test_a_log_without_its_first_line_is_begun_anew(out: Path) -> None:
    with open_result_log(out, BINDING, NullSink()) as log:
        log.add("math", [ROW])
    journal = out.parent / "drift.json.partial" / "journal.jsonl"
    journal.write_bytes(b"x" + journal.read_bytes())
    with open_result_log(out, BINDING, NullSink()) as log:
        assert log.finished() == {}
        log.add("math", [ROW])
    with open_result_log(out, BINDING, NullSink()) as log:
        assert list(log.finished()) == ["math"]


def test_a_run_that_finished_nothing_leaves_nothing(out: Path) -> None:
    with pytest.raises(RuntimeError), open_result_log(out, BINDING, NullSink()):
        raise RuntimeError
    assert list(out.parent.iterdir()) == []


def test_two_runs_on_one_output(out: Path) -> None:
    with (
        exclusive_lock(out.parent / "drift.json.lock", out),
        pytest.raises(OutputBusy, match="found process"),
        open_result_log(out, BINDING, NullSink()),
    ):
        pass


def test_a_file_in_the_way_is_not_touched(out: Path) -> None:
    (out.parent / "drift.json.partial").write_text("mine")
    with pytest.raises(OutputBusy, match="found a file"), open_result_log(out, BINDING, NullSink()):
        pass
    assert (out.parent / "drift.json.partial").read_text() == "mine"
    assert len(list(out.parent.iterdir())) == 1
