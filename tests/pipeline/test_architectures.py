"""The round trip over the architectures that people have, saved and loaded by transformers, by the public functions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, NEW_TOKENS, VOCABULARY, ArchitectureFamily, load, make_architecture_family
from checkpoints import read_weights

from mfs_decompose import Family, decompose, restore
from mfs_decompose.pipeline.request import DecomposeReport

EXPERT_MATRICES = {"mixtral": 2 * 5 * 3, "qwen3_moe": 5 * 3}
"""Saved one by one, whatever the model makes of them."""


@dataclass(frozen=True)
class Decomposed:
    name: str
    family: ArchitectureFamily
    default: Path
    lossless: Path
    report: DecomposeReport


@pytest.fixture(autouse=True, scope="module")
def one_quiet_thread() -> Iterator[None]:
    from transformers.utils import logging

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    yield
    logging.enable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=list(ARCHITECTURES))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decomposed:
    name = str(request.param)
    root = tmp_path_factory.mktemp(name)
    family = make_architecture_family(root, name)
    report = decompose(family.base, family.variants, root / "default", device="cpu", threads=1)
    decompose(family.base, family.variants, root / "lossless", codec="lossless", device="cpu", threads=1)
    return Decomposed(name, family, root / "default", root / "lossless", report)


def test_lossless_gives_every_file_back(made: Decomposed, tmp_path: Path) -> None:
    originals = {"base": made.family.base, **made.family.variants}
    for id, original in originals.items():
        restored = restore(made.lossless, id, tmp_path / id)
        assert restored.exact and restored.checked
        assert contents(tmp_path / id) == contents(original)


def test_the_restored_model_is_nearer_to_its_original_than_the_base(made: Decomposed, tmp_path: Path) -> None:
    """It loads whole, with the variant's own vocabulary, and its KL to the original is below the base's."""
    tokens = torch.randint(10, VOCABULARY, (3, 24), generator=torch.Generator().manual_seed(7))
    base = log_probabilities(load(made.family.base), tokens)
    for id, original in made.family.variants.items():
        restore(made.default, id, tmp_path / id)
        assert read_weights(tmp_path / id).keys() == read_weights(original).keys()
        side_files = {name: data for name, data in contents(original).items() if not name.endswith(".safetensors")}
        assert side_files.items() <= contents(tmp_path / id).items()
        model = load(tmp_path / id)
        rows = VOCABULARY + (NEW_TOKENS if id == "words" else 0)
        assert model.get_input_embeddings().weight.shape[0] == rows
        truth = log_probabilities(load(original), tokens)
        assert 0 < divergence(truth, log_probabilities(model, tokens)) < 0.9 * divergence(truth, base)


def test_the_recorded_error_is_that_of_a_float32_restore(made: Decomposed, tmp_path: Path) -> None:
    base = read_weights(made.family.base)
    for variant in made.report.variants:
        restore(made.default, variant.id, tmp_path / variant.id, dtype="float32")
        served = read_weights(tmp_path / variant.id)
        original = read_weights(made.family.variants[variant.id])
        errors, energies = [], []
        for name, weight in original.items():
            assert served[name].dtype == torch.float32
            errors.append(squares(served[name].double() - weight.double()))
            rows = min(len(weight), len(base[name]))
            energies.append(squares(weight[:rows].double() - base[name][:rows].double()))
        found = math.sqrt(math.fsum(errors) / math.fsum(energies))
        with Family.open(made.default) as opened:
            recorded = opened.variant(variant.id).rel_error
        assert found == pytest.approx(recorded, rel=1e-6)
        assert recorded == variant.rel_error
        assert 0.05 < recorded < 0.9


def test_every_tensor_has_a_record_and_every_expert_one_of_its_own(made: Decomposed) -> None:
    with Family.open(made.default) as opened:
        for id, original in made.family.variants.items():
            record = opened.variant(id)
            assert record.tensors.keys() == read_weights(original).keys()
            assert record.missing == ()
            assert record.footprint <= 0.05
            kinds = {name: tensor.kind for name, tensor in record.tensors.items()}
            grown = {name for name, kind in kinds.items() if kind == "resized"}
            assert set(kinds.values()) <= {"same", "resized"}
            assert bool(grown) == (id == "words")
            experts = [name for name in kinds if ".experts." in name]
            assert len(experts) == EXPERT_MATRICES.get(made.name, 0)
            coded = {record.tensors[name].tree["codec"] for name in kinds if record.tensors[name].energy > 0}
            assert "banded" in coded


def log_probabilities(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Over the base's vocabulary, in fp64: [sequences, tokens, VOCABULARY]."""
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=tokens).logits[..., :VOCABULARY]
    return logits.double().log_softmax(-1)


def divergence(truth: torch.Tensor, other: torch.Tensor) -> float:
    """Mean KL in nats a token."""
    return float((truth.exp() * (truth - other)).sum(-1).mean())


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def squares(values: torch.Tensor) -> float:
    return float(values.square().sum())
