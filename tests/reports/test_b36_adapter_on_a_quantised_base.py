"""B36, the base itself: an adapter given with the quantised base is refused, and the unquantised one is asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from adapter_cases import Q, Tensors, draw, factors, merge, refuse, toy_base, write
from adapters import logits_of, merged_weights, write_adapter
from checkpoints import make_llama
from quantised_models import Way, quantise
from report_runs import Notes, back, run

from mfs_decompose.errors import SourceIncompatible
from mfs_decompose.events import NullSink
from mfs_decompose.pipeline.merge_folder import write_merge
from mfs_decompose.source.adapter import resolve_adapter
from mfs_decompose.source.checkpoint import open_checkpoint

WAYS: list[Way] = ["fp8", "gptq", "awq", "nf4"]


def refused(root: Path, tensors: Tensors, base: Path) -> SourceIncompatible:
    write_adapter(root / "again", tensors, {"peft_type": "LORA", "r": 4, "lora_alpha": 10})
    with pytest.raises(SourceIncompatible) as caught:
        merged_weights(root / "again", base)
    assert caught.value.exit_code == 12
    return caught.value


@pytest.mark.parametrize("way", WAYS)
def test_the_unquantised_base_is_asked_for(tmp_path: Path, way: Way) -> None:
    base = {name: draw(name, 16, 32) for name in ("model.embed_tokens.weight", f"{Q}.weight")}
    tensors = factors(Q, 16, 32, 4)
    write(tmp_path, base, tensors, {})
    error = refused(tmp_path, tensors, quantise(tmp_path / "base", tmp_path / "coded", way))
    assert "q_proj" in error.message
    assert "The base is quantised" in (error.hint or "")


def test_other_faults_are_not_laid_on_codes_elsewhere(tmp_path: Path) -> None:
    base = toy_base()
    base |= {"model.other.weight": torch.zeros(8, 8).to(torch.float8_e4m3fn), "model.other.weight_scale": torch.ones(1)}
    merge(tmp_path, base, factors(Q, 12, 8, 4))
    error = refuse(tmp_path, base, factors(Q, 13, 8, 4))
    assert "that the adapter was trained on" in (error.hint or "")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int32])
def test_factors_that_are_no_weights_are_to_be_saved_again(tmp_path: Path, dtype: torch.dtype) -> None:
    error = refuse(tmp_path, toy_base(), {name: value.to(dtype) for name, value in factors(Q, 12, 8, 4).items()})
    assert "which are no weights" in error.message
    assert "Save the adapter again" in (error.hint or "")


class TestTheConfigOfItsTraining:
    """Trainers write the config of the model they trained beside the adapter; of a QLoRA's it says 4-bit codes."""

    def folders(self, root: Path, **changes: object) -> tuple[Path, Path]:
        base = make_llama(root / "base", seed=3)
        module = "model.layers.1.self_attn.q_proj"
        adapter = write_adapter(root / "adapter", factors(module, 56, 64, 4), {"r": 4, "lora_alpha": 10})
        config = json.loads((base / "config.json").read_text())
        (adapter / "config.json").write_text(json.dumps(config | changes))
        return base, adapter

    def test_what_is_restored_is_what_the_base_was(self, tmp_path: Path) -> None:
        base, adapter = self.folders(tmp_path, quantization_config={"load_in_4bit": True}, use_cache=False)
        notes = Notes()
        run(tmp_path / "art", base, {"x": adapter}, sink=notes)
        (note,) = [note for note in notes.notes if "config.json" in note]
        assert note.endswith("differ in quantization_config, use_cache")
        back(tmp_path / "art", "x", tmp_path / "out")
        assert (tmp_path / "out" / "config.json").read_bytes() == (base / "config.json").read_bytes()
        logits_of(tmp_path / "out")

    def test_so_is_its_original(self, tmp_path: Path) -> None:
        base, adapter = self.folders(tmp_path, quantization_config={"load_in_4bit": True})
        write_merge(open_checkpoint(adapter, "x"), open_checkpoint(base, "base"), tmp_path / "merge", NullSink())
        config = json.loads((tmp_path / "merge" / "config.json").read_text())
        assert config == json.loads((base / "config.json").read_text()) | {"dtype": "float32"}

    def test_the_adapter_comes_back_with_its_own(self, tmp_path: Path) -> None:
        base, adapter = self.folders(tmp_path, use_cache=False)
        run(tmp_path / "art", base, {"x": adapter})
        back(tmp_path / "art", "x", tmp_path / "out", form="adapter")
        assert (tmp_path / "out" / "config.json").read_bytes() == (adapter / "config.json").read_bytes()

    def test_a_base_without_one_takes_it(self, tmp_path: Path) -> None:
        base, adapter = self.folders(tmp_path)
        (base / "config.json").unlink()
        run(tmp_path / "art", base, {"x": adapter})
        back(tmp_path / "art", "x", tmp_path / "out")
        assert (tmp_path / "out" / "config.json").read_bytes() == (adapter / "config.json").read_bytes()

    @pytest.mark.parametrize(
        ("changes", "warned", "noted"),
        [
            ({}, False, False),
            ({"transformers_version": "1", "_name_or_path": "x"}, False, False),
            ({"use_cache": False}, False, True),
            ({"max_position_embeddings": 4096}, True, False),
            ({"rope_parameters": {"rope_theta": 3.0, "rope_type": "default"}}, True, False),
        ],
        ids=str,
    )
    def test_it_is_said_aloud(self, tmp_path: Path, changes: dict[str, object], warned: bool, noted: bool) -> None:
        base, adapter = self.folders(tmp_path, **changes)
        found = resolve_adapter(open_checkpoint(adapter, "x"), open_checkpoint(base, "base"))
        said = [any("config.json" in note for note in notes) for notes in (found.warnings, found.notes)]
        assert said == [warned, noted]
