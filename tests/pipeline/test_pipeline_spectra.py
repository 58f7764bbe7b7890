"""Spectra of the variants of an artifact: whose delta it is, what is measured of it, and what it is classed as."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapters import make_adapter, make_base
from checkpoints import read_weights
from pipeline_runs import RUN, Recording, Tensors, back, copied, doubles, planted, run, toy
from spectra_families import EMBED, EXPERTS, NORM, RANK, SHAPES, STEP, UP, K, Q, base_tensors, make_classes, merged

from mfs_decompose.errors import ArtifactInvalid, MfsError, SourceIncompatible, SourceNotFound, UsageError
from mfs_decompose.events import NullSink
from mfs_decompose.pipeline import spectra_tensor
from mfs_decompose.pipeline.spectra import SpectraRequest, VariantSpectra, measure_spectra
from mfs_decompose.pipeline.spectra_json import to_json
from mfs_decompose.pipeline.spectra_summary import name_families, summarise
from mfs_decompose.pipeline.spectra_tensor import Measured

CLASSES = {"same": "identical", "lora": "lora", "sparse": "sparse", "peaked": "concentrated", "flat": "flat"}


@dataclass(frozen=True)
class Made:
    """The family of one variant a class, and the artifact of it under the default recipe."""

    base: Path
    variants: Mapping[str, Path]
    art: Path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    root = tmp_path_factory.mktemp("classes")
    base, variants = make_classes(root)
    run(root / "art", base, variants, {"objective.budget": 0.3})
    return Made(base, variants, root / "art")


def measured(art: Path, sink: NullSink | None = None, **asked: Any) -> dict[str, VariantSpectra]:
    request = SpectraRequest(art, threads=1, **asked)
    return {one.id: one for one in measure_spectra(request, sink or NullSink())[1]}


def of_tensor(spectra: VariantSpectra, name: str, slice: int | None = None) -> Measured:
    (found,) = [one for one in spectra.matrices if (one.tensor, one.slice) == (name, slice)]
    return found


def without_hints(art: Path, to: Path) -> Path:
    """The artifact as somebody else gets it: nobody knows where the originals were."""
    copied(art, to)
    (to / RUN).unlink()
    return to


def check_facts(one: Measured, own: torch.Tensor, base: torch.Tensor) -> None:
    """Against numpy's SVD of the two tensors."""
    delta = (doubles(own) - doubles(base)).reshape(own.shape[0], -1)
    assert one.facts is not None
    assert one.facts.elements == own.numel()
    assert one.facts.unchanged == int((own.view(torch.int16) == base.view(torch.int16)).sum())
    assert one.facts.energy == pytest.approx(float(np.square(delta).sum()), rel=1e-12)
    if own.dim() > 1 and one.facts.energy:
        assert one.facts.energies is not None
        exact = np.square(np.linalg.svd(delta, compute_uv=False))
        assert np.allclose(one.facts.energies, exact, rtol=1e-9, atol=one.facts.resolution)


def test_each_variant_has_its_class(made: Made) -> None:
    found = measured(made.art)
    assert list(found) == sorted(CLASSES)
    for id, spectra in found.items():
        summary = summarise(spectra)
        assert (summary.kind, summary.of) == (CLASSES[id], "original")
    lora = summarise(found["lora"])
    assert lora.classes == {"identical": 1, "lora": 7}
    assert lora.unclassified == 1  # the counter
    assert {one.family: one.rank for one in lora.families if one.kind == "lora"} == {
        "q_proj": RANK,
        "up_proj": RANK,
        "embed_tokens": RANK,
        "gate_up_proj": RANK,
    }
    assert summarise(found["same"]).classes == {"identical": 8}


@pytest.mark.parametrize("id", sorted(CLASSES))
def test_facts_are_those_of_a_full_svd(made: Made, id: str) -> None:
    own, base = read_weights(made.variants[id]), read_weights(made.base)
    (spectra,) = measured(made.art, variants=(id,)).values()
    for name in SHAPES:
        if name == EXPERTS:
            for at in range(SHAPES[EXPERTS][0]):
                check_facts(of_tensor(spectra, name, at), own[name][at], base[name][at])
        else:
            check_facts(of_tensor(spectra, name), own[name], base[name])
    counter = of_tensor(spectra, STEP)
    assert (counter.facts, counter.verdict) == (None, None)


def test_without_originals_it_is_of_what_is_stored(made: Made, tmp_path: Path) -> None:
    art = without_hints(made.art, tmp_path / "art")
    found = measured(art)
    assert {id: one.of for id, one in found.items()} == {
        "same": "original",  # all of it is exact
        "lora": "stored",
        "sparse": "stored",
        "peaked": "stored",
        "flat": "stored",
    }
    assert of_tensor(found["lora"], NORM).of == "original"  # exact


def test_what_is_stored_of_a_flat_change_is_as_low_in_rank_as_its_codec(made: Made, tmp_path: Path) -> None:
    run(tmp_path / "made", made.base, {"flat": made.variants["flat"]}, {"objective.rank": 5})
    art = without_hints(tmp_path / "made", tmp_path / "art")
    (spectra,) = measured(art).values()
    served = back(art, "flat", tmp_path / "served", dtype="float32")[1]
    one, base = of_tensor(spectra, UP), read_weights(made.base)
    assert one.of == "stored"
    assert one.facts is not None
    delta = doubles(served[UP]) - doubles(base[UP])
    assert one.facts.energy == pytest.approx(float(np.square(delta).sum()), rel=1e-9)
    assert one.verdict is not None
    assert (one.verdict.kind, one.verdict.rank) == ("lora", 5)


def test_what_is_kept_exactly_is_the_original_wherever_that_is(made: Made, tmp_path: Path) -> None:
    refs = {id: made.variants[id] for id in ("lora", "flat")}
    run(tmp_path / "made", made.base, refs, {"deltas.default.codec": "lossless"})
    art = without_hints(tmp_path / "made", tmp_path / "art")
    for id, spectra in measured(art).items():
        assert spectra.of == "original"
        assert summarise(spectra) == summarise(measured(made.art, variants=(id,))[id])


def test_originals_are_taken_from_where_they_are_now(made: Made, tmp_path: Path) -> None:
    art = without_hints(made.art, tmp_path / "art")
    moved = copied(made.variants["flat"], tmp_path / "moved")
    found = measured(art, variants=("flat",), originals={"flat": str(moved)})["flat"]
    assert found.of == "original"
    assert summarise(found) == summarise(measured(made.art, variants=("flat",))["flat"])


def test_another_checkpoint_is_refused_and_a_stale_hint_is_not_believed(made: Made, tmp_path: Path) -> None:
    own = read_weights(made.variants["flat"])
    values = toy(tmp_path / "values", {**own, UP: planted(own[UP], 60, 0.5)})
    shape = toy(tmp_path / "shape", {**own, UP: own[UP][:-1]})
    for folder in (values, shape):
        with pytest.raises(SourceIncompatible, match=rf"is not the original of variant 'flat': tensor '{UP}' differs"):
            measured(made.art, variants=("flat",), originals={"flat": str(folder)})
        art = copied(made.art, tmp_path / f"art-{folder.name}")
        record = json.loads((art / RUN).read_bytes())
        record["hints"]["variants"]["flat"] = str(folder)
        (art / RUN).write_text(json.dumps(record))
        sink = Recording()
        found = measured(art, sink, variants=("flat",))["flat"]
        assert found.of == "stored"
        assert [level for _, level in sink.notes] == (["warning"] if folder is values else [])


def test_wrong_requests_say_what_is_wrong(made: Made, tmp_path: Path) -> None:
    wrong: list[tuple[type[MfsError], dict[str, Any]]] = [
        (UsageError, {"variants": ("flt",)}),
        (UsageError, {"tensors": "*.r_proj.*"}),
        (UsageError, {"originals": {"flt": str(made.base)}}),
        (UsageError, {"variants": ("lora",), "originals": {"flat": str(made.variants["flat"])}}),
        (UsageError, {"device": "gpu"}),
        (SourceNotFound, {"originals": {"flat": str(tmp_path / "nowhere")}}),
    ]
    for error, asked in wrong:
        with pytest.raises(error) as raised:
            measured(made.art, **asked)
        assert raised.value.message
    with pytest.raises(UsageError, match=r"none like '\*\.r_proj\.\*'"):
        measured(made.art, tensors="*.r_proj.*")


def test_only_some_tensors(made: Made) -> None:
    found = measured(made.art, tensors="*.q_proj.weight")
    assert {one.tensor for spectra in found.values() for one in spectra.matrices} == {Q, K}


def test_a_damaged_artifact_is_found_out(made: Made, tmp_path: Path) -> None:
    run(tmp_path / "made", made.base, {"flat": made.variants["flat"]}, {"deltas.default.codec": "raw"})
    art = without_hints(tmp_path / "made", tmp_path / "art")
    shard = next(art.glob("v0001-*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(data)
    with pytest.raises(ArtifactInvalid, match="the artifact is damaged"):
        measured(art)


def test_nothing_depends_on_threads_blocks_or_what_is_held(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = measured(made.art, variants=("peaked", "sparse"))
    request = SpectraRequest(made.art, ("peaked", "sparse"), threads=3)
    for one in measure_spectra(request, NullSink())[1]:
        assert to_json("", [one], None) == to_json("", [plain[one.id]], None)
    monkeypatch.setattr(spectra_tensor, "BLOCK_ELEMENTS", 1000)
    monkeypatch.setattr(spectra_tensor, "HELD_ELEMENTS", 2000)
    for id, one in measured(made.art, variants=("peaked", "sparse")).items():
        for cut, whole in zip(one.matrices, plain[id].matrices, strict=True):
            assert (cut.verdict is None) == (whole.verdict is None)
            if cut.facts is None or whole.facts is None or cut.facts.energies is None or whole.facts.energies is None:
                continue
            assert cut.facts.energy == pytest.approx(whole.facts.energy, rel=1e-12)
            assert np.allclose(cut.facts.energies, whole.facts.energies, rtol=1e-9, atol=whole.facts.resolution)
            assert cut.verdict is not None
            assert whole.verdict is not None
            assert (cut.verdict.kind, cut.verdict.rank) == (whole.verdict.kind, whole.verdict.rank)


def test_boxes_of_a_large_tensor_are_looked_at_in_part(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spectra_tensor, "BOX_ELEMENTS", 128 * 80)
    monkeypatch.setattr(spectra_tensor, "_RUNS", 8)
    (spectra,) = measured(made.art, variants=("lora",), tensors="*embed*").values()
    (one,) = spectra.matrices
    assert one.verdict is not None
    assert (one.verdict.kind, one.verdict.rank) == ("lora", RANK)


def test_progress_counts_the_bytes_of_the_variant(made: Made) -> None:
    sink = Recording()
    measured(made.art, sink, variants=("flat",))
    assert sink.stages == ["spectra of flat"]
    assert sink.advanced == sum(weight.nbytes for weight in read_weights(made.variants["flat"]).values())


# Odd tensors.


def odd_family(
    root: Path, changed: Mapping[str, torch.Tensor | None], base: Tensors | None = None
) -> dict[str, Measured]:
    """One variant with these tensors instead of the base's: what is measured, by tensor."""
    base = base or base_tensors()
    own = {name: tensor for name, tensor in {**base, **changed}.items() if tensor is not None}
    folders = toy(root / "base", base), {"odd": toy(root / "odd", own)}
    run(root / "art", *folders, {"objective.budget": 0.9})
    (spectra,) = measured(root / "art").values()
    return {one.tensor: one for one in spectra.matrices}


def test_what_is_not_finite_is_counted_and_left_out(tmp_path: Path) -> None:
    base = base_tensors()
    own = merged(base)
    own[UP] = planted(own[UP], 3, float("nan"), float("inf"), 1.0)
    one = odd_family(tmp_path, own)[UP]
    assert one.nonfinite == 2
    delta = doubles(own[UP]) - doubles(base[UP])
    assert one.facts is not None
    assert one.facts.energy == pytest.approx(float(np.square(delta[np.isfinite(delta)]).sum()), rel=1e-9)
    assert one.facts.energies is not None
    assert np.isfinite(one.facts.energies).all()


def test_new_rows_have_no_delta_and_the_others_do(tmp_path: Path) -> None:
    base = base_tensors()
    grown = torch.cat([merged(base)[EMBED], torch.ones(5, 80, dtype=torch.bfloat16)])
    extra = {"extra.weight": torch.ones(9, 9, dtype=torch.bfloat16), STEP: torch.tensor([8])}
    found = odd_family(tmp_path, {EMBED: grown, **extra})
    assert found[EMBED].facts is not None
    assert found[EMBED].facts.elements == 211 * 80
    assert found[EMBED].verdict is not None
    assert (found[EMBED].verdict.kind, found[EMBED].verdict.rank) == ("lora", RANK)
    for name in extra:
        assert (found[name].facts, found[name].verdict) == (None, None)


def test_other_float_types(tmp_path: Path) -> None:
    """fp32 beside a base in bf16: on its grid; bf16 beside a base in fp32: not."""
    base = base_tensors()
    fine = base[UP].float() + (merged(base)[UP].double() - base[UP].double()).float()
    one = odd_family(tmp_path / "fine", {UP: fine})[UP]
    assert one.facts is not None
    assert one.facts.noise < 1e-6 * one.facts.energy
    wide = {**base, UP: 0.02 * torch.randn(SHAPES[UP], generator=torch.Generator().manual_seed(9))}
    one = odd_family(tmp_path / "coarse", {UP: wide[UP].to(torch.bfloat16)}, wide)[UP]
    assert one.facts is not None
    assert one.facts.noise == pytest.approx(one.facts.energy, rel=0.1)  # nothing but rounding
    assert one.verdict is not None
    assert one.verdict.rank is None


def test_a_convolution_and_thin_tensors(tmp_path: Path) -> None:
    base = base_tensors() | {"conv.weight": (0.02 * torch.randn(24, 10, 3, 3)).bfloat16(), "thin": torch.ones(3, 50)}
    moved = {
        name: base[name] + 0.01 * torch.randn(base[name].shape).to(base[name].dtype) for name in ("conv.weight", "thin")
    }
    found = odd_family(tmp_path, moved, base)
    conv, thin = found["conv.weight"].facts, found["thin"].facts
    assert conv is not None
    assert conv.energies is not None
    assert conv.energies.size == 24
    assert thin is not None
    assert thin.energies is None
    assert found["thin"].verdict is not None
    assert found["thin"].verdict.kind == "flat"


def test_an_adapter_is_a_lora_of_its_rank_and_its_own_original(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "llama", torch.bfloat16)
    adapter = make_adapter(tmp_path, "linear", base).adapter
    run(tmp_path / "made", base, {"tuned": adapter})
    art = without_hints(tmp_path / "made", tmp_path / "art")
    rank = json.loads((adapter / "adapter_config.json").read_text())["r"]
    for originals in (None, {"tuned": str(adapter)}):
        (spectra,) = measured(art, originals=originals).values()
        summary = summarise(spectra)
        assert (spectra.of, summary.kind) == ("original", "lora")
        assert {one.rank for one in summary.families if one.kind == "lora"} == {rank}
    other = copied(adapter, tmp_path / "other")
    data = bytearray((other / "adapter_model.safetensors").read_bytes())
    data[-1] ^= 1
    (other / "adapter_model.safetensors").write_bytes(data)
    with pytest.raises(SourceIncompatible, match="is not the original of variant 'tuned'"):
        measured(art, originals={"tuned": str(other)})
    shutil.rmtree(other)


# Names of families.


def test_families_are_named_by_the_end_that_tells_them_apart() -> None:
    names = {
        "model.layers.0.self_attn.q_proj.weight": "q_proj",
        "model.layers.11.self_attn.q_proj.weight": "q_proj",
        "model.layers.0.self_attn.q_proj.bias": "bias",
        "model.embed_tokens.weight": "embed_tokens",
        "transformer.h.0.attn.c_proj.weight": "attn.c_proj",
        "transformer.h.0.mlp.c_proj.weight": "mlp.c_proj",
        "model.layers.0.mlp.experts.0.down.weight": "experts.down",
        "model.layers.0.mlp.experts.1.down.weight": "experts.down",
        "model.layers.0.mlp.down.weight": "mlp.down",
        "7": "7",
    }
    assert name_families(names) == names


def test_a_path_that_ends_another_one_is_told_in_full() -> None:
    assert name_families(["a.norm.weight", "b.a.norm.weight"]) == {
        "a.norm.weight": "a.norm",
        "b.a.norm.weight": "b.a.norm",
    }
