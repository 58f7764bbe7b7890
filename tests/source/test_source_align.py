"""Alignment: the kinds one by one, the proof that nothing is lost, and who is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from alignment_proof import prove_coverage
from checkpoints import Family, fine_tune, make_llama
from hypothesis import given
from hypothesis import strategies as st

from mfs_decompose.errors import SourceIncompatible
from mfs_decompose.source.align import (
    Member,
    align,
    align_mean,
    comparable,
    mean_base_tensors,
)
from mfs_decompose.source.checkpoint import Checkpoint, open_checkpoint
from mfs_decompose.source.header import TensorInfo, TensorSpec

Shapes = Mapping[str, tuple[object, ...]]  # (rows, columns, ...) for BF16, or (type, (rows, columns, ...))

BULK: dict[str, tuple[object, ...]] = {"bulk": (100, 100)}  # what keeps small test checkpoints of one architecture


def specs(shapes: Shapes) -> dict[str, TensorSpec]:
    made = {}
    for name, shape in shapes.items():
        dtype, lengths = shape if shape and isinstance(shape[0], str) else ("BF16", shape)
        assert isinstance(dtype, str)
        assert isinstance(lengths, tuple)
        made[name] = TensorSpec(name, dtype, lengths)
    return made


def variant(id: str, shapes: Shapes) -> Checkpoint:
    """A checkpoint without files: alignment reads headers only."""
    tensors = {
        name: TensorInfo(name, spec.dtype, spec.shape, "model.safetensors", 0) for name, spec in specs(shapes).items()
    }
    return Checkpoint(id, Path(id), (), None, tensors, (), (), {})


def only_member(base: Shapes, other: Shapes, name: str, config: dict[str, object] | None = None) -> Member:
    found = align(specs({**BULK, **base}), [variant("v", {**BULK, **other})], config or {})
    prove_coverage(found, specs({**BULK, **base}), [variant("v", {**BULK, **other})])
    (group,) = (group for group in found.groups if group.name == name)
    (member,) = group.members
    return member


class TestKinds:
    @pytest.mark.parametrize("shape", [(5, 3), (7,), (), (2, 3, 4), (0, 3), (3, 0)])
    def test_same(self, shape: tuple[int, ...]) -> None:
        member = only_member({"w": shape}, {"w": shape}, "w")
        assert (member.kind, member.common_rows) == ("same", shape[0] if shape else 1)

    @pytest.mark.parametrize(
        ("base", "other", "kind"),
        [
            ("BF16", "F32", "same"),
            ("F16", "BF16", "same"),
            ("F64", "F16", "same"),
            ("I64", "I64", "same"),
            ("F8_E4M3", "F8_E4M3", "same"),
            ("F8_E4M3", "BF16", "only_in_variant"),
            ("BF16", "F8_E5M2", "only_in_variant"),
            ("I64", "I32", "only_in_variant"),
            ("U8", "BF16", "only_in_variant"),
        ],
    )
    def test_types(self, base: str, other: str, kind: str) -> None:
        member = only_member({"w": (base, (5, 3))}, {"w": (other, (5, 3))}, "w")
        assert member.kind == kind
        assert member.spec == TensorSpec("w", other, (5, 3))

    @pytest.mark.parametrize(
        ("base", "other", "kind", "rows"),
        [
            ((257, 3), (259, 3), "resized", 257),
            ((259, 3), (257, 3), "resized", 257),
            ((4, 5, 6), (3, 5, 6), "resized", 3),
            ((5, 3), (5, 4), "only_in_variant", 0),
            ((5, 3), (3, 5), "only_in_variant", 0),
            ((5,), (7,), "only_in_variant", 0),
            ((), (1,), "only_in_variant", 0),
            ((5, 1), (5,), "only_in_variant", 0),
            ((0, 3), (5, 3), "only_in_variant", 0),
            ((5, 3), (5, 3, 1), "only_in_variant", 0),
        ],
    )
    def test_shapes(self, base: tuple[int, ...], other: tuple[int, ...], kind: str, rows: int) -> None:
        member = only_member({"w": base}, {"w": other}, "w")
        assert (member.kind, member.common_rows) == (kind, rows)
        assert comparable(TensorSpec("a", "F32", base), TensorSpec("b", "F32", other)) == (rows > 0)

    def test_missing(self) -> None:
        assert only_member({"w": (5, 3)}, {}, "w") == Member("v", "missing_in_variant", None, 0)

    def test_only_in_variant(self) -> None:
        member = only_member({}, {"mm_projector.weight": (5, 3)}, "mm_projector.weight")
        assert (member.kind, member.common_rows) == ("only_in_variant", 0)

    def test_a_head_apart_from_tied_embeddings(self) -> None:
        tied, embedding = {"model.embed_tokens.weight": (9, 3)}, "model.embed_tokens.weight"
        for rows, common in ((9, 9), (11, 9), (7, 7)):
            untied = {embedding: (rows, 3), "lm_head.weight": (rows, 3)}
            member = only_member(tied, untied, "lm_head.weight", {"tie_word_embeddings": True})
            assert (member.kind, member.common_rows) == ("tied", common)
            assert member.spec == TensorSpec("lm_head.weight", "BF16", (rows, 3))
            assert only_member(tied, untied, embedding).kind == ("same" if rows == 9 else "resized")
            denied = only_member(tied, untied, "lm_head.weight", {"tie_word_embeddings": False})
            assert denied.kind == "only_in_variant"

    def test_a_head_of_another_width_is_no_tied_one(self) -> None:
        tied = {"model.embed_tokens.weight": (9, 3)}
        found = align(specs({**BULK, **tied}), [variant("v", {**BULK, **tied, "lm_head.weight": (9, 4)})], {})
        (group,) = (group for group in found.groups if group.name == "lm_head.weight")
        assert (group.base, group.members[0].kind) == (None, "only_in_variant")

    def test_a_variant_that_ties_what_the_base_does_not(self) -> None:
        untied = {"model.embed_tokens.weight": (9, 3), "lm_head.weight": (9, 3)}
        tied = {"model.embed_tokens.weight": (9, 3)}
        assert only_member(untied, tied, "lm_head.weight").kind == "missing_in_variant"
        assert only_member(untied, tied, "model.embed_tokens.weight").kind == "same"
        stored_as_head = {"lm_head.weight": (9, 3)}
        assert only_member(stored_as_head, tied, "model.embed_tokens.weight").kind == "tied"

    def test_members_of_several_variants(self) -> None:
        base = specs({**BULK, "w": (5, 3), "model.embed_tokens.weight": (9, 3)})
        found = align(
            base,
            [
                variant("z", {**BULK, "w": (6, 3), "model.embed_tokens.weight": (9, 3), "lm_head.weight": (9, 3)}),
                variant("a", {**BULK, "model.embed_tokens.weight": (9, 3), "new": (2,)}),
                variant("m", {**BULK, "w": ("F32", (5, 3)), "model.embed_tokens.weight": (9, 3), "new": (3,)}),
            ],
            {},
        )
        assert found.variants == ("a", "m", "z")
        kinds = {group.name: [(member.variant, member.kind) for member in group.members] for group in found.groups}
        assert kinds == {
            "bulk": [("a", "same"), ("m", "same"), ("z", "same")],
            "lm_head.weight": [("z", "tied")],
            "model.embed_tokens.weight": [("a", "same"), ("m", "same"), ("z", "same")],
            "new": [("a", "only_in_variant"), ("m", "only_in_variant")],
            "w": [("a", "missing_in_variant"), ("m", "same"), ("z", "resized")],
        }

    def test_notes_say_what_is_odd(self) -> None:
        base = {**BULK, "w": (5, 3), "grown": (4, 2), "cut": (4, 2), "type": (4,), "model.embed_tokens.weight": (9, 3)}
        other: dict[str, tuple[object, ...]] = {
            **BULK,
            "grown": (6, 2),
            "cut": (3, 2),
            "type": ("I8", (4,)),
            "lm_head.weight": (9, 3),
        }
        other |= {f"new.{number}": (1,) for number in range(5)} | {"model.embed_tokens.weight": (9, 3)}
        notes = align(specs(base), [variant("v", other), variant("same", base)], {}).notes
        assert notes == (
            "v: 5 tensors not in the base, stored whole: new.0, new.1, new.2 and 2 more",
            "v: 1 tensor of another shape or type than the base's, stored whole: type",
            "v: 1 tensor of the base left out: w",
            "v: 1 tensor stored apart where the base ties it to its embeddings, compared with those: lm_head.weight",
            "v: 1 tensor with 3 rows where the base has 4, the other rows left out: cut",
            "v: 1 tensor with 6 rows where the base has 4, the new rows stored whole: grown",
        )


class TestRealFamilies:
    @pytest.mark.parametrize("flavour", ["tied", "untied"])
    def test_covers_everything(self, family: Family, untied_family: Family, flavour: str) -> None:
        chosen = family if flavour == "tied" else untied_family
        base = open_checkpoint(chosen.base, "base")
        variants = [open_checkpoint(folder, id) for id, folder in chosen.variants.items()]
        found = align(base.tensors, variants, base.config)
        prove_coverage(found, base.tensors, variants)
        resized = {group.name for group in found.groups for member in group.members if member.kind == "resized"}
        assert resized == {"model.embed_tokens.weight"} | ({"lm_head.weight"} if flavour == "untied" else set())
        assert {member.kind for group in found.groups for member in group.members} == {"same", "resized"}
        assert all(type(group.base) is TensorSpec for group in found.groups)

    def test_unties_and_ties(self, family: Family, untied_family: Family, tmp_path: Path) -> None:
        tied_base, untied_base = open_checkpoint(family.base, "base"), open_checkpoint(untied_family.base, "base")
        own_head = open_checkpoint(fine_tune(family.base, tmp_path / "a", seed=5, tie=False, kind="vocab"), "a")
        no_head = open_checkpoint(fine_tune(untied_family.base, tmp_path / "b", seed=5, tie=True), "b")
        found = {group.name: group for group in align(tied_base.tensors, [own_head], tied_base.config).groups}
        head = found["lm_head.weight"]
        assert (head.base_name, head.members[0].kind) == ("model.embed_tokens.weight", "tied")
        assert head.members[0].common_rows == 257
        found = {group.name: group for group in align(untied_base.tensors, [no_head], untied_base.config).groups}
        assert found["lm_head.weight"].members[0].kind == "missing_in_variant"

    def test_another_architecture(self, family: Family, tmp_path: Path) -> None:
        base = open_checkpoint(family.base, "base")
        wide = open_checkpoint(make_llama(tmp_path / "wide", seed=1, hidden=80), "wide")
        with pytest.raises(
            SourceIncompatible, match="variant 'wide' is of another architecture than the base"
        ) as caught:
            align(base.tensors, [open_checkpoint(family.variants["math"], "math"), wide], base.config)
        assert caught.value.exit_code == 12
        assert "2 of 20 tensors align, 12.1 % of its bytes" in caught.value.message
        assert "model.embed_tokens.weight is BF16 [257, 80] where the base has BF16 [257, 64]" in caught.value.message
        assert "and 15 more" in caught.value.message
        assert caught.value.hint == "Give the base that 'wide' was made from, or leave 'wide' out."


class TestRefusal:
    def test_is_decided_by_bytes_not_by_number(self) -> None:
        base = specs({"large": (100, 10), **{f"small.{number}": (2, 10) for number in range(9)}})
        many_strange = {"large": (100, 10), **{f"odd.{number}": (2, 10) for number in range(30)}}
        assert align(base, [variant("v", many_strange)], {}).variants == ("v",)
        with pytest.raises(SourceIncompatible, match=r"9 of 10 tensors align, 15\.3 % of its bytes"):
            align(base, [variant("v", {"new": (100, 10), **{f"small.{n}": (2, 10) for n in range(9)}})], {})

    def test_the_edge(self) -> None:
        base = specs({"a": (10, 3)})
        assert align(base, [variant("v", {"a": (10, 3), "b": (10, 3)})], {}).groups
        with pytest.raises(SourceIncompatible, match="b is not in the base"):
            align(base, [variant("v", {"a": (10, 3), "b": (11, 3)})], {})

    def test_only_common_rows_count(self) -> None:
        with pytest.raises(SourceIncompatible, match=r"1 of 1 tensors align, 20 %"):
            align(specs({"a": (10, 3)}), [variant("v", {"a": (50, 3)})], {})

    def test_no_match_at_all_is_refused_whatever_the_bytes(self) -> None:
        with pytest.raises(SourceIncompatible, match=r"0 of 1 tensors align, 0 % of its bytes; 1 do not"):
            align(specs({}), [variant("v", {"a": (0, 3)})], {})

    def test_no_bytes_at_all(self) -> None:
        assert align(specs({"a": (0, 3)}), [variant("v", {"a": (0, 3)})], {}).groups[0].members[0].kind == "same"

    def test_matched_and_unmatched_are_counted(self) -> None:
        base = specs({"model.a.weight": (5, 3), "model.b.weight": (9, 3)})
        with pytest.raises(
            SourceIncompatible, match=r"1 of 3 tensors align, 13\.2 % of its bytes; 2 do not, among"
        ) as caught:
            align(base, [variant("v", {"model.a.weight": (5, 3), "x.q": (11, 3), "x.r": (22, 3)})], {})
        assert caught.value.exit_code == 12

    def test_long_names_are_cut(self) -> None:
        with pytest.raises(SourceIncompatible) as caught:
            align(specs(BULK), [variant("v", {f"{letter * 1000}": (5, 3) for letter in "abcdef"})], {})
        assert len(caught.value.message) < 1000

    def test_doubled_ids_are_a_bug(self) -> None:
        with pytest.raises(AssertionError):
            align(specs(BULK), [variant("v", BULK), variant("v", BULK)], {})


class TestMeanBase:
    def test_what_all_have(self) -> None:
        found = mean_base_tensors(
            [
                variant("b", {**BULK, "w": (7, 3), "norm": (5,), "mixed": (2, 3), "s": (), "ids": ("I64", (4,))}),
                variant("a", {**BULK, "w": (5, 3), "norm": (5,), "mixed": ("F16", (2, 3)), "s": (), "only a": (3, 3)}),
                variant("c", {**BULK, "w": (6, 3), "norm": (5,), "mixed": (2, 3), "s": (), "ids": ("I64", (4,))}),
            ]
        )
        assert found == {
            "bulk": TensorSpec("bulk", "BF16", (100, 100)),
            "w": TensorSpec("w", "BF16", (5, 3)),
            "norm": TensorSpec("norm", "BF16", (5,)),
            "mixed": TensorSpec("mixed", "F32", (2, 3)),
            "s": TensorSpec("s", "BF16", ()),
        }

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            ((5, 3), (5, 4)),
            ((5,), (6,)),
            (("I64", (5, 3)), ("I64", (5, 3))),
            (("F8_E4M3", (5, 3)), ("F8_E4M3", (5, 3))),
            (("F32", (5, 3)), ("F8_E4M3", (5, 3))),
            ((5, 3), (0, 3)),
        ],
    )
    def test_what_cannot_be_averaged(self, one: tuple[int, ...], other: tuple[int, ...]) -> None:
        for first, second in ((one, other), (other, one)):
            assert set(
                mean_base_tensors([variant("a", {**BULK, "w": first}), variant("b", {**BULK, "w": second})])
            ) == {"bulk"}

    def test_a_grown_vocabulary_is_cut_to_the_shortest(self, family: Family) -> None:
        variants = [open_checkpoint(folder, id) for id, folder in family.variants.items()]
        found = mean_base_tensors(variants)
        assert found["model.embed_tokens.weight"].shape == (257, 64)
        assert set(found) == set(variants[0].tensors)
        assert all(type(spec) is TensorSpec for spec in found.values())
        aligned = align(found, variants, {})
        prove_coverage(aligned, found, variants)

    def test_one_variant(self) -> None:
        assert mean_base_tensors([variant("a", BULK)]) == specs(BULK)

    def test_the_stranger_is_named(self) -> None:
        family = [variant("a", {"x": (10, 3)}), variant("c", {"x": (10, 3)})]
        with pytest.raises(SourceIncompatible, match=r"less than half of the weights of 'b' can") as caught:
            mean_base_tensors([*family, variant("b", {"y": (10, 3)})])
        assert caught.value.exit_code == 12
        assert caught.value.hint

    def test_two_strangers_are_both_named(self) -> None:
        with pytest.raises(SourceIncompatible, match="of 'a', 'b' can"):
            mean_base_tensors([variant("b", {"x": (10, 3)}), variant("a", {"y": (10, 3)})])

    def test_all_are_named_where_no_one_is_to_blame(self) -> None:
        parts: dict[str, tuple[object, ...]] = {"x": (10, 3), "y": (10, 3), "z": (10, 3)}
        with pytest.raises(SourceIncompatible, match="of 'x', 'y', 'z' can"):
            mean_base_tensors(
                [
                    variant(left_out, {name: shape for name, shape in parts.items() if name != left_out})
                    for left_out in parts
                ]
            )

    def test_packed_weights_cannot_be_averaged(self) -> None:
        packed: dict[str, tuple[object, ...]] = {"qweight": ("I32", (100, 10)), "norm": (5,)}
        with pytest.raises(SourceIncompatible, match="of 'a' can"):
            mean_base_tensors([variant("a", packed)])


SPEC = st.tuples(st.sampled_from(["BF16", "F32", "I8"]), st.lists(st.integers(0, 3), max_size=3).map(tuple))
NAMES = st.sampled_from(["a", "b", "c", "lm_head.weight", "model.embed_tokens.weight", "transformer.wte.weight"])
SOURCE = st.dictionaries(NAMES, SPEC, max_size=6)


@given(SOURCE, st.lists(SOURCE, min_size=1, max_size=3), st.sampled_from([None, True, False]))
def test_any_sources_are_covered(base: Shapes, others: list[Shapes], tie: bool | None) -> None:
    variants = [variant(f"v{number}", {**BULK, **shapes}) for number, shapes in enumerate(others)]
    base_specs = specs({**BULK, **base})
    found = align(base_specs, variants, json.loads(json.dumps({"tie_word_embeddings": tie})))
    prove_coverage(found, base_specs, variants)
    assert found == align(base_specs, variants[::-1], {"tie_word_embeddings": tie})
    mean = mean_base_tensors(variants)
    prove_coverage(align(mean, variants, {}), mean, variants)
    assert align_mean(variants) == (mean, align(mean, variants, {}))
    assert mean == mean_base_tensors(variants[::-1])
