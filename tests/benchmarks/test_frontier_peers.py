"""benchmarks/frontier: every codec of the table spends what it is given and no more, and does what was published."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
from frontier_work import error, make_work
from safetensors.torch import load_file, save_file

from benchmarks.frontier import mergekit
from benchmarks.frontier.auto import without_tables
from benchmarks.frontier.deltacome import column_bits, delta_come
from benchmarks.frontier.groups import group_bytes, round_rows, round_with_feedback
from benchmarks.frontier.impart import BETAS, POWERS, _decode, drop_shares, impart, thinning
from benchmarks.frontier.lowrank import bf16_low_rank, int4_low_rank
from benchmarks.frontier.mergekit import extract, read_adapter
from benchmarks.frontier.plan import largest, shares
from benchmarks.frontier.signs import bit_delta, bit_delta_fitted, fit_scale
from benchmarks.frontier.sparse import dare, magnitude
from benchmarks.frontier.treatment import ROWS, Served, table_one, table_two, tables_alike, with_tables
from benchmarks.frontier.variant import Setup
from benchmarks.frontier.work import Work
from benchmarks.rate_drift_rows import Decoded
from mfs_decompose.fidelity.text import Corpus

SIZED = [
    "low rank bf16", "Delta-CoMe", "ImPart-Qt", "DARE, 4 bits", "magnitude sparse", "mfs lowrank int4", "mfs banded",
    "mfs deadzone",
]  # fmt: skip


def decoded(work: Work, name: str, budget: int) -> list[Decoded]:
    plan = ROWS[name].codec(work, work.linears, budget)
    assert plan is not None
    return list(plan.decode())


@pytest.mark.parametrize("name", SIZED)
@pytest.mark.parametrize("share", [0.08, 0.25])
def test_a_codec_of_any_size_meets_the_budget(name: str, share: float) -> None:
    work = make_work(grams=True)
    budget = int(share * work.stored_bytes(work.linears))
    found = decoded(work, name, budget)
    assert [one.name for one in found] == work.linears
    nbytes = sum(one.nbytes for one in found)
    # Of one rank, or with room for chance: a matrix this small cannot be cut finely.
    least = {"low rank bf16": 0.6, "DARE, 4 bits": 0.6, "Delta-CoMe": 0.75, "ImPart-Qt": 0.7, "mfs deadzone": 0.5}.get(
        name, 0.85
    )
    assert least * budget <= nbytes <= budget
    assert all(one.delta.shape == work.shape(one.name) and one.delta.isfinite().all() for one in found)


@pytest.mark.parametrize("name", [name for name in ROWS if name != "mfs lossless"])
def test_more_bytes_never_cost_much(name: str) -> None:
    work = make_work(grams=True)
    whole = work.stored_bytes(work.linears)
    small, large = (decoded(work, name, int(share * whole)) for share in (0.1, 0.4))
    bits = {one.name: one.nbytes for one in small}
    assert all(one.nbytes >= bits[one.name] * 0.9 for one in large)
    if name != "DARE, 4 bits":  # dropping by chance has a large error whatever it keeps
        for a, b in zip(small, large, strict=True):
            slack = 1.2 if name == "Delta-CoMe" else 1 + 1e-6  # 2-bit directions of noise
            assert error(work, b.name, b.delta) <= slack * error(work, a.name, a.delta)
            assert error(work, a.name, a.delta) < 1.01


def test_lossless_only_where_it_fits() -> None:
    work = make_work()
    assert ROWS["mfs lossless"].codec(work, work.linears, 1000) is None
    plan = ROWS["mfs lossless"].codec(work, work.linears, work.stored_bytes(work.linears) * 2)
    assert plan is not None
    for one in plan.decode():
        assert error(work, one.name, one.delta) == 0 and one.nbytes > 0


def test_bf16_low_rank_is_the_truncated_svd() -> None:
    work = make_work()
    plan = bf16_low_rank(work, work.linears, 7 * 2 * sum(sum(work.shape(name)) for name in work.linears))
    assert plan.knobs["rank"] == 7
    for one in plan.decode():
        u, s, vt = torch.linalg.svd(work.delta(one.name).double(), full_matrices=False)
        best = (u[:, :7] * s[:7]) @ vt[:7]
        assert float((one.delta - best).norm() / best.norm()) < 0.01
        assert one.nbytes == 7 * 2 * sum(work.shape(one.name))


def test_mergekit_factors_are_cut_to_a_rank() -> None:
    work = make_work()
    for name in work.linears:
        rows, columns = work.shape(name)
        work.adapter[name] = torch.ones(rows, 9).bfloat16(), torch.ones(9, columns).bfloat16()
    plan = bf16_low_rank(work, work.linears, 4 * 2 * sum(sum(work.shape(name)) for name in work.linears) + 1)
    assert plan.knobs == {"rank": 4, "from": "mergekit"}
    assert all(bool((one.delta == 4).all()) for one in plan.decode())


def test_an_adapter_is_read_and_the_rest_of_it_counted(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    work = make_work()
    found = {"base_model.model.model.embed_tokens.weight": work.variant["model.embed_tokens.weight"]}
    for name in work.linears:
        stem, (rows, columns) = "base_model.model." + name.removesuffix(".weight"), work.shape(name)
        found[f"{stem}.lora_A.weight"] = torch.full((3, columns), 2.0).bfloat16()
        found[f"{stem}.lora_B.weight"] = torch.full((rows, 3), 5.0).bfloat16()
    save_file(found, tmp_path / "adapter_model.safetensors")
    read_adapter(work, tmp_path / "adapter_model.safetensors")
    factors = sum(2 * 3 * sum(work.shape(name)) for name in work.linears)
    assert work.adapter_rest == (tmp_path / "adapter_model.safetensors").stat().st_size - factors
    served = table_two(work, ROWS["low rank bf16"], work.checkpoint_bytes)
    assert served is not None
    counted = sum(nbytes for _, nbytes, _ in served.weights) + served.extra_bytes
    assert counted == (tmp_path / "adapter_model.safetensors").stat().st_size  # all ranks are taken
    assert all(bool((one.delta == 30).all()) for one in bf16_low_rank(work, work.linears, 10**9).decode())


def test_mergekit_is_asked_for_enough_directions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work, asked = make_work(), []
    corpus = Corpus("text", ("a",))
    setup = Setup(tmp_path, tmp_path, corpus, corpus, tmp_path, 0.125, "auto", mergekit=Path(sys.executable))
    with pytest.raises(RuntimeError, match="mergekit wrote no adapter"):  # there is none beside this interpreter
        extract(work, setup, 0.2)
    monkeypatch.setattr(mergekit, "run", lambda *given: asked.append(given[3]) or given[4].mkdir() or given[4])
    monkeypatch.setattr(mergekit, "read_adapter", lambda *_: None)
    for share in (0.05, 0.2):
        extract(work, setup, share)
        plan = bf16_low_rank(work, work.linears, int(share * work.checkpoint_bytes))
        assert asked[-1] >= plan.knobs["rank"]
    assert not (tmp_path / "mergekit").exists()


def test_int4_takes_the_directions_of_most_energy() -> None:
    work = make_work()
    few = int4_low_rank(work, work.linears, 900)
    ranks = [round(one.nbytes) for one in few.decode()]
    assert 0 < sum(ranks) <= 900


def test_bits_by_place_in_the_spectrum() -> None:
    bits = column_bits(40).tolist()
    assert bits == [8] * 2 + [3] * 32 + [2] * 6


def test_delta_come_is_better_against_the_inputs_with_feedback() -> None:
    plain, fed = make_work(), make_work(grams=True)
    budget = int(0.3 * plain.stored_bytes(plain.linears))
    seen = {}
    for label, work in (("plain", plain), ("fed", fed)):
        plan = delta_come(work, work.linears, budget)
        seen[label] = sum(
            float(((one.delta - work.delta(one.name)) @ fed.grams[one.name] * (one.delta - work.delta(one.name))).sum())
            for one in plan.decode()
        )
    assert seen["fed"] < seen["plain"]


def test_feedback_with_white_inputs_is_plain_rounding() -> None:
    values = torch.randn(5, 130, generator=torch.Generator().manual_seed(1))
    found = round_with_feedback(values, torch.eye(130), torch.full((5,), 3))
    assert torch.allclose(found, round_rows(values, 3), atol=1e-5)


def test_feedback_lowers_the_error_of_outputs() -> None:
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(9, 150, generator=generator)
    x = torch.randn(400, 20, generator=generator) @ torch.randn(20, 150, generator=generator)
    x += 0.1 * torch.randn(400, 150, generator=generator)
    bits = torch.tensor([8, 8, 3, 3, 3, 2, 2, 2, 2])
    fed = round_with_feedback(values, x.mT @ x, bits) - values
    plain = torch.cat([round_rows(values[i : i + 1], int(b)) for i, b in enumerate(bits)]) - values
    assert float((x @ fed.mT).norm()) < 0.7 * float((x @ plain.mT).norm())


def test_groups_hold_as_many_values_as_their_bits() -> None:
    values = torch.randn(3, 100, generator=torch.Generator().manual_seed(4))
    for bits in (2, 3, 8):
        found = round_rows(values, bits)
        assert all(len(set(row[:64].tolist())) <= 1 << bits for row in found)
        assert group_bytes(100, bits) == math.ceil(100 * bits / 8) + 2 * 3


def test_impart_drops_the_weak_directions_first() -> None:
    energy = torch.tensor([16.0, 4.0, 1.0, 0.25], dtype=torch.float64)
    dropped = drop_shares(energy, 1.0, 0.5)
    assert dropped[0] == 0 and dropped[1] == pytest.approx(1 - 0.5**0.5) and dropped[2] == pytest.approx(0.5)
    assert drop_shares(energy, 1.0, 1.0)[1] == pytest.approx(0.5)
    assert drop_shares(energy, 9.0, 0.5).tolist() == [0.0, 1.0, 1.0, 1.0]


def test_impart_leaves_out_the_share_beta_until_more_fits() -> None:
    work = make_work()
    name = work.linears[2]
    few, many = (thinning(work, name, int(share * work.stored_bytes([name])), 0.8, 0.5) for share in (0.03, 0.3))
    assert few.rank == round(0.2 * 72) and few.gamma > 0
    assert many.rank > few.rank and many.gamma == 0


def test_impart_validates_on_held_in_text() -> None:
    work = make_work(grams=True)
    budget = int(0.08 * work.stored_bytes(work.linears))
    chosen = impart(work, work.linears, budget)
    sample = work.linears[::10]

    def wrong(beta: float, power: float) -> float:
        work.grams = {}
        total = 0.0
        for name in sample:
            delta, gram = work.delta(name), grams[name]
            how = thinning(work, name, shares(work, work.linears, budget - 8)[name], beta, power)
            left = delta - _decode(work, name, how).delta
            total += float((left @ gram * left).sum())
        return total

    grams = work.grams
    best = wrong(chosen.knobs["beta"], chosen.knobs["C"])
    assert all(best <= wrong(beta, power) for beta in BETAS for power in POWERS)
    assert impart(make_work(), work.linears, budget).knobs["beta"] == BETAS[-1]


def test_impart_masks_come_from_a_seed_and_keep_the_mean() -> None:
    work = make_work()
    plan = impart(work, work.linears, int(0.1 * work.stored_bytes(work.linears)))
    first, again = list(plan.decode()), list(plan.decode())
    assert all(torch.equal(a.delta, b.delta) for a, b in zip(first, again, strict=True))
    name = work.linears[2]
    found = next(one.delta for one in first if one.name == name)
    along = float((found * work.delta(name)).sum() / work.delta(name).square().sum())
    assert 0.5 < along < 1.5


def test_dare_keeps_by_chance_and_rescales() -> None:
    work = make_work()
    plan = dare(work, work.linears, int(0.12 * work.stored_bytes(work.linears)))
    density = plan.knobs["density"]
    for one in plan.decode():
        kept = float((one.delta != 0).double().mean())
        assert kept < density * 1.3  # some of what is kept rounds to zero
    big = max(plan.decode(), key=lambda one: one.delta.numel())
    mask = big.delta != 0
    scaled = big.delta[mask] / work.delta(big.name)[mask]
    assert float(scaled.median()) == pytest.approx(1 / density, rel=0.2)


def test_magnitude_keeps_the_largest() -> None:
    work = make_work()
    for one in magnitude(work, work.linears, int(0.2 * work.stored_bytes(work.linears))).decode():
        own = work.delta(one.name).abs()
        kept = one.delta != 0
        assert float(own[kept].min()) >= float(own[~kept].max()) - 1e-9
        assert one.nbytes == 4 * int(kept.sum()) + 2 * own.shape[0]


def test_the_fitted_scale_is_the_best_for_outputs() -> None:
    work = make_work(grams=True)
    name = work.linears[1]
    delta = work.delta(name).double()
    signs, gram = torch.where(delta >= 0, 1.0, -1.0).double(), work.grams[name].double()

    def wrong(scale: float) -> float:
        left = delta - scale * signs
        return float((left @ gram * left).sum())

    best = fit_scale(work, name)
    assert wrong(best) < min(wrong(best * 1.01), wrong(best * 0.99), wrong(float(delta.abs().mean())) + 1e-9)
    assert bit_delta_fitted(make_work(), work.linears, 0) is None
    for one in bit_delta(work, work.linears, 0).decode():
        assert len(one.delta.unique()) == 2
        rows, columns = work.shape(one.name)
        assert one.nbytes == rows * math.ceil(columns / 8) + 2


def test_largest_and_shares() -> None:
    assert [largest(limit.__ge__, 1, 9) for limit in (0, 1, 5, 9, 20)] == [1, 1, 5, 9, 9]
    work = make_work()
    found = shares(work, work.linears, 10_000)
    assert sum(found.values()) <= 10_000
    assert found[work.linears[0]] == 10_000 * 72 * 72 // sum(math.prod(work.shape(name)) for name in work.linears)


@pytest.mark.parametrize("name", ["low rank bf16", "Delta-CoMe", "mfs banded"])
def test_table_one_counts_embeddings_and_norms(name: str) -> None:
    work = make_work()
    budget = int(0.2 * work.checkpoint_bytes)
    served = table_one(work, ROWS[name], budget, 0.125)
    assert served is not None
    found = {tensor: (nbytes, weight) for tensor, nbytes, weight in served.weights}
    assert set(found) == set(work.base) and sum(nbytes for nbytes, _ in found.values()) <= budget
    assert found["model.norm.weight"][0] == 144
    assert torch.equal(found["model.norm.weight"][1], work.variant["model.norm.weight"].float())
    (table,) = tables_alike(work, budget, 0.125)
    nbytes, weight = found["model.embed_tokens.weight"]
    assert 0 < nbytes == table.nbytes <= 0.125 * budget
    assert torch.equal(weight, (work.base[table.name].double() + table.delta).float())


def test_what_brings_its_own_tables_gets_those_of_the_others(tmp_path: Path) -> None:
    work = make_work()
    budget = int(0.2 * work.checkpoint_bytes)
    tables = tables_alike(work, budget, 0.125)
    (tmp_path / "variant").mkdir()
    (tmp_path / "variant" / "config.json").write_text("{}")
    save_file(work.variant, tmp_path / "variant" / "model-00001-of-00001.safetensors")
    (tmp_path / "variant" / "model.safetensors.index.json").write_text("{}")
    own = without_tables(work, tmp_path / "variant", tmp_path / "own")
    assert sorted(path.name for path in own.iterdir()) == ["config.json", "model.safetensors"]
    loaded = load_file(own / "model.safetensors")
    assert all(torch.equal(loaded[name], (work.base if name in work.tables else work.variant)[name]) for name in loaded)
    assert without_tables(work, tmp_path / "variant", tmp_path / "own") == own
    plain = Served({"knob": 1}, ((name, 5, tensor.float()) for name, tensor in loaded.items()), extra_bytes=3)
    served = with_tables(work, tables, plain)
    found = {name: (nbytes, weight) for name, nbytes, weight in served.weights}
    assert (served.knobs, served.extra_bytes) == ({"knob": 1}, 3)
    assert {name: nbytes for name, (nbytes, _) in found.items()} == {
        name: 5 + (tables[0].nbytes if name in work.tables else 0) for name in loaded
    }
    name = work.tables[0]
    assert torch.equal(found[name][1], (work.base[name].double() + tables[0].delta).float())


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.ships])
def test_table_two_counts_what_peers_do_not(name: str) -> None:
    work = make_work(grams=True)
    budget = int(0.1 * work.checkpoint_bytes)
    served = table_two(work, ROWS[name], budget)
    assert served is not None
    found = {tensor: (nbytes, weight) for tensor, nbytes, weight in served.weights}
    assert set(found) == set(work.base)
    nbytes, weight = found["model.embed_tokens.weight"]
    kept = ROWS[name].ships != "coded"
    assert (nbytes == 257 * 72 * 2) == kept
    assert torch.equal(weight, work.variant["model.embed_tokens.weight"].float()) == kept
    assert served.extra_bytes == (257 * 72 * 2 if ROWS[name].ships == "copied" else 0)
