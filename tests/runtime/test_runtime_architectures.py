"""Mixed batches of every architecture against fp32 restores run alone in transformers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from runtime_families import Stored, alone, check_logits, few_rows, packed_logits, store_architecture, texts

from mfs_decompose.runtime.batch_plan import FEW_ROWS
from mfs_decompose.runtime.load import LoadedFamily

NAMES = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma3_text",
    "gpt2",
    "mixtral",
    "qwen3_moe",
    "falcon",
)
IDS = ("words", "base", "chat", "words", "base", "chat")


@pytest.fixture(scope="module", params=NAMES)
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Stored:
    return store_architecture(tmp_path_factory.mktemp("architecture"), request.param)


@pytest.fixture(scope="module", params=["together", "apart"])
def family(stored: Stored, request: pytest.FixtureRequest) -> Iterator[LoadedFamily]:
    """Few rows of all variants are answered by programs, or, as many rows are, group by group."""
    with few_rows(FEW_ROWS if request.param == "together" else 0):
        yield stored.load()


def test_a_mixed_batch_answers_as_each_variant_alone(stored: Stored, family: LoadedFamily) -> None:
    models = {id: stored.restored(id) for id in ("base", "chat", "words")}
    asked = texts(len(IDS))
    expected = [alone(models[id], text) for id, text in zip(IDS, asked, strict=True)]
    apart = float((alone(models["chat"], asked[0]) - alone(models["base"], asked[0])).abs().max())
    assert apart > 1e-2, "the variant must not be next to the base"
    for found, wanted in zip(packed_logits(family, IDS, asked), expected, strict=True):
        check_logits(found, wanted)
    ends = [sum(len(text) for text in asked[: at + 1]) - 1 for at in range(len(asked))]
    kept = packed_logits(family, IDS, asked, keep=ends)[0]
    check_logits(kept[[0, 3]], torch.stack([expected[0][-1], expected[3][-1]]))
    check_logits(kept[[1, 2]], torch.stack([expected[1][-1], expected[2][-1]]))
    for id in ("chat", "base", "words"):
        with family.use(id):
            check_logits(alone(family.model, asked[1]), alone(models[id], asked[1]))


def test_reference_ops_answer_alike(stored: Stored, family: LoadedFamily) -> None:
    asked = texts(len(IDS))
    slow, fast = (packed_logits(one, IDS, asked) for one in (stored.load(ops="reference"), family))
    for one, other in zip(slow, fast, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_every_tensor_is_accounted_for(stored: Stored, family: LoadedFamily) -> None:
    from mfs_decompose.artifact.reader import Family

    with Family.open(stored.artifact) as opened:
        for id in opened.variant_ids:
            assert family.variant(id).accounts.keys() == opened.variant(id).tensors.keys()
    assert family.variant("words").vocabulary == 304 > family.variant("chat").vocabulary == 301
    assert family.variant("chat").stop_ids == (2,)


def test_new_tokens_are_looked_up(stored: Stored, family: LoadedFamily) -> None:
    text = [301, 5, 303, 302, 9]
    found = packed_logits(family, ["chat", "words", "base"], [[4, 5, 6], text, [7, 8]])
    check_logits(found[1], alone(stored.restored("words"), text))


def test_no_plan_and_no_foreign_tokens(family: LoadedFamily) -> None:
    from mfs_decompose.errors import UsageError

    with pytest.raises(UsageError, match="none chosen"):
        alone(family.model, [5, 6])
    if family.model.config.model_type != "gpt2":
        width = family.model.get_input_embeddings().weight.shape[1]
        with family.use("chat"), pytest.raises(UsageError, match="without gradients"):
            family.model(inputs_embeds=torch.zeros(1, 3, width, requires_grad=True), use_cache=False)
    with family.use("chat"), pytest.raises(UsageError, match="below 301 for variant slot 0, found 302"):
        alone(family.model, [5, 302])
