"""Names: those we generate are recognised, those of users are safe or refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfs_decompose.artifact.layout import (
    base_shard_name,
    check_user_path,
    content_name,
    is_digest,
    is_generated_path,
    is_variant_id,
    variant_shard_name,
)
from mfs_decompose.errors import ArtifactInvalid


def test_generated_names() -> None:
    assert base_shard_name(1, 2) == "base-00001-of-00002.safetensors"
    assert variant_shard_name(1, 1) == "v0001-00001.safetensors"
    assert variant_shard_name(12_345, 3) == "v12345-00003.safetensors"
    assert content_name("0" * 64) == "files/" + "0" * 64


@pytest.mark.parametrize(
    "name", [base_shard_name(7, 99_999), variant_shard_name(10_000, 99_999), content_name("f" * 64), "README.md"]
)
def test_generated_names_are_recognised(name: str) -> None:
    assert is_generated_path(name)
    for spoiled in (name + "\n", " " + name, "./" + name, "../" + name, name.upper() + "x", name.replace(".", "/.", 1)):
        assert not is_generated_path(spoiled) or spoiled == name


@pytest.mark.parametrize("name", ["manifest.json", "run.json", "files", "files/", "files/abc", "files/" + "F" * 64])
def test_other_names_are_not_generated(name: str) -> None:
    assert not is_generated_path(name)


def test_digests_are_lower_case_ascii() -> None:
    assert is_digest("0123456789abcdef" * 4)
    assert not is_digest("0123456789ABCDEF" * 4)
    assert not is_digest("٣" * 64)
    assert not is_digest("a" * 64 + "\n")


@pytest.mark.parametrize("id", ["code", "a", "Llama-3.2_1B", "_x", "9", "a" * 64])
def test_variant_ids(id: str) -> None:
    assert is_variant_id(id)


@pytest.mark.parametrize(
    "id",
    ["", "base", "all", "a/b", "..", ".hidden", "end.", "a b", "a\n", "ä", "a" * 65, "../../evil", "x\u202ey", "-v"],
)
def test_ids_that_could_be_paths_options_or_reserved_are_refused(id: str) -> None:
    assert not is_variant_id(id)


@pytest.mark.parametrize(
    "path", ["config.json", "additional_chat_templates/tool.jinja", "a/b/c/d", "Größe.json", "x" * 255, "-dash", "a..b"]
)
def test_plain_user_paths_pass(path: str) -> None:
    assert check_user_path(path) == path


@pytest.mark.parametrize(
    "path",
    [
        "", ".", "..", "../x", "a/../b", "/etc/passwd", "a//b", "a/", "./a", "C:\\x", "C:x", "\\\\host\\share", "a\\b",
        "nul\0byte", "line\nbreak", "esc\x1b[2J", "trailing.", "trailing ", "a/b/c/d/e", "x" * 256, "ä" * 128,
        "right\u202eleft", "q?", "\ud800",
    ],
)  # fmt: skip
def test_user_paths_that_could_lead_elsewhere_are_refused(path: str) -> None:
    with pytest.raises(ArtifactInvalid, match="expected a plain relative file name"):
        check_user_path(path)


def test_a_shard_of_a_source_is_one_component() -> None:
    with pytest.raises(ArtifactInvalid):
        check_user_path("sub/model.safetensors", parts=1)


@given(st.text(alphabet="ab./\\\0: -", max_size=12))
def test_what_passes_stays_inside(path: str) -> None:
    try:
        check_user_path(path)
    except ArtifactInvalid:
        return
    parts = path.split("/")
    assert not path.startswith("/")
    assert all(part not in ("", ".", "..") and "\\" not in part and ":" not in part for part in parts)
