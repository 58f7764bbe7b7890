"""Lineage: fine-tunes pass, strangers are named, and odd weights are no division by zero."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from checkpoints import Family, fine_tune, make_llama, random_checkpoint, read_weights

from mfs_decompose.errors import SourceIncompatible
from mfs_decompose.source import lineage as lineage_module
from mfs_decompose.source.align import align, mean_base_tensors
from mfs_decompose.source.checkpoint import TensorReader, open_checkpoint
from mfs_decompose.source.lineage import Lineage, check_lineage

Tensors = dict[str, torch.Tensor]


def measure(base: Path | None, variants: Sequence[Path]) -> tuple[dict[str, Lineage], list[TensorReader]]:
    """Lineage by variant, named after its folder; base None is a mean base. Also all readers, to see what they read."""
    opened = [open_checkpoint(folder, folder.name) for folder in variants]
    readers = [TensorReader(checkpoint) for checkpoint in opened]
    if base is None:
        found = check_lineage(None, readers, align(mean_base_tensors(opened), opened, {}))
    else:
        known = open_checkpoint(base, "base")
        readers.append(TensorReader(known))
        found = check_lineage(readers[-1], readers[:-1], align(known.tensors, opened, known.config))
    assert [one.variant for one in found] == sorted(checkpoint.id for checkpoint in opened)
    return {one.variant: one for one in found}, readers


def oracle(base: Path, variant: Path) -> tuple[float, float]:
    """Cosine and distance over all matrices, whole: what the samples stand for."""
    one, other = read_weights(base), read_weights(variant)
    cosines, moved, size = [], 0.0, 0.0
    for name, weight in one.items():
        if weight.dim() < 2:
            continue
        left, right = weight.double(), other[name][: len(weight)].double()
        cosines.append(torch.nn.functional.cosine_similarity(left.reshape(-1), right.reshape(-1), dim=0).item())
        moved += (right - left).square().sum().item()
        size += left.square().sum().item()
    return torch.tensor(cosines).median().item(), math.sqrt(moved / size)


def drawn(seed: int, **extra: torch.Tensor) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {f"w{number:02d}": torch.randn(5 + number, 40, generator=generator) for number in range(11)} | extra


def near(tensors: Tensors, seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: weight + 0.1 * torch.randn(weight.shape, generator=generator) if weight.is_floating_point() else weight
        for name, weight in tensors.items()
    }


def wrapped(folder: Path, tensors: Tensors) -> Path:
    return random_checkpoint(folder, {f"inner.{name}": weight for name, weight in tensors.items()})


class TestUnderOtherNames:
    """The groups say which tensor of the base a variant's is: lineage goes by that, not by names."""

    def test_against_a_base(self, tmp_path: Path) -> None:
        base = random_checkpoint(tmp_path / "base", drawn(1))
        plain, other = (
            random_checkpoint(tmp_path / "plain", near(drawn(1), 2)),
            wrapped(tmp_path / "w", near(drawn(1), 2)),
        )
        found, readers = measure(base, [plain, other])
        assert (found["w"].cosine, found["w"].relative_distance) == (
            found["plain"].cosine,
            found["plain"].relative_distance,
        )
        assert readers[0].bytes_read == readers[1].bytes_read == readers[2].bytes_read > 0

    def test_a_stranger_in_a_wrapper(self, tmp_path: Path) -> None:
        base = random_checkpoint(tmp_path / "base", drawn(1))
        with pytest.raises(SourceIncompatible, match=r"found 'w' \(cosine"):
            measure(base, [wrapped(tmp_path / "w", drawn(5))])

    def test_against_each_other(self, tmp_path: Path) -> None:
        folders = [random_checkpoint(tmp_path / "a", near(drawn(1), 3)), wrapped(tmp_path / "b", near(drawn(1), 4))]
        same = [folders[0], random_checkpoint(tmp_path / "c", near(drawn(1), 4))]
        (found, readers), (expected, _) = measure(None, folders), measure(None, same)
        assert found["b"].cosine == expected["c"].cosine > 0.9
        assert found["a"] == expected["a"]
        assert readers[0].bytes_read == readers[1].bytes_read > 0


class TestAgainstABase:
    def test_fine_tunes_pass(self, family: Family, untied_family: Family) -> None:
        for chosen in (family, untied_family):
            found, _ = measure(chosen.base, list(chosen.variants.values()))
            for id, folder in chosen.variants.items():
                cosine, distance = oracle(chosen.base, folder)
                assert found[id].cosine == pytest.approx(cosine, abs=3e-3)
                assert found[id].relative_distance == pytest.approx(distance, rel=0.15)
                assert found[id].cosine > 0.98

    @pytest.mark.parametrize("kind", ["norms", "low_rank"])
    def test_the_base_itself(self, family: Family, tmp_path: Path, kind: str) -> None:
        """Equal matrices, whatever the norms do."""
        scale = 0.0 if kind == "low_rank" else 1.0
        copy = fine_tune(family.base, tmp_path / "copy", seed=9, kind=kind, scale=scale)  # type: ignore[arg-type]
        found, _ = measure(family.base, [copy])
        assert found["copy"].cosine == pytest.approx(1, abs=1e-12)
        assert found["copy"].relative_distance == 0

    def test_a_heavy_fine_tune_passes(self, family: Family, tmp_path: Path) -> None:
        heavy = fine_tune(family.base, tmp_path / "heavy", seed=9, kind="dense", scale=1.0)
        found, _ = measure(family.base, [heavy])
        assert found["heavy"].cosine == pytest.approx(math.sqrt(0.5), abs=0.02)
        assert found["heavy"].relative_distance == pytest.approx(1, abs=0.05)

    def test_a_stranger_of_the_same_architecture(self, family: Family, tmp_path: Path) -> None:
        stranger = make_llama(tmp_path / "stranger", seed=77)
        with pytest.raises(SourceIncompatible, match="expected fine-tunes of this base") as caught:
            measure(family.base, [family.variants["math"], stranger, family.variants["code"]])
        assert caught.value.exit_code == 12
        figure = re.search(r"'stranger' \(cosine to its weights (-?0\.\d{3})\)", caught.value.message)
        assert figure
        assert abs(float(figure[1])) < 0.05
        assert "'math'" not in caught.value.message
        assert "--base" in (caught.value.hint or "")

    def test_a_stranger_in_another_type(self, family: Family, tmp_path: Path) -> None:
        stranger = make_llama(tmp_path / "stranger", seed=77, dtype=torch.float32)
        with pytest.raises(SourceIncompatible, match="'stranger'"):
            measure(family.base, [stranger])
        same = make_llama(tmp_path / "same", seed=1, dtype=torch.float32)
        found, _ = measure(family.base, [same])
        assert found["same"].cosine > 0.9999

    def test_turned_weights_are_strange(self, tmp_path: Path) -> None:
        base = random_checkpoint(tmp_path / "base", drawn(1))
        turned = random_checkpoint(tmp_path / "turned", {name: -weight for name, weight in drawn(1).items()})
        with pytest.raises(SourceIncompatible, match=r"'turned' \(cosine to its weights -1\.000\)"):
            measure(base, [turned])

    def test_most_matrices_decide(self, tmp_path: Path) -> None:
        base = random_checkpoint(tmp_path / "base", drawn(1))
        swapped = near(drawn(1), 2) | {name: drawn(3)[name] for name in ("w00", "w05")}
        found, _ = measure(base, [random_checkpoint(tmp_path / "new-heads", swapped)])
        assert found["new-heads"].cosine > 0.9

    def test_an_infinite_or_missing_number_spoils_one_sample_only(self, tmp_path: Path) -> None:
        weights = drawn(1)
        weights["w00"][0, 0] = math.inf
        base = random_checkpoint(tmp_path / "base", weights)
        other = near(drawn(1), 2)
        other["w04"][1, 1] = math.nan
        found, _ = measure(base, [random_checkpoint(tmp_path / "v", other)])
        assert found["v"].cosine == pytest.approx(1, abs=0.01)
        assert found["v"].relative_distance == pytest.approx(0.1, rel=0.2)

    @pytest.mark.parametrize("value", [math.nan, math.inf, 1e300])
    def test_nothing_that_can_be_compared(self, tmp_path: Path, value: float) -> None:
        weights = {name: torch.full((5, 3), value, dtype=torch.float64) for name in "ab"}
        base = random_checkpoint(tmp_path / "base", weights)
        found, _ = measure(base, [random_checkpoint(tmp_path / "v", weights)])
        assert found["v"] == Lineage("v", 1.0, 0.0)

    def test_zeros(self, tmp_path: Path) -> None:
        zeros = {name: torch.zeros(5, 3) for name in "ab"}
        base = random_checkpoint(tmp_path / "base", zeros)
        found, _ = measure(base, [random_checkpoint(tmp_path / "same", zeros)])
        assert found["same"] == Lineage("same", 1.0, 0.0)
        moved = random_checkpoint(tmp_path / "moved", {name: torch.ones(5, 3) for name in "ab"})
        found, _ = measure(base, [moved])
        assert found["moved"] == Lineage("moved", 1.0, math.inf)
        found, _ = measure(moved, [base])
        assert found["base"] == Lineage("base", 1.0, 1.0)

    def test_no_matrices(self, tmp_path: Path) -> None:
        base = random_checkpoint(tmp_path / "base", {"norm": torch.ones(5), "ids": torch.ones(3, 3).int()})
        found, readers = measure(base, [base])
        assert found["base"] == Lineage("base", 1.0, 0.0)
        assert [reader.bytes_read for reader in readers] == [0, 0]

    def test_is_cheap(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lineage_module, "_SAMPLED_ELEMENTS", 50)
        base = random_checkpoint(tmp_path / "base", drawn(1))
        variants = [random_checkpoint(tmp_path / id, near(drawn(1), seed)) for seed, id in enumerate("abc")]
        found, readers = measure(base, variants)
        assert [reader.bytes_read for reader in readers] == [8 * 50 * 4] * 4
        assert all(one.cosine > 0.98 for one in found.values())

    def test_a_row_larger_than_a_sample(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Fused experts: [experts, out, in], where a row is a whole matrix."""
        monkeypatch.setattr(lineage_module, "_SAMPLED_ELEMENTS", 50)
        experts = {"experts": torch.randn(3, 7, 11, generator=torch.Generator().manual_seed(1))}
        base = random_checkpoint(tmp_path / "base", experts)
        _, readers = measure(base, [random_checkpoint(tmp_path / "v", near(experts, 2))])
        assert [reader.bytes_read for reader in readers] == [200, 200]


class TestAgainstEachOther:
    def test_a_family_passes(self, family: Family, untied_family: Family) -> None:
        for chosen in (family, untied_family):
            found, _ = measure(None, list(chosen.variants.values()))
            assert all(one.cosine > 0.98 for one in found.values())
            assert all(0.005 < one.relative_distance < 0.06 for one in found.values())

    def test_equal_variants(self, family: Family, tmp_path: Path) -> None:
        copies = [fine_tune(family.base, tmp_path / id, seed=5) for id in "abc"]
        found, _ = measure(None, copies)
        for one in found.values():
            assert one.cosine == pytest.approx(1, abs=1e-12)
            assert one.relative_distance == pytest.approx(0, abs=1e-12)

    def test_the_stranger_is_named(self, family: Family, tmp_path: Path) -> None:
        stranger = make_llama(tmp_path / "a-stranger", seed=77)
        for others in (["math", "code"], ["math", "code", "vocab"]):
            with pytest.raises(SourceIncompatible, match="expected fine-tunes of one base") as caught:
                measure(None, [stranger, *(family.variants[id] for id in others)])
            assert caught.value.exit_code == 12
            assert "found 'a-stranger' (cosine to the others' weights" in caught.value.message
            assert caught.value.message.count("(") == 1
            assert "--base" in (caught.value.hint or "")

    def test_of_two_both_are_named(self, family: Family, tmp_path: Path) -> None:
        stranger = make_llama(tmp_path / "stranger", seed=77)
        with pytest.raises(SourceIncompatible, match=r"found 'math' \(.*\), 'stranger' \("):
            measure(None, [family.variants["math"], stranger])

    def test_the_smaller_camp_is_named(self, tmp_path: Path) -> None:
        folders = [random_checkpoint(tmp_path / f"big{seed}", near(drawn(1), seed)) for seed in range(3)]
        folders += [random_checkpoint(tmp_path / f"small{seed}", near(drawn(2), seed)) for seed in range(2)]
        with pytest.raises(SourceIncompatible, match=r"found 'small0' \(.*\), 'small1' \(") as caught:
            measure(None, folders)
        assert "big" not in caught.value.message

    def test_one_variant(self, family: Family) -> None:
        found, _ = measure(None, [family.variants["math"]])
        assert found["math"] == Lineage("math", 1.0, 0.0)

    def test_zeros_and_what_is_not_finite(self, tmp_path: Path) -> None:
        broken = near(drawn(1), 1)
        for number in range(11):
            broken[f"w{number:02d}"][0, 0] = math.nan
        zero = {name: torch.zeros_like(weight) for name, weight in drawn(1).items()}
        folders = [random_checkpoint(tmp_path / "broken", broken), random_checkpoint(tmp_path / "zero", zero)]
        folders += [random_checkpoint(tmp_path / f"v{seed}", near(drawn(1), seed)) for seed in (3, 4)]
        found, _ = measure(None, folders)
        assert found["broken"] == Lineage("broken", 1.0, 0.0)
        assert found["zero"].cosine == 1
        assert found["zero"].relative_distance == pytest.approx(1)
        assert found["v3"].cosine == pytest.approx(1, abs=0.02)

    def test_all_of_it_broken(self, tmp_path: Path) -> None:
        nan = {name: torch.full((5, 3), math.nan) for name in "ab"}
        found, _ = measure(None, [random_checkpoint(tmp_path / id, nan) for id in "ab"])
        assert list(found.values()) == [Lineage("a", 1.0, 0.0), Lineage("b", 1.0, 0.0)]

    def test_many_variants_get_smaller_samples(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lineage_module, "_ELEMENTS_AT_ONCE", 300)
        folders = [random_checkpoint(tmp_path / f"v{seed}", near(drawn(1), seed)) for seed in range(5)]
        _, readers = measure(None, folders)
        assert [reader.bytes_read for reader in readers] == [8 * 60 * 4] * 5
