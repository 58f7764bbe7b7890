"""A mean base of variants that call their tensors otherwise: by the names of the first, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from alignment_proof import prove_coverage
from checkpoints import random_checkpoint
from rename_trees import called, checkpoint, joined, kinds, partners, tensors, text, vision

from mfs_decompose.errors import SourceIncompatible
from mfs_decompose.source.align import align_mean, mean_base_tensors
from mfs_decompose.source.checkpoint import open_checkpoint
from mfs_decompose.source.header import TensorSpec
from mfs_decompose.source.rename_weights import open_heads


class TestMeanBaseUnderOtherNames:
    def test_maps_onto_the_names_of_the_first(self) -> None:
        variants = [
            checkpoint("b", text("language_model.model.", "language_model.lm_head.", vocab=99)),
            checkpoint("a", text(vocab=103)),
            checkpoint("c", joined(text("", "lm_head."), vision("visual."))),
        ]
        found, aligned = align_mean(variants)
        assert found == text(vocab=99)
        assert found == mean_base_tensors(variants)
        prove_coverage(aligned, found, variants)
        assert dict(aligned.renames) == {"b": (("", "language_model."),), "c": (("model.", ""),)}
        for id in "abc":
            assert partners(aligned, id).keys() == found.keys()
        assert partners(aligned, "b")["model.norm.weight"] == "language_model.model.norm.weight"
        assert kinds(aligned, "c")["visual.encoder.layers.0.mlp.fc1.weight"] == "only_in_variant"
        assert (found, aligned) == align_mean(variants[::-1])

    def test_a_wrapped_first(self) -> None:
        found, aligned = align_mean([checkpoint("a", text("x.model.", "x.lm_head.")), checkpoint("b", text())])
        assert set(found) == set(text("x.model.", "x.lm_head."))
        assert dict(aligned.renames) == {"b": (("x.", ""),)}

    def test_rules_that_average_nothing_are_not_said(self) -> None:
        first = joined(text(), vision("audio."))
        second = joined(text("x.model.", "x.lm_head."), vision("sound."))
        found, aligned = align_mean([checkpoint("a", first), checkpoint("b", second), checkpoint("c", text())])
        assert set(found) == set(text())
        assert dict(aligned.renames) == {"b": (("", "x."),)}
        assert kinds(aligned, "b")["sound.encoder.layers.0.mlp.fc1.weight"] == "only_in_variant"

    def test_two_towers_are_refused_by_name(self) -> None:
        towers = joined(text("one.", None), text("two.", None))
        with pytest.raises(SourceIncompatible, match=r"variant 'b' .* 29 tensors fit both one\. -> .* and two\. -> "):
            align_mean([checkpoint("a", towers), checkpoint("b", text("", None))])

    def test_other_names_altogether_are_refused_by_name(self) -> None:
        odd = {f"{name}_x": TensorSpec(f"{name}_x", spec.dtype, spec.shape) for name, spec in text().items()}
        with pytest.raises(SourceIncompatible, match="of 'b' can be averaged"):
            align_mean([checkpoint("a", text()), checkpoint("b", odd), checkpoint("c", text("", None))])

    def test_a_name_of_the_first_that_means_another_tensor(self) -> None:
        """In b, `encoder` is a small tower of its own, and the first's `encoder` is `text.encoder`."""
        first = tensors({f"encoder.layers.{at}.mlp.weight": (40, 12) for at in range(3)})
        small = tensors({f"encoder.layers.{at}.mlp.weight": (6, 5) for at in range(3)})
        wrapped = called(first.values(), "", "text.")
        found, aligned = align_mean([checkpoint("a", first), checkpoint("b", joined(wrapped, small))])
        assert found == first
        assert partners(aligned, "b") == {name: f"text.{name}" for name in first}

    def test_weights_tell_towers_apart(self, tmp_path: Path) -> None:
        generator = torch.Generator().manual_seed(4)
        one, two = (
            {f"layers.{at}.mlp.weight": torch.randn(9, 7, generator=generator) for at in range(4)} for _ in range(2)
        )
        towers = {
            f"{prefix}.{name}": weight for prefix, part in (("x", one), ("y", two)) for name, weight in part.items()
        }
        variants = [
            open_checkpoint(random_checkpoint(tmp_path / "a", towers), "a"),
            open_checkpoint(
                random_checkpoint(tmp_path / "b", {name: weight * 1.01 for name, weight in two.items()}), "b"
            ),
        ]
        found, aligned = align_mean(variants, heads=open_heads(None, variants))
        assert set(found) == {f"y.{name}" for name in two}
        assert aligned.renames["b"] == (("y.layers.", "layers."),)
        assert mean_base_tensors(variants, heads=open_heads(None, variants)) == found
