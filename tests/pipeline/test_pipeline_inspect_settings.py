from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Family
from pipeline_runs import run, toy, toy_tensors, toys

from mfs_decompose.pipeline import inspect_settings
from mfs_decompose.pipeline.inspect import inspect
from mfs_decompose.source.tokenizer_facts import read_tokenizer

RANK = {"objective.rank": 3}


def settings_of(artifact: Path) -> dict[str, Any]:
    document = json.loads(json.dumps(inspect(artifact), allow_nan=False))
    return {one["id"]: {key: one[key] for key in ("config_changes", "stop_ids")} for one in document["variants"]}


def test_a_grown_vocabulary_is_a_change_of_the_config(art: Path) -> None:
    changes = settings_of(art)["vocab"]["config_changes"]
    assert [one for one in changes if one["file"] == "config.json"] == [
        {"file": "config.json", "key": "vocab_size", "kind": "changed", "base": 257, "variant": 259}
    ]
    generation = {one["key"]: (one["base"], one["variant"]) for one in changes if one["file"] != "config.json"}
    assert generation["max_new_tokens"] == (None, 7)
    assert settings_of(art)["vocab"]["stop_ids"]["ids"] == [256]


def test_a_tokenizer_that_variants_share_is_read_once(art: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[object] = []
    monkeypatch.setattr(
        inspect_settings, "read_tokenizer", lambda files: (read.append(files), read_tokenizer(files))[1]
    )
    settings_of(art)
    assert len(read) == 2  # code and math have the base's, vocab its own


def test_what_is_noise_is_not_shown(tmp_path: Path) -> None:
    base, variants = toys(tmp_path, "one", "two")
    (base / "config.json").write_text('{"_name_or_path": "a", "torch_dtype": "bfloat16", "rope_theta": 5.0}')
    rope = '"rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}'
    new = f'{{"dtype": "bfloat16", {rope}, "transformers_version": "5"}}'
    (variants["one"] / "config.json").write_text(new)
    (variants["two"] / "config.json").write_text(new.replace("5.0", "6.0"))
    run(tmp_path / "art", base, variants, RANK)
    found = settings_of(tmp_path / "art")
    assert found["one"]["config_changes"] == []
    assert found["two"]["config_changes"] == [
        {"file": "config.json", "key": "rope_parameters.rope_theta", "kind": "changed", "base": 5.0, "variant": 6.0}
    ]


def test_a_file_that_one_of_them_lacks(tmp_path: Path) -> None:
    base, variants = toys(tmp_path, "one", "two")
    (base / "generation_config.json").write_text('{"eos_token_id": 3}')
    (variants["two"] / "generation_config.json").write_text('{"eos_token_id": 3}')
    (variants["two"] / "config.json").unlink()
    run(tmp_path / "art", base, variants, RANK)
    found = settings_of(tmp_path / "art")
    gone = {"key": None, "kind": "only_base", "base": None, "variant": None}
    assert found["one"]["config_changes"] == [{"file": "generation_config.json", **gone}]
    assert found["two"]["config_changes"] == [{"file": "config.json", **gone}]
    assert (found["one"]["stop_ids"]["ids"], found["two"]["stop_ids"]["ids"]) == ([], [3])


def test_a_malformed_file_is_a_warning(tmp_path: Path) -> None:
    base, variants = toys(tmp_path, "one")
    (base / "generation_config.json").write_text('{"eos_token_id": 3}')
    (variants["one"] / "generation_config.json").write_text("{")
    (variants["one"] / "tokenizer.json").write_text("[1]")
    run(tmp_path / "art", base, variants, RANK)
    found = settings_of(tmp_path / "art")["one"]
    assert found["config_changes"] == []
    assert found["stop_ids"]["warnings"][0].startswith("generation_config.json cannot be read: it is not JSON")


def test_a_mean_base_says_what_all_variants_say(tmp_path: Path) -> None:
    _, variants = toys(tmp_path, "one", "two")
    for id, theta in (("one", 5.0), ("two", 7.0)):
        (variants[id] / "config.json").write_text(json.dumps({"model_type": "toy", "rope_theta": theta, "a": [1]}))
    run(tmp_path / "art", None, variants, RANK)
    found = settings_of(tmp_path / "art")
    for id, theta in (("one", 5.0), ("two", 7.0)):
        (change,) = found[id]["config_changes"]
        assert (change["kind"], change["base"]) == ("only_variant", None)
        assert change["variant"] == {"rope_type": "default", "rope_theta": theta}


def test_no_side_files_at_all(tmp_path: Path) -> None:
    folders = {id: toy(tmp_path / id, toy_tensors()) for id in ("base", "one")}
    for folder in folders.values():
        (folder / "config.json").unlink()
    run(tmp_path / "art", folders["base"], {"one": folders["one"]}, RANK)
    empty = {"ids": [], "sources": [], "warnings": []}
    assert settings_of(tmp_path / "art") == {"one": {"config_changes": [], "stop_ids": empty}}


def test_the_tied_family_stops_where_its_files_say(family: Family, art: Path) -> None:
    for id in family.variants:
        sources = settings_of(art)[id]["stop_ids"]["sources"]
        assert [(one["file"], one["ids"], one["token"]) for one in sources] == [
            ("generation_config.json", [256], None),
            ("config.json", [256], None),
            ("tokenizer_config.json", [256], "<|end|>"),
        ]
