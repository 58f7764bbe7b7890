"""What a row gets depends on its own variant alone, bit for bit, and nothing that is asked changes the base."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from runtime_families import Stored, alone, few_rows, packed_logits, store_architecture, texts

from mfs_decompose.runtime.batch_plan import FEW_ROWS
from mfs_decompose.runtime.load import LoadedFamily

NAMES = ("gpt2", "gemma3_text", "qwen3_moe")


@pytest.fixture(scope="module", params=NAMES)
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Stored:
    return store_architecture(tmp_path_factory.mktemp("neighbours"), request.param)


@pytest.fixture(scope="module", params=["together", "apart"])
def family(stored: Stored, request: pytest.FixtureRequest) -> Iterator[LoadedFamily]:
    """Few rows of all variants are answered by programs, or, as many rows are, group by group."""
    with few_rows(FEW_ROWS if request.param == "together" else 0):
        yield stored.load()


def test_neighbours_of_other_variants_change_no_bit(family: LoadedFamily) -> None:
    asked = texts(4)
    ids = ("chat", "base", "words")
    for own in ids:
        # Its own group stays as it is: more rows of it would be a product of another shape.
        one, other = (id for id in ids if id != own)
        pairs = ((one, other), (other, one), (one, one), (other, other))
        found = [packed_logits(family, [first, own, second, first], asked)[1] for first, second in pairs]
        for other in found[1:]:
            assert torch.equal(found[0], other)


def test_neighbours_of_other_texts_change_no_bit(family: LoadedFamily) -> None:
    asked = texts(3)
    other = [[300 - token for token in text] for text in asked]
    ids = ["chat", "words", "base"]
    first = packed_logits(family, ids, asked)
    second = packed_logits(family, ids, [other[0], asked[1], other[2]])
    assert torch.equal(first[1], second[1])
    assert not torch.equal(first[0], second[0])


def test_answers_of_variants_keep_the_base(family: LoadedFamily) -> None:
    asked = texts(3)
    digest, held = family.base_digest(), family.memory()
    first = packed_logits(family, ["base"] * 3, asked)
    for turn in range(12):
        packed_logits(family, [["chat", "words", "base"][(turn + at) % 3] for at in range(3)], asked)
        with family.use(("chat", "words")[turn % 2]):
            alone(family.model, asked[0])
    assert family.base_digest() == digest
    assert family.memory() == held
    for before, after in zip(first, packed_logits(family, ["base"] * 3, asked), strict=True):
        assert torch.equal(before, after)


def test_base_rows_change_no_bit_whatever_lies_about_them(family: LoadedFamily) -> None:
    asked = texts(3)
    pairs = (("chat", "words"), ("words", "chat"), ("chat", "chat"), ("words", "words"))
    found = [packed_logits(family, [first, "base", second], asked)[1] for first, second in pairs]
    for other in found[1:]:
        assert torch.equal(found[0], other)
    if family.model.config.model_type != "qwen3_moe":  # experts take the rows of a group at a time
        assert torch.equal(found[0], packed_logits(family, ["base"] * 3, asked)[1])


def test_a_failed_call_leaves_the_family_as_it_was(family: LoadedFamily) -> None:
    asked = texts(2)
    before = packed_logits(family, ["words", "chat"], asked)
    with pytest.raises(Exception, match="token ids below"):
        packed_logits(family, ["words", "chat"], [asked[0], [303]])
    for one, other in zip(before, packed_logits(family, ["words", "chat"], asked), strict=True):
        assert torch.equal(one, other)
