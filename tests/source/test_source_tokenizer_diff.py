from __future__ import annotations

from typing import Any

import pytest
from checkpoints import Family
from hypothesis import given
from hypothesis import strategies as st
from side_files_made import made, of_folder

from mfs_decompose.source.side_files import NO_FILES
from mfs_decompose.source.tokenizer_diff import EXAMPLES, TokenizerDiff, compare_tokenizers
from mfs_decompose.source.tokenizer_facts import read_tokenizer

VOCABULARIES = st.dictionaries(st.text("abcd", min_size=1, max_size=2), st.integers(0, 9), max_size=8)


def compared(a: dict[str, Any], b: dict[str, Any]) -> TokenizerDiff:
    return compare_tokenizers(read_tokenizer(made(a)), read_tokenizer(made(b)))


def words(vocab: object, **more: Any) -> dict[str, Any]:
    return {"tokenizer.json": {"model": {"vocab": vocab}, **more}}


def test_two_new_tokens(family: Family) -> None:
    base, grown = (read_tokenizer(of_folder(folder)) for folder in (family.base, family.variants["vocab"]))
    found = compare_tokenizers(base, grown)
    assert not found.equal
    assert (found.vocabulary.a, found.vocabulary.b) == (257, 259)
    assert found.vocabulary.only_b_first == (("<|extra_0|>", 257), ("<|extra_1|>", 258))
    assert (found.vocabulary.only_a, found.vocabulary.only_b, found.vocabulary.moved) == (0, 2, 0)
    assert [one.key for one in found.added] == ["<|extra_0|>", "<|extra_1|>"]
    assert (found.special, found.templates, found.merges) == ((), (), (0, 0, True))
    assert compare_tokenizers(base, base).equal
    assert compare_tokenizers(grown, base).vocabulary.only_a == 2


@given(VOCABULARIES, VOCABULARIES)
def test_every_token_is_counted_once(a: dict[str, int], b: dict[str, int]) -> None:
    found = compared(words(a), words(b)).vocabulary
    assert found.only_a == len([text for text in a if text not in b])
    assert found.only_b == len([text for text in b if text not in a])
    assert found.moved == len([text for text in a if text in b and a[text] != b[text]])
    assert (found.a, found.b) == (len(a), len(b))
    assert dict(found.only_a_first) == {text: id for text, id in a.items() if text not in b}
    assert {text: (one, two) for text, one, two in found.moved_first} == {
        text: (a[text], b[text]) for text in a.keys() & b.keys() if a[text] != b[text]
    }


def test_examples_are_few_and_by_id() -> None:
    many = {f"t{id}": id for id in range(100)}
    found = compared(words({}), words(many)).vocabulary
    assert (found.only_b, len(found.only_b_first)) == (100, EXAMPLES)
    assert [id for _, id in found.only_b_first] == list(range(EXAMPLES))


def test_merges_are_counted_and_compared_in_either_spelling() -> None:
    def merged(merges: object) -> dict[str, Any]:
        return {"tokenizer.json": {"model": {"vocab": {"a": 0}, "merges": merges}}}

    assert compared(merged([["a", "b"]]), merged(["a b"])).equal
    found = compared(merged(["a b", "b c"]), merged(["b c", "a b"]))
    assert (found.merges, found.equal) == ((2, 2, False), False)
    assert compared(merged(["a b"]), words({"a": 0})).merges == (1, 0, False)
    assert compared(words({"a": 0}), words({"a": 0})).merges is None


def test_special_tokens_and_settings_by_key() -> None:
    a = {"tokenizer_config.json": {"eos_token": "<a>", "model_max_length": 5, "name_or_path": "x", "unk_token": "u"}}
    b = {"tokenizer_config.json": {"eos_token": {"content": "<b>"}, "model_max_length": 6, "name_or_path": "y"}}
    found = compared(a, b)
    assert [(one.key, one.kind, one.a, one.b) for one in found.special] == [
        ("eos_token", "changed", "<a>", "<b>"),
        ("unk_token", "only_a", "u", None),
    ]
    assert [one.key for one in found.settings] == ["model_max_length"]


def test_the_same_special_tokens_in_another_file_are_the_same() -> None:
    a = {"tokenizer_config.json": {"eos_token": "<a>"}}
    assert compared(a, {"special_tokens_map.json": {"eos_token": {"content": "<a>"}}}).equal
    assert compared(a, {**a, "special_tokens_map.json": {"eos_token": "<a>"}}).equal


def test_a_template_is_shown_as_a_unified_diff() -> None:
    one = {"chat_template.jinja": "".join(f"line {n}\n" for n in range(9))}
    two = {"chat_template.jinja": one["chat_template.jinja"].replace("line 4", "line four")}
    (template,) = compared(one, two).templates
    assert (template.name, template.in_a, template.in_b) == ("default", True, True)
    assert template.diff == ("--- A", "+++ B", "@@ -4,3 +4,3 @@", " line 3", "-line 4", "+line four", " line 5")
    (gone,) = compared(one, {}).templates
    assert (gone.in_a, gone.in_b) == (True, False)


def test_a_template_of_one_line_is_cut_at_its_tags() -> None:
    one = "".join("{% if a %}" + "x" * 20 for _ in range(20))
    (template,) = compared({"chat_template.jinja": one}, {"chat_template.jinja": one + "{% if b %}"}).templates
    assert "+{% if b %}" in template.diff
    assert max(len(line) for line in template.diff) < 40


@pytest.mark.parametrize("size", [300, 100_000])
def test_a_long_diff_is_cut(size: int) -> None:
    one = {"chat_template.jinja": "\n".join("a" * 2 for _ in range(size))}
    two = {"chat_template.jinja": "\n".join("b" * 2 for _ in range(size))}
    (template,) = compared(one, two).templates
    assert len(template.diff) == (61 if size == 300 else 0)
    assert size != 300 or template.diff[-1] == "... and 543 more lines"


def test_no_tokenizer_on_one_side() -> None:
    found = compare_tokenizers(read_tokenizer(made(words({"a": 0}))), read_tokenizer(NO_FILES))
    assert (found.vocabulary.a, found.vocabulary.b, found.equal) == (1, 0, False)
    assert compare_tokenizers(read_tokenizer(NO_FILES), read_tokenizer(NO_FILES)).merges is None
