"""PEFT adapters of every kind on tiny real models, what PEFT computes with them, and what we make of them.

Coincidences are avoided: alpha is not the rank, layers are not square (but those of GPT-2, where that is the point),
factors are large enough to matter, and the batch holds more than one text.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

VOCABULARY = 61
TOKENS = torch.tensor([[1, 5, 9, 60, 33, 2, 17], [4, 4, 58, 0, 21, 40, 7]])

_SIZES: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Kind:
    """A kind of adapter: LoraConfig's fields, the model it sits on, and what happens to model, files or config."""

    base: str
    fields: Mapping[str, Any]
    grown: int = 0
    alter: Callable[[dict[str, torch.Tensor], dict[str, Any]], None] | None = None


def _llama(tie: bool) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**_SIZES, head_dim=8, tie_word_embeddings=tie)


def _qwen2() -> Any:
    from transformers import Qwen2Config

    return Qwen2Config(**_SIZES, tie_word_embeddings=False)


def _gpt2() -> Any:
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=24, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2
    )


def _qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(**_SIZES, head_dim=8, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=16)


def _mixtral() -> Any:
    from transformers import MixtralConfig

    return MixtralConfig(**_SIZES, head_dim=8, num_local_experts=3, num_experts_per_tok=2)


def _gpt_oss() -> Any:
    from transformers import GptOssConfig

    sizes = {**_SIZES, "intermediate_size": 24}  # so that down_proj is square, as in the released models
    return GptOssConfig(**sizes, head_dim=8, num_local_experts=3, num_experts_per_tok=2, tie_word_embeddings=False)


BASES: Mapping[str, Callable[[], Any]] = {
    "llama": lambda: _llama(False),
    "tied": lambda: _llama(True),
    "qwen2": _qwen2,
    "gpt2": _gpt2,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "gpt_oss": _gpt_oss,
}

_ATTENTION = ["q_proj", "v_proj"]
_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_LORA: Mapping[str, Any] = {"r": 3, "lora_alpha": 7}


def _with_default_names(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    del config
    for name in list(tensors):
        tensors[name.replace(".weight", ".default.weight")] = tensors.pop(name)


def _with_old_bias_names(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    del config
    for name in list(tensors):
        tensors[name.replace(".base_layer.bias", ".bias")] = tensors.pop(name)


def _one_half(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    config["target_modules"] = ["gate_proj", "v_proj"]
    for name in [name for name in tensors if "gate_proj" not in name and "v_proj" not in name]:
        del tensors[name]


def _experts_one_by_one(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    """As transformers 4 named them: each expert's projections are modules of their own."""
    config["target_modules"] = ["w1", "w2", "w3"]
    for name in [name for name in tensors if "self_attn" in name]:
        layer, rank = name.split(".self_attn")[0], 3
        for expert in range(3):
            for module, outs, ins in (("w1", 40, 24), ("w3", 40, 24), ("w2", 24, 40)):
                stem = f"{layer}.block_sparse_moe.experts.{expert}.{module}"
                tensors[f"{stem}.lora_A.weight"] = 0.3 * _noise(f"{stem} a", (rank, ins))
                tensors[f"{stem}.lora_B.weight"] = 0.3 * _noise(f"{stem} b", (outs, rank))
        tensors.pop(name)


def _kinds() -> dict[str, Kind]:
    patterns = {
        "rank_pattern": {"q_proj": 5, r"layers\.1\.self_attn\.v_proj": 2},
        "alpha_pattern": {"v_proj": 11},
    }
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return {
        "linear": Kind("llama", {**_LORA, "target_modules": _LINEAR}),
        "rslora": Kind("llama", {"r": 5, "lora_alpha": 6, "use_rslora": True, "target_modules": _LINEAR}),
        "patterns": Kind("llama", {**_LORA, **patterns, "target_modules": _LINEAR}),
        "rslora_patterns": Kind("llama", {**_LORA, **patterns, "use_rslora": True, "target_modules": _LINEAR}),
        "half": Kind("llama", {**_LORA, "target_modules": _LINEAR}, alter=_one_half),
        "default_names": Kind("llama", {**_LORA, "target_modules": _ATTENTION}, alter=_with_default_names),
        "bf16": Kind("llama", {**_LORA, "target_modules": _LINEAR}, alter=_in_bf16),
        "conv1d": Kind("gpt2", {**_LORA, "target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
        "conv1d_flag_forgotten": Kind(
            "gpt2", {**_LORA, "target_modules": ["c_attn", "c_proj"]}, alter=_forget("fan_in_fan_out")
        ),
        "saved": Kind("llama", {**_LORA, "target_modules": _ATTENTION, "modules_to_save": ["lm_head", "norm"]}),
        "saved_embeddings": Kind(
            "llama", {**_LORA, "target_modules": _ATTENTION, "modules_to_save": ["embed_tokens", "lm_head"]}
        ),
        "grown": Kind(
            "llama", {**_LORA, "target_modules": _ATTENTION, "modules_to_save": ["embed_tokens", "lm_head"]}, grown=3
        ),
        "bias_lora_only": Kind("qwen2", {**_LORA, "target_modules": ["q_proj", "o_proj"], "bias": "lora_only"}),
        "bias_old_names": Kind(
            "qwen2",
            {**_LORA, "target_modules": ["q_proj", "k_proj"], "bias": "lora_only"},
            alter=_with_old_bias_names,
        ),
        "bias_all": Kind("gpt2", {**_LORA, "target_modules": ["c_attn"], "bias": "all", "fan_in_fan_out": True}),
        "lora_bias": Kind("qwen2", {**_LORA, "target_modules": ["q_proj", "k_proj"], "lora_bias": True}),
        "dora": Kind("llama", {**_LORA, "target_modules": _LINEAR, "use_dora": True}),
        "dora_bias": Kind("qwen2", {**_LORA, "target_modules": ["q_proj", "down_proj"], "use_dora": True}),
        "dora_conv1d": Kind(
            "gpt2", {**_LORA, "target_modules": ["c_attn", "c_proj"], "use_dora": True, "fan_in_fan_out": True}
        ),
        "dora_embedding": Kind("llama", {**_LORA, "target_modules": ["embed_tokens", "q_proj"], "use_dora": True}),
        "embedding": Kind("llama", {**_LORA, "target_modules": ["embed_tokens", "lm_head", "q_proj"]}),
        "tied_embedding": Kind("tied", {**_LORA, "target_modules": ["embed_tokens", "q_proj"]}),
        "tied_head": Kind("tied", {**_LORA, "target_modules": ["lm_head", "q_proj"]}),
        "tied_both": Kind("tied", {**_LORA, "target_modules": ["embed_tokens", "lm_head"]}),
        "tied_ensured": Kind(
            "tied", {**_LORA, "target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": True}
        ),
        "tied_saved_both": Kind(
            "tied", {**_LORA, "target_modules": _ATTENTION, "modules_to_save": ["embed_tokens", "lm_head"]}
        ),
        "tied_saved_embedding": Kind(
            "tied", {**_LORA, "target_modules": _ATTENTION, "modules_to_save": ["embed_tokens"]}
        ),
        "tied_saved_head": Kind("tied", {**_LORA, "target_modules": _ATTENTION, "modules_to_save": ["lm_head"]}),
        "tied_grown": Kind(
            "tied", {**_LORA, "target_modules": _ATTENTION, "modules_to_save": ["embed_tokens", "lm_head"]}, grown=3
        ),
        "tied_gpt2_embedding": Kind("gpt2", {**_LORA, "target_modules": ["wte", "c_attn"], "fan_in_fan_out": True}),
        "tokens": Kind("llama", {**_LORA, "target_modules": _ATTENTION, "trainable_token_indices": [60, 3, 17]}),
        "tied_tokens": Kind("tied", {**_LORA, "target_modules": _ATTENTION, "trainable_token_indices": [9, 60]}),
        "tokens_of_both": Kind(
            "tied",
            {
                **_LORA,
                "target_modules": _ATTENTION,
                "trainable_token_indices": {"embed_tokens": [9, 60], "lm_head": [3]},
            },
        ),
        "parameter": Kind("llama", {**_LORA, "target_modules": [], "target_parameters": ["q_proj.weight"]}),
        "experts": Kind("qwen3_moe", {**_LORA, "target_modules": _ATTENTION, "target_parameters": experts}),
        "mixtral_experts": Kind("mixtral", {**_LORA, "target_modules": [], "target_parameters": experts}),
        "one_expert_parameter": Kind(
            "mixtral", {**_LORA, "target_modules": [], "target_parameters": ["experts.down_proj"]}
        ),
        "old_experts": Kind("mixtral", {**_LORA, "target_modules": ["q_proj"]}, alter=_experts_one_by_one),
        "transposed_experts": Kind("gpt_oss", {**_LORA, "target_modules": [], "target_parameters": experts}),
    }


def _in_bf16(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    del config
    for name in tensors:
        tensors[name] = tensors[name].to(torch.bfloat16)


def _forget(field: str) -> Callable[[dict[str, torch.Tensor], dict[str, Any]], None]:
    def alter(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        del tensors, config[field]

    return alter


KINDS: Mapping[str, Kind] = _kinds()


@dataclass(frozen=True)
class Made:
    """The folders of a base and an adapter on it; `grown` is by how many tokens the adapter's base was larger."""

    base: Path
    adapter: Path
    grown: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)


def make_base(folder: Path, name: str, dtype: torch.dtype = torch.float32) -> Path:
    """One of BASES with random weights, no norm of ones and no bias of zeros, as save_pretrained writes it."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(BASES[name]())
        for key, weight in model.named_parameters():
            noise = _noise(key, weight.shape)
            if weight.dim() == 1:
                weight.add_(0.1 * noise)
            else:
                weight.copy_(0.3 * noise)
    model.to(dtype).save_pretrained(folder)
    return folder


def make_adapter(root: Path, kind: str | Kind, base: Path | None = None) -> Made:
    """An untrained adapter of random values, saved by PEFT, on `base` or a new one in root/base."""
    from peft import LoraConfig, get_peft_model

    wanted = KINDS[kind] if isinstance(kind, str) else kind
    base = base or make_base(root / "base", wanted.base)
    model = load_base(base, wanted.grown)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about tied embeddings and biases, which are what is wanted here
        wrapped = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **wanted.fields))
    with torch.no_grad():
        for name, weight in wrapped.named_parameters():
            if not weight.requires_grad:
                continue
            if ".lora_" in name and "magnitude" not in name:
                weight.zero_()  # PEFT draws lora_A
            weight.add_(0.3 * _noise(name, weight.shape))
    folder = root / "adapter"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped.save_pretrained(folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    saved = json.loads((folder / "adapter_config.json").read_text())
    if wanted.alter is not None:
        wanted.alter(tensors, saved)
    write_adapter(folder, tensors, saved)
    return Made(base, folder, wanted.grown, saved)


def write_adapter(folder: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> Path:
    """An adapter's folder of any tensors and any config."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(dict(config), default=list) + "\n")
    return folder


def load_base(folder: Path, grown: int = 0) -> Any:
    """A base in fp32, as a training would have it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if grown:
        model.resize_token_embeddings(VOCABULARY + grown, mean_resizing=False)
    return model.eval()


def logits_of(folder: Path) -> torch.Tensor:
    """Of a whole checkpoint in fp32; every tensor of its files is used and none is drawn."""
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    with torch.no_grad():
        return model.eval()(TOKENS).logits  # type: ignore[no-any-return]


_ORACLE = """
import json, sys
import torch
from peft import PeftModel
from safetensors.torch import save_file
from adapters import TOKENS, load_base
torch.set_num_threads(1)
jobs, out = json.loads(sys.argv[1]), {}
for name, base, adapter, grown in jobs:
    model = PeftModel.from_pretrained(load_base(base, grown), adapter)
    with torch.no_grad():
        out[name] = model.eval()(TOKENS).logits.float().contiguous()
save_file(out, sys.argv[2])
"""


def peft_logits(made: Mapping[str, Made], scratch: Path) -> dict[str, torch.Tensor]:
    """What PEFT computes unmerged, by name; in a process of its own, so that nothing of ours can leak into it."""
    jobs = [[name, str(one.base), str(one.adapter), one.grown] for name, one in made.items()]
    place = scratch / "oracle.safetensors"
    command = [sys.executable, "-c", _ORACLE, json.dumps(jobs), str(place)]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return load_file(place)


def merge_by_us(made: Made, folder: Path) -> Path:
    """Our merge as a checkpoint in fp32, with the base's files and the changed config."""
    weights, merge = merged_weights(made.adapter, made.base)
    write_merge(made.base, folder, {name: value.float() for name, value in weights.items()}, merge.config_changes)
    return folder


def merged_weights(adapter_folder: Path, base_folder: Path, blocks: int = 3) -> tuple[dict[str, torch.Tensor], Any]:
    """Every tensor of our merge in fp64, read in blocks of rows, and the Merge itself."""
    from mfs_decompose.codec.adapter import check_adapter_values, open_adapter_tensor
    from mfs_decompose.source.adapter import resolve_adapter
    from mfs_decompose.source.checkpoint import TensorReader, open_checkpoint

    adapter, base = open_checkpoint(adapter_folder, "adapter"), open_checkpoint(base_folder, "base")
    merge = resolve_adapter(adapter, base)
    weights: dict[str, torch.Tensor] = {}
    with TensorReader(adapter) as own, TensorReader(base) as old:
        for name in adapter.tensors:
            check_adapter_values(name, own.rows(name))
        for name, tensor in merge.tensors.items():
            start = tensor.base.name if tensor.base else ""
            rows = (lambda low, high, start=start: old.rows(start, low, high)) if start else None
            if tensor.params is None:
                weights[name] = old.rows(start).double()
                continue
            params = json.loads(json.dumps(tensor.params))  # it has to be plain JSON
            opened = open_adapter_tensor(params, own.rows, tensor.spec, tensor.base)
            edges = [tensor.spec.rows * at // blocks for at in range(blocks + 1)]
            parts = [opened.rows(low, high, rows) for low, high in zip(edges, edges[1:], strict=False)]
            weights[name] = torch.cat(parts)
            assert weights[name].shape == tensor.spec.shape
    return weights, merge


def write_merge(base: Path, folder: Path, weights: Mapping[str, torch.Tensor], changes: Mapping[str, object]) -> None:
    """A checkpoint's folder: the base's side files, its config with the changes, and these weights in one file."""
    folder.mkdir(parents=True)
    for file in base.iterdir():
        if file.suffix != ".safetensors" and not file.name.endswith(".index.json"):
            shutil.copyfile(file, folder / file.name)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(_merged(config, changes)) + "\n")
    save_file(
        {name: value.contiguous() for name, value in weights.items()}, folder / "model.safetensors", {"format": "pt"}
    )


def _merged(config: dict[str, Any], changes: Mapping[str, object]) -> dict[str, Any]:
    for key, value in changes.items():
        inner = config.get(key)
        config[key] = _merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return config


def _noise(name: str, shape: Sequence[int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(tuple(shape), generator=generator)
