from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import CHAT_TEMPLATE, Family
from hypothesis import given
from hypothesis import strategies as st
from side_files_made import made, of_folder

from mfs_decompose.source.side_files import NO_FILES
from mfs_decompose.source.stop_ids import find_stop_ids
from mfs_decompose.source.tokenizer_diff import compare_tokenizers
from mfs_decompose.source.tokenizer_facts import UNDERSTOOD, VOCAB, read_tokenizer


def test_a_real_tokenizer_reads_as_transformers_reads_it(family: Family) -> None:
    from transformers import AutoTokenizer

    folder = family.variants["vocab"]
    facts, oracle = read_tokenizer(of_folder(folder)), AutoTokenizer.from_pretrained(folder)
    assert facts.ids == oracle.get_vocab()
    assert len(facts.ids) == 259
    assert facts.added.keys() == set(oracle.get_added_vocab())
    assert facts.special == {"bos_token": oracle.bos_token, "eos_token": oracle.eos_token}
    assert facts.templates == {"default": CHAT_TEMPLATE}
    assert (facts.merges, facts.problems) == ((), ())


def test_every_word_of_the_files_is_in_the_facts(family: Family) -> None:
    """UNDERSTOOD promises it: change any one value of tokenizer.json or its config, and the facts change."""
    files = {path.name: json.loads(path.read_text()) for path in family.base.glob("tokenizer*.json")}
    files["tokenizer.json"]["model"]["vocab"] = {"a": 0, "b": 1}  # the others are no different
    facts = read_tokenizer(made(files))
    paths = [(name, way) for name in files for way in leaves(files[name])]
    assert len(paths) > 20
    for name, way in paths:
        other = json.loads(json.dumps(files))
        place = other[name]
        for key in way[:-1]:
            place = place[key]
        place[way[-1]] = 77 if isinstance(place[way[-1]], int) and not isinstance(place[way[-1]], bool) else "other"
        equal = compare_tokenizers(facts, read_tokenizer(made(other))).equal
        assert equal == (way[-1] in ("is_local", "local_files_only")), (name, way)


def leaves(value: Any) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        return [(key, *way) for key, inner in value.items() for way in leaves(inner)]
    if isinstance(value, list):
        return [(at, *way) for at, inner in enumerate(value) for way in leaves(inner)]
    return [()]


def test_tokenizers_of_old_say_it_in_other_files() -> None:
    facts = read_tokenizer(
        made(
            {
                "vocab.json": {"a": 0, "b": 1},
                "added_tokens.json": {"<x>": 2},
                "special_tokens_map.json": {"eos_token": {"content": "<x>", "lstrip": False}, "pad_token": "<p>"},
                "tokenizer_config.json": {
                    "pad_token": "b",
                    "added_tokens_decoder": {
                        "3": {"__type": "AddedToken", "content": "<y>", "special": True},
                        "four": {"content": "<z>"},
                    },
                    "additional_special_tokens": ["<y>", {"content": "<w>"}],
                    "model_max_length": 5,
                },
            }
        )
    )
    assert facts.ids == {"a": 0, "b": 1, "<x>": 2, "<y>": 3}
    assert facts.special == {"eos_token": "<x>", "pad_token": "b", "additional_special_tokens": ["<y>", "<w>"]}
    assert facts.added == {"<y>": {"special": True}}
    assert facts.settings == {"model_max_length": 5}


def test_tokenizer_json_goes_before_the_others() -> None:
    files = {
        "tokenizer.json": {
            "added_tokens": [{"id": 7, "content": "<x>", "special": True}],
            "model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"], "c d"]},
        },
        "tokenizer_config.json": {"added_tokens_decoder": {"8": {"content": "<x>", "special": False}}},
        "added_tokens.json": {"<x>": 9, "<y>": 10},
    }
    facts = read_tokenizer(made(files))
    assert facts.ids == {"a": 0, "<x>": 7, "<y>": 10}
    assert facts.added == {"<x>": {"special": True}}
    assert facts.merges == ("a b", "c d")
    assert facts.pipeline == {"model": {"type": "BPE"}}


def test_a_unigram_vocabulary_is_a_list_and_its_scores_count() -> None:
    def unigram(score: float) -> Any:
        return read_tokenizer(made({"tokenizer.json": {"model": {"vocab": [["a", 0.0], ["b", score]]}}}))

    assert unigram(-1.5).ids == {"a": 0, "b": 1}
    assert compare_tokenizers(unigram(-1.5), unigram(-1.5)).equal
    (change,) = compare_tokenizers(unigram(-1.5), unigram(-2.5)).pipeline
    assert change.key == "model.scores_sha256"


IN_CONFIG = {"chat_template": "c"}


@pytest.mark.parametrize(
    ("files", "templates"),
    [
        ({"tokenizer_config.json": IN_CONFIG}, {"default": "c"}),
        ({"tokenizer_config.json": IN_CONFIG, "chat_template.json": {"chat_template": "j"}}, {"default": "j"}),
        ({"tokenizer_config.json": IN_CONFIG, "chat_template.jinja": "t"}, {"default": "t"}),
        ({"chat_template.json": {"chat_template": "j"}, "chat_template.jinja": "t"}, {"default": "t"}),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": [
                        {"name": "default", "template": "d"},
                        {"name": "rag", "template": "r"},
                        {"name": 3},
                    ]
                }
            },
            {"default": "d", "rag": "r"},
        ),
        ({"tokenizer_config.json": {"chat_template": 3}}, {}),
    ],
)
def test_templates_stand_in_several_places(files: dict[str, Any], templates: dict[str, str]) -> None:
    assert read_tokenizer(made(files)).templates == templates


def test_files_that_cannot_be_read_are_named() -> None:
    facts = read_tokenizer(
        made({"tokenizer.json": "{", "tokenizer_config.json": "[]", "chat_template.jinja": b"\xff", "vocab.json": "{}"})
    )
    assert [name for name, _ in facts.problems] == ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
    assert (facts.ids, facts.templates) == ({}, {})
    assert compare_tokenizers(read_tokenizer(NO_FILES), read_tokenizer(NO_FILES)).equal


_WORDS = ["model", "vocab", "merges", "added_tokens", "content", "id", "name", "template", "text_config", "1", "²"]
KEYS = [*_WORDS, "eos_token", "eos_token_id", "chat_template", "added_tokens_decoder", "extra_special_tokens"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**40) | st.text("aé\x1b\ud800", max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(KEYS),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(sorted(UNDERSTOOD | {VOCAB, "config.json", "generation_config.json"})), JSON))
def test_any_json_at_all_is_read_without_a_crash(documents: dict[str, Any]) -> None:
    files = made({name: json.dumps(value) for name, value in documents.items()})
    facts = read_tokenizer(files)
    assert all(type(id) is int for id in facts.ids.values())
    difference = compare_tokenizers(facts, read_tokenizer(NO_FILES))
    assert difference.equal == (facts == read_tokenizer(NO_FILES)) or facts.problems
    stops = find_stop_ids(files, facts)
    assert all(type(id) is int and 0 <= id < 2**31 for id in stops.ids)
    json.dumps([stops.warnings, [change.a for change in difference.special]], allow_nan=False)


def test_a_tokenizer_config_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<s>", "name_or_path": "/somewhere"}')
    facts = read_tokenizer(of_folder(tmp_path))
    assert facts.special == {"eos_token": "<s>"}
