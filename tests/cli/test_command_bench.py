"""`mfs bench runtime`: what it measures, says and draws. No figure of time is asserted."""

from __future__ import annotations

import math
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from adapters import write_adapter
from checkpoints import fine_tune, make_llama, read_weights
from e2e_program import refused, succeeded

from mfs_decompose.bench import peers
from mfs_decompose.bench.measured import MOST_OVERHEAD, Mixed, recommend_cap
from mfs_decompose.bench.runtime import BenchRequest, bench_runtime, random_prompts
from mfs_decompose.errors import UsageError
from mfs_decompose.events import NullSink
from mfs_decompose.runtime.load import load_family

DOCS = Path(__file__).parents[2] / "docs" / "json.md"
QUICK = ("--rows", "3", "--prompt", "5", "--tokens", "3", "--rounds", "1", "--threads", "1")


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A variant with changed norms and one of a low rank in all linear layers."""
    root = tmp_path_factory.mktemp("bench")
    base = make_llama(root / "base", seed=51)
    fine_tune(base, root / "code", seed=52)
    _write_lora(base, root / "lora")
    succeeded(
        "decompose", "--base", base, "--variants", f"code={root / 'code'}", f"lora={root / 'lora'}", "--out",
        root / "art", "--budget", "30%", "--threads", "1",
    )  # fmt: skip
    return root / "art"


def _write_lora(base: Path, folder: Path) -> None:
    draw = torch.Generator().manual_seed(53)
    tensors = {}
    for name, weight in read_weights(base).items():
        if name.endswith(("q_proj.weight", "up_proj.weight")):
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{stem}.lora_A.weight"] = 0.2 * torch.randn(3, weight.shape[1], generator=draw)
            tensors[f"{stem}.lora_B.weight"] = 0.2 * torch.randn(weight.shape[0], 3, generator=draw)
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "up_proj"]}
    write_adapter(folder, tensors, config)


def finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0


def test_the_document_has_every_part_and_the_page_names_it(artifact: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    plot = tmp_path / "overhead.svg"
    found = succeeded("bench", "runtime", artifact, *QUICK, "--plot", plot, "--json").document
    assert found["schema"] == "mfs.bench.runtime/1" and found["plot"] == str(plot)
    assert found["settings"]["rows"] == 4  # a multiple of the two variants
    assert [one["variants"] for one in found["mixed"]] == [0, 1, 2]
    assert found["mixed"][0]["overhead"] == 1.0
    assert all(finite(value) for one in found["mixed"] for key, value in one.items() if key != "variants")
    assert [one["id"] for one in found["single"]] == ["code", "lora"]
    assert all(one["codecs"] and one["forms"] and finite(one["overhead"]) for one in found["single"])
    whole, adapters = found["peers"]
    assert finite(whole["tokens_per_second"]) and finite(whole["ratio"])
    assert adapters["note"] is not None
    memory = found["memory"]
    assert memory["total"] == memory["base"] + memory["shared"] + memory["variants"]
    assert memory["ratio"] == memory["whole_models"] / memory["total"]
    assert 1 <= found["cap"] <= 2 and found["most_overhead"] == MOST_OVERHEAD
    assert {"torch", "transformers", "python"} <= found["versions"].keys()
    assert {"cpu", "cores", "memory_bytes", "load_before", "system"} == found["machine"].keys()
    _check_plot(plot.read_bytes())
    page = DOCS.read_text(encoding="utf-8")
    section = page[page.index("`mfs.bench.runtime/1`") :].partition("\n## ")[0]
    names = {*found, *found["mixed"][0], *found["single"][0], *whole, *memory, *found["settings"], *found["machine"]}
    assert [name for name in sorted(names - {"schema"}) if f"{name}" not in section] == []


def _check_plot(data: bytes) -> None:
    root = ElementTree.fromstring(data)
    ids = {element.get("id") for element in root.iter()}
    assert {"overhead", "single:code", "single:lora", "limit", "cap"} <= ids


def test_the_table_says_what_was_measured(artifact: Path) -> None:
    said = succeeded("bench", "runtime", artifact, *QUICK, "--no-peers", "--variant", "lora").out
    assert "0 (base rows)" in said and "overhead" in said and "lora" in said and "code" not in said
    assert "recommended: at most 1 distinct variants a step" in said
    assert "times less than" in said and "PEFT" not in said


def test_one_variant_of_low_rank_is_an_adapter_of_peft_with_the_same_logits(artifact: Path, tmp_path: Path) -> None:
    """What PEFT is timed on is the same delta, so that the two do the same work."""
    pytest.importorskip("peft")
    family = load_family(artifact, variants=["lora"])
    adapter = peers._adapter_of(family, "lora")
    assert adapter.factors and not adapter.others and not adapter.left
    succeeded("restore", artifact, "--variant", "base", "--out", tmp_path / "base", "--dtype", "float32")
    model = peers._with_adapters(peers.load_whole(tmp_path / "base", "cpu"), {"v0": adapter.factors})
    ids = torch.tensor([[5, 9, 11, 3]])
    with torch.inference_mode(), family.use("lora") as ours:
        expected, plain = ours(input_ids=ids).logits, model(input_ids=ids, adapter_names=["__base__"]).logits
        found = model(input_ids=ids, adapter_names=["v0"]).logits
    assert float((found - expected).abs().max()) < 1e-4 < float((plain - expected).abs().max())


def test_peft_is_measured_where_all_variants_are_of_low_rank(artifact: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    request = BenchRequest(artifact, rows=2, prompt=4, tokens=2, rounds=1, variants=["lora"], scratch=tmp_path)
    found = bench_runtime(request, NullSink())
    assert found.peers[1].note is None and finite(found.peers[1].tokens_per_second)
    assert finite(found.peers[1].ratio) and list(tmp_path.iterdir()) == []


def test_without_peft_the_rest_is_measured(artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    family = load_family(artifact, variants=["lora"])
    request = BenchRequest(artifact, scratch=tmp_path, variants=["lora"])
    assert peers.measure_peft(request, family, ["lora"], [[1, 2]], NullSink()) == (None, "peft is not installed")


@pytest.mark.parametrize(
    ("overheads", "cap"),
    [([1.0, 1.2, 1.5, 1.6], 2), ([1.0, 1.7, 1.1], 1), ([1.0, 1.1, 1.2], 2), ([1.0], 1), ([1.0, 1.4, 1.9, 1.2], 1)],
)
def test_the_cap_is_the_last_before_the_first_that_costs_too_much(overheads: list[float], cap: int) -> None:
    assert recommend_cap(tuple(Mixed(at, 0.1, 0.1, 9.0, value) for at, value in enumerate(overheads))) == cap


def test_prompts_are_the_same_for_everybody() -> None:
    assert random_prompts(3, 4, 50, 1) == random_prompts(3, 4, 50, 1) != random_prompts(3, 4, 50, 2)
    assert all(0 <= token < 2 for row in random_prompts(2, 30, 2, 0) for token in row)


def test_mistakes_are_named(artifact: Path, tmp_path: Path) -> None:
    said, _ = refused(2, "bench", "runtime", artifact, "--variant", "maths")
    assert "maths" in said
    said, _ = refused(14, "bench", "runtime", artifact, "--plot", tmp_path / "none" / "x.svg")
    assert "--plot" in said
    with pytest.raises(UsageError, match="tokens: expected at least 2, found 1"):
        BenchRequest(artifact, tokens=1)
    said, _ = refused(2, "bench", "runtime", artifact, "--prompt", "5000", *QUICK[4:], "--no-peers")
    assert "shorter than the context" in said
    said, _ = refused(2, "bench", "runtime", artifact, "--rows", "1", "--tokens", "140", "--rounds", "1", "--no-peers")
    assert "expected answers of 140 tokens, found 96: the context is full" in said
