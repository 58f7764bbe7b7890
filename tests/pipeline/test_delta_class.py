"""Classes of deltas, from spectra that were made and facts at the edges."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from spectra_families import base_tensors, dense, drawn, merged, sparse

from mfs_decompose.linalg.peel import find_rank, make_problem
from mfs_decompose.linalg.rounding_noise import count_units, predict_noise
from mfs_decompose.linalg.spectrum import gram_spectra, resolution
from mfs_decompose.pipeline.delta_class import (
    CONCENTRATED_SHARE,
    FEW_DIRECTIONS,
    LORA_SHARE,
    SPARSE_CHANGED,
    Facts,
    Verdict,
    classify,
    directions_for,
    effective_rank,
    most_energy,
)

NAME = "model.layers.0.mlp.up_proj.weight"
Search = Callable[[int], int | None]


def facts_of(own: torch.Tensor, base: torch.Tensor, dtype: str = "BF16") -> Facts:
    """What is measured of two matrices of one dtype."""
    delta = own.to(torch.float32) - base.to(torch.float32)
    energies = gram_spectra(delta[None])[0]
    unchanged = int((own == base).sum())
    energy = float(delta.double().square().sum())
    noise = predict_noise(count_units(own), dtype, unchanged, energy, on_grid=True)
    shape = (own.shape[0], own.shape[1])
    return Facts(shape, own.numel(), unchanged, energy, noise, energies.numpy(), resolution(energies))


def boxes_of(own: torch.Tensor, base: torch.Tensor) -> Search:
    return lambda guess: find_rank(make_problem(own, base, "once", 11), min(own.shape) // 4, guess)


def judged(own: torch.Tensor, base: torch.Tensor) -> Verdict:
    return classify(facts_of(own, base), boxes_of(own, base))


def test_one_of_each() -> None:
    base = base_tensors()
    own = {
        "lora": merged(base),
        "sparse": sparse(base),
        "concentrated": dense(base, decay=0.9),
        "flat": dense(base, decay=0.0),
        "identical": base,
    }
    for kind, tensors in own.items():
        assert judged(tensors[NAME], base[NAME]).kind == kind


@pytest.mark.parametrize("rank", [1, 2, 5])
@pytest.mark.parametrize("rms", [2e-4, 1e-3, 1e-2])
def test_the_rank_of_a_merge_is_found(rank: int, rms: float) -> None:
    base = {NAME: (0.02 * drawn(NAME, 1, 130, 160)).to(torch.bfloat16)}
    left, right = drawn(NAME, 2, 130, rank), drawn(NAME, 3, rank, 160)
    own = (base[NAME].double() + rms / rank**0.5 * (left @ right)).to(torch.bfloat16)
    verdict = judged(own, base[NAME])
    assert (verdict.kind, verdict.rank) == ("lora", rank)
    assert verdict.tail is not None
    assert verdict.tail < 1.1
    assert verdict.why.startswith(f"{rank} of 130 directions leave ")


def test_weights_of_fp32_have_no_boxes_and_show_their_rank() -> None:
    base = 0.02 * drawn(NAME, 1, 60, 90).float()
    own = base + 1e-3 * (drawn(NAME, 2, 60, 4) @ drawn(NAME, 3, 4, 90)).float()
    verdict = classify(facts_of(own, base, "F32"))
    assert (verdict.kind, verdict.rank) == ("lora", 4)
    full = base + 1e-3 * drawn(NAME, 4, 60, 90).float()
    assert classify(facts_of(full, base, "F32")).kind == "flat"


def test_updates_below_the_unit_are_no_lora() -> None:
    """What RL leaves of a dense update in bf16: few weights change, and the boxes are met by next to nothing."""
    base = (0.02 * drawn(NAME, 1, 160, 190)).to(torch.bfloat16)
    for rms in (1e-5, 3e-6):
        own = (base.double() + rms * drawn(NAME, 2, 160, 190)).to(torch.bfloat16)
        verdict = judged(own, base)
        assert facts_of(own, base).changed_share < 0.15
        assert verdict.kind == "sparse"
        assert verdict.rank is None


def test_a_tail_within_the_noise_is_not_enough() -> None:
    """Where the boxes say no, or only at a rank that leaves more than noise."""
    base = base_tensors()[NAME]
    own = merged(base_tensors())[NAME]
    facts = facts_of(own, base)
    assert classify(facts, lambda _: None).kind != "lora"
    assert classify(facts, lambda _: 1).kind != "lora"  # one direction of three leaves far more than noise
    assert classify(facts, lambda _: min(own.shape)).kind != "lora"
    assert classify(facts, lambda _: 3).rank == 3
    asked: list[int] = []
    full = dense(base_tensors(), decay=0.0)[NAME]
    classify(facts_of(full, base), lambda guess: asked.append(guess))  # type: ignore[func-returns-value]
    assert asked == []  # nothing is searched where the tail rules it out


def made_up(energies: list[float], changed: float, noise: float = 0.0) -> Facts:
    """Facts of a [400, 400] matrix with these directions."""
    values = np.array(energies, dtype=np.float64)
    elements = 160_000
    return Facts((400, 400), elements, round((1 - changed) * elements), float(values.sum()), noise, values)


def test_the_thresholds_are_where_they_say() -> None:
    directions = 160
    few = int(directions * FEW_DIRECTIONS)

    def facts(head: float, changed: float) -> Facts:
        rest = (1 - head) / (directions - few)
        return made_up([head / few] * few + [rest] * (directions - few), changed)

    below, above = CONCENTRATED_SHARE - 0.01, CONCENTRATED_SHARE + 0.01
    assert classify(facts(above, 0.9)).kind == "concentrated"
    assert classify(facts(below, 0.9)).kind == "flat"
    assert classify(facts(below, SPARSE_CHANGED - 0.01)).kind == "sparse"
    assert classify(facts(below, SPARSE_CHANGED + 0.01)).kind == "flat"
    assert classify(facts(above, SPARSE_CHANGED - 0.01)).kind == "concentrated"


def test_a_rank_is_far_below_full_or_none() -> None:
    directions = 40
    limit = int(directions * LORA_SHARE)
    small = np.zeros(directions)
    small[:limit] = 1.0
    facts = replace(made_up(small.tolist(), 1.0), shape=(4000, 40))
    assert classify(facts).rank == limit
    small[limit] = 1.0
    assert classify(replace(facts, energies=small, energy=float(small.sum()))).rank is None


def test_directions_in_the_noise_are_none() -> None:
    """A head that noise alone explains is no concentration."""
    energies = [0.5] * 10 + [0.03] * 150
    quiet = made_up(energies, 0.9)
    verdict = classify(quiet)
    assert (verdict.kind, verdict.standing_out) == ("concentrated", 160)
    loud = made_up(energies, 0.9, noise=0.51 * 160_000 / (2 * math.sqrt(400)) ** 2)
    assert loud.noise_edge == pytest.approx(0.51)
    verdict = classify(replace(loud, energies=np.array([0.5] * 160), energy=80.0))
    assert (verdict.standing_out, verdict.head) == (0, 0.0)


def test_vectors_and_zeros() -> None:
    assert classify(Facts(None, 10, 10, 0.0, 0.0)).kind == "identical"
    assert classify(Facts(None, 10, 8, 1.0, 0.0)).kind == "sparse"
    assert classify(Facts(None, 10, 0, 1.0, 0.0)).kind == "flat"
    zeros = np.zeros(20)  # -0.0 became 0.0
    assert classify(Facts((20, 30), 600, 599, 0.0, 0.0, zeros)).kind == "sparse"
    assert classify(Facts((20, 30), 600, 0, 0.0, 0.0, zeros)).kind == "flat"


def test_most_energy_decides_and_counts_tell() -> None:
    found = [("lora", 1.0), ("flat", 0.4), ("flat", 0.5), ("identical", 0.0), ("identical", 0.0)]
    kind, counts = most_energy(found)  # type: ignore[arg-type]
    assert kind == "lora"
    assert counts == {"identical": 2, "lora": 1, "flat": 2}
    assert list(counts) == ["identical", "lora", "flat"]
    assert most_energy([("identical", 0.0)] * 3) == ("identical", {"identical": 3})
    assert most_energy([("identical", 0.0), ("sparse", 0.0)])[0] == "sparse"
    assert most_energy([]) == (None, {})


def test_directions_and_effective_rank_of_known_spectra() -> None:
    even = np.full(8, 2.0)
    assert effective_rank(even) == pytest.approx(8.0)
    assert [directions_for(even, share) for share in (0.5, 0.9, 0.99)] == [4, 8, 8]
    one = np.array([5.0, 0.0, 0.0])
    assert effective_rank(one) == pytest.approx(1.0)
    assert directions_for(one, 0.99) == 1
    assert (effective_rank(np.zeros(3)), directions_for(np.zeros(3), 0.5)) == (0.0, 0)
    two = np.array([3.0, 1.0])
    assert effective_rank(two) == pytest.approx(math.exp(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25))))
    assert directions_for(two, 0.75) == 1


@given(
    energies=st.lists(st.floats(0, 1e6), min_size=1, max_size=40).map(lambda values: sorted(values, reverse=True)),
    share=st.floats(0.01, 1),
)
def test_directions_hold_what_they_say(energies: list[float], share: float) -> None:
    values = np.array(energies)
    count = directions_for(values, share)
    total = float(values.sum())
    assert 0 <= count <= values.size
    assert 0.0 <= effective_rank(values) <= values.size * (1 + 1e-9)
    if total > 0.0 and count:
        assert values[:count].sum() >= share * total * (1 - 1e-12)
        assert values[: count - 1].sum() <= share * total * (1 + 1e-12)


@given(
    energies=st.lists(st.floats(0, 1e6), min_size=4, max_size=30).map(lambda values: sorted(values, reverse=True)),
    unchanged=st.integers(0, 900),
    noise=st.floats(0, 1e7),
    boxes=st.sampled_from([None, 0, 1, 3, 9]),
)
def test_every_delta_has_a_class(energies: list[float], unchanged: int, noise: float, boxes: int | None) -> None:
    values = np.array(energies)
    facts = Facts((30, 30), 900, unchanged, float(values.sum()), noise, values)
    search: Search | None = None if boxes == 0 else lambda _: boxes
    verdict = classify(facts, search)
    assert (verdict.kind == "identical") == (unchanged == 900)
    assert (verdict.rank is not None) == (verdict.kind == "lora")
    assert verdict.why
    assert verdict == classify(facts, search)
