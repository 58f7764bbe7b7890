"""Renamed trees: wrappers, several prefixes in one model, towers that only weights tell apart, and coincidences."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from alignment_proof import prove_coverage
from checkpoints import random_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from rename_trees import Specs, called, checkpoint, joined, kinds, partners, tensors, text, vision

from mfs_decompose.errors import SourceIncompatible
from mfs_decompose.source.align import Alignment, align
from mfs_decompose.source.checkpoint import open_checkpoint
from mfs_decompose.source.header import TensorSpec
from mfs_decompose.source.rename import find_renames
from mfs_decompose.source.rename_weights import Heads, cosine_of, open_heads

ALONE = "judged by name and shape alone, no weights were compared"


def aligned(
    base: Specs, variant: Specs, config: Mapping[str, object] | None = None, heads: Heads | None = None
) -> Alignment:
    """The alignment of one variant `v`, proven to hold every tensor once."""
    found = align(base, [checkpoint("v", variant)], config or {}, heads=heads)
    prove_coverage(found, base, [checkpoint("v", variant)])
    return found


def rules(base: Specs, variant: Specs) -> tuple[tuple[str, str], ...]:
    return aligned(base, variant).renames.get("v", ())


LLAVA = joined(
    text("language_model.model.", "language_model.lm_head."),
    vision("vision_tower.vision_model."),
    tensors({"multi_modal_projector.linear_1.weight": (12, 12), "multi_modal_projector.linear_1.bias": (12,)}),
)
LLAVA_5 = joined(
    text("model.language_model.", "lm_head."),
    vision("model.vision_tower.vision_model."),
    tensors(
        {"model.multi_modal_projector.linear_1.weight": (12, 12), "model.multi_modal_projector.linear_1.bias": (12,)}
    ),
)
QWEN_VL = joined(text(), vision("visual."))
QWEN_VL_5 = joined(text("model.language_model."), vision("model.visual."))
GPT = tensors(
    {
        f"transformer.h.{at}.{name}.weight": shape
        for at in range(2)
        for name, shape in {"ln": (5,), "mlp": (7, 5)}.items()
    }
    | {"transformer.wte.weight": (31, 5)}
)


class TestWrappers:
    @pytest.mark.parametrize(
        ("base", "variant", "expected"),
        [
            (called(text().values(), "", "language_model."), text(), [("language_model.", "")]),
            (text(), called(text().values(), "", "language_model."), [("", "language_model.")]),
            (text(head=None), text("language_model.model.", None), [("model.", "language_model.model.")]),
            (text("", None), text(head=None), [("", "model.")]),
            (text("", None), text(), [("", "model.")]),
            (text("", "lm_head."), text(), [("", "model.")]),
            (GPT, called(GPT.values(), "transformer.", ""), [("transformer.", "")]),
            (called(GPT.values(), "transformer.", ""), GPT, [("", "transformer.")]),
            (text(), text("model.language_model."), [("model.", "model.language_model.")]),
            (QWEN_VL, QWEN_VL_5, [("visual.", "model.visual."), ("model.", "model.language_model.")]),
            (QWEN_VL_5, QWEN_VL, [("model.language_model.", "model."), ("model.visual.", "visual.")]),
            (
                LLAVA,
                LLAVA_5,
                [
                    ("language_model.lm_head.", "lm_head."),
                    ("language_model.model.", "model.language_model."),
                    ("", "model."),
                ],
            ),
            (
                LLAVA_5,
                LLAVA,
                [
                    ("model.language_model.", "language_model.model."),
                    ("lm_head.", "language_model.lm_head."),
                    ("model.", ""),
                ],
            ),
            (LLAVA, text(), [("language_model.", "")]),
            (text(), LLAVA_5, [("model.", "model.language_model.")]),
            (text(), LLAVA, [("", "language_model.")]),
            (text(), text(), []),
            (QWEN_VL, text(), []),
        ],
    )
    def test_rules(self, base: Specs, variant: Specs, expected: list[tuple[str, str]]) -> None:
        assert rules(base, variant) == tuple(expected)

    def test_pairs_under_every_rule(self) -> None:
        found = partners(aligned(LLAVA, LLAVA_5), "v")
        assert found.keys() == LLAVA.keys()
        assert set(found.values()) == LLAVA_5.keys()
        assert found["language_model.lm_head.weight"] == "lm_head.weight"
        assert (
            found["language_model.model.layers.2.mlp.up_proj.weight"]
            == "model.language_model.layers.2.mlp.up_proj.weight"
        )
        assert found["multi_modal_projector.linear_1.bias"] == "model.multi_modal_projector.linear_1.bias"

    def test_a_member_bears_its_own_name_and_the_base_has_no_group_left(self) -> None:
        found = aligned(text("language_model.model.", None), text(head=None))
        assert [group.name for group in found.groups] == sorted(text(head=None))
        group = next(group for group in found.groups if group.name == "model.norm.weight")
        assert group.base == TensorSpec("language_model.model.norm.weight", "BF16", (12,))
        assert group.members[0].spec == TensorSpec("model.norm.weight", "BF16", (12,))
        assert (group.members[0].kind, group.members[0].common_rows) == ("same", 12)

    def test_variants_that_use_other_names(self) -> None:
        base = text()
        variants = [
            checkpoint("plain", base),
            checkpoint("wrapped", text("language_model.model.", "language_model.lm_head.")),
            checkpoint("bare", text("", "lm_head.", vocab=103)),
            checkpoint("cut", {name: spec for name, spec in base.items() if name != "model.norm.weight"}),
        ]
        found = align(base, variants, {})
        prove_coverage(found, base, variants)
        assert dict(found.renames) == {"bare": (("model.", ""),), "wrapped": (("", "language_model."),)}
        by_key = {(group.name, group.base_name): group for group in found.groups}
        norm = by_key["model.norm.weight", "model.norm.weight"]
        assert [(m.variant, m.kind) for m in norm.members] == [("cut", "missing_in_variant"), ("plain", "same")]
        assert [m.variant for m in by_key["norm.weight", "model.norm.weight"].members] == ["bare"]
        grown = by_key["embed_tokens.weight", "model.embed_tokens.weight"].members[0]
        assert (grown.kind, grown.common_rows) == ("resized", 101)

    def test_dtypes_need_not_agree_but_kinds_must(self) -> None:
        wide = {name: TensorSpec(name, "F32", spec.shape) for name, spec in text("x.model.", "x.lm_head.").items()}
        assert rules(text(), wide) == (("", "x."),)
        packed = {**wide, "x.model.norm.weight": TensorSpec("x.model.norm.weight", "I8", (12,))}
        found = kinds(aligned(text(), packed), "v")
        assert found["x.model.norm.weight"] == "only_in_variant"
        assert found["model.norm.weight"] == "missing_in_variant"

    def test_only_vocabularies_may_be_of_another_height(self) -> None:
        taller = text("x.model.", "x.lm_head.", vocab=111)
        name = "x.model.layers.1.mlp.up_proj.weight"
        taller[name] = TensorSpec(name, "BF16", (30, 12))
        found = aligned(text(), taller)
        assert found.renames["v"] == (("", "x."),)
        of = kinds(found, "v")
        assert (of["x.model.embed_tokens.weight"], of["x.lm_head.weight"]) == ("resized", "resized")
        assert (of[name], of["model.layers.1.mlp.up_proj.weight"]) == ("only_in_variant", "missing_in_variant")


class TestNotes:
    def test_counts(self) -> None:
        base = joined(text(head=None), tensors({"model.rotary.inv_freq": (6,)}))
        variant = joined(
            text("language_model.model.", None), tensors({"projector.weight": (9, 12), "projector.bias": (9,)})
        )
        assert aligned(base, variant).notes == (
            "v: 29 tensors renamed: model. -> language_model.model.; 29 matched, 2 only in the variant, "
            "1 of the base left out",
            f"v: {ALONE}: model. -> language_model.model.",
            "v: 2 tensors not in the base, stored whole: projector.bias, projector.weight",
            "v: 1 tensor of the base left out: model.rotary.inv_freq",
        )

    def test_no_prefix_is_said(self) -> None:
        assert (
            aligned(text("", None), text(head=None))
            .notes[0]
            .startswith("v: 29 tensors renamed: (no prefix) -> model.;")
        )

    def test_nothing_renamed_nothing_said(self) -> None:
        found = aligned(text(), text())
        assert (found.notes, dict(found.renames)) == ((), {})

    def test_zero_matches(self) -> None:
        odd = {f"{name}_x": TensorSpec(f"{name}_x", spec.dtype, spec.shape) for name, spec in text().items()}
        with pytest.raises(
            SourceIncompatible, match="0 of 30 tensors align, 0 % of its bytes; 30 do not, among"
        ) as caught:
            aligned(text(), odd)
        assert caught.value.exit_code == 12


class TestCoincidences:
    """What is left over in a model that is aligned otherwise must not be paired because it looks alike."""

    @pytest.mark.parametrize(
        ("gone", "new"),
        [
            ("model.norm.weight", "final.norm.weight"),
            ("model.norm.weight", "encoder.head.norm.weight"),
            ("model.layers.2.mlp.up_proj.weight", "mtp.0.mlp.up_proj.weight"),
            ("model.layers.2.mlp.up_proj.weight", "adapter.mlp.up_proj.weight"),
            ("lm_head.weight", "score.weight"),
            ("model.norm.weight", "norm"),
        ],
    )
    def test_single_tensors(self, gone: str, new: str) -> None:
        base = text()
        variant = {name: spec for name, spec in base.items() if name != gone}
        variant[new] = TensorSpec(new, "BF16", base[gone].shape)
        found = aligned(base, variant)
        assert dict(found.renames) == {}
        assert (kinds(found, "v")[gone], kinds(found, "v")[new]) == ("missing_in_variant", "only_in_variant")

    def test_a_layer_in_another_place(self) -> None:
        """Places of layers never change: the last layer that is gone is not the extra block that came."""
        base, last = text(), text(layers=3).keys() - text(layers=2).keys()
        block = called([base[name] for name in sorted(last)], "model.layers.2.", "mtp.layers.0.")
        found = aligned(base, joined(text(layers=2), block))
        assert dict(found.renames) == {}
        moved = called([base[name] for name in sorted(last)], "model.layers.2.", "mtp.layers.2.")
        assert dict(aligned(base, joined(text(layers=2), moved)).renames) == {}

    def test_exact_names_win(self) -> None:
        """The variant has its own `model.` and another tree that looks like it."""
        found = aligned(text(), joined(text(), text("draft.model.", None)))
        assert dict(found.renames) == {}
        assert kinds(found, "v")["draft.model.norm.weight"] == "only_in_variant"

    def test_a_whole_subtree_is_a_rename(self) -> None:
        base = joined(text(), vision("audio."))
        found = aligned(base, joined(text(), vision("sound.")))
        assert found.renames["v"] == (("audio.", "sound."),)
        assert any(note.startswith(f"v: {ALONE}") for note in found.notes)

    def test_a_few_of_a_subtree_are_none(self) -> None:
        base = joined(text(), vision("audio.", layers=9))
        few = {name: spec for name, spec in vision("sound.", layers=9).items() if ".layers.4." in name}
        rest = tensors({f"sound.other.{at}.weight": (4, at + 1) for at in range(9)})
        assert dict(aligned(base, joined(text(), few, rest)).renames) == {}

    def test_a_name_in_use_for_another_shape_is_left_over_too(self) -> None:
        """The wrapper's own tower took the name that the base's tower had."""
        base = tensors({f"encoder.layers.{at}.mlp.weight": (40, 12) for at in range(3)})
        small = tensors({f"encoder.layers.{at}.mlp.weight": (6, 5) for at in range(3)})
        found = aligned(base, joined(called(base.values(), "", "text."), small))
        assert found.renames["v"] == (("encoder.layers.", "text.encoder.layers."),)
        assert kinds(found, "v")["encoder.layers.0.mlp.weight"] == "only_in_variant"
        assert "missing_in_variant" not in kinds(found, "v").values()


class TestPieces:
    def fused(self, prefix: str) -> Specs:
        specs = text(prefix)
        for at in range(3):
            for part in "qkv":
                del specs[f"{prefix}layers.{at}.self_attn.{part}_proj.weight"]
            specs |= tensors({f"{prefix}layers.{at}.self_attn.qkv_proj.weight": (40, 12)})
        return specs

    @pytest.mark.parametrize("prefix", ["model.", "language_model.model."])
    def test_fused_attention_is_no_rename(self, prefix: str) -> None:
        found = aligned(text(), self.fused(prefix))
        of = kinds(found, "v")
        assert {of[f"{prefix}layers.{at}.self_attn.qkv_proj.weight"] for at in range(3)} == {"only_in_variant"}
        assert of["model.layers.0.self_attn.q_proj.weight"] == "missing_in_variant"
        assert any(
            note.startswith(
                "v: 3 tensors in other pieces than the base's (fused or split), which is no rename, stored whole: "
                f"{prefix}layers.0.self_attn.qkv_proj.weight"
            )
            for note in found.notes
        )

    def test_split_attention_is_no_rename(self) -> None:
        found = aligned(self.fused("model."), text())
        assert "9 tensors in other pieces than the base's" in "".join(found.notes)
        assert kinds(found, "v")["model.layers.1.self_attn.qkv_proj.weight"] == "missing_in_variant"

    def test_experts_whose_axes_are_alike(self) -> None:
        """B25: with H = 2 I a fused [E, 2I, H] reads as [E, H, H]; nothing is guessed from that."""
        bulk = tensors({"model.embed_tokens.weight": (900, 8)})
        split = {f"model.mlp.experts.{at}.{part}_proj.weight": (4, 8) for at in range(3) for part in ("gate", "up")}
        split |= {f"model.mlp.experts.{at}.down_proj.weight": (8, 4) for at in range(3)}
        fused = tensors({"model.mlp.experts.gate_up_proj": (3, 8, 8), "model.mlp.experts.down_proj": (3, 8, 4)})
        for base, variant, count in ((tensors(split), fused, 2), (fused, tensors(split), 9)):
            found = aligned(joined(bulk, base), joined(bulk, variant))
            assert dict(found.renames) == {}
            assert {kinds(found, "v")[name] for name in variant} == {"only_in_variant"}
            assert f"v: {count} tensors in other pieces than the base's (fused or split)" in "".join(found.notes)

    def test_where_too_much_is_cut_otherwise(self) -> None:
        base = tensors({f"model.mlp.experts.{at}.up_proj.weight": (8, 8) for at in range(3)} | {"norm.weight": (8,)})
        fused = tensors({"model.mlp.experts.up_proj": (3, 8, 8), "norm.weight": (8,)})
        with pytest.raises(SourceIncompatible, match=r"1 tensor in other pieces than the base's") as caught:
            aligned(base, fused)
        assert "one layout" in (caught.value.hint or "")

    def test_new_tensors_beside_are_just_new(self) -> None:
        found = aligned(text(), joined(text(), tensors({"model.layers.0.self_attn.q_norm.weight": (4,)})))
        assert "not in the base, stored whole" in "".join(found.notes)


# Towers that names and shapes do not tell apart: only the weights can.


def drawn(specs: Specs, seed: int) -> dict[str, torch.Tensor]:
    """Normal matrices, and vectors about one as norms have them."""
    generator = torch.Generator().manual_seed(seed)
    noise = {name: torch.randn(spec.shape, generator=generator) for name, spec in sorted(specs.items())}
    return {name: value if value.dim() > 1 else 1 + 0.01 * value for name, value in noise.items()}


def tuned(weights: Mapping[str, torch.Tensor], names: Mapping[str, str], seed: int) -> dict[str, torch.Tensor]:
    """A fine-tune under other names: `names` from old prefixes to new ones."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, weight in weights.items():
        old = max((prefix for prefix in names if name.startswith(prefix)), key=len)
        found[names[old] + name[len(old) :]] = weight + 0.05 * torch.randn(weight.shape, generator=generator)
    return found


class TwoTowers:
    """A base with two equal towers on disk, and variants of it."""

    def __init__(self, root: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        self.root, self.dtype = root, dtype
        self.one, self.two = drawn(text("text.", None), 1), drawn(text("vision.", None), 2)
        self.base = open_checkpoint(self.save("base", {**self.one, **self.two}), "base")

    def save(self, name: str, weights: Mapping[str, torch.Tensor]) -> Path:
        return random_checkpoint(self.root / name, {key: value.to(self.dtype) for key, value in weights.items()})

    def align(self, weights: Mapping[str, torch.Tensor], *, read: bool = True) -> Alignment:
        variant = open_checkpoint(self.save("v", weights), "v")
        heads = open_heads(self.base, [variant]) if read else None
        found = align(self.base.tensors, [variant], {}, heads=heads)
        prove_coverage(found, self.base.tensors, [variant])
        return found


class TestWeights:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
    def test_tell_which_tower_it_is(self, tmp_path: Path, dtype: torch.dtype) -> None:
        towers = TwoTowers(tmp_path, dtype)
        found = towers.align(tuned(towers.two, {"vision.": ""}, 5))
        assert found.renames["v"] == (("vision.", ""),)
        assert kinds(found, "v")["text.norm.weight"] == "missing_in_variant"
        assert not any(ALONE in note for note in found.notes)

    def test_tell_two_towers_from_two(self, tmp_path: Path) -> None:
        towers = TwoTowers(tmp_path)
        found = towers.align(tuned({**towers.one, **towers.two}, {"text.": "b.", "vision.": "a."}, 5))
        assert set(found.renames["v"]) == {("text.", "b."), ("vision.", "a.")}
        assert len(found.notes) == 1

    def test_without_weights_the_two_are_named(self, tmp_path: Path) -> None:
        towers = TwoTowers(tmp_path)
        with pytest.raises(
            SourceIncompatible, match=r"29 tensors fit both text\. -> .* and vision\. -> .* by name and shape"
        ) as caught:
            towers.align(tuned(towers.two, {"vision.": ""}, 5), read=False)
        assert caught.value.exit_code == 12
        assert "dry run" in (caught.value.hint or "")

    def test_equal_towers_cannot_be_told(self, tmp_path: Path) -> None:
        towers = TwoTowers(tmp_path)
        towers.base = open_checkpoint(
            towers.save("twins", {**towers.one, **tuned(towers.one, {"text.": "vision."}, 7)}), "base"
        )
        with pytest.raises(SourceIncompatible, match=r"by name, shape and weights, and nothing tells which"):
            towers.align(tuned(towers.one, {"text.": ""}, 5))

    def test_a_small_doubt_is_noted_and_stored_whole(self) -> None:
        tower = {"norm.weight": (9,), "fc.weight": (3, 2)}
        base = joined(text(vocab=3001), *(tensors({f"{p}.{n}": s for n, s in tower.items()}) for p in ("a", "b")))
        variant = joined(text(vocab=3001), tensors({f"c.{name}": shape for name, shape in tower.items()}))
        found = aligned(base, variant)
        assert (
            found.notes[0]
            == "v: 2 tensors fit both a. -> c. and b. -> c. by name and shape, and nothing tells which: not renamed"
        )
        assert kinds(found, "v")["c.fc.weight"] == "only_in_variant"

    def test_a_foreign_tree_of_fitting_names_is_no_rename(self, tmp_path: Path) -> None:
        towers = TwoTowers(tmp_path)
        with pytest.raises(
            SourceIncompatible, match=r"0 of 29 tensors align.* would fit .* but the weights do not \(cosine -?0\.0"
        ):
            towers.align(drawn(text("", None), 9))

    def test_denied_names_give_way_to_what_the_weights_say(self, tmp_path: Path) -> None:
        """By names `model.layers` looks like the tail of `vision.model.layers`; it is the text tower's."""
        base = {**drawn(text("text.inner.", None), 1), **drawn(text("vision.model.", None), 2)}
        opened = open_checkpoint(random_checkpoint(tmp_path / "base", base), "base")
        own = tuned({name: w for name, w in base.items() if name.startswith("text.")}, {"text.inner.": "model."}, 4)
        variant = open_checkpoint(random_checkpoint(tmp_path / "v", own), "v")
        blind = align(opened.tensors, [variant], {})
        assert blind.renames["v"] == (("vision.model.", "model."),)
        found = align(opened.tensors, [variant], {}, heads=open_heads(opened, [variant]))
        assert found.renames["v"] == (("text.inner.", "model."),)

    def test_weights_confirm_what_names_alone_would_not(self, tmp_path: Path) -> None:
        base = {**drawn(text(), 1), "mm.0.weight": torch.randn(8, 6, generator=torch.Generator().manual_seed(3))}
        own = dict(base)
        own["model.projector.0.weight"] = own.pop("mm.0.weight") * 1.01
        opened = open_checkpoint(random_checkpoint(tmp_path / "base", base), "base")
        variant = open_checkpoint(random_checkpoint(tmp_path / "v", own), "v")
        assert dict(align(opened.tensors, [variant], {}).renames) == {}
        found = align(opened.tensors, [variant], {}, heads=open_heads(opened, [variant]))
        assert found.renames["v"] == (("mm.", "model.projector."),)

    def test_are_not_read_where_names_agree(self) -> None:
        def never(source: str, name: str) -> npt.NDArray[np.float32]:
            raise AssertionError((source, name))

        align(text(), [checkpoint("v", text(vocab=111))], {}, heads=never)
        partly = {name: spec for name, spec in text().items() if name != "model.norm.weight"}
        align(text(), [checkpoint("v", partly)], {}, heads=never)


class TestHeads:
    def test_are_the_first_elements(self, tmp_path: Path) -> None:
        generator = torch.Generator().manual_seed(1)
        wide = torch.randn(200, 90, generator=generator)
        weights = {"a": wide.bfloat16(), "b": wide.half(), "c": wide.double(), "d": wide, "i": torch.arange(4)}
        one = open_checkpoint(random_checkpoint(tmp_path / "one", weights), "base")
        two = open_checkpoint(random_checkpoint(tmp_path / "two", {"a": wide[:2]}), "v")
        heads = open_heads(one, [two])
        for name in "abcd":
            head = heads("base", name)
            assert head is not None
            assert head.dtype == np.float32
            assert np.array_equal(head, weights[name].float().reshape(-1)[: 2**14].numpy())
        assert heads("base", "i") is None
        short = heads("v", "a")
        assert short is not None
        assert short.size == 180
        assert open_heads(None, [two])("base", "a") is not None

    def test_what_cannot_be_read_says_nothing(self, tmp_path: Path) -> None:
        folder = random_checkpoint(tmp_path / "one", {"a": torch.ones(3, 2)})
        opened = open_checkpoint(folder, "base")
        heads = open_heads(opened, [checkpoint("far", tensors({"a": (3, 2)}))])
        assert heads("far", "a") is None
        assert cosine_of(heads, "base", "far")("a", "a") is None
        with (folder / "model.safetensors").open("ab") as stream:
            stream.write(b"x")
        assert heads("base", "a") is None
        (folder / "model.safetensors").unlink()
        assert heads("base", "a") is None

    @pytest.mark.parametrize(
        ("one", "other", "expected"),
        [
            ([1.0, 2.0], [2.0, 4.0], 1.0),
            ([1.0, 2.0, 9.0], [-1.0, -2.0], -1.0),
            ([1.0, 0.0], [0.0, 1.0], 0.0),
            ([0.0, 0.0], [0.0, 1.0], None),
            ([math.nan, 0.0], [0.0, 1.0], None),
            ([math.inf, 0.0], [1.0, 1.0], None),
            ([3e38, 3e38], [3e38, 3e38], 1.0),
            ([], [1.0], None),
        ],
    )
    def test_cosine(self, one: list[float], other: list[float], expected: float | None) -> None:
        values = {"base": np.array(one, np.float32), "v": np.array(other, np.float32)}
        found = cosine_of(lambda source, name: values[source], "base", "v")("x", "y")
        assert found == (None if expected is None else pytest.approx(expected))

    def test_without_torch(self, tmp_path: Path) -> None:
        for name, prefix in (("base", "model."), ("v", "x.model.")):
            random_checkpoint(tmp_path / name, {f"{prefix}{at}.a.weight": torch.ones(3, 4) * at for at in range(3)})
        program = (
            "import sys\nfrom pathlib import Path\n"
            "from mfs_decompose.source.checkpoint import open_checkpoint as o\n"
            "from mfs_decompose.source.align import align\n"
            "from mfs_decompose.source.rename_weights import open_heads\n"
            "b, v = o(sys.argv[1] + '/base', 'base'), o(sys.argv[1] + '/v', 'v')\n"
            "assert align(b.tensors, [v], {}, heads=open_heads(b, [v])).renames\n"
            "assert 'torch' not in sys.modules, 'torch'\n"
        )
        subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)


# Random trees, renamed by known prefixes, with tensors lost, added, resized and retyped.

PREFIXES = ["", "model.", "text.", "language_model.model.", "vision_tower.", "a.b."]
NEW = ["", "wrapped.", "model.language_model.", "x.y.z.", "model.visual."]


@st.composite
def families(draw: st.DrawFn) -> tuple[Specs, Specs]:
    """A base and one variant of it under other names."""
    chosen = draw(st.lists(st.sampled_from(PREFIXES), min_size=1, max_size=3, unique=True))
    base: Specs = {}
    variant: Specs = {}
    for at, prefix in enumerate(chosen):
        tree = vision(prefix) if draw(st.booleans()) else text(prefix, None, layers=draw(st.integers(1, 3)))
        base |= tree
        new = draw(st.sampled_from([*NEW, prefix, f"tower{at}."]))
        variant |= called(tree.values(), prefix, new)
    chance = random.Random(draw(st.integers(0, 2**16)))
    for specs in (base, variant):
        for name in sorted(specs):
            fate = chance.random()
            if fate < 0.05:
                del specs[name]
            elif fate < 0.08:
                specs[name] = TensorSpec(name, specs[name].dtype, (*specs[name].shape[:-1], specs[name].shape[-1] + 1))
            elif fate < 0.11:
                specs[name] = TensorSpec(name, chance.choice(["F32", "I8"]), specs[name].shape)
            elif fate < 0.14:
                extra = f"{name.rpartition('.')[0]}.extra"
                specs[extra] = TensorSpec(extra, "BF16", specs[name].shape)
    return base, variant


@given(families())
def test_any_tree_is_covered_or_refused(family: tuple[Specs, Specs]) -> None:
    base, variant = family
    if not base or not variant:
        return
    one, other = checkpoint("v", variant), checkpoint("w", base)
    try:
        found = align(base, [one, other], {})
    except SourceIncompatible as error:
        assert "'v'" in error.message
        return
    prove_coverage(found, base, [one, other])
    assert found == align(dict(sorted(base.items(), reverse=True)), [other, one], {})
    assert partners(found, "w") == {name: name for name in base}
    for old, new in partners(found, "v").items():
        if old != new:  # exact names win
            assert new not in base or kinds(found, "v").get(old) != "same"
            assert old.rpartition(".")[2] == new.rpartition(".")[2]


@given(st.sampled_from(PREFIXES), st.sampled_from(NEW), st.integers(0, 2**16))
def test_a_renamed_tree_is_found_whatever_was_dropped(old: str, new: str, seed: int) -> None:
    tree = text(old, None, layers=4)
    kept = [tree[name] for name in sorted(tree) if random.Random(f"{seed} {name}").random() < 0.8]
    variant = called(kept, old, new)
    found = find_renames(tree, variant)
    truth = {spec.name: new + spec.name[len(old) :] for spec in kept}
    assert {name: found.pairs.get(name, name) for name in truth} == truth
