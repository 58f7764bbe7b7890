"""B37: users try to merge or diff GPTQ, AWQ and bitsandbytes weights: packs of 4-bit codes in int32 or bytes.

Packed integers are no numbers: nothing is subtracted, they and their scales are stored exactly, one sentence says why.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import fine_tune, make_llama, read_weights
from quantised_models import CONFIGS, Way, is_linear, quantise
from report_program import run, succeeded
from report_runs import same_bits, tensors_of
from safetensors.torch import save_file

WAYS: list[Way] = ["gptq", "awq", "nf4"]
CALLED = {"gptq": "GPTQ or AWQ", "awq": "GPTQ or AWQ", "nf4": "bitsandbytes 4-bit"}
CODES = {"gptq": ".qweight", "awq": ".qweight", "nf4": "_proj.weight"}
BESIDE = {
    "gptq": (".qzeros", ".scales", ".g_idx"),
    "awq": (".qzeros", ".scales"),
    "nf4": (".weight.absmax", ".weight.quant_map", ".weight.quant_state.bitsandbytes__nf4"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """For each way a quantised base, and a variant of it with other codes in 1 % of places and other norms."""
    root = tmp_path_factory.mktemp("b37")
    plain = make_llama(root / "plain", seed=37)
    found = {"plain": plain, "tuned": fine_tune(plain, root / "tuned", seed=38)}
    for way in WAYS:
        base = found[f"base-{way}"] = quantise(plain, root / f"base-{way}", way)
        own = found[f"own-{way}"] = shutil.copytree(base, root / f"own-{way}")
        generator = torch.Generator().manual_seed(39)
        weights = read_weights(base)
        for name, weight in weights.items():
            if name.endswith(CODES[way]):
                flipped = torch.rand(weight.shape, generator=generator) < 0.01
                assert flipped.any()
                weights[name] = torch.where(flipped, weight ^ 0x30, weight)
            elif name.endswith((".scales", ".absmax")) or weight.dtype == torch.bfloat16:
                weights[name] = (weight * (1 + 0.05 * torch.rand(weight.shape, generator=generator))).to(weight.dtype)
        save_file(weights, own / "model.safetensors")
    return found


@pytest.mark.parametrize("way", WAYS)
def test_packs_and_scales_are_exact_and_a_sentence_says_so(folders: dict[str, Path], tmp_path: Path, way: Way) -> None:
    own = folders[f"own-{way}"]
    words = ["decompose", "--base", folders[f"base-{way}"], "--variants", f"own={own}", "--rank", "3"]
    dry = succeeded(*words, "--out", tmp_path / "art", "--dry-run")
    ran = succeeded(*words, "--out", tmp_path / "art")
    method = CONFIGS[way]["quant_method"]
    said = (
        f"own: 14 tensors of quantised weights ({CALLED[way]}; config.json: {method}) and {14 * len(BESIDE[way])} with"
    )
    assert said in ran.err and said in dry.out
    assert "their scales are stored exactly and not compared" in ran.err

    original, tensors = read_weights(own), tensors_of(tmp_path / "art", "own")
    succeeded("restore", tmp_path / "art", "--variant", "own", "--out", tmp_path / "back")
    restored = read_weights(tmp_path / "back")
    kept = [name for name in original if name.endswith((CODES[way], *BESIDE[way]))]
    assert len(kept) == 14 * (1 + len(BESIDE[way]))
    for name in kept:
        assert tensors[name]["exact"] and same_bits(restored[name], original[name]), name
        assert tensors[name]["error"] == 0.0
    lossy = {name for name, found in tensors.items() if not found["exact"]}
    assert lossy == {"model.embed_tokens.weight"}  # what is not quantised is decomposed as ever
    assert (tmp_path / "back" / "config.json").read_bytes() == (own / "config.json").read_bytes()
    succeeded("verify", tmp_path / "art", "--level", "values", "--against", f"own={own}")


@pytest.mark.parametrize("way", WAYS)
def test_a_pack_that_equals_the_base_costs_nothing(folders: dict[str, Path], tmp_path: Path, way: Way) -> None:
    base = folders[f"base-{way}"]
    succeeded("decompose", "--base", base, "--variants", f"twin={base}", "--rank", "3", "--out", tmp_path / "art")
    assert {found["tree"]["codec"] for found in tensors_of(tmp_path / "art", "twin").values()} == {"identical"}


@pytest.mark.parametrize("way", WAYS)
def test_packs_beside_numbers_are_refused_by_name(folders: dict[str, Path], tmp_path: Path, way: Way) -> None:
    for base, own, said in (
        ("plain", f"base-{way}", f"variant 'own' is quantised ({CALLED[way]}) and the base is not"),
        (f"base-{way}", "tuned", f"the base is quantised ({CALLED[way]}) and variant 'own' is not"),
    ):
        words = ["decompose", "--base", folders[base], "--variants", f"own={folders[own]}", "--rank", "3"]
        ran = run(*words, "--out", tmp_path / "art")
        assert ran.code == 12 and said in ran.err, ran.err
        assert "before it was quantised" in ran.err
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("way", WAYS)
def test_packs_have_no_mean(folders: dict[str, Path], tmp_path: Path, way: Way) -> None:
    """Averaged scales without their codes would be orphans."""
    variants = [f"one={folders[f'base-{way}']}", f"two={folders[f'own-{way}']}"]
    ran = run("decompose", "--variants", *variants, "--rank", "3", "--out", tmp_path / "art")
    assert ran.code == 12
    assert f"variant 'one' is quantised ({CALLED[way]}), and codes have no mean: 14 tensors, among" in ran.err
    assert "with --base" in ran.err
    assert list(tmp_path.iterdir()) == []


def test_a_budget_that_packs_exceed_names_the_one_that_holds(folders: dict[str, Path], tmp_path: Path) -> None:
    words = ["decompose", "--base", folders["base-gptq"], "--variants", f"own={folders['own-gptq']}"]
    ran = run(*words, "--budget", "3%", "--out", tmp_path / "art")
    assert ran.code == 2
    assert "does not hold what must be stored exactly" in ran.err and "smallest budget that holds" in ran.err
    smallest = ran.err.strip().rpartition(" ")[2]
    succeeded(*words, "--budget", smallest, "--out", tmp_path / "art")


def test_linear_names_are_what_the_maker_takes_for_linear() -> None:
    assert is_linear("model.layers.0.self_attn.q_proj.weight")
    assert not is_linear("model.norm.weight") and not is_linear("lm_head.weight")
