"""The coverage proof can fail, and fails for everything that could get lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import EMBEDDING, Family
from pipeline_runs import asked, run

from mfs_decompose.artifact.reader import Family as Artifact
from mfs_decompose.artifact.records import VariantRecord
from mfs_decompose.pipeline import assemble
from mfs_decompose.pipeline.coverage import CoverageError, prove_coverage
from mfs_decompose.pipeline.prepare import Prepared, prepare

NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def prepared(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepare(asked(tmp_path_factory.mktemp("none") / "art", family.base, family.variants))


@pytest.fixture(scope="module")
def records(art: Path) -> tuple[VariantRecord, ...]:
    with Artifact.open(art) as opened:
        return opened.manifest.variants


def prove(
    prepared: Prepared, records: tuple[VariantRecord, ...], base_names: set[str] | None = None
) -> tuple[int, int]:
    assert prepared.base is not None
    names = set(prepared.base.tensors) if base_names is None else base_names
    found = prove_coverage(prepared.plan, prepared.base, prepared.variants, names, records)
    return found.tensors, found.groups


def changed(records: tuple[VariantRecord, ...], edit: Callable[[dict[str, object]], None]) -> tuple[VariantRecord, ...]:
    """The records with the tensors of the last variant edited."""
    tensors: dict[str, object] = dict(records[-1].tensors)
    edit(tensors)
    return (*records[:-1], records[-1].model_copy(update={"tensors": tensors}))


def test_every_tensor_of_every_source_is_counted(prepared: Prepared, records: tuple[VariantRecord, ...]) -> None:
    assert prepared.base is not None
    sources = (prepared.base, *prepared.variants)
    assert prove(prepared, records) == (sum(len(source.tensors) for source in sources), 20)


def _drop(tensors: dict[str, object]) -> None:
    del tensors[NORM]


def _rename(tensors: dict[str, object]) -> None:
    tensors["model.norm.wait"] = tensors.pop(NORM)


def _add(tensors: dict[str, object]) -> None:
    tensors["more"] = tensors[NORM]


def _reshape(tensors: dict[str, object]) -> None:
    tensors[EMBEDDING] = tensors[EMBEDDING].model_copy(update={"shape": (64, 259)})  # type: ignore[attr-defined]


def _cut(tensors: dict[str, object]) -> None:
    tensors[EMBEDDING] = tensors[EMBEDDING].model_copy(update={"shape": (257, 64)})  # type: ignore[attr-defined]


def _convert(tensors: dict[str, object]) -> None:
    tensors[NORM] = tensors[NORM].model_copy(update={"dtype": "F16"})  # type: ignore[attr-defined]


@pytest.mark.parametrize("edit", [_drop, _rename, _add, _reshape, _cut, _convert])
def test_a_record_that_is_wrong(
    prepared: Prepared, records: tuple[VariantRecord, ...], edit: Callable[[dict[str, object]], None]
) -> None:
    with pytest.raises(CoverageError):
        prove(prepared, changed(records, edit))


def test_what_a_variant_lacks_must_be_said(prepared: Prepared, records: tuple[VariantRecord, ...]) -> None:
    claimed = records[-1].model_copy(update={"missing": (NORM,)})
    with pytest.raises(CoverageError, match=r"what variant 'vocab' lacks: .* without a tensor \['model.norm.weight'\]"):
        prove(prepared, (*records[:-1], claimed))
    last = prepared.variants[-1]
    shorter = replace(last, tensors={name: info for name, info in last.tensors.items() if name != NORM})
    short = replace(prepared, variants=(*prepared.variants[:-1], shorter))
    with pytest.raises(CoverageError, match="what variant 'vocab' lacks"):
        prove(short, changed(records, _drop))


@pytest.mark.parametrize("names", [{NORM}, {"another"}])
def test_the_base_is_covered_too(prepared: Prepared, records: tuple[VariantRecord, ...], names: set[str]) -> None:
    assert prepared.base is not None
    own = set(prepared.base.tensors)
    with pytest.raises(CoverageError):
        prove(prepared, records, own ^ names)


def test_a_run_that_loses_a_tensor_publishes_nothing(
    tmp_path: Path, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = assemble._variant_record

    def forgetful(*arguments: object) -> VariantRecord:
        made = whole(*arguments)  # type: ignore[arg-type]
        tensors = {name: tensor for name, tensor in made.tensors.items() if name != NORM}
        return made.model_copy(update={"tensors": tensors})

    monkeypatch.setattr(assemble, "_variant_record", forgetful)
    with pytest.raises(CoverageError, match="without a record"):
        run(tmp_path / "art", family.base, {"code": family.variants["code"]})
    assert not (tmp_path / "art").exists()
    monkeypatch.undo()
    assert run(tmp_path / "art", family.base, {"code": family.variants["code"]}).resumed_units > 0
