from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoints import Family, random_checkpoint

from mfs_decompose.pipeline.diff_files import FilesDiff, compare_files, files_to_json
from mfs_decompose.source.checkpoint import open_checkpoint
from mfs_decompose.source.side_files import files_of_checkpoint


def folder(root: Path, **files: str | bytes) -> Path:
    """A checkpoint with side files; `config_json` is config.json."""
    random_checkpoint(root, {"a": torch.ones(3)})
    for name, data in files.items():
        head, _, end = name.rpartition("_")
        (root / f"{head}.{end}").write_bytes(data if isinstance(data, bytes) else data.encode())
    return root


def compared(a: Path, b: Path) -> FilesDiff:
    found = compare_files(*(files_of_checkpoint(open_checkpoint(one, "x")) for one in (a, b)))
    json.dumps(files_to_json(found), allow_nan=False)
    return found


def pair(tmp_path: Path, name: str, a: str | bytes | None, b: str | bytes | None) -> FilesDiff:
    one = folder(tmp_path / "a", **({} if a is None else {name: a}))
    return compared(one, folder(tmp_path / "b", **({} if b is None else {name: b})))


def test_the_same_files_say_the_same(family: Family) -> None:
    found = compared(family.base, family.base)
    assert (found.equal, found.files, found.problems) == (True, (), ())


def test_where_a_config_came_from_is_no_difference(tmp_path: Path) -> None:
    found = pair(tmp_path, "config_json", '{"_name_or_path": "x", "torch_dtype": "float32"}', '{"dtype": "float32"}')
    assert found.equal
    assert found.configs["config.json"].noise == ("_name_or_path", "dtype", "torch_dtype")
    assert [(one.file, one.kind, one.understood) for one in found.files] == [("config.json", "changed", True)]


@pytest.mark.parametrize("name", ["config_json", "generation_config_json"])
def test_a_key_that_means_something_is_one(tmp_path: Path, name: str) -> None:
    found = pair(tmp_path, name, '{"eos_token_id": 2}', '{"eos_token_id": [2, 7]}')
    (change,) = found.configs[name.replace("_json", ".json")].changes
    assert (change.key, change.a, change.b, found.equal) == ("eos_token_id", 2, [2, 7], False)
    assert [stops.ids for stops in found.stop_ids] == [(2,), (2, 7)]


@pytest.mark.parametrize("name", ["config_json", "generation_config_json", "README_md", "tokenizer_model"])
def test_a_file_on_one_side_is_one(tmp_path: Path, name: str) -> None:
    found = pair(tmp_path, name, None, "{}")
    (only,) = found.files
    assert (only.kind, only.size_a, only.size_b, only.understood) == ("only_b", None, 2, False)
    assert not found.equal
    assert all(not diff.changes for diff in found.configs.values())


def test_other_files_count_by_their_bytes(tmp_path: Path) -> None:
    found = pair(tmp_path, "merges_txt", "a b", "a c")
    assert [(one.file, one.kind, one.size_a, one.size_b) for one in found.files] == [("merges.txt", "changed", 3, 3)]
    assert not found.equal


def test_a_tokenizer_written_in_another_way_is_the_same(tmp_path: Path) -> None:
    found = pair(tmp_path, "tokenizer_config_json", '{"eos_token": "x"}', '{ "eos_token": {"content": "x"} }')
    assert found.equal
    assert [one.understood for one in found.files] == [True]


@pytest.mark.parametrize(
    ("name", "data", "what"),
    [
        ("generation_config_json", "{", "it is not JSON"),
        ("generation_config_json", "[" * 5000, "it is nested too deeply"),
        ("tokenizer_config_json", "[]", "expected a JSON object, found list"),
        ("chat_template_jinja", b"\xff\xfe", "it is not UTF-8"),
    ],
)
def test_a_file_that_cannot_be_read_is_a_sentence_and_counts_by_bytes(
    tmp_path: Path, name: str, data: str | bytes, what: str
) -> None:
    found = pair(tmp_path, name, data, "{}")
    ((side, file, problem),) = found.problems
    assert (side, file) == ("a", name.rpartition("_")[0] + "." + name.rpartition("_")[2])
    assert problem.startswith(what)
    assert not found.equal
    same = pair(tmp_path / "same", name, data, data)
    assert (same.equal, len(same.problems)) == (True, 2)
