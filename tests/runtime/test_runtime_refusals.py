"""What cannot be served is refused by name while it is loaded; what can, though a config says otherwise, is served."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import build, fine_tune, load, save
from checkpoints import fine_tune as tune
from checkpoints import make_llama
from runtime_families import Stored, alone, check_logits, edit_json, packed_logits, store, texts

from mfs_decompose.errors import MfsError, SourceIncompatible, UsageError
from mfs_decompose.runtime.load import load_family


def family_of(root: Path, base: Path, **changes: object) -> Stored:
    """A fine-tune whose config.json says otherwise than its base's, beside one that does not."""
    own = tune(base, root / "own", seed=2)
    edit_json(own / "config.json", **changes)
    return store(root, base, {"own": own, "plain": tune(base, root / "plain", seed=3)})


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return make_llama(tmp_path / "base", seed=1)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rms_norm_eps": 1e-3}, "rms_norm_eps 0.001 instead of 1e-06"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' instead of 'silu'"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "type dynamic"),
    ],
)
def test_other_maths_is_refused_by_key(tmp_path: Path, base: Path, changes: dict[str, object], named: str) -> None:
    stored = family_of(tmp_path, base, **changes)
    with pytest.raises(SourceIncompatible, match=named) as raised:
        stored.load()
    assert "'own'" in str(raised.value)
    assert stored.load(variants=["plain"]).variants.keys() == {"base", "plain"}


def test_keys_without_an_effect_are_let_pass(tmp_path: Path, base: Path) -> None:
    stored = family_of(tmp_path, base, attention_dropout=0.3, eos_token_id=7, unsloth_version="1", use_cache=False)
    family = stored.load()
    # generation_config.json comes first; both count.
    assert family.variant("own").stop_ids == (256, 7)
    assert family.variant("base").stop_ids == (256,)
    assert family.variant("own").generation["eos_token_id"] == [256]
    assert family.variant("own").load_tokenizer().eos_token == "<|end|>"


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 5e5},
        {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 32},
    ],
)
def test_rotary_embeddings_of_its_own(tmp_path: Path, base: Path, rope: dict[str, object]) -> None:
    stored = family_of(tmp_path, base, rope_parameters=rope)
    family = stored.load()
    ids = ("own", "base", "plain", "own")
    models = {id: stored.restored(id) for id in set(ids)}
    asked = texts(4, below=250)
    for text, id, found in zip(asked, ids, packed_logits(family, ids, asked), strict=True):
        check_logits(found, alone(models[id], text))
    with family.use("own"):
        check_logits(alone(family.model, asked[0]), alone(models["own"], asked[0]))


def test_tied_and_untied_heads_in_one_family(tmp_path: Path, base: Path) -> None:
    variants = {
        "tied": tune(base, tmp_path / "tied", seed=2),
        "untied": tune(base, tmp_path / "untied", seed=3, tie=False),
        "grown": tune(base, tmp_path / "grown", seed=4, kind="vocab"),
    }
    check_family(store(tmp_path, base, variants))


def test_a_tied_variant_of_an_untied_base(tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base", seed=1, tie=False)
    variants = {"tied": tune(base, tmp_path / "tied", seed=2, tie=True), "own": tune(base, tmp_path / "own", seed=3)}
    check_family(store(tmp_path, base, variants))


def test_a_smaller_vocabulary(tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base", seed=1, vocab=300)
    small = load(tune(base, tmp_path / "tuned", seed=2))
    small.resize_token_embeddings(280)
    variants = {"small": save(small, tmp_path / "small", "small"), "own": tune(base, tmp_path / "own", seed=3)}
    check_family(store(tmp_path, base, variants))


def check_family(stored: Stored) -> None:
    family = stored.load()
    ids = [*family.variants, *reversed(family.variants)]
    asked = texts(len(ids), below=250)
    models = {id: stored.restored(id) for id in family.variants}
    for id, text, found in zip(ids, asked, packed_logits(family, ids, asked), strict=True):
        check_logits(found, alone(models[id], text))


@pytest.mark.parametrize("norms_only", [True, False])
def test_changed_norms_alone(tmp_path: Path, base: Path, norms_only: bool) -> None:
    kind: Any = "norms" if norms_only else "dense"
    stored = store(tmp_path, base, {"own": tune(base, tmp_path / "own", seed=2, kind=kind, scale=0.2)})
    check_family(stored)
    if norms_only:
        assert set(stored.load().memory().variants["own"]) == {"whole parameters"}


def test_another_architecture_is_refused(tmp_path: Path, base: Path) -> None:
    from transformers import MistralConfig

    config = json.loads((base / "config.json").read_text())
    sizes = {key: config[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    heads = {key: config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")}
    other = build(MistralConfig(**sizes, **heads, tie_word_embeddings=True), seed=5)
    other.load_state_dict(load(base).state_dict())
    fine_tune(other, 6)
    stored = store(tmp_path, base, {"other": save(other, tmp_path / "other", "other")})
    with pytest.raises(SourceIncompatible, match="architecture llama, found mistral"):
        stored.load()


def test_requests_that_make_no_sense(tmp_path: Path, base: Path) -> None:
    stored = family_of(tmp_path, base)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"variants": ["owl"]}, "found 'owl'"),
        ({"device": "tp"}, "found tensor parallelism"),
        ({"device": "mps"}, "found 'mps'"),
        ({"dtype": "int8"}, "found 'int8'"),
        ({"ops": "fast"}, "found ops 'fast'"),
    ]
    for options, match in wrong:
        with pytest.raises(UsageError, match=match):
            load_family(stored.artifact, **options)
    with pytest.raises(UsageError, match="found 'plain'"):
        stored.load(variants=["own"]).use("plain")


def test_several_processes_are_refused(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = family_of(tmp_path, base)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(UsageError, match="tensor parallelism"):
        stored.load()


def test_an_artifact_without_a_config_is_refused(tmp_path: Path, base: Path) -> None:
    plain = tune(base, tmp_path / "plain", seed=3)
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copyfile(base / "model.safetensors", bare / "model.safetensors")
    with pytest.raises(MfsError, match=r"config\.json of 'base'"):
        store(tmp_path, bare, {"plain": plain}).load()


def test_a_base_in_bf16_answers_nearly_so(tmp_path: Path, base: Path) -> None:
    stored = family_of(tmp_path, base)
    family = stored.load(dtype="bfloat16")
    assert family.memory().base < 0.6 * stored.load().memory().base
    wanted = alone(stored.restored("own"), texts(1, below=250)[0])
    with family.use("own"):
        found = alone(family.model, texts(1, below=250)[0])
    assert found.dtype == torch.bfloat16
    assert float((found.float() - wanted).abs().max()) < 0.05 * float(wanted.std())
