from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mfs_decompose.errors import MfsError, SourceNotFound, UsageError
from mfs_decompose.fidelity.text import Corpus, read_corpus

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def _write(name: str, content: str | bytes | list[object]) -> Path:
        path = tmp_path / name
        if isinstance(content, list):
            content = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in content)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return _write


def test_txt_is_one_document_kept_as_it_is(write: Write) -> None:
    path = write("prose.txt", "one\r\n\n two \u2028 three\n")
    assert read_corpus(str(path)) == Corpus("prose", ("one\r\n\n two \u2028 three\n",))


def test_byte_order_mark_is_not_text(write: Write) -> None:
    assert read_corpus(str(write("a.txt", b"\xef\xbb\xbfhi"))).documents == ("hi",)


def test_fields_are_concatenated_in_the_order_given(write: Write) -> None:
    path = write(
        "code.jsonl", [{"prompt": "def f():\n", "answer": "    pass", "id": "7"}, {"prompt": "a", "answer": "b"}]
    )
    assert read_corpus(f"{path}:prompt+answer") == Corpus("code", ("def f():\n    pass", "ab"))
    assert read_corpus(f"{path}:answer+prompt").documents == ("    passdef f():\n", "ba")
    assert read_corpus(f"{path}:prompt").documents == ("def f():\n", "a")


def test_without_fields_the_only_text_field_or_text(write: Write) -> None:
    assert read_corpus(str(write("a.jsonl", [{"n": 1, "question": "why?"}]))).documents == ("why?",)
    assert read_corpus(str(write("b.jsonl", [{"title": "t", "text": "body"}]))).documents == ("body",)


def test_without_fields_and_several_text_fields_the_choice_is_named(write: Write) -> None:
    path = write("c.jsonl", [{"prompt": "p", "n": 3, "answer": "a"}])
    with pytest.raises(UsageError, match="found prompt, answer") as caught:
        read_corpus(str(path))
    assert caught.value.hint is not None
    assert f"{path}:prompt+answer" in caught.value.hint


def test_lines_end_at_newlines_only_and_blank_ones_are_skipped(write: Write) -> None:
    path = write("u.jsonl", '{"text": "a\u2028b\x85c"}\r\n\n   \n{"text": "d"}\n{"text": "  "}\n')
    assert read_corpus(str(path)).documents == ("a\u2028b\x85c", "d")


@pytest.mark.parametrize("name", ["a:b.txt", "C:text.txt", "odd.txt:", "x.jsonl:text"])
def test_a_colon_in_a_file_name_is_no_field(write: Write, name: str) -> None:
    path = write(name, "content")
    if Path(name).suffix in (".txt",):
        assert read_corpus(str(path)).documents == ("content",)
    else:  # The file exists under this very name, so its suffix is what is wrong.
        with pytest.raises(UsageError, match=r"expected a \.txt or \.jsonl file"):
            read_corpus(str(path))


def test_only_the_last_colon_splits(write: Write) -> None:
    path = write("a:b.jsonl", [{"q:r": "no", "s": "yes"}])
    assert read_corpus(f"{path}:s") == Corpus("a:b", ("yes",))


def test_windows_style_path_that_is_missing_is_reported_whole() -> None:
    with pytest.raises(SourceNotFound, match=r"at C:\\texts\\a\.txt, found nothing"):
        read_corpus(r"C:\texts\a.txt")


def test_missing_field_names_those_that_exist(write: Write) -> None:
    path = write("d.jsonl", [{"prompt": "p", "answer": "a"}, {"prompt": "p"}])
    with pytest.raises(UsageError, match=r"field 'promt' on line 1 of .*d\.jsonl, found prompt, answer"):
        read_corpus(f"{path}:promt")
    with pytest.raises(UsageError, match=r"field 'answer' on line 2 of .*, found prompt"):
        read_corpus(f"{path}:prompt+answer")


@pytest.mark.parametrize(
    ("name", "content", "fields", "kind", "message"),
    [
        ("none.txt", None, "", SourceNotFound, "found nothing"),
        ("none.jsonl", None, ":text", SourceNotFound, "found nothing"),
        ("empty.txt", b"", "", UsageError, "expected text in .*empty.txt, found none"),
        ("blank.jsonl", b"\n\n", "", UsageError, "found none"),
        ("blank.jsonl", b'{"text": ""}\n', ":text", UsageError, "found none"),
        ("latin.txt", "caf\u00e9".encode("latin-1"), "", UsageError, "other bytes at offset 3"),
        ("bad.jsonl", b'{"text": "a"}\n{oops\n', "", UsageError, "one JSON object on line 2 .* found '{oops'"),
        ("list.jsonl", b"[1]\n", "", UsageError, "one JSON object on line 1"),
        ("deep.jsonl", b"[" * 100_000, "", UsageError, "one JSON object on line 1"),
        ("number.jsonl", b'{"n": 4}\n', ":n", UsageError, "expected text in the field 'n' on line 1 .*, found int"),
        ("number.jsonl", b'{"n": 4}\n', "", UsageError, "one text field in .*, found none"),
        ("f.jsonl", b'{"a": "x"}\n', ":", UsageError, "expected fields joined by"),
        ("f.jsonl", b'{"a": "x"}\n', ":a++b", UsageError, "expected fields joined by"),
        ("f.txt", b"x", ":a", UsageError, "expected no fields for a .txt file"),
        ("f.md", b"x", "", UsageError, r"expected a \.txt or \.jsonl file"),
    ],
)
def test_bad_input_is_one_sentence_with_a_hint(
    write: Write, tmp_path: Path, name: str, content: bytes | None, fields: str, kind: type[MfsError], message: str
) -> None:
    path = tmp_path / name if content is None else write(name, content)
    with pytest.raises(kind, match=message) as caught:
        read_corpus(f"{path}{fields}")
    if "found none" not in message or "one text field" in message:
        assert caught.value.hint
    assert "\n" not in caught.value.message


def test_folder_and_forbidden_file_are_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SourceNotFound, match="found the folder"):
        read_corpus(str(tmp_path))

    def refuse(_: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "secret.txt").write_text("x")
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(SourceNotFound, match=r"cannot read .*secret\.txt: Permission denied"):
        read_corpus(str(tmp_path / "secret.txt"))


def test_impossible_names_are_not_found() -> None:
    with pytest.raises(SourceNotFound, match="cannot read"):
        read_corpus("a" * 5000 + ".txt:field")


def test_relative_paths_work(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("r.jsonl", [{"text": "here"}])
    monkeypatch.chdir(path.parent)
    assert read_corpus(f".{os.sep}r.jsonl:text").documents == ("here",)
