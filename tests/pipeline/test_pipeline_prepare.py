"""What is refused before any weight is read, and leaves nothing behind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Family, fine_tune, make_llama
from pipeline_runs import asked, contents, run, toy, toy_tensors, toys

from mfs_decompose.errors import (
    MfsError,
    OutputBusy,
    ResourceShortage,
    SourceIncompatible,
    SourceNotFound,
    UsageError,
)
from mfs_decompose.pipeline import prepare as prepare_module
from mfs_decompose.pipeline.device import choose_device, platform_facts
from mfs_decompose.pipeline.prepare import prepare, thread_count
from mfs_decompose.provenance import processors

RANK = {"objective.rank": 2}


def refused(kind: type[MfsError], match: str, out: Path, *arguments: Any, **changes: Any) -> MfsError:
    """Decompose and prepare alike refuse; neither leaves a trace beside `out`."""
    parent = out.absolute().parent
    before = sorted(parent.iterdir()) if parent.is_dir() else None
    with pytest.raises(kind, match=match):
        prepare(asked(out, *arguments, **changes))
    with pytest.raises(kind, match=match) as caught:
        run(out, *arguments, **changes)
    assert (sorted(parent.iterdir()) if parent.is_dir() else None) == before
    return caught.value


@pytest.mark.parametrize("id", ["base", "all", "a/b", "..", "", "a b", "x" * 65, ".hidden", "ends."])
def test_ids_that_cannot_be_names(tmp_path: Path, family: Family, id: str) -> None:
    error = refused(UsageError, "expected a variant id of letters", tmp_path / "art", family.base, {id: family.base})
    assert error.exit_code == 2


def test_ids_that_a_file_system_could_not_tell_apart(tmp_path: Path, family: Family) -> None:
    variants = {"Math": family.variants["math"], "math": family.variants["code"]}
    refused(UsageError, "two variants are called 'Math' and 'math'", tmp_path / "art", family.base, variants)


def test_too_few_variants(tmp_path: Path, family: Family) -> None:
    refused(UsageError, "at least one variant, found none", tmp_path / "art", family.base, {})
    one = {"math": family.variants["math"]}
    refused(UsageError, "a base or at least two variants, found one", tmp_path / "art", None, one)
    refused(UsageError, "'known' needs a base", tmp_path / "art", None, family.variants, {"base.mode": "known"})


@pytest.mark.parametrize("store", ["reference", "hardlink"])
def test_a_mean_base_exists_nowhere_else(tmp_path: Path, family: Family, store: str) -> None:
    recipe = {"base.store": store}
    refused(UsageError, f"cannot be stored by {store}", tmp_path / "art", None, family.variants, recipe)


def test_sources_that_are_not_there(tmp_path: Path, family: Family) -> None:
    out, nowhere = tmp_path / "art", tmp_path / "nowhere"
    assert refused(SourceNotFound, "no such folder", out, nowhere, family.variants).exit_code == 11
    refused(SourceNotFound, "no such folder", out, family.base, {"math": nowhere})


def test_an_output_that_is_an_input_or_lies_in_one(tmp_path: Path) -> None:
    base, variants = toys(tmp_path / "in", "one")
    before = contents(tmp_path / "in")
    (tmp_path / "link").symlink_to(base)
    for out in (
        base,
        variants["one"],
        base / "art",
        variants["one"] / "deep" / "art",
        tmp_path / "in",
        tmp_path / "link",
    ):
        error = refused(OutputBusy, "overlaps the source", out, base, variants, RANK)
        assert error.exit_code == 14
    assert contents(tmp_path / "in") == before


def test_an_output_that_something_else_is(tmp_path: Path, family: Family) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note.txt").write_text("mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    refused(OutputBusy, "found something that is no folder", tmp_path / "file", family.base, family.variants)
    refused(OutputBusy, "found a folder with other files", tmp_path / "full", family.base, family.variants)
    refused(OutputBusy, "found something that is no folder", tmp_path / "dangling", family.base, family.variants)
    refused(OutputBusy, "not a folder that can be written to", tmp_path / "file" / "art", family.base, family.variants)
    overwriting = {"overwrite": True}
    refused(OutputBusy, "other files", tmp_path / "full", family.base, family.variants, **overwriting)
    assert (tmp_path / "full" / "note.txt").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is closed to root")
def test_an_output_that_cannot_be_written(tmp_path: Path, family: Family) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    refused(OutputBusy, "not a folder that can be written to", closed / "art", family.base, family.variants)


def test_an_output_in_folders_that_are_not_there_yet(tmp_path: Path) -> None:
    base, variants = toys(tmp_path / "in", "one")
    assert run(tmp_path / "not" / "yet" / "art", base, variants, RANK).written


def test_an_output_that_is_empty_or_the_folder_one_stands_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, variants = toys(tmp_path / "in", "one")
    (tmp_path / "empty").mkdir()
    run(tmp_path / "empty", base, variants, RANK)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert run(Path(), base, variants, RANK).out == tmp_path / "here"
    assert contents(tmp_path / "here") == contents(tmp_path / "empty")
    monkeypatch.chdir(tmp_path)
    run(Path("relative"), base, variants, RANK)
    assert contents(tmp_path / "relative") == contents(tmp_path / "empty")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "here", "in", "relative"]


def test_a_stranger_is_refused_by_name_and_leaves_nothing(tmp_path: Path, family: Family) -> None:
    stranger = make_llama(tmp_path / "stranger", seed=99)
    (tmp_path / "work").mkdir()
    variants = {"math": family.variants["math"], "odd": stranger}
    for base, chosen in ((family.base, variants), (None, {**variants, "code": family.variants["code"]})):
        with pytest.raises(SourceIncompatible, match=r"found 'odd' \(cosine to (its|the others') weights") as caught:
            run(tmp_path / "work" / "art", base, chosen)
        assert caught.value.exit_code == 12
        assert list((tmp_path / "work").iterdir()) == []


def test_another_architecture_is_refused_from_headers(tmp_path: Path, family: Family) -> None:
    other = make_llama(tmp_path / "other", seed=1, hidden=48, inter=72)
    refused(SourceIncompatible, "of another architecture", tmp_path / "art", family.base, {"other": other})


def test_memory_that_does_not_hold_one_unit(tmp_path: Path, family: Family) -> None:
    out = tmp_path / "art"
    with pytest.raises(ResourceShortage, match=r"and 351 MB was allowed") as caught:
        run(out, family.base, family.variants, {"limits.max_ram": "351MB"})
    assert caught.value.exit_code == 13
    assert list(tmp_path.iterdir()) == []
    assert caught.value.hint is not None
    named = caught.value.hint.split()[2]
    assert run(out, family.base, {"math": family.variants["math"]}, {"limits.max_ram": named}).written


def test_memory_of_a_machine_that_is_full(tmp_path: Path, family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_module, "available_memory", lambda: 390_000_000)
    with pytest.raises(ResourceShortage, match=r"and 351 MB is free"):
        run(tmp_path / "art", family.base, family.variants)


def test_a_disk_that_is_too_small(tmp_path: Path, family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_module, "free_disk", lambda folder: 300_000)
    with pytest.raises(ResourceShortage, match=r"of disk at .*, and 300 kB is free") as caught:
        run(tmp_path / "art", family.base, family.variants)
    assert caught.value.exit_code == 13
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_may_not_be_filled(tmp_path: Path, family: Family) -> None:
    out = tmp_path / "art"
    with pytest.raises(ResourceShortage, match=r"and 300 kB was allowed") as caught:
        run(out, family.base, family.variants, {"limits.max_disk": "300kB"})
    assert list(tmp_path.iterdir()) == []
    assert caught.value.hint is not None
    named = caught.value.hint.split()[2]
    assert run(out, family.base, family.variants, {"limits.max_disk": named}).written


def test_preparing_writes_nothing_and_reads_headers(tmp_path: Path, family: Family) -> None:
    prepared = prepare(asked(tmp_path / "not" / "yet", family.base, family.variants))
    assert list(tmp_path.iterdir()) == []
    assert [variant.id for variant in prepared.variants] == ["code", "math", "vocab"]
    assert prepared.base is not None and prepared.base.root == family.base
    averaged = prepare(asked(tmp_path / "art", family.base, family.variants, {"base.mode": "mean"}))
    assert averaged.base is None
    assert averaged.plan.base_mode == "mean"


def test_a_config_that_says_untied_is_believed(tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base", seed=1, hidden=48, inter=72, layers=1, vocab=67)
    headed = fine_tune(base, tmp_path / "headed", seed=2, tie=False)
    plan = prepare(asked(tmp_path / "art", base, {"headed": headed}, RANK)).plan
    assert {item.kind for item in plan.items() if item.name == "lm_head.weight"} == {"tied"}
    config = base / "config.json"
    config.write_text(config.read_text().replace('"tie_word_embeddings": true', '"tie_word_embeddings": false'))
    plan = prepare(asked(tmp_path / "art", base, {"headed": headed}, RANK)).plan
    assert {item.kind for item in plan.items() if item.name == "lm_head.weight"} == {"only_in_variant"}


def test_threads() -> None:
    def of(threads: int | None) -> int:
        return thread_count(asked(Path("art"), None, {}, threads=threads))

    assert (of(3), of(1)) == (3, 1)
    assert of(None) == of(0) == processors()


def test_devices() -> None:
    import torch

    assert choose_device("cpu") == "cpu"
    if not torch.cuda.is_available():
        assert choose_device("auto") == "cpu"
        for wanted in ("cuda", "cuda:1"):
            with pytest.raises(UsageError, match="found 0"):
                choose_device(wanted)
    for wanted in ("tpu", "cuda:", "cpu:0", "cuda:x", ""):
        with pytest.raises(UsageError, match="expected a device among auto, cpu, cuda"):
            choose_device(wanted)
    facts = platform_facts("cpu")
    assert facts == {"device": "cpu", "capability": torch.backends.cpu.get_cpu_capability()}
    assert platform_facts("cuda:1")["device"] == "cuda"


def test_a_folder_without_weights(tmp_path: Path) -> None:
    base = toy(tmp_path / "base", toy_tensors())
    (tmp_path / "empty").mkdir()
    refused(SourceNotFound, "the folder is empty", tmp_path / "art", base, {"one": tmp_path / "empty"}, RANK)
