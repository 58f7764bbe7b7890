"""Adapters of every kind served as they are: their factors, unmerged, against the merge in fp32."""

from __future__ import annotations

import pytest
from adapter_kinds import KINDS
from adapters import TOKENS, make_adapter
from runtime_families import Stored, alone, check_logits, store
from safetensors.torch import load_file

from mfs_decompose.errors import SourceIncompatible

SERVED = (
    "linear", "rslora", "patterns", "bf16", "conv1d", "saved", "saved_embeddings", "grown", "bias_lora_only",
    "bias_all", "lora_bias", "dora", "dora_conv1d", "dora_embedding", "embedding", "tied_embedding", "tied_head",
    "tied_both", "tied_saved_both", "tied_saved_head", "tied_grown", "tokens", "tied_tokens", "tokens_of_both",
    "experts", "mixtral_experts", "old_experts", "all_linear", "fused", "tied_by_default", "transposed_experts",
)  # fmt: skip


@pytest.mark.parametrize("kind", SERVED)
def test_an_adapter_is_served_as_its_merge(kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    made = make_adapter(tmp_path_factory.mktemp(kind), kind)
    root = made.base.parent
    stored = store(root, made.base, {"tuned": made.adapter}, {})
    family = stored.load()
    for id in ("tuned", "base"):
        wanted = alone(stored.restored(id), TOKENS[0].tolist())
        with family.use(id):
            found = alone(family.model, TOKENS[0].tolist())
        scale = max(1.0, float(wanted.abs().max()))
        check_logits(found / scale, wanted / scale)
    forms = family.memory().variants["tuned"]
    if kind in ("linear", "patterns", "conv1d", "experts", "mixtral_experts", "fused"):
        assert set(forms) == {"low rank float32"}
    if kind == "bf16":
        assert set(forms) == {"low rank bfloat16"}


def test_every_kind_is_served_or_left_to_the_reports() -> None:
    assert set(SERVED) <= KINDS.keys()


def test_factors_are_the_adapters_own_bytes(tmp_path_factory: pytest.TempPathFactory) -> None:
    made = make_adapter(tmp_path_factory.mktemp("bytes"), "bf16")
    stored: Stored = store(made.base.parent, made.base, {"tuned": made.adapter}, {})
    factors = load_file(made.adapter / "adapter_model.safetensors").values()
    scales = 4 * sum(factor.shape[0] for factor in list(factors)) // 2  # alpha / r, an fp32 number a direction
    held = stored.load().memory().variants["tuned"]["low rank bfloat16"]
    assert sum(factor.nbytes for factor in factors) < held <= sum(factor.nbytes for factor in factors) + scales


def test_a_wrapper_with_an_adapter_on_its_image_tower_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    made = make_adapter(tmp_path_factory.mktemp("wrapper"), "wrapper")
    stored = store(made.base.parent, made.base, {"tuned": made.adapter}, {})
    with pytest.raises(SourceIncompatible, match="text to pass through"):
        stored.load()
