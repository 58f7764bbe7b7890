"""What the map names instead of passing over, and what it refuses to map at all."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, build, save
from checkpoints import random_checkpoint, read_weights

from mfs_decompose.errors import SourceIncompatible
from mfs_decompose.source.checkpoint import open_checkpoint
from mfs_decompose.source.tensor_map import TensorMap, load_tensor_map


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("saved")

    def folder(name: str) -> Path:
        if not (root / name).exists():
            save(build(ARCHITECTURES[name](), seed=6), root / name, name)
        return root / name

    return folder


def mapped(
    source: Path,
    to: Path,
    drop: tuple[str, ...] = (),
    add: Mapping[str, torch.Tensor] | None = None,
    config: Mapping[str, Any] | None = None,
) -> TensorMap:
    """The map of a folder with tensors taken away and added, and keys of its config changed."""
    weights = read_weights(source)
    for name in drop:
        del weights[name]
    random_checkpoint(to, {**weights, **(add or {})}, {"format": "pt"})
    changed = json.loads((source / "config.json").read_text()) | dict(config or {})
    (to / "config.json").write_text(json.dumps({key: value for key, value in changed.items() if value is not None}))
    return load_tensor_map(open_checkpoint(to, "one"))


def test_two_tensors_for_one_parameter_are_named(saved: Callable[[str], Path], tmp_path: Path) -> None:
    """transformers takes the first of the sorted names and says nothing of the other."""
    base = saved("llama")
    twice = {"norm.weight": torch.ones(40, dtype=torch.bfloat16)}
    found = mapped(base, tmp_path / "twice", add=twice)
    assert found.shadowed == {"norm.weight": "model.norm.weight"}
    assert found.parameters["model.norm.weight"].tensors == ("model.norm.weight",)
    assert (found.unused, found.unfilled) == ((), ())


def test_what_an_architecture_leaves_out_by_intention_is_apart_from_what_it_does_not_know(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    one = torch.ones(6)
    llama = mapped(
        saved("llama"),
        tmp_path / "llama",
        add={"model.layers.0.self_attn.rotary_emb.inv_freq": one, "model.layers.7.mlp.up_proj.weight": one + 1},
    )
    assert llama.ignored == ("model.layers.0.self_attn.rotary_emb.inv_freq",)
    assert llama.unused == ("model.layers.7.mlp.up_proj.weight",)
    gpt2 = mapped(saved("gpt2"), tmp_path / "gpt2", add={"transformer.h.0.attn.bias": torch.ones(1, 1, 5, 5)})
    assert (gpt2.ignored, gpt2.unused) == (("transformer.h.0.attn.bias",), ())


def test_parameters_that_nothing_fills_are_named(saved: Callable[[str], Path], tmp_path: Path) -> None:
    found = mapped(saved("llama"), tmp_path / "one", drop=("lm_head.weight", "model.layers.1.mlp.down_proj.weight"))
    assert found.unfilled == ("lm_head.weight", "model.layers.1.mlp.down_proj.weight")
    assert found.parameters["lm_head.weight"].pieces == ()
    tied = mapped(saved("qwen3"), tmp_path / "two", drop=("model.embed_tokens.weight",))
    assert tied.unfilled == ("lm_head.weight", "model.embed_tokens.weight")
    assert tied.aliases == {}


def test_a_hole_in_a_stack_of_experts_is_named(saved: Callable[[str], Path], tmp_path: Path) -> None:
    inside = "model.layers.0.block_sparse_moe.experts."
    half = mapped(saved("mixtral"), tmp_path / "half", drop=(f"{inside}3.w1.weight",))
    (failure,) = half.failed
    assert failure.parameter == "model.layers.0.mlp.experts.gate_up_proj"
    assert "Sizes of tensors must match" in failure.reason
    assert set(failure.tensors) == {f"{inside}{i}.{w}.weight" for i in range(5) for w in ("w1", "w3")} - {
        f"{inside}3.w1.weight"
    }
    assert half.unfilled == ()
    whole = mapped(
        saved("mixtral"), tmp_path / "whole", drop=tuple(f"{inside}3.{w}.weight" for w in ("w1", "w2", "w3"))
    )
    assert sorted((one.parameter, one.found, one.expected) for one in whole.mismatched) == [
        ("model.layers.0.mlp.experts.down_proj", (4, 40, 56), (5, 40, 56)),
        ("model.layers.0.mlp.experts.gate_up_proj", (4, 112, 40), (5, 112, 40)),
    ]


def test_another_vocabulary_than_the_config_says(saved: Callable[[str], Path], tmp_path: Path) -> None:
    found = mapped(saved("llama"), tmp_path / "one", config={"vocab_size": 304})
    assert {(one.parameter, one.found, one.expected) for one in found.mismatched} == {
        ("model.embed_tokens.weight", (301, 40), (304, 40)),
        ("lm_head.weight", (301, 40), (304, 40)),
    }


def test_the_class_is_the_one_that_the_config_names(saved: Callable[[str], Path], tmp_path: Path) -> None:
    found = mapped(
        saved("llama"),
        tmp_path / "one",
        drop=("lm_head.weight",),
        add={"score.weight": torch.ones(2, 40)},
        config={"architectures": ["LlamaForSequenceClassification"]},
    )
    assert found.architecture == "LlamaForSequenceClassification"
    assert found.parameters["score.weight"].tensors == ("score.weight",)
    assert (found.unused, found.unfilled, found.mismatched) == ((), (), ())


@pytest.mark.parametrize(
    "named", [None, [], "LlamaForCausalLM", ["os"], ["PreTrainedModel"], [3], ["Qwen2ForCausalLM"], ["__class__"]]
)
def test_a_class_that_is_none_for_this_config_is_not_taken(
    named: object, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    assert mapped(saved("llama"), tmp_path / "one", config={"architectures": named}).architecture == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "foreign"}, "found model_type 'foreign'"),
        ({"model_type": None}, "found no model_type"),
        ({"model_type": ["llama"]}, r"found model_type \['llama'\]"),
        (
            {"model_type": "siglip_vision_model", "architectures": None},
            "found SiglipVisionConfig, which answers no text",
        ),
        ({"hidden_size": "wide"}, "transformers cannot build the architecture in the config.json of 'one'"),
        ({"num_attention_heads": 0}, "transformers cannot build the architecture in the config.json of 'one'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "expected plain weights in 'one'"),
    ],
)
def test_configs_that_cannot_be_mapped(
    config: dict[str, object], message: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(SourceIncompatible, match=message) as caught:
        mapped(saved("llama"), tmp_path / "one", config=config)
    assert caught.value.hint


def test_code_of_the_folder_is_never_run(saved: Callable[[str], Path], tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "evil.py").write_text(f"open({str(ran)!r}, 'w')")
    code = {"auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}}
    assert mapped(saved("llama"), tmp_path / "one", config=code).architecture == "LlamaForCausalLM"
    with pytest.raises(SourceIncompatible, match="found model_type 'foreign'"):
        mapped(saved("llama"), tmp_path / "one", config={**code, "model_type": "foreign"})
    assert not ran.exists()


def test_no_weight_is_read(saved: Callable[[str], Path], tmp_path: Path) -> None:
    mapped(saved("llama"), tmp_path / "one")
    checkpoint = open_checkpoint(tmp_path / "one", "one")
    (tmp_path / "one" / "model.safetensors").unlink()
    (tmp_path / "one" / "config.json").unlink()
    assert load_tensor_map(checkpoint).unfilled == ()


def test_it_is_quiet(saved: Callable[[str], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    capfd.readouterr()
    mapped(saved("qwen3"), tmp_path / "one", drop=("model.embed_tokens.weight",), config={"bos_token_id": 999_999})
    assert capfd.readouterr() == ("", "")


def test_the_module_does_not_import_torch() -> None:
    modules = ", ".join(f"mfs_decompose.source.{name}" for name in ("tensor_map", "architecture", "matching"))
    code = f"import sys, {modules}; print(sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
