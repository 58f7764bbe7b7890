"""B05: an adapter trained on an expanded vocabulary, given the original base: its embeddings define the new one, or
both sizes are named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from adapter_cases import Q, Tensors, draw, factors, merge, refuse, toy_base

SAVED = {"modules_to_save": ["embed_tokens", "lm_head"]}
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def overrides(rows: int, *names: str) -> Tensors:
    return {f"base_model.model.{name}": draw(name + "new", rows, 8) for name in names}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_whole_embeddings_and_head_define_the_vocabulary(tmp_path: Path, tied: bool, nested: bool) -> None:
    tensors = factors(Q, 12, 8, 4) | overrides(520, EMBED, HEAD)
    config = {"text_config": {"vocab_size": 512, "n": 1}} if nested else {"vocab_size": 512}
    weights, found = merge(tmp_path, toy_base(tied=tied), tensors, SAVED, tie_word_embeddings=tied, **config)
    for name in (EMBED, HEAD):
        assert torch.equal(weights[name], tensors[f"base_model.model.{name}"].double())
        assert found.tensors[name].common_rows == 512
    assert found.tensors[EMBED].kind == "resized"
    assert found.tensors[HEAD].kind == ("tied" if tied else "resized")
    changes = dict(found.config_changes)
    if tied:
        assert changes.pop("tie_word_embeddings") is False
        changes.get("text_config", {}).pop("tie_word_embeddings", None)
    assert changes == ({"text_config": {"vocab_size": 520}} if nested else {"vocab_size": 520})


def test_a_smaller_vocabulary(tmp_path: Path) -> None:
    tensors = factors(Q, 12, 8, 4) | overrides(500, EMBED, HEAD)
    weights, found = merge(tmp_path, toy_base(), tensors, SAVED, vocab_size=512)
    assert weights[EMBED].shape == (500, 8)
    assert (found.tensors[EMBED].common_rows, found.config_changes) == (500, {"vocab_size": 500})


@pytest.mark.parametrize("name", [EMBED, HEAD])
def test_one_of_the_two_alone_names_both_sizes(tmp_path: Path, name: str) -> None:
    error = refuse(tmp_path, toy_base(), factors(Q, 12, 8, 4) | overrides(520, name), SAVED, vocab_size=512)
    assert "520" in error.message
    assert "512" in error.message


def test_a_lora_on_the_larger_head_names_both_sizes(tmp_path: Path) -> None:
    error = refuse(tmp_path, toy_base(), factors("lm_head", 520, 8, 4))
    assert "[520, 8] where the base has [512, 8]" in error.message
    assert "resize_token_embeddings" in (error.hint or "")


def test_a_lora_on_larger_embeddings_that_come_with_them(tmp_path: Path) -> None:
    """PEFT saves the resized embeddings below the LoRA: those are what it is added to."""
    stem = "base_model.model.model.embed_tokens"
    tensors = {
        f"{stem}.lora_embedding_A": draw("a", 4, 520),
        f"{stem}.lora_embedding_B": draw("b", 8, 4),
        f"{stem}.base_layer.weight": draw("w", 520, 8),
        "base_model.model.lm_head.weight": draw("h", 520, 8),
    }
    weights, found = merge(tmp_path, toy_base(), tensors, {}, vocab_size=512)
    product = tensors[f"{stem}.lora_embedding_B"].double() @ tensors[f"{stem}.lora_embedding_A"].double()
    torch.testing.assert_close(weights[EMBED], tensors[f"{stem}.base_layer.weight"].double() + 2.5 * product.mT)
    assert found.config_changes == {"vocab_size": 520}


def test_another_width_is_never_a_vocabulary(tmp_path: Path) -> None:
    tensors = factors(Q, 12, 8, 4) | {f"base_model.model.{EMBED}": draw("x", 520, 9)}
    assert "[520, 9] where the base has [512, 8]" in refuse(tmp_path, toy_base(), tensors, SAVED).message
