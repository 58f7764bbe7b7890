from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfs_decompose.errors import UsageError
from mfs_decompose.source.ref import SourceRef, is_commit, redact

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("text", "repo", "revision"),
    [
        ("org/name", "org/name", None),
        ("HuggingFaceTB/SmolLM2-135M", "HuggingFaceTB/SmolLM2-135M", None),
        ("org/name@main", "org/name", "main"),
        (f"org/name@{COMMIT}", "org/name", COMMIT),
        ("org/name@refs/pr/3", "org/name", "refs/pr/3"),
        ("a_1/b.c-d@v1.0+x", "a_1/b.c-d", "v1.0+x"),
        ("o/n", "o/n", None),
    ],
)
@pytest.mark.parametrize("scheme", ["", "hf://"])
def test_models_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str, text: str, repo: str, revision: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    ref = SourceRef.parse(scheme + text)
    assert ref == SourceRef(scheme + text, None, repo, revision)
    assert (ref.is_bare, ref.label, ref.name) == (not scheme, text, repo.partition("/")[2])


@pytest.mark.parametrize(
    "text", ["base", "./org/name", "/models/base", "../up", "a/b/c", "org/name/", "~/models/base", "gpt2", "org/-name"]
)
def test_paths_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.chdir(tmp_path)
    ref = SourceRef.parse(text)
    assert (ref.folder, ref.repo, ref.is_bare) == (Path(text), None, False)


@pytest.mark.parametrize("text", ["org/name", "org/name@v1", "hf:/odd", "https://x.org/a"])
@pytest.mark.parametrize("kind", ["folder", "file", "dangling link"])
def test_what_exists_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, kind: str) -> None:
    monkeypatch.chdir(tmp_path)
    place = tmp_path / text
    place.parent.mkdir(parents=True)
    if kind == "folder":
        place.mkdir()
    elif kind == "file":
        place.write_text("x")
    else:
        place.symlink_to("nowhere")
    assert SourceRef.parse(text).folder == Path(text)


def test_the_scheme_forces_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert SourceRef.parse("hf://org/name").repo == "org/name"
    assert SourceRef.parse("org/name").repo is None


def test_names_of_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = {text: SourceRef.parse(text).name for text in ("./math", "/models/code/", ".", "a/b/c")}
    assert names == {"./math": "math", "/models/code/": "code", ".": tmp_path.name, "a/b/c": "c"}


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("hf://", "hf://org/name"),
        ("hf://gpt2", "hf://org/name"),
        ("hf://org/name/sub", "hf://org/name"),
        ("hf://datasets/org/name", "hf://org/name"),
        ("hf://org/na me", "hf://org/name"),
        ("hf://../name", "hf://org/name"),
        ("hf://org/..", "hf://org/name"),
        ("hf://org/a--b", "hf://org/name"),
        ("hf://org/name.git", "hf://org/name"),
        ("hf://org/name\n", "hf://org/name"),
        ("hf://" + "x" * 97 + "/name", "hf://org/name"),
        ("hf:org/name", "hf://org/name"),
        ("s3://bucket/name", "hf://org/name"),
        ("https://huggingface.co/org/name", "Write hf://org/name"),
        ("https://huggingface.co/org/name/tree/v1", "Write hf://org/name@v1"),
        ("https://huggingface.co/org/name/", "Write hf://org/name"),
        ("https://huggingface.co/", "hf://org/name"),
        ("", "Give the folder"),
        ("a\0b", "Give the folder"),
    ],
)
def test_what_is_neither(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, hint: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="expected a folder") as caught:
        SourceRef.parse(text)
    assert caught.value.exit_code == 2
    assert hint in (caught.value.hint or "")
    assert caught.value.message.isprintable()


@pytest.mark.parametrize(
    "revision", ["", "a b", "../x", "a/../b", "/x", "x/", "-x", "a//b", "@", "x" * 256, "a\nb", "~1", "^", ":x", "*"]
)
@pytest.mark.parametrize("scheme", ["", "hf://"])
def test_revisions_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str, revision: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="expected a branch, tag or commit behind the @") as caught:
        SourceRef.parse(f"{scheme}org/name@{revision}")
    assert caught.value.hint == "Write org/name@main, or leave the @ out for the default branch."
    assert caught.value.message.isprintable()


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=60))
def test_any_text_is_a_path_a_model_or_refused(text: str) -> None:
    for written in (text, f"hf://{text}", f"org/name@{text}"):
        try:
            ref = SourceRef.parse(written)
        except UsageError:
            continue
        assert (ref.folder is None) != (ref.repo is None)
        if ref.repo is not None:
            assert ref.repo.count("/") == 1
            assert ".." not in ref.repo + (ref.revision or "")
        if written.startswith("hf://"):
            assert ref.repo is not None


@given(st.text(alphabet="abcXYZ019.-_/@", max_size=12).map(lambda text: "o/" + text))
def test_what_we_take_for_a_model_huggingface_hub_does_too(text: str) -> None:
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        ref = SourceRef.parse("hf://" + text)
    except UsageError:
        return
    validate_repo_id(ref.repo)


def test_commits() -> None:
    assert is_commit(COMMIT)
    assert not any(is_commit(text) for text in ("main", COMMIT[:-1], COMMIT + "0", COMMIT.upper(), COMMIT + "\n"))


@pytest.mark.parametrize(
    "text", ["hf://hf_abcDEF123456@org/name", "hf://user:hf_abcDEF123456@x/y", "hf:hf_abcDEF123456"]
)
def test_tokens_on_the_command_line_are_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        SourceRef.parse(text)
    assert "abcDEF123456" not in caught.value.message + str(caught.value.hint)
    assert redact(f"x {text}").count("hf_***") == 1


def test_a_missing_folder_inside_one_that_is_there_is_a_typo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    ref = SourceRef.parse("own/bsae")
    assert (ref.repo, ref.folder) == (None, Path("own/bsae"))
    assert SourceRef.parse("hf://own/bsae").repo == "own/bsae"
    assert SourceRef.parse("other/base").repo == "other/base"
