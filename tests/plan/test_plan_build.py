"""How every tensor will be stored, decided from headers."""

from __future__ import annotations

import subprocess
import sys

import pytest
from plan_cases import LLAMA, Specs, checkpoint, grown, plan_of, without

from mfs_decompose.codec.sizes import step_bytes
from mfs_decompose.errors import UsageError
from mfs_decompose.plan.model import Item, Plan

EMBEDDING = "model.embed_tokens.weight"
UP = "model.layers.0.mlp.up_proj.weight"
NORM = "model.norm.weight"


def found(plan: Plan, name: str, variant: str = "a") -> Item:
    return next(item for item in plan.items() if item.key == (variant, name))


def test_the_floor_of_plans_needs_no_tensor_library() -> None:
    code = (
        "import sys, mfs_decompose.plan.build, mfs_decompose.plan.estimate, mfs_decompose.plan.summary, "
        "mfs_decompose.plan.fingerprint, mfs_decompose.plan.allocate, mfs_decompose.pipeline.prepare\n"
        "loaded = {'torch', 'numpy', 'transformers', 'safetensors', 'scipy', 'zstandard'} & set(sys.modules)\n"
        "sys.exit(f'loaded {sorted(loaded)}' if loaded else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_matrices_get_the_lossy_codec_and_vectors_are_raw() -> None:
    plan = plan_of(checkpoint("a", LLAMA))
    matrix, norm = found(plan, UP), found(plan, NORM)
    assert (matrix.codec, matrix.auto, matrix.matrix, dict(matrix.params)) == ("banded", True, (96, 40), {})
    assert (norm.codec, norm.matrix, dict(norm.params), norm.steps) == ("raw", None, {}, 0)
    assert (plan.base_mode, plan.base_store, plan.groups) == ("known", "copy", len(LLAMA))


@pytest.mark.parametrize(
    ("base", "own", "codec", "matrix"),
    [
        (("BF16", (20, 30)), ("BF16", (20, 30)), "lowrank", (20, 30)),
        (("F32", (20, 30)), ("BF16", (20, 30)), "lowrank", (20, 30)),
        (("BF16", (7, 30)), ("BF16", (7, 30)), "raw", None),  # too thin to be worth a factorisation
        (("BF16", (3, 10, 12)), ("BF16", (3, 10, 12)), "lowrank", (10, 12)),  # three matrices
        (("BF16", (3, 10, 12)), ("BF16", (1, 10, 12)), "lowrank", (10, 12)),
        (("BF16", (16, 1, 12)), ("BF16", (16, 1, 12)), "lowrank", (16, 12)),  # slices too thin, the whole is not
        (("BF16", (16, 12, 1)), ("BF16", (16, 12, 1)), "raw", None),
        (("BF16", (16, 12, 3)), ("BF16", (16, 12, 3)), "raw", None),
        (("I8", (3, 10, 12)), ("I8", (3, 10, 12)), "raw", None),
        (("BF16", (3, 0, 12)), ("BF16", (3, 0, 12)), "raw", None),
        (("BF16", (20, 3, 4, 2)), ("BF16", (20, 3, 4, 2)), "lowrank", (20, 24)),
        (("I32", (20, 30)), ("I32", (20, 30)), "raw", None),
        (("F8_E4M3", (20, 30)), ("F8_E4M3", (20, 30)), "raw", None),
        (("BF16", (0, 30)), ("BF16", (0, 30)), "raw", None),
        (("I64", ()), ("I64", ()), "raw", None),
        (("BF16", (20, 30)), ("BF16", (20, 31)), "raw", None),  # only in the variant
        (("BF16", (20, 30)), ("BF16", (12, 30)), "lowrank", (12, 30)),  # a cut vocabulary
    ],
)
def test_what_a_lossy_codec_is_used_for(
    base: tuple[str, tuple[int, ...]],
    own: tuple[str, tuple[int, ...]],
    codec: str,
    matrix: tuple[int, int] | None,
) -> None:
    more: Specs = {"big": ("BF16", (90, 100))}  # so that kinship does not hang on the tensor in question
    plan = plan_of(checkpoint("a", {**more, "t": own}), base={**more, "t": base}, recipe={"objective.rank": 3})
    assert (found(plan, "t").codec, found(plan, "t").matrix) == (codec, matrix)


def test_only_the_rows_that_base_and_variant_share_go_to_the_codec() -> None:
    plan = plan_of(checkpoint("a", grown(LLAMA, 5)), recipe={"objective.budget": "30%"})
    item = found(plan, EMBEDDING)
    assert (item.kind, item.common_rows, item.matrix) == ("resized", 259, (259, 40))
    assert (item.common.shape, item.tail_bytes, item.comparable_bits) == ((259, 40), 5 * 40 * 2, True)
    assert found(plan, UP).comparable_bits
    assert plan.variants[0].unavoidable_bytes == 5 * 40 * 2 + 96


def test_missing_and_extra_tensors() -> None:
    extra: Specs = {**without(LLAMA, NORM, UP), "tower.weight": ("BF16", (16, 12))}
    plan = plan_of(checkpoint("b", extra), checkpoint("a", LLAMA), recipe={"objective.budget": "50%"})
    assert plan.missing == {"a": (), "b": (UP, NORM)}
    tower = found(plan, "tower.weight", "b")
    assert (tower.kind, tower.base, tower.codec, tower.common_rows) == ("only_in_variant", None, "raw", 0)
    assert (tower.common.nbytes, tower.tail_bytes) == (0, 16 * 12 * 2)
    assert plan.variants[1].unavoidable_bytes == 16 * 12 * 2 + 96
    assert len(plan.items()) == len(LLAMA) + len(extra)


def test_a_scalar_that_only_the_variant_has() -> None:
    plan = plan_of(checkpoint("a", {**LLAMA, "step": ("I64", ())}), recipe={"objective.rank": 2})
    item = found(plan, "step")
    assert (item.common.nbytes, item.tail_bytes) == (0, 8)


def test_a_head_of_its_own_is_compared_with_the_embedding_of_a_tied_base() -> None:
    plan = plan_of(checkpoint("a", {**LLAMA, "lm_head.weight": LLAMA[EMBEDDING]}))
    item = found(plan, "lm_head.weight")
    assert item.base is not None
    assert (item.kind, item.base.name, item.auto) == ("tied", EMBEDDING, True)


def test_a_mean_base_needs_no_base() -> None:
    plan = plan_of(checkpoint("b", LLAMA), checkpoint("a", grown(LLAMA, 4)), base=None)
    assert (plan.base_mode, plan.base_store) == ("mean", "copy")
    assert plan.base_tensors[EMBEDDING].shape == (259, 40)
    assert found(plan, EMBEDDING, "a").kind == "resized"


def test_rules_by_name_the_first_that_fits() -> None:
    rules = [
        {"match": ["*.mlp.*"], "codec": "sparse", "values": "int8"},
        {"match": "*up_proj*", "codec": "raw"},
        {"match": "*k_proj*", "codec": "lowrank", "factors": "bf16", "rank": 3},
        {"match": "*norm*", "codec": "lossless"},
    ]
    with pytest.raises(UsageError, match=r"the rule for \*up_proj\* fits none of the 12 tensors") as caught:
        plan_of(checkpoint("a", LLAMA), recipe={"deltas.rules": rules})
    assert caught.value.hint is not None
    plan = plan_of(checkpoint("a", LLAMA), recipe={"deltas.rules": [rules[0], *rules[2:]]})
    up, k, norm = (
        found(plan, f"model.layers.0.{name}.weight") for name in ("mlp.up_proj", "self_attn.k_proj", "input_layernorm")
    )
    assert (up.codec, dict(up.params), up.fixed) == ("sparse", {"values": "int8"}, False)
    assert (k.codec, dict(k.params), k.steps, k.fixed) == ("lowrank", {"factors": "bf16"}, 3, True)
    assert (norm.codec, norm.matrix) == ("lossless", None)


def test_a_fixed_rank_is_at_most_that_of_the_matrix() -> None:
    plan = plan_of(checkpoint("a", LLAMA), recipe={"objective.rank": 32})
    assert found(plan, UP).steps == 32
    assert found(plan, "model.layers.0.self_attn.k_proj.weight").steps == 24
    assert all(item.fixed for item in plan.items() if item.fitted)
    assert plan.variants[0].cap is None


@pytest.mark.parametrize(("density", "entries"), [("0.1%", 1), ("10%", 4), ("100%", 40)])
def test_a_density_is_a_share_of_each_row(density: str, entries: int) -> None:
    plan = plan_of(checkpoint("a", LLAMA), recipe={"objective.density": density, "deltas.default.codec": "sparse"})
    assert (found(plan, UP).steps, found(plan, UP).fixed) == (entries, True)


@pytest.mark.parametrize(("codec", "times"), [("lowrank", 2), ("auto", 4)])
def test_under_a_budget_a_fit_may_take_several_times_an_even_share(codec: str, times: int) -> None:
    plan = plan_of(checkpoint("a", LLAMA), recipe={"objective.budget": "12%", "deltas.default.codec": codec})
    lossy = [item for item in plan.items() if item.fitted]
    each = sum(step_bytes(item.codec, item.matrix, item.params) for item in lossy if item.matrix)
    cap = plan.variants[0].cap
    assert cap == int(0.12 * sum(info.nbytes for info in checkpoint("a", LLAMA).tensors.values()))
    even = cap / each
    assert even > 8
    assert found(plan, UP).steps == min(int(times * even) + 1, found(plan, UP).worthwhile_steps)
    tight = plan_of(checkpoint("a", LLAMA), recipe={"objective.budget": "1%", "deltas.default.codec": codec})
    assert found(tight, UP).steps == 8


def test_a_fit_never_takes_more_than_the_tensor_itself() -> None:
    plan = plan_of(checkpoint("a", LLAMA), recipe={"objective.budget": "100%", "deltas.default.factors": "bf16"})
    for item in plan.items():
        if item.matrix is not None:
            assert item.steps * step_bytes(item.codec, item.matrix, item.params) <= item.spec.nbytes
    assert found(plan, UP).steps == 96 * 40 * 2 // (2 * (96 + 40))


def test_every_shape_and_name_is_decided_alike_for_every_variant() -> None:
    plan = plan_of(checkpoint("b", LLAMA), checkpoint("a", LLAMA))
    for name in LLAMA:
        one, other = found(plan, name, "a"), found(plan, name, "b")
        assert (one.codec, one.matrix, one.steps, one.fixed) == (other.codec, other.matrix, other.steps, other.fixed)
    assert [variant.id for variant in plan.variants] == ["a", "b"]
