from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import pytest
import torch
from fidelity_models import make_model, make_tokenizer, save
from safetensors.torch import load_file, save_file

from mfs_decompose.errors import ArtifactInvalid, ResourceShortage, SourceIncompatible, SourceNotFound
from mfs_decompose.fidelity.model import load_model, predict_windows
from mfs_decompose.fidelity.settings import EvalSettings
from mfs_decompose.fidelity.windows import Window

SETTINGS = EvalSettings()


@pytest.fixture
def folder(family: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(family["original"], tmp_path / "model"))


def edit_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    weights = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        if tensor is None:
            del weights[name]
        else:
            weights[name] = tensor
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_loads_float32_in_eval_mode_with_the_asked_attention(family: dict[str, Path]) -> None:
    model = load_model(family["original"], "original", SETTINGS)
    assert not model.network.training
    assert {weight.dtype for weight in model.network.parameters()} == {torch.float32}
    assert model.network.config._attn_implementation == "eager"
    assert (model.vocabulary, model.max_positions) == (131, 64)
    other = load_model(family["original"], "original", EvalSettings(dtype="bfloat16", attention="sdpa"))
    assert other.network.dtype == torch.bfloat16
    assert other.network.config._attn_implementation == "sdpa"


def test_loads_without_a_word_and_leaves_the_settings_of_transformers(
    family: dict[str, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    load_model(family["near"], "served", SETTINGS)
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def test_loads_without_network(family: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("network used")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    load_model(family["original"], "original", SETTINGS)


def test_equal_weights_give_equal_logits_whatever_dtype_the_file_has(family: dict[str, Path]) -> None:
    # float32 files are mapped at addresses that are no multiple of 64; matrix products may round by alignment.
    narrow = load_model(family["original"], "original", SETTINGS)
    wide = load_model(family["widened"], "served", SETTINGS)
    assert all(weight.data_ptr() % 64 == 0 for weight in wide.network.parameters())
    window = Window(0, tuple(range(3, 60)), tuple(range(4, 61)), 0)
    (left,), (right,) = predict_windows(narrow, [window]), predict_windows(wide, [window])
    # `widened` was saved from unrounded weights, so compare against the same weights rounded.
    assert left.shape == right.shape == (57, 131)
    narrowed = {name: weight.bfloat16().float() for name, weight in wide.network.state_dict().items()}
    wide.network.load_state_dict(narrowed)
    assert torch.equal(left, predict_windows(wide, [window])[0])


def test_tied_heads_are_not_missing(tmp_path: Path) -> None:
    tied = save(make_model(tied=True), tmp_path / "tied")
    assert "lm_head.weight" not in load_file(tied / "model.safetensors")
    model = load_model(tied, "restored", SETTINGS)
    assert model.network.get_output_embeddings().weight is model.network.get_input_embeddings().weight


def test_shards_load(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path / "sharded", max_shard_size="60KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    assert load_model(tmp_path / "sharded", "original", SETTINGS).vocabulary == 131


def test_logits_stand_at_the_positions_that_predict_the_targets(family: dict[str, Path]) -> None:
    model = load_model(family["original"], "original", SETTINGS)
    tokens = torch.arange(20, 31)
    with torch.no_grad():
        whole = model.network(tokens[None]).logits[0]
    window = Window(0, tuple(tokens[:-1].tolist()), tuple(tokens[-4:].tolist()), 0)
    (found,) = predict_windows(model, [window])
    torch.testing.assert_close(found, whole[-5:-1], rtol=1e-4, atol=1e-4)


def test_padding_is_never_seen(family: dict[str, Path]) -> None:
    model = load_model(family["original"], "original", SETTINGS)
    windows = [Window(0, tuple(range(5, 5 + n)), tuple(range(6, 6 + n)), 0) for n in (40, 3, 17)]
    for window, together in zip(windows, predict_windows(model, windows), strict=True):
        (alone,) = predict_windows(model, [window])
        assert together.shape == alone.shape
        torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("role", "kind"), [("original", SourceIncompatible), ("restored", ArtifactInvalid)])
def test_wrong_tensors_are_named(folder: Path, role: str, kind: type[Exception]) -> None:
    edit_weights(
        folder,
        **{
            "model.norm.weight": None,
            "extra.weight": torch.ones(3),
            "model.layers.0.mlp.up_proj.weight": torch.ones(79, 48),
        },
    )
    with pytest.raises(kind) as caught:
        load_model(folder, role, SETTINGS)
    message = str(caught.value)
    assert "missing model.norm.weight" in message
    assert "unexpected extra.weight" in message
    assert "of another shape model.layers.0.mlp.up_proj.weight [79, 48] instead of [80, 48]" in message


def test_many_wrong_tensors_are_counted(folder: Path) -> None:
    edit_weights(folder, **{f"extra.{i}": torch.ones(1) for i in range(9)})
    with pytest.raises(SourceIncompatible, match=r"extra\.0, extra\.1, extra\.2, extra\.3, extra\.4 and 4 more"):
        load_model(folder, "base", SETTINGS)


def test_a_missing_head_is_missing_where_nothing_ties_it(folder: Path) -> None:
    edit_weights(folder, **{"lm_head.weight": None})
    with pytest.raises(ArtifactInvalid, match=r"missing lm_head\.weight"):
        load_model(folder, "served", SETTINGS)


@pytest.mark.parametrize(("role", "kind"), [("base", SourceIncompatible), ("served", ArtifactInvalid)])
def test_unreadable_weights(folder: Path, role: str, kind: type[Exception]) -> None:
    (folder / "model.safetensors").write_bytes(b"<html>not here</html>")
    with pytest.raises(kind, match=f"transformers cannot load the {role} checkpoint"):
        load_model(folder, role, SETTINGS)


def test_no_weights_and_pickles_are_refused(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    with pytest.raises(SourceIncompatible):
        load_model(folder, "original", SETTINGS)
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(SourceIncompatible):
        load_model(folder, "original", SETTINGS)


def test_code_of_the_folder_is_never_run(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.update(model_type="foreign", auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(SourceIncompatible, match="transformers cannot load"):
        load_model(folder, "original", SETTINGS)
    assert not (tmp_path / "ran").exists()


def test_not_a_checkpoint_folder(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(SourceNotFound, match="expected the served checkpoint in a folder"):
        load_model(tmp_path / "nowhere", "served", SETTINGS)
    with pytest.raises(SourceNotFound, match=r"expected config\.json in the base checkpoint"):
        load_model(tmp_path, "base", SETTINGS)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(SourceIncompatible, match="found an adapter"):
        load_model(folder, "original", SETTINGS)


def test_a_config_of_the_wrong_kind(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llama", "hidden_size": "wide"}')
    with pytest.raises(SourceIncompatible, match="transformers cannot load the original checkpoint"):
        load_model(folder, "original", SETTINGS)


def test_running_out_of_memory_is_a_shortage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    def exhaust(*_: object, **__: object) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", exhaust)
    with pytest.raises(ResourceShortage, match="not enough memory to load the original checkpoint"):
        load_model(folder, "original", SETTINGS)


def test_tokenizer_files_are_not_needed(family: dict[str, Path], tmp_path: Path) -> None:
    assert not (family["near"] / "tokenizer.json").exists()
    make_tokenizer(bos=True).save_pretrained(tmp_path)
    assert load_model(family["near"], "served", SETTINGS).role == "served"
