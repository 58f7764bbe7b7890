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
from benchmarks.frontier.foretold import NATS, NATS_NOISE, Foretold
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


LAYER, TABLE = "model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"


def foretell(name: str, delta: torch.Tensor, error: torch.Tensor) -> float:
    """What is foretold of one matrix of a variant served with an error."""
    base = torch.randn(delta.shape, generator=torch.Generator().manual_seed(4))
    work = Work({name: base}, {name: base + delta})
    foretold = Foretold(work)
    served = work.variant[name] + error
    assert [(one, count) for one, count, _ in foretold.watch(iter([(name, 3, served)]))] == [(name, 3)]
    return foretold.kl


def falling(shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A delta as U [O, R], s [R] and V^T [R, I], each direction nine tenths of the one before."""
    generator = torch.Generator().manual_seed(5)
    left, _, right = torch.linalg.svd(torch.randn(*shape, generator=generator), full_matrices=False)
    return left, 20 * 0.9 ** torch.arange(min(shape)), right


@pytest.mark.parametrize("shape", [(40, 24), (24, 40)])
def test_directions_left_out_cost_what_they_are_missed_by(shape: tuple[int, int]) -> None:
    left, s, right = falling(shape)
    found = foretell(LAYER, (left * s) @ right, -(left[:, 7:] * s[7:]) @ right[7:])
    missed, energy = float((s[7:] ** 2 * (s[7:] / s[0]) ** 3).sum() / s[0]), float((s[7:] ** 2).sum())
    # One layer of three is looked at, for all.
    assert found == pytest.approx(3 * (NATS * missed + NATS_NOISE * energy), rel=1e-3)


def test_of_equal_errors_that_along_the_delta_costs_most() -> None:
    left, s, right = falling((60, 40))
    delta = (left * s) @ right
    generator = torch.Generator().manual_seed(9)
    size = 0.1 * float(delta.norm())
    noise, crossed = torch.randn(delta.shape, generator=generator), left.flip(1) @ right
    weak = left[:, -1:] @ right[-1:]
    costs = [foretell(LAYER, delta, size * error / error.norm()) for error in (delta, noise, crossed, weak)]
    least = 3 * NATS_NOISE * size**2
    assert costs[0] > 5 * max(costs[1:]) and min(costs) >= least * 0.999
    assert costs[2:] == pytest.approx([least, least], rel=0.02)  # between directions, or along a weak one: noise


def test_a_larger_delta_costs_its_norm() -> None:
    """What a tenth less of it costs, which is all along the delta."""
    left, s, right = falling((60, 40))
    found = []
    for times in (1.0, 4.0):
        delta = times * (left * s) @ right
        noise = 3 * NATS_NOISE * float((0.1 * delta).square().sum())
        found.append(foretell(LAYER, delta, -0.1 * delta) - noise)
    assert found[1] == pytest.approx(4 * found[0], rel=1e-3)


@pytest.mark.parametrize("shape", [(90, 24), (24, 40)])
def test_errors_of_an_embedding_are_noise(shape: tuple[int, int]) -> None:
    left, s, right = falling(shape)
    delta = (left * s) @ right
    for error in (-0.1 * delta, torch.ones(shape)):
        assert foretell(TABLE, delta, error) == pytest.approx(NATS_NOISE * float(error.square().sum()), rel=1e-3)


def test_a_delta_of_nothing_leaves_noise_alone() -> None:
    error = torch.full((9, 8), 0.5)
    for name, times in ((LAYER, 3), (TABLE, 1)):
        assert foretell(name, torch.zeros(9, 8), error) == pytest.approx(times * NATS_NOISE * 18, rel=1e-4)


def test_a_little_too_much_costs_like_a_little_too_little() -> None:
    """A delta enlarged to make up for what it leaves out is judged as it is served."""
    left, s, right = falling((40, 24))
    delta = (left * s) @ right
    assert foretell(LAYER, delta, 0.05 * delta) == pytest.approx(foretell(LAYER, delta, -0.05 * delta), rel=1e-3)


@pytest.mark.parametrize("name", [LAYER, TABLE])
def test_nothing_is_foretold_of_the_variant_itself(name: str) -> None:
    delta = torch.randn(9, 8, generator=torch.Generator().manual_seed(1))
    for one in (delta, 0 * delta):
        assert foretell(name, one, torch.zeros(9, 8)) == 0.0


def test_a_delta_is_factored_once_for_all_cells() -> None:
    base, delta = (torch.randn(9, 8, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    work = Work({LAYER: base}, {LAYER: base + delta})
    list(Foretold(work).watch(iter([(LAYER, 0, base)])))
    found = work.factor(LAYER)
    list(Foretold(work).watch(iter([(LAYER, 0, base + 0.9 * delta)])))
    assert work.factor(LAYER) is found
