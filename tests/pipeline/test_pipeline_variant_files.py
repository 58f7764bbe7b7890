from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pipeline_runs import back, run, toys

from mfs_decompose.artifact.reader import Family
from mfs_decompose.artifact.variant_files import files_of_base, files_of_variant
from mfs_decompose.source.side_files import SideFiles


def contents(files: SideFiles) -> dict[str, bytes]:
    found = {name: files.read(name) for name in files.sizes}
    assert {name: len(data) for name, data in found.items()} == dict(files.sizes)
    assert all(files.digest(name) == hashlib.sha256(data).hexdigest() for name, data in found.items())
    return found


def on_disk(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".safetensors"}


@pytest.mark.parametrize("mean", [False, True])
def test_they_are_what_restore_writes(tmp_path: Path, mean: bool) -> None:
    base, variants = toys(tmp_path, "one", "two")
    (variants["one"] / "merges.txt").write_text("a b")
    (variants["two"] / "config.json").write_text('{"model_type": "toy", "x": 1}')
    run(tmp_path / "art", None if mean else base, variants, {"objective.rank": 3})
    with Family.open(tmp_path / "art") as family:
        found = {record.id: contents(files_of_variant(family, record)) for record in family.manifest.variants}
        found["base"] = contents(files_of_base(family))
    for id, files in found.items():
        back(tmp_path / "art", id, tmp_path / "back" / id)
        assert files == on_disk(tmp_path / "back" / id), id
    assert found["base"].keys() == (set() if mean else {"config.json"})


def an_adapter(base: dict[str, Any] | None, own: dict[str, Any], changes: dict[str, Any]) -> SideFiles:
    """The files of an adapter's merge, out of records that hold no more than is needed."""
    stored: dict[str, bytes] = {}

    def source(files: dict[str, Any]) -> SimpleNamespace:
        data = {name: json.dumps(value).encode() for name, value in files.items()}
        named = {name: hashlib.sha256(one).hexdigest() for name, one in data.items()}
        stored.update({named[name]: one for name, one in data.items()})
        return SimpleNamespace(files=named)

    record = SimpleNamespace(source=source(own), adapter=SimpleNamespace(config_changes=changes))
    held = SimpleNamespace(source=None if base is None else source(base))
    table = {f"files/{digest}": SimpleNamespace(size=len(data)) for digest, data in stored.items()}
    family: Any = SimpleNamespace(manifest=SimpleNamespace(base=held, files=table), file_bytes=stored.__getitem__)
    return files_of_variant(family, record)  # type: ignore[arg-type]


def test_an_adapter_has_the_bases_files_with_its_own_on_top() -> None:
    base = {"config.json": {"vocab_size": 5, "a": {"b": 1}}, "tokenizer.json": {"x": 1}, "README.md": {}}
    own = {"adapter_config.json": {"r": 2}, "tokenizer.json": {"x": 2}, "README.md": {"mine": 1}}
    found = contents(an_adapter(base, own, {"vocab_size": 7, "a": {"b": 3}}))
    assert found.keys() == {"config.json", "tokenizer.json"}
    assert json.loads(found["config.json"]) == {"vocab_size": 7, "a": {"b": 3}}
    assert json.loads(found["tokenizer.json"]) == {"x": 2}
    assert json.loads(contents(an_adapter(base, own, {}))["config.json"]) == base["config.json"]


def test_an_adapter_of_a_base_without_files() -> None:
    assert contents(an_adapter(None, {"adapter_config.json": {}}, {"vocab_size": 7})).keys() == {"adapter_config.json"}
    assert contents(an_adapter({}, {"tokenizer.json": {}}, {"vocab_size": 7})).keys() == {"tokenizer.json"}
