"""Checkpoints as quantisers write them: codes in place of the linear weights, scales beside them, config.json."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Literal

import torch
from checkpoints import read_weights
from report_runs import Tensors
from safetensors.torch import save_file

Way = Literal["fp8", "fp8-blocks", "gptq", "awq", "nf4"]
BLOCK = 8
CONFIGS: dict[Way, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "activation_scheme": "static"},
    "fp8-blocks": {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": BLOCK, "desc_act": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": BLOCK},
    "nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
}


def is_linear(name: str) -> bool:
    return name.endswith("_proj.weight")


def quantise(folder: Path, out: Path, way: Way) -> Path:
    """`folder` with every linear weight quantised."""
    shutil.copytree(folder, out)
    weights: Tensors = {}
    for name, weight in read_weights(folder).items():
        weights |= _QUANTISERS[way](name, weight.float()) if is_linear(name) else {name: weight}
    save_file({name: weight.contiguous() for name, weight in weights.items()}, out / "model.safetensors")
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "quantization_config": CONFIGS[way]}, indent=1))
    return out


def dequantised(weights: Tensors, name: str) -> torch.Tensor:
    """What FP8 codes and their scales mean: fp64."""
    codes = weights[name].double()
    scale = weights.get(f"{name}_scale", weights.get(f"{name}_scale_inv"))
    assert scale is not None
    if scale.dim() == 2:
        scale = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: codes.shape[0], : codes.shape[1]]
    return codes * scale.double()


def _fp8(name: str, weight: torch.Tensor) -> Tensors:
    scale = weight.abs().max() / 448
    scales = {f"{name}_scale": scale, f"{name.removesuffix('weight')}input_scale": scale * 3}
    return {name: (weight / scale).to(torch.float8_e4m3fn), **scales}


def _fp8_blocks(name: str, weight: torch.Tensor) -> Tensors:
    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    padded = torch.zeros(rows * BLOCK, columns * BLOCK)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    scale = padded.reshape(rows, BLOCK, columns, BLOCK).abs().amax((1, 3)) / 448
    spread = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: weight.shape[0], : weight.shape[1]]
    return {name: (weight / spread).to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}


def _packed(name: str, weight: torch.Tensor) -> Tensors:
    """4-bit codes [I / 8, O] in int32, one scale and one zero point for a group of inputs."""
    module, w_IO = name.removesuffix("weight"), weight.T.contiguous()
    groups, outputs = w_IO.shape[0] // BLOCK, w_IO.shape[1] // 8 * 8
    w_IO = w_IO[:, :outputs]
    scales = w_IO.reshape(groups, BLOCK, outputs).abs().amax(1) / 7
    codes = (w_IO / scales.repeat_interleave(BLOCK, 0)).round().clamp(-8, 7).to(torch.int64) + 8
    shifts = 4 * torch.arange(8)
    words = (codes.reshape(-1, 8, outputs) << shifts[:, None]).sum(1)
    zeros = torch.full((groups, outputs // 8), 0x77777777, dtype=torch.int32)
    return {
        f"{module}qweight": (words - ((words >> 31) << 32)).to(torch.int32),
        f"{module}qzeros": zeros,
        f"{module}scales": scales.half(),
    }


def _gptq(name: str, weight: torch.Tensor) -> Tensors:
    return {**_packed(name, weight), f"{name.removesuffix('weight')}g_idx": torch.arange(weight.shape[1]) // BLOCK}


def _nf4(name: str, weight: torch.Tensor) -> Tensors:
    blocks = weight.reshape(-1, BLOCK)
    absmax = blocks.abs().amax(1)
    codes = ((blocks / absmax[:, None] + 1) * 7.5).round().to(torch.uint8).reshape(-1, 2)
    return {
        name: (codes[:, :1] * 16 + codes[:, 1:]),
        f"{name}.absmax": absmax,
        f"{name}.quant_map": torch.linspace(-1, 1, 16),
        f"{name}.quant_state.bitsandbytes__nf4": torch.arange(70, dtype=torch.uint8),
    }


_QUANTISERS = {"fp8": _fp8, "fp8-blocks": _fp8_blocks, "gptq": _gptq, "awq": _packed, "nf4": _nf4}
