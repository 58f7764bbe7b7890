"""Names of modules against names in the base's files: exact, under another prefix, through a map, or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, NoReturn

import pytest
import torch
from adapters import write_adapter
from checkpoints import random_checkpoint

from mfs_decompose.codec.adapter import open_adapter_tensor
from mfs_decompose.errors import SourceIncompatible
from mfs_decompose.source.adapter import Merge, resolve_adapter
from mfs_decompose.source.adapter_names import LoadMap
from mfs_decompose.source.checkpoint import TensorReader, open_checkpoint
from mfs_decompose.source.pieces import Piece, concatenate, insert, permute, whole
from mfs_decompose.source.tensor_map import Parameter, TensorMap


def nobody() -> NoReturn:
    raise AssertionError("a map of the base is not needed to tell")


def pair(module: str, outs: int, ins: int, rank: int = 2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(map(ord, module)))
    a, b = (torch.randn(shape, generator=generator) for shape in ((rank, ins), (outs, rank)))
    return {f"base_model.model.{module}.lora_A.weight": a, f"base_model.model.{module}.lora_B.weight": b}


def resolve(
    root: Path,
    base: dict[str, torch.Tensor],
    tensors: dict[str, torch.Tensor],
    load_map: LoadMap = nobody,
    **fields: Any,
) -> Merge:
    random_checkpoint(root / "base", base)
    write_adapter(root / "adapter", tensors, {"peft_type": "LORA", "r": 2, "lora_alpha": 5, **fields})
    opened = open_checkpoint(root / "adapter", "a"), open_checkpoint(root / "base", "base")
    return resolve_adapter(*opened, load_map)


def merged(root: Path, merge: Merge, name: str) -> torch.Tensor:
    """One merged tensor, fp64, row by row."""
    tensor = merge.tensors[name]
    assert tensor.params is not None
    opened = open_checkpoint(root / "adapter", "a"), open_checkpoint(root / "base", "base")
    with TensorReader(opened[0]) as own, TensorReader(opened[1]) as old:
        reader = open_adapter_tensor(tensor.params, own.rows, tensor.spec, tensor.base)
        base = tensor.base
        rows = None if base is None else lambda low, high: old.rows(base.name, low, high)
        return torch.cat([reader.rows(at, at + 1, rows) for at in range(tensor.spec.rows)])


def map_of(*parameters: Parameter, aliases: dict[str, str] | None = None) -> LoadMap:
    names = {parameter.name: parameter for parameter in parameters}
    found = TensorMap("X", names, aliases or {}, {}, (), (), {}, (), (), (), ())
    return lambda: found


LAYERS = {f"language_model.model.layers.{n}.q.weight": torch.randn(6, 4) for n in range(3)}


class TestPrefixes:
    def test_one_that_is_added(self, tmp_path: Path) -> None:
        tower = {"vision.layers.0.v.weight": torch.randn(3, 3)}
        tensors = pair("model.layers.0.q", 6, 4) | pair("model.layers.2.q", 6, 4)
        merge = resolve(tmp_path, LAYERS | tower, tensors)
        changed = [name for name, tensor in merge.tensors.items() if tensor.params is not None]
        assert changed == ["language_model.model.layers.0.q.weight", "language_model.model.layers.2.q.weight"]
        assert list(merge.tensors) == sorted(LAYERS | tower)
        assert merge.notes[0] == "adapter: changes 2 of the base's 4 tensors"
        assert "2 of 2 names match under another prefix: * is language_model.* in the base" in merge.notes[1]

    def test_one_that_is_stripped(self, tmp_path: Path) -> None:
        base = {f"h.{n}.q.weight": torch.randn(6, 4) for n in range(2)}
        merge = resolve(tmp_path, base, pair("transformer.h.1.q", 6, 4))
        assert merge.tensors["h.1.q.weight"].params is not None
        assert "transformer.* is * in the base" in merge.notes[1]

    def test_one_for_another(self, tmp_path: Path) -> None:
        base = {f"model.layers.{n}.q.weight": torch.randn(6, 4) for n in range(2)}
        merge = resolve(tmp_path, base, pair("model.language_model.layers.1.q", 6, 4))
        assert merge.tensors["model.layers.1.q.weight"].params is not None

    def test_exact_names_stay_beside_it(self, tmp_path: Path) -> None:
        base = LAYERS | {"lm_head.weight": torch.randn(9, 4), "e.weight": torch.randn(9, 4)}
        merge = resolve(tmp_path, base, pair("model.layers.0.q", 6, 4) | pair("lm_head", 9, 4))
        assert merge.tensors["lm_head.weight"].params is not None
        assert "1 of 2 names" in merge.notes[1]

    def test_two_that_would_do_are_refused(self, tmp_path: Path) -> None:
        base = {f"{tower}.layers.0.q.weight": torch.randn(6, 4) for tower in ("text", "vision")}
        with pytest.raises(SourceIncompatible, match=r"none of 1 modules .* not there: model\.layers\.0\.q"):
            resolve(tmp_path, base, pair("model.layers.0.q", 6, 4), map_of())

    def test_what_matches_under_none_is_named(self, tmp_path: Path) -> None:
        tensors = {name: value for n in (0, 2, 7) for name, value in pair(f"model.layers.{n}.q", 6, 4).items()}
        with pytest.raises(SourceIncompatible, match=r"2 of 3 modules .* not there: model\.layers\.7\.q") as caught:
            resolve(tmp_path, LAYERS, tensors, map_of())
        assert caught.value.exit_code == 12
        assert "--base" in (caught.value.hint or "")


class TestTheMap:
    def test_a_tensor_under_another_name(self, tmp_path: Path) -> None:
        load = map_of(Parameter("m.q.weight", (6, 4), whole("a.b", (6, 4))))
        tensors = pair("m.q", 6, 4) | {"m.o.weight": torch.randn(3, 4)}
        more = Parameter("m.o.weight", (3, 4), whole("c", (3, 4)))
        both = map_of(load().parameters["m.q.weight"], more)
        base = {"a.b": torch.randn(6, 4), "c": torch.zeros(3, 4)}
        merge = resolve(tmp_path, base, tensors, both, modules_to_save=["o"])
        assert {name: tensor.kind for name, tensor in merge.tensors.items()} == {"a.b": "same", "c": "same"}
        assert torch.equal(merged(tmp_path, merge, "c"), tensors["m.o.weight"].double())

    def test_a_part_of_a_fused_tensor(self, tmp_path: Path) -> None:
        """The model has q and v apart where the file has them below each other: what is not targeted stays."""
        fused = torch.randn(10, 4)
        piece = whole("qkv.weight", (10, 4))[0]
        q = Piece("qkv.weight", (10, 4), ((0, 6), (0, 4)), ((0, 6), (0, 4)), (0, 1))
        v = Piece("qkv.weight", (10, 4), ((8, 10), (0, 4)), ((0, 2), (0, 4)), (0, 1))
        load = map_of(Parameter("q.weight", (6, 4), (q,)), Parameter("v.weight", (2, 4), (v,)))
        tensors = pair("q", 6, 4) | pair("v", 2, 4)
        merge = resolve(tmp_path, {"qkv.weight": fused}, tensors, load)
        expected = fused.double()
        for module, rows in (("q", slice(0, 6)), ("v", slice(8, 10))):
            a, b = (tensors[f"base_model.model.{module}.lora_{side}.weight"].double() for side in "AB")
            expected[rows] += 2.5 * b @ a
        torch.testing.assert_close(merged(tmp_path, merge, "qkv.weight"), expected)
        assert merge.notes[0] == "adapter: changes 1 of the base's 1 tensors"
        assert merge.notes[1] == "adapter: found by transformers' own map of the base's names: 2 of 2"
        assert piece.takes_all

    def test_a_fused_parameter_of_several_tensors(self, tmp_path: Path) -> None:
        base = {"gate.weight": torch.randn(3, 4), "up.weight": torch.randn(5, 4)}
        pieces = concatenate([(whole(name, tuple(value.shape)), value.shape[0]) for name, value in base.items()], 0)
        tensors = pair("mlp.gate_up", 8, 4)
        merge = resolve(tmp_path, base, tensors, map_of(Parameter("mlp.gate_up.weight", (8, 4), pieces)))
        a, b = tensors.values()
        delta = 2.5 * b.double() @ a.double()
        torch.testing.assert_close(merged(tmp_path, merge, "gate.weight"), base["gate.weight"].double() + delta[:3])
        torch.testing.assert_close(merged(tmp_path, merge, "up.weight"), base["up.weight"].double() + delta[3:])

    @pytest.mark.parametrize("turned", [False, True])
    def test_experts_one_by_one(self, tmp_path: Path, turned: bool) -> None:
        """A stacked parameter [E, O, I] of tensors [O, I], or [I, O], and factors of all experts together."""
        generator = torch.Generator().manual_seed(3)
        experts, outs, ins, rank = 3, 5, 4, 2
        base = {f"e.{n}.w": torch.randn((ins, outs) if turned else (outs, ins), generator=generator) for n in range(3)}
        parts = []
        for name, value in base.items():
            one = whole(name, tuple(value.shape))
            parts.append((insert(permute(one, (1, 0)) if turned else one, 0), 1))
        load = map_of(Parameter("m.experts.down", (experts, outs, ins), concatenate(parts, 0)))
        a = torch.randn(rank * experts, ins, generator=generator)
        b = torch.randn(outs, rank * experts, generator=generator)
        tensors = {"m.experts.lora_A.weight": a, "m.experts.lora_B.weight": b}
        merge = resolve(tmp_path, base, tensors, load, target_parameters=["experts.down"])
        stacked = torch.einsum(
            "ore,eri->eoi", b.double().reshape(outs, rank, experts), a.double().reshape(experts, rank, ins)
        )
        for n, (name, value) in enumerate(base.items()):
            delta = 2.5 * (stacked[n].mT if turned else stacked[n])
            torch.testing.assert_close(merged(tmp_path, merge, name), value.double() + delta)

    def test_one_expert_in_a_stacked_file(self, tmp_path: Path) -> None:
        """Adapters of transformers 4 name each expert; the file has them stacked, gate above up."""
        stack = torch.randn(3, 10, 4)
        shape = (3, 10, 4)
        up = Piece("gate_up", shape, ((1, 2), (6, 10), (0, 4)), ((0, 4), (0, 4)), (1, 2))
        tensors = pair("experts.1.up", 4, 4)
        merge = resolve(tmp_path, {"gate_up": stack}, tensors, map_of(Parameter("experts.1.up.weight", (4, 4), (up,))))
        a, b = tensors.values()
        expected = stack.double()
        expected[1, 6:] += 2.5 * b.double() @ a.double()
        torch.testing.assert_close(merged(tmp_path, merge, "gate_up"), expected)

    def test_a_head_that_is_tied_gets_a_tensor_of_its_own(self, tmp_path: Path) -> None:
        words = whole("words", (9, 4))
        parameters = (Parameter("embed.weight", (9, 4), words), Parameter("lm_head.weight", (9, 4), words))
        load = map_of(*parameters, aliases={"lm_head.weight": "embed.weight"})
        merge = resolve(tmp_path, {"words": torch.randn(9, 4)}, pair("lm_head", 9, 4), load)
        assert {name: tensor.kind for name, tensor in merge.tensors.items()} == {
            "lm_head.weight": "tied",
            "words": "same",
        }
        assert merge.tensors["words"].params is None
        assert merge.config_changes == {"tie_word_embeddings": False}

    def test_an_order_that_cannot_be_followed(self, tmp_path: Path) -> None:
        strange = Piece("w", (4, 2, 3), ((0, 4), (0, 2), (0, 3)), ((0, 4), (0, 2), (0, 3)), (1, 0, 2))
        tensors = {"m.lora_A.weight": torch.ones(4, 3), "m.lora_B.weight": torch.ones(4, 4)}
        load = map_of(Parameter("m.x", (2, 4, 3), (strange,)))
        with pytest.raises(SourceIncompatible, match="in an order that this version cannot follow"):
            resolve(tmp_path, {"w": torch.zeros(4, 2, 3)}, tensors, load, target_parameters=["m.x"])

    def test_no_map_is_no_reason_to_guess(self, tmp_path: Path) -> None:
        def fail() -> NoReturn:
            raise SourceIncompatible("no such architecture")

        with pytest.raises(SourceIncompatible, match=r"none of 1 modules .*\(no such architecture\)"):
            resolve(tmp_path, {"w": torch.ones(2, 2)}, pair("q", 6, 4), fail)


class TestWrappedParameters:
    base: ClassVar = {"x.experts.up": torch.randn(2, 6, 4), "x.experts.down": torch.randn(2, 4, 5)}

    @staticmethod
    def factors(outs: int, ins: int, inner: bool) -> dict[str, torch.Tensor]:
        stem = "x.experts" + (".base_layer" if inner else "")
        return {f"{stem}.lora_A.weight": torch.randn(4, ins), f"{stem}.lora_B.weight": torch.randn(outs, 4)}

    def test_shapes_tell_which_is_which(self, tmp_path: Path) -> None:
        tensors = self.factors(6, 4, inner=True) | self.factors(4, 5, inner=False)
        merge = resolve(tmp_path, self.base, tensors, target_parameters=["experts.up", "experts.down"])
        assert all(tensor.params is not None for tensor in merge.tensors.values())

    def test_where_they_do_not_the_order_of_definition_does(self, tmp_path: Path) -> None:
        base = {name: torch.randn(2, 6, 4) for name in ("x.experts.b_first", "x.experts.a_second")}
        order = map_of(*(Parameter(name, (2, 6, 4), whole(name, (2, 6, 4))) for name in base))
        tensors = self.factors(6, 4, inner=True) | self.factors(6, 4, inner=False)
        targets = ["experts.a_second", "experts.b_first"]
        merge = resolve(tmp_path, base, tensors, order, target_parameters=targets)
        params = merge.tensors["x.experts.b_first"].params
        assert params is not None
        assert "base_layer" in str(params["factors"])  # the first is the innermost

    @pytest.mark.parametrize("missing", [True, False])
    def test_as_many_pairs_as_parameters(self, tmp_path: Path, missing: bool) -> None:
        tensors = self.factors(6, 4, inner=True)
        if missing:
            tensors |= self.factors(4, 5, inner=False)
        targets = ["experts.up"] if missing else ["experts.up", "experts.down"]
        with pytest.raises(SourceIncompatible, match="pairs for"):
            resolve(tmp_path, self.base, tensors, target_parameters=targets)
