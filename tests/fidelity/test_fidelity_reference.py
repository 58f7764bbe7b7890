"""Saved references: the same figures to the bit when the original is gone, and never a wrong number."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fidelity_models import DOCUMENTS, RecordingSink, StoredFamily, make_model, make_tokenizer, save
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mfs_decompose.artifact.canonical import digest_of
from mfs_decompose.errors import ArtifactInvalid, ResourceShortage, SourceIncompatible, SourceNotFound, UsageError
from mfs_decompose.events import NullSink
from mfs_decompose.fidelity import evaluate, reference
from mfs_decompose.fidelity.artifact_drift import DriftRequest, measure_artifact, save_artifact_reference
from mfs_decompose.fidelity.evaluate import measure_drift, save_reference
from mfs_decompose.fidelity.model import load_model, predict_windows
from mfs_decompose.fidelity.reference import StoredReference
from mfs_decompose.fidelity.residency import measure_model
from mfs_decompose.fidelity.result import DriftResult
from mfs_decompose.fidelity.self_check import check_measurement
from mfs_decompose.fidelity.settings import EvalSettings
from mfs_decompose.fidelity.text import Corpus
from mfs_decompose.fidelity.tokenizer import load_encoder
from mfs_decompose.fidelity.windows import tokenize_corpus

PROSE = Corpus("prose", DOCUMENTS)
CODE = Corpus("code", ("for i in range(9): total += i * i", "while not done: step(); log(now)"))
SMALL = EvalSettings(window=24, max_tokens=150)


@pytest.fixture
def candidates(family: dict[str, Path], tmp_path: Path) -> dict[str, Path]:
    """Restored folders carry the variant's own tokenizer, as restore writes them."""
    folders = {}
    for role, id in (("served", "near"), ("restored", "far")):
        folders[role] = Path(shutil.copytree(family[id], tmp_path / role))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(family["original"] / name, folders[role] / name)
    return folders


def measure(original: Any, candidates: dict[str, Path], base: Path | None, settings: EvalSettings) -> list[DriftResult]:
    return measure_drift(original, candidates, base, [PROSE, CODE], settings, "v", NullSink())


@pytest.mark.parametrize(
    "settings",
    [
        SMALL,
        replace(SMALL, batch_size=2),
        replace(SMALL, batch_size=5, padding="left", bos="on"),
        replace(SMALL, stride=10),
        replace(SMALL, dtype="bfloat16"),
    ],
)
def test_figures_are_those_beside_the_original_to_the_bit(
    family: dict[str, Path], candidates: dict[str, Path], tmp_path: Path, settings: EvalSettings
) -> None:
    path = tmp_path / "v.reference"
    size = save_reference(family["original"], [PROSE, CODE], settings, path, {"variant": "v"}, NullSink())
    assert size == path.stat().st_size
    beside = measure(family["original"], candidates, family["base"], settings)
    alone = measure(StoredReference.open(path), candidates, family["base"], settings)
    assert alone == beside
    for left, right in zip(alone, beside, strict=True):
        assert left.noise_kl == right.noise_kl
        assert left.figures is not None and right.figures is not None
        for name in ("nll_original", "nll_x", "kl", "top1"):
            assert np.array_equal(getattr(left.figures.x, name), getattr(right.figures.x, name))


def test_models_in_turn_read_the_reference_again(
    family: dict[str, Path], candidates: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "v.reference"
    save_reference(family["original"], [PROSE, CODE], SMALL, path, {}, NullSink())
    together = measure(StoredReference.open(path), candidates, family["base"], SMALL)
    size = measure_model(family["original"], 4).weight_bytes
    monkeypatch.setattr(evaluate, "available_memory", lambda device: int(1.5 * size))
    assert measure(StoredReference.open(path), candidates, family["base"], SMALL) == together


def test_what_is_kept_is_a_safetensors_file_that_says_what_it_is_of(family: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "v.reference"
    about = {"variant": "v", "settings": {"window": 24}}
    sink = RecordingSink()
    save_reference(family["original"], [PROSE, CODE], SMALL, path, about, sink)
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        described = json.loads(file.metadata()["mfs.reference"])
    tokens = [text["tokens"] for text in described["texts"]]
    assert tensors == {
        "0.noise": [16], "0.logits": [tokens[0], 131], "0.sha256": [32],
        "1.noise": [16], "1.logits": [tokens[1], 131], "1.sha256": [32],
    }  # fmt: skip
    assert described["about"] == StoredReference.open(path).about == about
    assert (described["schema"], described["vocabulary"], described["max_positions"]) == ("mfs.reference/1", 131, 64)
    (note,) = sink.notes
    assert note.startswith("the reference takes ") and str(path) in note
    stage, total, done = sink.stages[-1]
    assert (stage, done) == ("save the reference", total)


def test_logits_wider_than_the_vocabulary_are_kept_whole(tmp_path: Path) -> None:
    """A head with more rows than the embedding has tokens: all of them are in the softmax."""
    model = make_model(seed=2, vocabulary=131)
    folder = save(model, tmp_path / "m", make_tokenizer(bos=False))
    loaded = load_model(folder, "original", SMALL)
    loaded.network.lm_head = torch.nn.Linear(48, 137, bias=False)
    narrow = replace(loaded, vocabulary=131)
    texts = [tokenize_corpus(CODE, load_encoder(folder, "auto"), SMALL)]
    reference.write_reference(tmp_path / "r", narrow, texts, SMALL, {}, NullSink())
    stored = StoredReference.open(tmp_path / "r")
    assert stored.vocabulary == 131
    batched = [[window] for window in texts[0].windows]
    for (found,), batch in zip(stored.answers("code", batched, "cpu"), batched, strict=True):
        assert found.shape == (len(batch[0].targets), 137)
        assert torch.equal(found, predict_windows(narrow, batch)[0])


# Never a wrong number.


@pytest.fixture
def saved(family: dict[str, Path], tmp_path: Path) -> Path:
    path = tmp_path / "v.reference"
    save_reference(family["original"], [PROSE, CODE], SMALL, path, {"variant": "v"}, NullSink())
    return path


def test_every_flipped_bit_is_found(saved: Path, candidates: dict[str, Path]) -> None:
    data = saved.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    for at in (3, header // 2, header + 5, header + 20, (header + len(data)) // 2, len(data) - 40, len(data) - 3):
        saved.write_bytes(data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :])
        with pytest.raises((ArtifactInvalid, SourceIncompatible)):
            measure(StoredReference.open(saved), candidates, None, SMALL)
    saved.write_bytes(data)
    assert measure(StoredReference.open(saved), candidates, None, SMALL)


def test_a_cut_file_and_other_files_are_refused(saved: Path, candidates: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(SourceNotFound, match="expected a saved reference at"):
        StoredReference.open(tmp_path / "absent")
    data = saved.read_bytes()
    for wrong in (data[:-1], data + b"x", b"", b"{}", data[:100]):
        saved.write_bytes(wrong)
        with pytest.raises(ArtifactInvalid, match="is no saved reference, or a damaged one"):
            StoredReference.open(saved)
    with pytest.raises(ArtifactInvalid, match="is no saved reference"):
        StoredReference.open(candidates["served"] / "model.safetensors")


def test_other_metadata_is_refused(saved: Path) -> None:
    with safe_open(saved, framework="pt") as file:
        tensors, text = load_file(saved), file.metadata()["mfs.reference"]
    for change in ({"schema": "mfs.reference/2"}, {"vocabulary": 130}, {"about": {"variant": "w"}}):
        save_file(tensors, saved, {"mfs.reference": json.dumps(json.loads(text) | change)})
        with pytest.raises(ArtifactInvalid):
            StoredReference.open(saved)
    save_file(tensors, saved, {"mfs.reference": text})
    assert StoredReference.open(saved).about == {"variant": "v"}


@pytest.mark.parametrize(
    ("corpora", "settings"),
    [
        ([Corpus("prose", (*DOCUMENTS[:-1], "another end"))], SMALL),
        ([Corpus("other", DOCUMENTS)], SMALL),
        ([PROSE], replace(SMALL, window=23)),
        ([PROSE], replace(SMALL, bos="on")),
        ([PROSE], replace(SMALL, max_tokens=90)),
    ],
)
def test_other_texts_and_windows_are_refused(
    saved: Path, candidates: dict[str, Path], corpora: list[Corpus], settings: EvalSettings
) -> None:
    with pytest.raises(SourceIncompatible, match=r"to hold answers to the windows of \w+, found others"):
        measure_drift(StoredReference.open(saved), candidates, None, corpora, settings, "v", NullSink())


def test_fewer_texts_than_were_saved_are_fine(saved: Path, candidates: dict[str, Path]) -> None:
    both = measure(StoredReference.open(saved), candidates, None, SMALL)
    alone = measure_drift(StoredReference.open(saved), candidates, None, [CODE], SMALL, "v", NullSink())
    assert alone == both[2:]


def test_too_little_disk_is_said_before_anything_is_written(
    family: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "free_disk", lambda folder: 10_000)
    with pytest.raises(ResourceShortage, match=r"the reference needs \S+ kB of disk, and 10 kB is free"):
        save_reference(family["original"], [PROSE], SMALL, tmp_path / "r", {}, NullSink())
    assert list(tmp_path.iterdir()) == []


# Of an artifact.


def asked(stored: StoredFamily, scratch: Path, **changes: Any) -> DriftRequest:
    scratch.mkdir(exist_ok=True)
    lines = tuple(f"Line {i}: the quick brown fox jumps over {i * i} lazy dogs, and sleeps." for i in range(60))
    request = DriftRequest(
        stored.artifact,
        [Corpus("lines", lines)],
        EvalSettings(window=64, max_tokens=3400),
        ("served", "restored"),
        scratch,
    )
    return replace(request, **changes)


def test_an_artifact_is_measured_and_checked_when_its_original_is_gone(stored: StoredFamily, tmp_path: Path) -> None:
    path = tmp_path / "math.reference"
    beside = asked(stored, tmp_path / "a", variants=["math"])
    save_artifact_reference(beside, path, NullSink())
    results, _ = measure_artifact(beside, NullSink())
    gone = {id: str(tmp_path / "gone") for id in stored.variants}
    alone = asked(stored, tmp_path / "b", reference=path, originals=gone)
    sink = RecordingSink()
    again, _ = measure_artifact(alone, sink)
    assert again == results
    assert [result.variant for result in again] == ["math", "math"]
    assert not any("original" in stage for stage, _, _ in sink.stages)
    checks = check_measurement(asked(stored, tmp_path / "c", reference=path, originals=gone), NullSink())
    assert checks == check_measurement(asked(stored, tmp_path / "d", variants=["math"]), NullSink())


def test_a_reference_of_something_else_is_refused(stored: StoredFamily, tmp_path: Path) -> None:
    path = tmp_path / "math.reference"
    save_artifact_reference(asked(stored, tmp_path / "a", variants=["math"]), path, NullSink())
    with pytest.raises(UsageError, match="expected a reference of code, found one of math"):
        measure_artifact(asked(stored, tmp_path / "b", reference=path, variants=["code"]), NullSink())
    settings = EvalSettings(window=32, max_tokens=3400)
    with pytest.raises(UsageError, match="saved under other settings than asked for: window: 64 and 32; stride"):
        measure_artifact(asked(stored, tmp_path / "b", reference=path, settings=settings), NullSink())
    with safe_open(path, framework="pt") as file:
        tensors, described = load_file(path), json.loads(file.metadata()["mfs.reference"])
    described["about"]["original"] = "0" * 64
    described["digest"] = digest_of(described)
    save_file(tensors, path, {"mfs.reference": json.dumps(described)})
    with pytest.raises(SourceIncompatible, match="is of another original than variant 'math' was made from"):
        measure_artifact(asked(stored, tmp_path / "b", reference=path), NullSink())


def test_one_variant_a_reference(stored: StoredFamily, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="one variant to save a reference of, found code, math, vocab") as caught:
        save_artifact_reference(asked(stored, tmp_path / "a"), tmp_path / "r", NullSink())
    assert caught.value.hint == "--variant code"


def test_a_reference_serves_other_artifacts_of_the_same_original(stored: StoredFamily, tmp_path: Path) -> None:
    from fidelity_models import store_family

    path = tmp_path / "math.reference"
    save_artifact_reference(asked(stored, tmp_path / "a", variants=["math"]), path, NullSink())
    other = store_family(tmp_path / "other", budget="30%")
    results, _ = measure_artifact(asked(other, tmp_path / "b", reference=path), NullSink())
    first, _ = measure_artifact(asked(stored, tmp_path / "c", reference=path), NullSink())
    assert results[0].ppl_original == first[0].ppl_original
    assert results[0].kl_mean != first[0].kl_mean
