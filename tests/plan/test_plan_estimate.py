"""Bounds from headers alone. That they really are bounds is shown in tests/pipeline/test_pipeline_estimate.py."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from plan_cases import LLAMA, checkpoint, grown, plan_of

from mfs_decompose.codec.sizes import step_bytes
from mfs_decompose.plan.cap import ENTRY_BYTES, SHARD_BYTES
from mfs_decompose.plan.estimate import Estimate, estimate
from mfs_decompose.plan.summary import summarise

BASE = checkpoint("base", LLAMA)
PAIR = (checkpoint("a", LLAMA), checkpoint("b", grown(LLAMA, 3)))


def of(recipe: dict[str, object], *, threads: int = 1, store: str = "copy", mean: bool = False) -> Estimate:
    plan = plan_of(*PAIR, base=None if mean else LLAMA, recipe=recipe, store=store)
    return estimate(plan, None if mean else BASE, PAIR, threads)


def test_a_cap_bounds_a_variant() -> None:
    found = of({"objective.budget": "10%"}).variants
    assert [variant.id for variant in found] == ["a", "b"]
    assert [variant.bytes for variant in found] == [int(0.1 * variant.checkpoint_bytes) for variant in found]


def test_a_cap_that_is_never_reached_does_not() -> None:
    found = of({"objective.budget": "90GB"}).variants[0]
    assert found.bytes < 2 * found.checkpoint_bytes


def test_what_is_shared_needs_scratch() -> None:
    """What deltas have in common lies there whole, in bf16."""
    plan = plan_of(*PAIR, recipe={"objective.budget": "10%"}, store="copy")
    known = estimate(plan, BASE, PAIR, 1)
    shared = estimate(replace(plan, base_mode="shared"), BASE, PAIR, 1)
    assert shared.disk_bytes == known.disk_bytes + 2 * sum(info.spec.numel for info in BASE.tensors.values())
    assert shared.base_bytes == known.base_bytes


def test_a_rank_is_added_up() -> None:
    plan = plan_of(*PAIR, recipe={"objective.rank": 5})
    lossy = [item for item in plan.items() if item.variant == "b" and item.matrix is not None]
    factors = sum(5 * step_bytes(item.codec, item.matrix, item.params) for item in lossy if item.matrix)
    norms, rows = 3 * 40 * 2, 3 * 40 * 2
    expected = factors + norms + rows + len(LLAMA) * ENTRY_BYTES + SHARD_BYTES
    assert of({"objective.rank": 5}).variants[1].bytes == expected


def test_small_shards_have_more_headers() -> None:
    whole, cut = (of({"objective.rank": 5, "output.shard_size": size}).variants[0] for size in ("2GB", "500B"))
    assert cut.bytes == whole.bytes + (len(LLAMA) - 1) * SHARD_BYTES


@pytest.mark.parametrize(("store", "shards"), [("copy", 1), ("reference", 0), ("hardlink", 0)])
def test_the_base_counts_where_it_is_copied(store: str, shards: int) -> None:
    assert of({}, store=store).base_bytes == shards * BASE.shards[0].size
    assert of({}, store=store).disk_bytes == of({}, store="reference").disk_bytes + shards * BASE.shards[0].size


def test_a_mean_lies_on_disk_twice_for_a_while() -> None:
    mean, known = of({}, mean=True), of({}, store="reference")
    assert BASE.tensor_bytes < mean.base_bytes < BASE.tensor_bytes + 1000 * len(LLAMA)
    assert mean.disk_bytes >= known.disk_bytes - sum(len(shard.raw) for shard in BASE.shards) + 2 * mean.base_bytes
    assert mean.read_bytes - known.read_bytes == BASE.tensor_bytes  # two variants instead of one base


def test_threads_hold_as_many_units_at_once() -> None:
    plan = plan_of(*PAIR)
    peaks = sorted((unit.peak_bytes for unit in plan.units), reverse=True)
    assert of({}, threads=3).peak_ram == sum(peaks[:3])
    assert of({}, threads=99).peak_ram == sum(peaks)


def test_what_must_be_read_again() -> None:
    """Lossy: once to measure. Raw: to write and to measure. Lossless: against the base, and once more if that grows."""
    lossy, raw = of({"objective.rank": 2}), of({"deltas.default.codec": "raw"})
    lossless = of({"deltas.default.codec": "lossless"})
    assert lossy.read_bytes < raw.read_bytes < lossless.read_bytes


def test_a_summary_is_plain_json(tmp_path: Path) -> None:
    plan = plan_of(*PAIR, recipe={"objective.budget": "8%"})
    document = json.loads(json.dumps(summarise(plan, of({"objective.budget": "8%"}), BASE, PAIR, tmp_path)))
    assert document["schema"] == "mfs.plan/1"
    assert document["coverage"] == {"tensors": 3 * len(LLAMA), "planned": 3 * len(LLAMA), "groups": len(LLAMA)}
    assert document["variants"][1]["codecs"] == {"auto": 9, "raw": 3}
    assert 0 < document["variants"][1]["max_footprint"] <= 0.08
    assert document["recipe"]["objective"] == {"budget": 0.08}
    assert document["base"] == {"mode": "known", "store": "copy", "bytes": BASE.shards[0].size}
