"""B07: on a tied base an adapter changes embedding and head differently: both are written, and the config says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_cases import Q, Tensors, delta, draw, factors, merge, refuse, toy_base

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
EMBED_KEY, HEAD_KEY = f"base_model.model.{EMBED}", f"base_model.model.{HEAD}"


def embedding_factors() -> Tensors:
    stem = "base_model.model.model.embed_tokens"
    return {f"{stem}.lora_embedding_A": draw("a", 4, 512), f"{stem}.lora_embedding_B": draw("b", 8, 4)}


def tied(root: Path, tensors: Tensors, config: dict[str, Any], **base_config: Any) -> tuple[Tensors, Any, torch.Tensor]:
    base = toy_base(tied=True)
    flags = {"tie_word_embeddings": True, **base_config}
    weights, found = merge(root, base, tensors, config, **flags)
    return weights, found, base[EMBED].double()


def test_copies_of_both(tmp_path: Path) -> None:
    tensors = {EMBED_KEY: draw("e", 512, 8), HEAD_KEY: draw("h", 512, 8)}
    weights, found, _ = tied(tmp_path, tensors, {"modules_to_save": ["embed_tokens", "lm_head"]})
    assert torch.equal(weights[EMBED], tensors[EMBED_KEY].double())
    assert torch.equal(weights[HEAD], tensors[HEAD_KEY].double())
    assert found.config_changes == {"tie_word_embeddings": False}
    assert any("tie_word_embeddings false" in note for note in found.notes)


def test_a_lora_on_the_head_leaves_the_embeddings(tmp_path: Path) -> None:
    tensors = factors("lm_head", 512, 8, 4)
    weights, found, shared = tied(tmp_path, tensors, {})
    assert torch.equal(weights[EMBED], shared)
    assert found.tensors[EMBED].params is None
    torch.testing.assert_close(weights[HEAD], shared + delta(tensors, "lm_head", 2.5))
    head = found.tensors[HEAD]
    assert (head.kind, head.base.name, head.common_rows) == ("tied", EMBED, 512)
    assert found.config_changes == {"tie_word_embeddings": False}


@pytest.mark.parametrize("way", ["lora", "copy"])
def test_a_change_of_the_embeddings_leaves_the_head(tmp_path: Path, way: str) -> None:
    tensors = embedding_factors() if way == "lora" else factors(Q, 12, 8, 4) | {EMBED_KEY: draw("e", 512, 8)}
    weights, found, shared = tied(tmp_path, tensors, {"modules_to_save": ["embed_tokens"]} if way == "copy" else {})
    assert torch.equal(weights[HEAD], shared)
    assert (found.tensors[HEAD].kind, found.tensors[HEAD].params) == ("tied", None)
    assert not torch.equal(weights[EMBED], shared)


def test_ensured_tying_keeps_them_one(tmp_path: Path) -> None:
    weights, found, _ = tied(tmp_path, embedding_factors(), {"ensure_weight_tying": True})
    assert HEAD not in weights
    assert found.config_changes == {}


def test_what_replaces_the_shared_tensor_itself_changes_both(tmp_path: Path) -> None:
    """Embeddings that PEFT saved because they were resized: no module has a copy of its own."""
    for at, key in enumerate((EMBED_KEY, HEAD_KEY)):
        tensors = factors(Q, 12, 8, 4) | {key: draw("e", 520, 8)}
        weights, found, _ = tied(tmp_path / str(at), tensors, {}, vocab_size=512)
        assert torch.equal(weights[EMBED], tensors[key].double())
        assert HEAD not in weights
        assert found.config_changes == {"vocab_size": 520}


def test_a_lora_over_replaced_embeddings(tmp_path: Path) -> None:
    """The head keeps what lies below the LoRA, which is the adapter's copy."""
    below = draw("below", 512, 8)
    tensors = embedding_factors() | {"base_model.model.model.embed_tokens.base_layer.weight": below}
    weights, _, _ = tied(tmp_path, tensors, {})
    assert torch.equal(weights[HEAD], below.double())
    assert not torch.equal(weights[EMBED], below.double())


def test_a_tied_base_that_stores_its_head(tmp_path: Path) -> None:
    base = toy_base(tied=True)
    base[HEAD] = base[EMBED].clone()
    weights, found = merge(tmp_path, base, embedding_factors(), {}, tie_word_embeddings=True)
    assert torch.equal(weights[HEAD], base[HEAD].double())
    assert found.tensors[HEAD].kind == "same"
    assert found.config_changes == {"tie_word_embeddings": False}


def test_the_flag_is_set_where_the_model_looks_for_it(tmp_path: Path) -> None:
    config: dict[str, Any] = {"text_config": {"tie_word_embeddings": True, "hidden_size": 8}}
    _, found, _ = tied(tmp_path, factors("lm_head", 512, 8, 4), {}, **config)
    assert found.config_changes == {"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": False}}


def test_an_architecture_that_computes_otherwise_when_untied_is_refused(tmp_path: Path) -> None:
    base = toy_base(tied=True)
    base["shared.weight"] = base.pop(EMBED)
    error = refuse(tmp_path, base, factors("lm_head", 512, 8, 4), {}, is_encoder_decoder=True)
    assert "cannot write apart" in error.message


@pytest.mark.parametrize("architecture", ["BertForMaskedLM", "LlamaModel"])
def test_a_head_of_another_name_or_none(tmp_path: Path, architecture: str) -> None:
    config = {"architectures": [architecture]}
    if architecture == "LlamaModel":
        weights, found = merge(tmp_path, toy_base(tied=True), embedding_factors(), {}, **config)
        assert HEAD not in weights
        assert found.config_changes == {}
    else:
        assert "cannot write apart" in refuse(tmp_path, toy_base(tied=True), embedding_factors(), {}, **config).message


def test_several_embeddings_of_which_one_is_changed(tmp_path: Path) -> None:
    base = toy_base(tied=True) | {"decoder.embed_tokens.weight": draw("d", 512, 8)}
    assert "may be tied" in refuse(tmp_path, base, embedding_factors(), {}).message
    weights, _ = merge(tmp_path / "apart", base, embedding_factors(), {}, tie_word_embeddings=False)
    assert sorted(weights) == sorted(base)


@pytest.mark.parametrize("flag", [[1], {"a": 1}, "yes", None, 2])
def test_a_flag_that_is_none_is_no_crash(tmp_path: Path, flag: object) -> None:
    _, found, _ = tied(tmp_path, factors("lm_head", 512, 8, 4), {}, tie_word_embeddings=flag, text_config=[flag])
    assert found.config_changes["tie_word_embeddings"] is False
