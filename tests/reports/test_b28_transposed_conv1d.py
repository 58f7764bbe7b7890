"""B28: GPT-2 stores [in, out]: the update is transposed, by the kind of module, since a square one cannot tell."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from adapter_cases import delta, draw, factors, merge, refuse

ATTENTION, OUTPUT = "transformer.h.0.attn.c_attn", "transformer.h.0.attn.c_proj"
BASE = {
    f"{ATTENTION}.weight": draw("c", 8, 24),
    f"{OUTPUT}.weight": draw("p", 8, 8),
    "transformer.wte.weight": draw("e", 9, 8),
}


@pytest.mark.parametrize("config", [{}, {"fan_in_fan_out": True}, {"fan_in_fan_out": False}], ids=str)
def test_the_module_decides_and_not_the_flag(tmp_path: Path, config: dict[str, bool]) -> None:
    tensors = factors(ATTENTION, 24, 8, 4) | factors(OUTPUT, 8, 8, 4)
    weights, _ = merge(tmp_path, BASE, tensors, config, model_type="gpt2")
    for module in (ATTENTION, OUTPUT):
        expected = BASE[f"{module}.weight"].double() + delta(tensors, module, 2.5).mT
        torch.testing.assert_close(weights[f"{module}.weight"], expected)


def test_names_as_in_the_oldest_files(tmp_path: Path) -> None:
    """The first GPT-2 files have no prefix."""
    base = {name.removeprefix("transformer."): value for name, value in BASE.items()}
    tensors = factors(OUTPUT, 8, 8, 4)
    weights, found = merge(tmp_path, base, tensors, {}, model_type="gpt2")
    name = f"{OUTPUT}.weight".removeprefix("transformer.")
    torch.testing.assert_close(weights[name], base[name].double() + delta(tensors, OUTPUT, 2.5).mT)
    assert any("transformer.* is * in the base" in note for note in found.notes)


def test_a_linear_layer_is_never_transposed_to_make_it_fit(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj"
    error = refuse(tmp_path, {f"{name}.weight": draw("u", 8, 14)}, factors(name, 14, 8, 4))
    assert "[14, 8] where the base has [8, 14]" in error.message
