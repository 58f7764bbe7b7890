"""B52 (the source's part): an adapter with added tokens brings its own tokenizer and rows, and the vocabulary grows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from adapter_cases import Q, Tensors, draw, factors, merge, refuse, toy_base, write
from adapters import merged_weights

from mfs_decompose.source.checkpoint import open_checkpoint

EMBED = "model.embed_tokens.weight"
DELTA = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"


def tokens(count: int) -> Tensors:
    return factors(Q, 12, 8, 4) | {DELTA: draw("t", count, 8)}


def test_its_tokenizer_is_its_own(tmp_path: Path) -> None:
    saved = {f"base_model.model.{name}": draw(name, 515, 8) for name in (EMBED, "lm_head.weight")}
    config = {"modules_to_save": ["embed_tokens", "lm_head"]}
    write(tmp_path, toy_base(), factors(Q, 12, 8, 4) | saved, config, vocab_size=512)
    for name in ("tokenizer.json", "tokenizer_config.json", "added_tokens.json", "chat_template.jinja"):
        (tmp_path / "adapter" / name).write_text("{}")
    sidecars = [sidecar.name for sidecar in open_checkpoint(tmp_path / "adapter", "x").sidecars]
    assert sidecars == [
        "adapter_config.json",
        "added_tokens.json",
        "chat_template.jinja",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    weights, found = merged_weights(tmp_path / "adapter", tmp_path / "base")
    assert weights[EMBED].shape == (515, 8)
    assert found.config_changes == {"vocab_size": 515}


def test_trained_rows_of_a_tied_base_grow_it(tmp_path: Path) -> None:
    base, tensors = toy_base(tied=True), tokens(4)
    config = {"trainable_token_indices": [513, 512, 7, 514]}
    weights, found = merge(tmp_path, base, tensors, config, vocab_size=512, tie_word_embeddings=True)
    expected = torch.cat([base[EMBED].double(), torch.zeros(3, 8, dtype=torch.float64)])
    expected[[513, 512, 7, 514]] = tensors[DELTA].double()
    assert torch.equal(weights[EMBED], expected)
    assert (found.tensors[EMBED].kind, found.tensors[EMBED].common_rows) == ("resized", 512)
    assert found.config_changes == {"vocab_size": 515}
    assert "lm_head.weight" not in weights


@pytest.mark.parametrize(
    ("rows", "gist"), [([512, 514], "trains token 514, and the base has 512 tokens"), ([1], "2, 8] for 1 tokens")]
)
def test_rows_that_are_not_all_there(tmp_path: Path, rows: list[int], gist: str) -> None:
    error = refuse(tmp_path, toy_base(tied=True), tokens(2), {"trainable_token_indices": rows})
    assert gist in error.message


def test_an_untied_head_without_the_new_rows(tmp_path: Path) -> None:
    error = refuse(tmp_path, toy_base(), tokens(1), {"trainable_token_indices": [512]}, tie_word_embeddings=False)
    assert "with 513 tokens and lm_head.weight with 512" in error.message


def test_rows_that_the_config_does_not_name(tmp_path: Path) -> None:
    assert "no trainable_token_indices" in refuse(tmp_path, toy_base(), tokens(1)).message


class TestTokensWithoutEmbeddings:
    def warnings(self, root: Path, base_tokens: int, own_tokens: int | None, file: str = "tokenizer.json") -> list[str]:
        write(root, toy_base(), factors(Q, 12, 8, 4), {})
        for folder, count in (("base", base_tokens), ("adapter", own_tokens)):
            ids = {f"<{id}>": id for id in range(count or 0)}
            document = {"model": {"vocab": ids}} if file == "tokenizer.json" else ids
            if count is not None:
                (root / folder / file).write_text(json.dumps(document))
        _, found = merged_weights(root / "adapter", root / "base")
        return list(found.warnings)

    @pytest.mark.parametrize("file", ["tokenizer.json", "added_tokens.json"])
    def test_they_are_named(self, tmp_path: Path, file: str) -> None:
        (warning,) = self.warnings(tmp_path, 512, 515, file)
        assert "3 tokens beyond the 512 rows of the embeddings: <512>, <513>, <514>;" in warning

    @pytest.mark.parametrize(
        ("base_tokens", "own_tokens"), [(512, 512), (500, 512), (512, None), (515, 515), (520, 515)], ids=str
    )
    def test_nothing_is_said_of_a_padded_vocabulary_or_what_the_base_has_as_well(
        self, tmp_path: Path, base_tokens: int, own_tokens: int | None
    ) -> None:
        assert self.warnings(tmp_path, base_tokens, own_tokens) == []

    def test_rows_that_it_brings_count(self, tmp_path: Path) -> None:
        saved = {f"base_model.model.{name}": draw(name, 515, 8) for name in (EMBED, "lm_head.weight")}
        write(tmp_path, toy_base(), factors(Q, 12, 8, 4) | saved, {"modules_to_save": ["embed_tokens", "lm_head"]})
        ids = {f"<{id}>": id for id in range(515)}
        (tmp_path / "adapter" / "tokenizer.json").write_text(json.dumps({"model": {"vocab": ids}}))
        _, found = merged_weights(tmp_path / "adapter", tmp_path / "base")
        assert found.warnings == ()
