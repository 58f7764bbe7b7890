"""B34: a merge of a per-tensor FP8 checkpoint writes raw codes, dangling scales, and a config without quantisation.

FP8 codes and their scales are one group: stored exactly, never compared as numbers, never without each other, config
kept; one sentence says so. A bf16 base beside FP8 codes has nothing to be compared with, and that is refused.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoints import fine_tune, make_llama, read_weights
from quantised_models import Way, dequantised, is_linear, quantise
from report_program import run, succeeded
from report_runs import same_bits, tensors_of

WAYS: list[Way] = ["fp8", "fp8-blocks"]
SCALES = {"fp8": ("weight_scale", "input_scale"), "fp8-blocks": ("weight_scale_inv",)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A base and a fine-tune of it, in bf16 and in either way of FP8."""
    root = tmp_path_factory.mktemp("b34")
    found = {"base": make_llama(root / "base", seed=34)}
    found["own"] = fine_tune(found["base"], root / "own", seed=35)
    for way in WAYS:
        for id in ("base", "own"):
            found[f"{id}-{way}"] = quantise(found[id], root / f"{id}-{way}", way)
    return found


@pytest.mark.parametrize("way", WAYS)
def test_codes_and_scales_come_back_together(folders: dict[str, Path], tmp_path: Path, way: Way) -> None:
    base, own = folders[f"base-{way}"], folders[f"own-{way}"]
    words = ["decompose", "--base", base, "--variants", f"own={own}", "--rank", "3", "--out", tmp_path / "art"]
    ran = succeeded(*words)
    original = read_weights(own)
    linears = [name for name in original if is_linear(name)]
    count = len(linears) * len(SCALES[way])
    (note,) = [line for line in ran.talk if "own: " in line]
    assert (
        f"own: {len(linears)} tensors of quantised weights (FP8; config.json: fp8) and {count} with their scales"
        in note
    )
    assert "are stored exactly and not compared" in note

    tensors = tensors_of(tmp_path / "art", "own")
    assert tensors["model.embed_tokens.weight"]["tree"]["codec"] == "lowrank"  # the rest is decomposed as ever
    succeeded("restore", tmp_path / "art", "--variant", "own", "--out", tmp_path / "back")
    restored = read_weights(tmp_path / "back")
    assert restored.keys() == original.keys()
    for name in linears:
        group = [name, *(name.removesuffix("weight") + scale for scale in SCALES[way])]
        assert all(tensors[one]["exact"] and same_bits(restored[one], original[one]) for one in group)
        assert torch.equal(dequantised(restored, name), dequantised(original, name))
    assert (tmp_path / "back" / "config.json").read_bytes() == (own / "config.json").read_bytes()
    assert json.loads((tmp_path / "back" / "config.json").read_text())["quantization_config"]["quant_method"] == "fp8"
    succeeded("verify", tmp_path / "art", "--level", "values")


@pytest.mark.parametrize("way", WAYS)
def test_served_in_float32_the_codes_stay_codes(folders: dict[str, Path], tmp_path: Path, way: Way) -> None:
    words = ["decompose", "--base", folders[f"base-{way}"], "--variants", folders[f"own-{way}"], "--rank", "3"]
    succeeded(*words, "--out", tmp_path / "art")
    words = ["restore", tmp_path / "art", "--variant", f"own-{way}", "--dtype", "float32", "--out", tmp_path / "back"]
    succeeded(*words)
    restored, original = read_weights(tmp_path / "back"), read_weights(folders[f"own-{way}"])
    for name in original:
        if is_linear(name):
            assert restored[name].dtype == torch.float8_e4m3fn
            assert torch.equal(dequantised(restored, name), dequantised(original, name))


def test_what_equals_the_base_costs_nothing(folders: dict[str, Path], tmp_path: Path) -> None:
    """Codes are compared bit by bit: that needs no scale."""
    base = folders["base-fp8-blocks"]
    words = ["decompose", "--base", base, "--variants", f"twin={base}", "--rank", "3", "--out", tmp_path / "art"]
    succeeded(*words)
    assert {found["tree"]["codec"] for found in tensors_of(tmp_path / "art", "twin").values()} == {"identical"}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_codes_beside_numbers_are_refused_by_name(
    folders: dict[str, Path], tmp_path: Path, way: Way, more: tuple[str, ...]
) -> None:
    """Most of the bytes have no counterpart, whichever of the two is quantised."""
    for base, own, said, hint in (
        ("base", f"own-{way}", "variant 'own' is quantised (FP8) and the base is not", "as it was before"),
        (f"base-{way}", "own", "the base is quantised (FP8) and variant 'own' is not", "Give the base as it was"),
    ):
        words = ["decompose", "--base", folders[base], "--variants", f"own={folders[own]}", "--rank", "3"]
        ran = run(*words, "--out", tmp_path / "art", *more)
        assert ran.code == 12, ran.err
        assert said in ran.err and hint in ran.err
        assert "cannot be compared, among them model.layers.0.mlp.down_proj.weight" in ran.err
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reverse", [False, True])
def test_a_few_codes_beside_numbers_are_stored_whole(tmp_path: Path, way: Way, reverse: bool) -> None:
    """Where most of the bytes are embeddings, the rest is stored whole, and its scales are no orphans."""
    base = make_llama(tmp_path / "base", seed=34, vocab=901, hidden=40, inter=48, layers=1)
    own = fine_tune(base, tmp_path / "own", seed=35)
    sources = {"base": base, "own": own}
    who = "base" if reverse else "own"
    sources[who] = quantise(sources[who], tmp_path / "quantised", way)
    words = ["decompose", "--base", sources["base"], "--variants", f"own={sources['own']}", "--rank", "3"]
    ran = succeeded(*words, "--out", tmp_path / "art")
    assert f"{who}: 7 tensors of quantised weights (FP8" in ran.err
    original, tensors = read_weights(sources["own"]), tensors_of(tmp_path / "art", "own")
    succeeded("restore", tmp_path / "art", "--variant", "own", "--out", tmp_path / "back")
    restored = read_weights(tmp_path / "back")
    assert restored.keys() == original.keys()
    for name in original:
        if is_linear(name) or "scale" in name:
            assert (tensors[name]["kind"], tensors[name]["exact"]) == ("only_in_variant", True)
            assert same_bits(restored[name], original[name])
    (variant,) = json.loads((tmp_path / "art" / "manifest.json").read_bytes())["variants"]
    assert variant["missing"] == sorted(read_weights(sources["base"]).keys() - original.keys())
    succeeded("restore", tmp_path / "art", "--variant", "base", "--out", tmp_path / "again")
    whole = read_weights(sources["base"])
    assert all(same_bits(one, whole[name]) for name, one in read_weights(tmp_path / "again").items())


def test_other_codes_than_the_base_has(folders: dict[str, Path], tmp_path: Path) -> None:
    """FP8 of another format, or packed integers: neither is comparable."""
    packed = quantise(folders["own"], tmp_path / "packed", "gptq")
    ran = run("decompose", "--base", folders["base-fp8"], "--variants", packed, "--out", tmp_path / "art")
    assert ran.code == 12
    assert "variant 'packed' is quantised (GPTQ or AWQ) in another way than the base (FP8)" in ran.err


def test_a_config_that_speaks_of_codes_where_there_are_none(folders: dict[str, Path], tmp_path: Path) -> None:
    """A merge of a QLoRA run saves bf16 weights and often leaves the settings of its 4-bit base in config.json."""
    own = fine_tune(folders["base"], tmp_path / "own", seed=36)
    config = json.loads((own / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (own / "config.json").write_text(json.dumps(config))
    words = ["decompose", "--base", folders["base"], "--variants", own, "--rank", "3", "--out", tmp_path / "art"]
    ran = succeeded(*words)
    assert "own: config.json speaks of quantised weights (config.json: bitsandbytes), and no tensor is" in ran.err
    succeeded("restore", tmp_path / "art", "--variant", "own", "--out", tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config
