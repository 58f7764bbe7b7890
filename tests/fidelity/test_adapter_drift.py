"""The drift of an adapter: against its fp32 merge, made of its own folder and its base."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from adapters import make_adapter
from checkpoints import make_llama
from safetensors.torch import load_file, save_file

from mfs_decompose.errors import SourceIncompatible
from mfs_decompose.events import NullSink
from mfs_decompose.fidelity.artifact_drift import DriftRequest, measure_artifact, save_artifact_reference
from mfs_decompose.fidelity.self_check import check_measurement
from mfs_decompose.fidelity.settings import EvalSettings
from mfs_decompose.fidelity.text import Corpus
from mfs_decompose.pipeline.decompose import decompose
from mfs_decompose.pipeline.request import DecomposeRequest
from mfs_decompose.recipe.load import load_recipe

PROSE = Corpus("prose", ("The quick brown fox jumps over the lazy dog, and sleeps in the sun.", "So it goes."))


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """An artifact of one adapter on a bf16 base, the adapter's folder, and the base's."""
    root = tmp_path_factory.mktemp("stored")
    base = make_llama(root / "base", seed=7)
    from adapters import Kind

    kind = Kind("tied", {"r": 3, "lora_alpha": 7, "target_modules": ["q_proj", "v_proj", "down_proj", "lm_head"]})
    made = make_adapter(root, kind, base)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(base / name, made.adapter / name)
    request = DecomposeRequest({"tuned": str(made.adapter)}, root / "art", load_recipe(None, {}), base=str(base))
    decompose(replace(request, threads=1, device="cpu"))
    return root / "art", made.adapter, base


def asked(artifact: Path, scratch: Path) -> DriftRequest:
    scratch.mkdir()
    return DriftRequest(artifact, [PROSE], EvalSettings(window=32, max_tokens=60), ("served", "restored"), scratch)


def test_what_is_served_is_the_merge_and_a_restore_rounds_it(stored: tuple[Path, Path, Path], tmp_path: Path) -> None:
    (served, restored), _ = measure_artifact(asked(stored[0], tmp_path / "s"), NullSink())
    assert 0.0 <= (served.kl_mean or 0.0) < 1e-9 and served.ppl_x == pytest.approx(served.ppl_original, rel=1e-5)
    (same, _), _ = measure_artifact(replace(asked(stored[0], tmp_path / "r"), engine="restore"), NullSink())
    assert same.kl_mean == 0.0 and same.ppl_x == same.ppl_original
    assert 0.0 < restored.kl_mean < 0.05 * (restored.kl_base or 0.0)
    assert served.kl_base is not None and served.kl_base > 0.0


def test_it_is_measured_against_its_own_folder(stored: tuple[Path, Path, Path], tmp_path: Path) -> None:
    other = Path(shutil.copytree(stored[1], tmp_path / "other"))
    tensors = load_file(other / "adapter_model.safetensors")
    name = next(iter(tensors))
    tensors[name] = tensors[name] + 1.0
    save_file(tensors, other / "adapter_model.safetensors")
    request = replace(asked(stored[0], tmp_path / "s"), originals={"tuned": str(other)})
    with pytest.raises(SourceIncompatible, match="is not the original of variant 'tuned': tensor"):
        measure_artifact(request, NullSink())


def test_its_config_says_what_its_factors_mean(stored: tuple[Path, Path, Path], tmp_path: Path) -> None:
    other = Path(shutil.copytree(stored[1], tmp_path / "other"))
    config = json.loads((other / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 14}))
    request = replace(asked(stored[0], tmp_path / "s"), originals={"tuned": str(other)})
    with pytest.raises(SourceIncompatible, match=r"adapter_config\.json differs"):
        measure_artifact(request, NullSink())


def test_a_saved_reference_stands_for_it(stored: tuple[Path, Path, Path], tmp_path: Path) -> None:
    place = tmp_path / "reference.safetensors"
    save_artifact_reference(asked(stored[0], tmp_path / "a"), place, NullSink())
    again = replace(asked(stored[0], tmp_path / "b"), reference=place, engine="restore")
    (served, _), _ = measure_artifact(again, NullSink())
    assert served.kl_mean == 0.0


def test_planted_corruptions_are_seen(stored: tuple[Path, Path, Path], tmp_path: Path) -> None:
    request = asked(stored[0], tmp_path / "s")
    measure_artifact(request, NullSink())  # the same scratch serves both, as one command does
    found = check_measurement(request, NullSink())
    assert [check.seen for check in found if check.seen is not None] and all(
        check.seen for check in found if check.seen is not None
    )


def test_a_wrong_merge_would_be_seen(
    stored: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The original comes from the sources: an artifact whose factors were decoded wrongly drifts."""
    from mfs_decompose.artifact import values

    real = values.read_adapter_tensor
    monkeypatch.setattr(values, "read_adapter_tensor", lambda *words: real(*words) * torch.tensor(1.5))
    request = replace(asked(stored[0], tmp_path / "s"), through=("served",))
    (served,), _ = measure_artifact(request, NullSink())
    assert served.kl_mean > 1e-4
