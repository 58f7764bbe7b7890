"""benchmarks/frontier whole, on a tiny family: what is measured, kept, taken up again, and written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import Family

from benchmarks.frontier import __main__ as frontier
from benchmarks.frontier import variant as variant_module
from benchmarks.frontier.distill import distill_scales
from benchmarks.frontier.foretold import NATS, NATS_A_TOKEN, Foretold
from benchmarks.frontier.judge import Judge, summarise
from benchmarks.frontier.signs import bit_delta_fitted
from benchmarks.frontier.treatment import AUTO, BASE, ROWS, base_alone
from benchmarks.frontier.variant import read_held_in
from benchmarks.frontier.work import Work, read_work
from mfs_decompose.fidelity.figures import TokenFigures
from mfs_decompose.fidelity.text import Corpus

DOCUMENTS = tuple(f"def f{n}(x):\n    return x * {n} + {n * n}  # number {n}\n" for n in range(12))


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def places(family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments of a run on a tiny base and variant, with one thread and a small held-in text."""
    folder = tmp_path / "family"
    folder.mkdir()
    (folder / "base").symlink_to(family.base)
    (folder / "code").symlink_to(family.variants["math"])
    data = tmp_path / "data"
    data.mkdir()
    lines = [json.dumps({"prompt": text[:14], "canonical_solution": text[14:]}) for text in DOCUMENTS]
    (data / "humaneval.jsonl").write_text("\n".join(lines))
    monkeypatch.setattr(variant_module, "HELD_IN_TOKENS", 100)
    argv = ["--family", str(folder), "--data-dir", str(data), "--out", str(tmp_path / "out" / "f.json")]
    return [*argv, "--threads", "1", "--auto-codec", "banded", "--variants", "code"]


def test_whole_table(places: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    (tmp_path / "f").mkdir()
    for only in (["20%"], ["base"], ["table 2"]):
        frontier.main([*places, "--only", *only, "--markdown", str(page)])
    document: dict[str, Any] = json.loads((tmp_path / "out" / "f.json").read_text())
    rows = {(row["table"], row["codec"]): row for row in document["rows"]}
    assert {(1, AUTO), (2, AUTO), (0, BASE), (1, "Delta-CoMe"), (2, "DARE, 4 bits")} <= set(rows)
    assert {codec for table, codec in rows if table == 2} == {AUTO, *(c for c, row in ROWS.items() if row.ships)}
    one = {codec: row for (table, codec), row in rows.items() if table == 1}
    assert all(row["share"] <= 0.2 and not row["bytes_over"] for row in one.values())
    base = next(row for row in document["rows"] if row["codec"] == BASE and row["tokens"] == 1024)
    assert base["bytes"] == 0 and base["recovered"] == 0 and base["kl"] > 0
    assert all(0 < row["kl"] < base["kl"] for codec, row in one.items() if codec not in ("DARE, 4 bits", "ImPart-Qt"))
    assert one["mfs banded"]["recovered"] == pytest.approx(1 - one["mfs banded"]["kl"] / base["kl"])
    low, high = one["magnitude sparse"]["kl_above_auto_ci"]
    assert low <= one["magnitude sparse"]["kl_above_auto"] <= high
    assert rows[2, "BitDelta sign"]["bytes_over"] and rows[2, "BitDelta sign"]["share"] > 0.2
    text = page.read_text()
    assert "| Delta-CoMe | " in text and "Each codec as it ships" in text
    assert (tmp_path / "out" / "f.svg").read_text().count("code:mfs auto") == 1
    assert str(tmp_path) not in json.dumps(document) + text
    assert "unknown: KL of auto on code at 5 % is at most 0.0003" in capsys.readouterr().out


def test_finished_cells_are_not_measured_again(
    places: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*places, "--only", "20%", "lowrank"]
    frontier.main(argv)
    journal = tmp_path / "out" / "f.jsonl"
    first = journal.read_text()
    frontier.main(argv)
    assert journal.read_text() == first
    journal.write_text(first[:-30])  # killed while it wrote
    frontier.main(argv)
    assert len(journal.read_text().splitlines()) == 2
    frontier.main([*argv, "--embedding-share", "0.2"])
    assert len(journal.read_text().splitlines()) == 3
    monkeypatch.setattr(frontier, "measure_cells", lambda *_: pytest.fail("measured"))
    frontier.main([*places, "--report"])
    assert "not measured" in capsys.readouterr().out


def test_the_judge_finds_nothing_in_the_variant_itself(family: Family, tmp_path: Path) -> None:
    judge = Judge(family.variants["math"], tmp_path)
    judge.learn(Corpus("text", DOCUMENTS), 300)
    work = read_work(family.base, family.variants["math"])
    whole = ((name, 3, tensor.float()) for name, tensor in work.variant.items())
    assert judge.put(whole) == 3 * len(work.variant)
    same = judge.measure(300)
    assert same.kl == 0 and same.top1 == 1 and same.ppl_ratio == 1
    judge.put(base_alone(work).weights)
    other = judge.measure(300)
    assert other.kl > 0 and sum(other.kl_units) / sum(other.token_units) == pytest.approx(other.kl)
    with pytest.raises(ValueError, match="expected every parameter"):
        judge.put(iter([next(iter(base_alone(work).weights))]))


def test_grams_are_of_the_inputs(family: Family, tmp_path: Path) -> None:
    judge = Judge(family.variants["math"], tmp_path)
    windows = judge.cut(Corpus("text", DOCUMENTS), 200).windows
    name = "model.layers.0.self_attn.q_proj.weight"
    (found,) = judge.grams(windows, [name]).values()
    network = judge._model.network
    total = torch.zeros(64, 64)
    for window in windows:
        embedded = network.get_input_embeddings()(torch.tensor(window.inputs))
        x = network.model.layers[0].input_layernorm(embedded)
        total += x.mT @ x
    assert torch.allclose(found, total, rtol=1e-4, atol=1e-5)


def test_scales_are_trained_on_logits(family: Family, tmp_path: Path) -> None:
    work = read_work(family.base, family.variants["math"])
    windows = Judge(family.variants["math"], tmp_path).cut(Corpus("text", DOCUMENTS), 120, 40).windows
    losses = distill_scales(work, family.variants["math"], windows[:1], 12)
    assert losses[-1] < losses[0] and set(work.scales) == set(work.linears)
    moved = [work.scales[name] / float(work.delta(name).abs().mean()) for name in work.linears]
    assert all(0.5 < ratio < 2 for ratio in moved) and any(abs(ratio - 1) > 0.05 for ratio in moved)
    plan = bit_delta_fitted(work, work.linears, 0)
    assert plan is not None and plan.knobs["fit"] == "logits"
    one = next(iter(plan.decode()))
    assert float(one.delta.abs().max()) == pytest.approx(work.scales[one.name], rel=0.01)


def test_runs_of_a_document_are_summed_together() -> None:
    kl = np.arange(150, dtype=np.float64)
    figures = TokenFigures(nll_original=kl, nll_x=kl + 0.5, kl=kl, top1=np.ones(150))
    found = summarise(figures, np.array([0] * 70 + [1] * 80))
    assert found.token_units == [64, 6, 64, 16] and found.document_units == [0, 0, 1, 1]
    assert found.kl_units[1] == sum(range(64, 70)) and found.ppl_ratio == pytest.approx(np.exp(0.5))


def test_source_of_the_standard_library_is_held_in_text() -> None:
    assert all("def " in document for document in read_held_in(None).documents)


@pytest.mark.parametrize("shape", [(40, 24), (24, 40)])
def test_what_is_foretold_of_directions_left_out_is_the_sum_that_allocation_works_with(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(5)
    base, delta = (torch.randn(*shape, generator=generator) * scale for scale in (1.0, 0.1))
    name = "model.layers.0.mlp.up_proj.weight"
    work = Work({name: base}, {name: base + delta})
    left, s, right = torch.linalg.svd(work.variant[name] - base, full_matrices=False)
    foretold = Foretold(work)
    served = base + (left[:, :7] * s[:7]) @ right[:7]
    assert [(one, count) for one, count, _ in foretold.watch(iter([(name, 3, served)]))] == [(name, 3)]
    expected = float((s[7:] ** 2 * (s[7:] / s[0]) ** 4).sum())
    assert foretold.kl == pytest.approx(NATS * 3 * expected, rel=1e-3)  # one layer of three is looked at, for all


@pytest.mark.parametrize("shape", [(90, 24), (24, 40)])
def test_errors_of_an_embedding_count_by_the_side_that_is_not_tokens(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(6)
    base, delta = (torch.randn(*shape, generator=generator) * scale for scale in (1.0, 0.1))
    error = 0.01 * torch.randn(*shape, generator=generator) - 0.05 * delta
    name = "model.embed_tokens.weight"
    foretold = Foretold(Work({name: base}, {name: base + delta}))
    list(foretold.watch(iter([(name, 3, base + delta + error)])))
    tall = (delta, error) if shape[0] > shape[1] else (delta.mT, error.mT)
    _, s, right = torch.linalg.svd(tall[0], full_matrices=False)
    expected = float(((tall[1] @ right.mT) * s).square().sum() / s[0] ** 2)
    assert foretold.kl == pytest.approx(NATS_A_TOKEN * expected, rel=1e-3)


@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"])
def test_a_delta_that_is_enlarged_is_foretold_as_if_it_were_not(name: str) -> None:
    base, delta = (torch.randn(60, 24, generator=torch.Generator().manual_seed(seed)) for seed in (7, 8))
    left, s, right = torch.linalg.svd(delta, full_matrices=False)
    s = s * 0.7 ** torch.arange(24)
    delta, stored = (left * s) @ right, (left[:, :9] * s[:9]) @ right[:9]
    found = []
    for times in (1.0, 1.1, 1.3):
        foretold = Foretold(Work({name: base}, {name: base + delta}))
        list(foretold.watch(iter([(name, 3, base + times * stored)])))
        found.append(foretold.kl)
    assert found[1] == pytest.approx(found[0], rel=0.02)
    assert found[2] > 2 * found[0]  # more than makes up for anything is an error


def test_nothing_is_foretold_of_the_variant_itself() -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    own = {name: torch.randn(9, 8, generator=torch.Generator().manual_seed(1))}
    for base in (own[name], own[name] + 1):
        foretold = Foretold(Work({name: base}, own))
        list(foretold.watch(iter([(name, 0, own[name])])))
        assert foretold.kl == 0.0
