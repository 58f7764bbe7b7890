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
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from adapter_kinds import BASES, KINDS, TOKENS, VOCABULARY, Kind
from adapter_kinds import noise as draw_noise
from architectures import auto_loader
from safetensors.torch import load_file, save_file


@dataclass(frozen=True)
class Made:
    """The folders of a base and an adapter on it; `grown` is by how many tokens the adapter's base was larger."""

    base: Path
    adapter: Path
    grown: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)


def make_base(folder: Path, name: str, dtype: torch.dtype = torch.float32) -> Path:
    """One of BASES with random weights, no norm of ones and no bias of zeros, as save_pretrained writes it."""
    config = BASES[name]()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        model = auto_loader(config).from_config(config)
        for key, weight in model.named_parameters():
            noise = draw_noise(key, weight.shape)
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
            weight.add_(0.3 * draw_noise(name, weight.shape))
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
    model, _ = _load(folder)
    if grown:
        model.resize_token_embeddings(VOCABULARY + grown, mean_resizing=False)
    return model.eval()


def logits_of(folder: Path) -> torch.Tensor:
    """Of a whole checkpoint in fp32; every tensor of its files is used and none is drawn."""
    model, info = _load(folder)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    with torch.no_grad():
        return model.eval()(TOKENS).logits  # type: ignore[no-any-return]


def _load(folder: Path) -> tuple[Any, dict[str, Any]]:
    from transformers import AutoConfig

    loader = auto_loader(AutoConfig.from_pretrained(folder))
    model, info = loader.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    return model, info


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
            parts = [opened.rows(low, high, rows) for low, high in pairwise(edges)]
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
