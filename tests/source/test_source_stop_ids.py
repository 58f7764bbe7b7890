from __future__ import annotations

from typing import Any

import pytest
from checkpoints import Family
from side_files_made import made, of_folder

from mfs_decompose.source.stop_ids import StopIds, StopSource, find_stop_ids
from mfs_decompose.source.tokenizer_facts import read_tokenizer

CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer_config.json"
WORDS = {"tokenizer.json": {"added_tokens": [{"id": 7, "content": "<|im_end|>"}], "model": {"vocab": {"</s>": 2}}}}


def found(files: dict[str, Any]) -> StopIds:
    held = made(files)
    return find_stop_ids(held, read_tokenizer(held))


def test_all_places_count_in_their_order() -> None:
    stops = found(
        {
            **WORDS,
            GENERATION: {"eos_token_id": [9, 2]},
            CONFIG: {"eos_token_id": 2, "text_config": {"eos_token_id": [11]}},
            TOKENIZER: {"eos_token": {"content": "<|im_end|>"}},
        }
    )
    assert stops.ids == (9, 2, 11, 7)
    assert stops.sources == (
        StopSource(GENERATION, "eos_token_id", (9, 2)),
        StopSource(CONFIG, "eos_token_id", (2,)),
        StopSource(CONFIG, "text_config.eos_token_id", (11,)),
        StopSource(TOKENIZER, "eos_token", (7,), "<|im_end|>"),
    )
    assert stops.warnings == (
        "config.json ends at 11 and generation_config.json at 9, 2 alone: what reads one of them runs past the other",
        "tokenizer_config.json ends at 7 ('<|im_end|>') and generation_config.json at 9, 2 alone: "
        "what reads one of them runs past the other",
    )


def test_a_shorter_list_is_no_contradiction() -> None:
    """As published chat models have it: generation_config.json lists more than the others name."""
    files = {
        **WORDS,
        GENERATION: {"eos_token_id": [2, 7]},
        CONFIG: {"eos_token_id": 2},
        TOKENIZER: {"eos_token": "</s>"},
    }
    assert (found(files).ids, found(files).warnings) == ((2, 7), ())


def test_the_first_place_that_says_something_is_the_one_contradicted() -> None:
    stops = found(
        {**WORDS, CONFIG: {"eos_token_id": 2}, GENERATION: {"temperature": 1}, TOKENIZER: {"eos_token": "<|im_end|>"}}
    )
    assert stops.ids == (2, 7)
    assert [w.split(":")[0] for w in stops.warnings] == [
        "tokenizer_config.json ends at 7 ('<|im_end|>') and config.json at 2 alone"
    ]


@pytest.mark.parametrize(
    "files", [{}, {CONFIG: {}}, {CONFIG: {"eos_token_id": None}}, {TOKENIZER: {"eos_token": None}}]
)
def test_a_model_may_name_none(files: dict[str, Any]) -> None:
    assert found(files) == StopIds((), (), ())


def test_a_real_variant(family: Family) -> None:
    files = of_folder(family.variants["math"])
    stops = find_stop_ids(files, read_tokenizer(files))
    assert (stops.ids, stops.warnings) == ((256,), ())
    assert [(one.file, one.token) for one in stops.sources] == [
        (GENERATION, None),
        (CONFIG, None),
        (TOKENIZER, "<|end|>"),
    ]


@pytest.mark.parametrize("place", ["added_tokens.json", "vocab.json"])
def test_the_token_is_looked_up_wherever_tokens_stand(place: str) -> None:
    assert found({place: {"<e>": 5}, TOKENIZER: {"eos_token": "<e>"}}).ids == (5,)
    assert found({place: {"<e>": 5}, "special_tokens_map.json": {"eos_token": "<e>"}}).sources == (
        StopSource("special_tokens_map.json", "eos_token", (5,), "<e>"),
    )


@pytest.mark.parametrize("value", ["2", True, -1, 2.0, 2**31, [None], {"a": 1}, [[2]]])
def test_what_is_no_id_is_named_and_not_used(value: object) -> None:
    stops = found({CONFIG: {"eos_token_id": value}})
    assert stops.ids == ()
    assert stops.warnings == (f"config.json: expected eos_token_id to be an id or a list of ids, found {value!r}",)


def test_the_good_ids_of_a_bad_list_count() -> None:
    stops = found({GENERATION: {"eos_token_id": [3, "x" * 99, 3]}})
    assert stops.ids == (3,)
    assert stops.warnings[0].endswith("...")
    assert found({GENERATION: {"eos_token_id": [3, 3]}}).warnings == ()


def test_a_token_that_is_none_of_the_vocabulary() -> None:
    stops = found({**WORDS, TOKENIZER: {"eos_token": "<nope>"}})
    assert stops.warnings == ("tokenizer_config.json: the eos_token '<nope>' is no token of the vocabulary",)
    assert found({TOKENIZER: {"eos_token": "<nope>"}}).warnings == ()  # its vocabulary is in a file we do not open


def test_files_that_cannot_be_read_name_none() -> None:
    stops = found({CONFIG: "{", GENERATION: "[]"})
    assert stops.ids == ()
    assert stops.warnings == (
        "generation_config.json cannot be read: expected a JSON object, found list",
        "config.json cannot be read: it is not JSON (Expecting property name enclosed in double quotes at character 1)",
    )


def test_many_ids_are_cut() -> None:
    stops = found({CONFIG: {"eos_token_id": list(range(5000))}})
    assert len(stops.ids) == 1000
    more = found({GENERATION: {"eos_token_id": 0}, CONFIG: {"eos_token_id": list(range(20))}})
    assert "1, 2, 3, 4, 5, 6, 7, 8 and 11 more" in more.warnings[0]
