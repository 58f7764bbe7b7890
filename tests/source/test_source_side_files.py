from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from checkpoints import random_checkpoint

from mfs_decompose.errors import SourceIncompatible
from mfs_decompose.source.checkpoint import open_checkpoint
from mfs_decompose.source.folder import MAX_SIDECAR_BYTES
from mfs_decompose.source.side_files import NO_FILES, SideFiles, files_of_checkpoint


def held(**files: bytes) -> SideFiles:
    named = {name.replace("__", "."): data for name, data in files.items()}
    return SideFiles({name: len(data) for name, data in named.items()}, named.__getitem__)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"{", "it is not JSON (Expecting property name enclosed in double quotes at character 1)"),
        (b"", "it is not JSON (Expecting value at character 0)"),
        (b'{"a": "\xff"}', "it is not UTF-8"),
        (b"[1]", "expected a JSON object, found list"),
        (b"[" * 200_000, "it is nested too deeply"),
        (b'{"a": ' + b"1" * 5000 + b"}", "it holds a number that is too long"),
    ],
)
def test_what_is_no_json_object_is_a_sentence(data: bytes, problem: str) -> None:
    parsed = held(config__json=data).parse("config.json")
    assert (parsed.value, parsed.problem) == (None, problem)


def test_published_configs_hold_infinity() -> None:
    parsed = held(config__json=b'{"limit": Infinity, "a": 1, "a": 2}').parse("config.json")
    assert parsed.value == {"limit": float("inf"), "a": 2}


def test_absent_is_neither_a_value_nor_a_problem() -> None:
    assert (NO_FILES.parse("config.json").value, NO_FILES.parse("config.json").problem) == (None, None)
    assert NO_FILES.text("chat_template.jinja") == (None, None)
    assert "config.json" not in NO_FILES


@pytest.mark.parametrize(("name", "limit"), [("config.json", 4 * 2**20), ("tokenizer.json", MAX_SIDECAR_BYTES)])
def test_what_is_too_large_is_not_read(name: str, limit: int) -> None:
    def never(name: str) -> bytes:
        raise AssertionError(name)

    parsed = SideFiles({name: limit + 1}, never).parse(name)
    assert parsed.problem == f"it has {limit + 1} bytes, and at most {limit} are read"
    assert SideFiles({name: MAX_SIDECAR_BYTES + 1}, never).text(name)[1] is not None


def test_text_is_utf8() -> None:
    files = held(good=b"\xc3\xa4", bad=b"\xff")
    assert files.text("good") == ("ä", None)
    assert files.text("bad") == (None, "it is not UTF-8")


def test_a_digest_on_record_is_not_computed_again() -> None:
    files = held(a=b"x")
    assert files.digest("a") == hashlib.sha256(b"x").hexdigest()
    assert SideFiles({"a": 1}, files.read, {"a": "known"}).digest("a") == "known"


def test_the_files_of_a_checkpoint(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path / "model", {"a": torch.ones(3)})
    (folder / "config.json").write_text('{"a": 1}')
    (folder / "weights.bin").write_bytes(b"12")
    files = files_of_checkpoint(open_checkpoint(folder, "x"))
    assert dict(files.sizes) == {"config.json": 8}
    assert files.parse("config.json").value == {"a": 1}
    (folder / "config.json").write_text('{"a": 1, "b": 2}')
    with pytest.raises(SourceIncompatible, match="changed while it was being read"):
        files.parse("config.json")
