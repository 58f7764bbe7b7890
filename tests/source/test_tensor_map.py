"""The map against transformers itself: what a load really gives, bit for bit, and what it says is left over."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, auto_loader, build, save
from checkpoints import random_checkpoint, read_weights

from mfs_decompose.source.checkpoint import open_checkpoint
from mfs_decompose.source.tensor_map import Part, TensorMap, assemble, load_tensor_map

SMALL: Mapping[str, Any] = {
    "vocab_size": 301,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def _deepseek() -> Any:
    from transformers import DeepseekV3Config

    sizes: dict[str, Any] = {
        "q_lora_rank": 12,
        "kv_lora_rank": 10,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
    }
    experts: dict[str, Any] = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
    text = {**SMALL, "num_key_value_heads": 4, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
    return DeepseekV3Config(**text, **sizes, **experts)


def _gpt_oss() -> Any:
    from transformers import GptOssConfig

    return GptOssConfig(**SMALL, head_dim=12, num_local_experts=5, num_experts_per_tok=2)


def _qwen2_5_vl() -> Any:
    from transformers import Qwen2_5_VLConfig

    rope = {"rope_type": "default", "mrope_section": [1, 2, 2], "rope_theta": 10000.0}
    vision = {"depth": 1, "hidden_size": 48, "intermediate_size": 68, "num_heads": 2, "out_hidden_size": 40}
    place = {"patch_size": 7, "window_size": 28, "fullatt_block_indexes": [0]}
    return Qwen2_5_VLConfig(text_config={**SMALL, "rope_parameters": rope}, vision_config={**vision, **place})


def _llava() -> Any:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig

    vision = CLIPVisionConfig(
        hidden_size=48, intermediate_size=68, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=7
    )
    return LlavaConfig(text_config=LlamaConfig(**SMALL), vision_config=vision)


ALL: Mapping[str, Callable[[], Any]] = {
    **ARCHITECTURES,
    "deepseek_v3": _deepseek,
    "gpt_oss": _gpt_oss,
    "qwen2_5_vl": _qwen2_5_vl,
    "llava": _llava,
}
"""Beyond those of the round trip: buffers, experts fused on disk, and two more ways to wrap a language model."""


@pytest.fixture(autouse=True, scope="module")
def quiet() -> Iterator[None]:
    from transformers.utils import logging as untyped

    logging: Any = untyped
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()
    logging.set_verbosity(before)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of an architecture, saved once by save_pretrained."""
    root = tmp_path_factory.mktemp("saved")

    def folder(name: str) -> Path:
        if not (root / name).exists():
            save(build(ALL[name](), seed=5), root / name, name)
        return root / name

    return folder


def mapped(folder: Path) -> TensorMap:
    return load_tensor_map(open_checkpoint(folder, folder.name))


def loaded(folder: Path) -> tuple[Any, dict[str, Any]]:
    """What transformers makes of a folder, and what it says about it."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    model, info = auto_loader(config).from_pretrained(
        folder, dtype=torch.bfloat16, output_loading_info=True, ignore_mismatched_sizes=True
    )
    return model, info


def prove(folder: Path) -> TensorMap:
    """The map of a whole checkpoint, every parameter held against a real load."""
    found, (model, info) = mapped(folder), loaded(folder)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    weights, state = read_weights(folder), model.state_dict()
    assert found.architecture == type(model).__name__
    assert found.parameters.keys() == state.keys()
    for name, value in state.items():
        made = assemble(found.parameters[name], weights.__getitem__)
        assert torch.equal(made.to(value.dtype), value), name
    assert found.modules == {name: type(module).__name__ for name, module in model.named_modules()}
    assert set(found.places) == set(weights)
    assert (found.unused, found.ignored, found.shadowed, found.mismatched, found.failed) == ((), (), {}, (), ())
    assert (found.unfilled, found.initialised) == ((), ())
    for alias, owner in found.aliases.items():
        assert model.get_parameter(alias) is model.get_parameter(owner)
    return found


@pytest.mark.parametrize("name", list(ALL))
def test_every_parameter_is_what_a_real_load_makes_of_the_checkpoint(
    name: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = saved(name)
    prove(folder)
    # Values equal by chance or by a constant would prove nothing: each tensor is another one's worth apart.
    weights = read_weights(folder)
    assert len({value.float().sum().item() for value in weights.values()}) >= 0.9 * len(weights)


def test_experts_are_slices_of_stacked_parameters(saved: Callable[[str], Path]) -> None:
    found = mapped(saved("mixtral"))
    inside = "model.layers.1.block_sparse_moe.experts."
    gate_up = found.parameters["model.layers.1.mlp.experts.gate_up_proj"]
    assert gate_up.shape == (5, 112, 40)
    assert gate_up.parts() == (
        *(Part(f"{inside}{expert}.w1.weight", expert, (0, 56), False) for expert in range(5)),
        *(Part(f"{inside}{expert}.w3.weight", expert, (56, 112), False) for expert in range(5)),
    )
    down = found.parameters["model.layers.1.mlp.experts.down_proj"]
    assert down.parts() == tuple(Part(f"{inside}{expert}.w2.weight", expert, None, False) for expert in range(5))
    ((parameter, piece),) = found.places[f"{inside}3.w3.weight"]
    assert parameter == "model.layers.1.mlp.experts.gate_up_proj"
    assert piece.place == ((3, 4), (56, 112), (0, 40))
    assert found.modules["model.layers.1.mlp.experts"] == "MixtralExperts"


def test_fused_experts_on_disk_are_whole(saved: Callable[[str], Path]) -> None:
    found = mapped(saved("gpt_oss"))
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert found.parameters[name].parts() == (Part(name, None, None, False),)


def test_tied_names_share_the_pieces(saved: Callable[[str], Path]) -> None:
    found = mapped(saved("qwen3"))
    assert found.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert found.parameters["lm_head.weight"].parts() == (Part("model.embed_tokens.weight", None, None, False),)
    assert [name for name, _ in found.places["model.embed_tokens.weight"]] == [
        "model.embed_tokens.weight",
        "lm_head.weight",
    ]


def test_prefixes_of_wrappers_and_old_names_are_renamed(saved: Callable[[str], Path]) -> None:
    wrapper = mapped(saved("gemma3_vision"))
    key = "model.language_model.layers.0.self_attn.k_proj"
    assert wrapper.modules[key] == "Linear"
    assert wrapper.parameters[f"{key}.weight"].tensors == ("language_model.model.layers.0.self_attn.k_proj.weight",)
    assert mapped(saved("gpt_neox")).parameters["lm_head.weight"].tensors == ("embed_out.weight",)


def test_conv1d_is_told_from_linear_by_its_module(saved: Callable[[str], Path]) -> None:
    found = mapped(saved("gpt2"))
    assert found.modules["transformer.h.0.mlp.c_fc"] == "Conv1D"
    assert found.parameters["transformer.h.0.mlp.c_fc.weight"].parts()[0].transposed is False


def rewritten(folder: Path, to: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """The folder again, its tensors changed in place."""
    weights = read_weights(folder)
    change(weights)
    random_checkpoint(to, weights, {"format": "pt"})
    (to / "config.json").write_bytes((folder / "config.json").read_bytes())
    return to


def renamed(old: str, new: str) -> Callable[[dict[str, torch.Tensor]], object]:
    def change(weights: dict[str, torch.Tensor]) -> None:
        for name in [name for name in weights if name.startswith(old)]:
            weights[new + name.removeprefix(old)] = weights.pop(name)

    return change


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("qwen2", "model.", ""),  # saved from the model without a head
        ("gpt2", "transformer.", ""),  # as OpenAI's own checkpoints are
        ("gemma3_vision", "language_model.model.", "model.language_model."),  # as transformers 5 names them inside
        ("gemma3_vision", "vision_tower.", "vision_tower.vision_model."),  # as released
        ("llava", "model.language_model.", "language_model.model."),
    ],
)
def test_other_spellings_of_the_same_checkpoint(
    name: str, old: str, new: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    weights = read_weights(saved(name))
    assert any(key.startswith(old) for key in weights) or name == "llava"
    prove(rewritten(saved(name), tmp_path / "other", renamed(old, new)))


def test_a_tied_head_of_its_own_is_no_alias_and_a_head_alone_ties_the_embedding(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    both = prove(rewritten(saved("qwen2"), tmp_path / "both", lambda w: w.update({head: w[embedding] + 1})))
    assert both.aliases == {}
    assert both.parameters[head].tensors == (head,)
    swapped = prove(rewritten(saved("qwen2"), tmp_path / "swapped", lambda w: w.update({head: w.pop(embedding)})))
    assert swapped.aliases == {embedding: head}
    assert swapped.parameters[embedding].tensors == (head,)


@pytest.mark.parametrize("seed", range(24))
def test_leftovers_are_those_that_transformers_reports(seed: int, saved: Callable[[str], Path], tmp_path: Path) -> None:
    """Tensors dropped, added, cut and renamed at random: both sides agree on what is missing, left over and unlike."""
    draw = random.Random(seed)
    name = draw.choice(["mixtral", "gemma3_vision", "gpt2", "qwen2", "gpt_neox", "deepseek_v3"])

    def spoil(weights: dict[str, torch.Tensor]) -> None:
        for key in draw.sample(sorted(weights), draw.randint(0, 4)):
            what = draw.choice(["drop", "add", "cut", "rename"])
            value = weights[key].clone() if what in ("add", "cut") else weights.pop(key)
            if what in ("add", "rename"):
                weights[draw.choice([f"{key}.extra", f"extra.{key}", f"model.{key}"])] = value
            elif what == "cut":
                weights[key] = value[:-1].contiguous()

    folder = rewritten(saved(name), tmp_path / "spoiled", spoil)
    found, weights = mapped(folder), read_weights(folder)
    try:
        model, info = loaded(folder)
    except RuntimeError:  # a conversion failed, or a stack of experts has a hole
        assert found.failed
        return
    assert not found.failed
    assert set(found.unfilled) == set(info["missing_keys"])
    assert len(found.unused) == len(info["unexpected_keys"])
    assert {one[:3] for one in found.mismatched} == {(k, tuple(a), tuple(b)) for k, a, b in info["mismatched_keys"]}
    held = {tensor for mismatch in found.mismatched for tensor in mismatch.tensors}
    for group in (found.places, found.unused, found.ignored, found.shadowed):
        assert not held & set(group)
        held |= set(group)
    assert held == set(weights)  # every tensor once, and none forgotten
    for key, value in model.state_dict().items():
        if found.parameters[key].pieces:
            assert torch.equal(assemble(found.parameters[key], weights.__getitem__).to(value.dtype), value)
