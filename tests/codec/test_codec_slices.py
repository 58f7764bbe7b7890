"""Stacks of matrices in one node: what it holds, what it decodes to, and that nothing else passes for one."""

from __future__ import annotations

import json

import pytest
import torch
from codec_entries import LOSSY_FORMATS, Stored, bits, decaying, fit_one, generator, rows_of, store_exact, store_fit
from hypothesis import given
from hypothesis import strategies as st

from mfs_decompose.codec.base import slice_shape
from mfs_decompose.codec.opened import OpenedTensor
from mfs_decompose.codec.slices import stack_node, stack_ranges, step_bytes
from mfs_decompose.codec.tree import CodecNode
from mfs_decompose.errors import ArtifactInvalid
from mfs_decompose.source.dtypes import torch_dtype
from mfs_decompose.source.header import TensorSpec

O, I = 19, 33  # noqa: E741  # the names of the axes
FITTED = (5, 5, 3, 0, 5)


@pytest.mark.parametrize(
    ("shape", "found"),
    [
        ((5, 19, 33), (19, 33)),
        ((2, 8, 8), (8, 8)),
        ((1, 19, 33), None),  # one matrix, which matrix_shape sees as such
        ((5, 7, 33), None),
        ((5, 33, 7), None),
        ((64, 1, 9), None),  # a depthwise convolution
        ((64, 9, 1), None),
        ((0, 19, 33), None),
        ((5, 0, 33), None),
        ((19, 33), None),
        ((5, 19, 3, 11), None),
        ((), None),
    ],
)
def test_what_is_a_stack_of_matrices(shape: tuple[int, ...], found: tuple[int, int] | None) -> None:
    assert slice_shape(shape) == found


class Fits:
    """Fits of five matrices one behind another, as scratch holds them, and each by itself."""

    def __init__(self, codec: str, params: dict[str, str]) -> None:
        self.codec, self.params = codec, params
        self.fits = []
        for seed, steps in enumerate(FITTED):
            delta = decaying(O, I, seed=seed, scale=0.01)
            # A fit of no steps, as that of a zero delta is under lowrank.
            fit = fit_one(codec, delta, max(steps, 1), params)
            self.fits.append((fit, steps))
        self.stored = [store_fit(codec, fit, steps, params) for fit, steps in self.fits]
        self.scratch = b"".join(one.data for one in self.stored)

    @property
    def like(self) -> CodecNode:
        return self.stored[0].node

    def cut(self, steps: tuple[int, ...]) -> Stored:
        ranges = stack_ranges(self.like, FITTED, steps)
        data = b"".join(self.scratch[start : start + count] for start, count in ranges)
        return Stored(stack_node(self.like, steps), data)

    def alone(self, at: int, steps: int) -> Stored:
        return store_fit(self.codec, self.fits[at][0], steps, self.params)


ALL = {f"{codec} {'.'.join(params.values())}": Fits(codec, params) for codec, params in LOSSY_FORMATS}


@given(st.sampled_from(sorted(ALL)), st.tuples(*(st.integers(0, most) for most in FITTED)), st.data())
def test_every_slice_is_what_it_is_alone(which: str, steps: tuple[int, ...], data: st.DataObject) -> None:
    fits = ALL[which]
    stack = fits.cut(steps)
    assert stack.node.nbytes == len(stack.data) == sum(steps) * step_bytes(fits.like)
    spec = TensorSpec("experts", "BF16", (5, O, I))
    tensor = OpenedTensor(stack.node, stack.fetch, spec)
    assert not tensor.exact
    start = data.draw(st.integers(0, 4))
    stop = data.draw(st.integers(start + 1, 5))
    found = tensor.delta(start, stop)
    assert found is not None and found.shape == ((stop - start) * O, I)
    for at in range(start, stop):
        one = fits.alone(at, steps[at])
        alone = OpenedTensor(one.node, one.fetch, TensorSpec("experts", "BF16", (1, O, I))).delta(0, 1)
        assert alone is not None
        assert torch.equal(found[(at - start) * O : (at - start + 1) * O], alone)
        assert steps[at] or not alone.any()


@pytest.mark.parametrize("which", sorted(ALL))
def test_parts_of_a_slice_can_be_read(which: str) -> None:
    fits = ALL[which]
    stack = fits.cut((2, 5, 3, 0, 1))
    opened = OpenedTensor(stack.node, stack.fetch, TensorSpec("experts", "F32", (5, O, I)))
    whole = opened.delta(0, 5)
    assert whole is not None
    delta = opened._segments[0].delta
    assert delta is not None
    for start, stop in ((3, 7), (O - 2, O + 3), (7, 3 * O + 1), (4 * O, 5 * O)):
        assert torch.equal(delta.rows(start, stop), whole[start:stop])


def test_a_slice_without_steps_decodes_to_the_base() -> None:
    base = torch.randn(5, O, I, generator=generator(4)).to(torch.bfloat16)
    stack = ALL["lowrank int4"].cut((0, 3, 0, 0, 2))
    tensor = OpenedTensor(stack.node, stack.fetch, TensorSpec("experts", "BF16", (5, O, I)))
    restored = tensor.restored(0, 5, rows_of(base))
    assert bits(restored[[0, 2, 3]]) == bits(base[[0, 2, 3]])
    assert not torch.equal(restored[[1, 4]], base[[1, 4]])


def test_runs_of_other_codecs_beside_it() -> None:
    """Two slices of the base's own, three of low rank, one with all its bits."""
    spec = TensorSpec("experts", "BF16", (6, O, I))
    base = torch.randn(6, O, I, generator=generator(5)).to(torch.bfloat16)
    own = torch.randn(6, O, I, generator=generator(6)).to(torch.bfloat16)
    fits = ALL["lowrank int8"]
    middle = Stored(
        stack_node(fits.like, (4, 0, 2)),
        b"".join(
            fits.scratch[start : start + count] for start, count in stack_ranges(fits.like, FITTED[:3], (4, 0, 2))
        ),
    )
    last = store_exact("lossless", own[5:], base[5:], TensorSpec("", "BF16", (1, O, I)))
    children = (CodecNode("identical"), middle.node, last.node.shifted(len(middle.data)))
    tree = CodecNode("rows", params={"splits": [0, 2, 5, 6]}, children=children)
    stored = Stored(CodecNode.from_json(json.loads(json.dumps(tree.to_json()))), middle.data + last.data)
    tensor = OpenedTensor(stored.node, stored.fetch, spec)
    restored = tensor.restored(0, 6, rows_of(base))
    assert bits(restored[:2]) == bits(base[:2]) and bits(restored[5:]) == bits(own[5:])
    assert bits(restored[3]) == bits(base[3])
    for at in (2, 4):
        assert bits(tensor.restored(at, at + 1, rows_of(base))) == bits(restored[at])
        assert not torch.equal(restored[at], base[at])
    assert [tensor.delta(0, 2) is None, tensor.delta(2, 5) is None, tensor.delta(5, 6) is None] == [True, False, True]


def test_the_manifest_grows_by_a_number_a_slice() -> None:
    node = ALL["lowrank int4"].like
    few, many = (len(json.dumps(stack_node(node, (17,) * count).to_json())) for count in (2, 1002))
    assert many - few < 6 * 1000


def test_an_artifact_of_before_with_one_fit_over_all_slices_stays_readable() -> None:
    """[E, O, I] used to be one matrix [E * O, I]: no `slices`, and the product by hand."""
    u, v = [1, -2, 3, 4, 5, 6, 7, -7, 0, 1, 2, 3, -4, 5, 6, 7], [7, 6, 5, -4, 3, 2, 1, 0]
    packed = bytes((u[at] & 15) | ((u[at + 1] & 15) << 4) for at in range(0, 16, 2))
    packed += bytes((v[at] & 15) | ((v[at + 1] & 15) << 4) for at in range(0, 8, 2))
    data = bytes.fromhex("0040") + bytes.fromhex("803e") + packed  # scales 2.0 and 0.25
    tree = {
        "codec": "lowrank",
        "version": 1,
        "params": {"steps": 1, "factors": "int4", "group": 64},
        "parts": [
            {"name": "us", "dtype": "BF16", "shape": [1, 1], "offset": 0, "nbytes": 2},
            {"name": "vs", "dtype": "BF16", "shape": [1, 1], "offset": 2, "nbytes": 2},
            {"name": "u", "dtype": "U8", "shape": [1, 8], "offset": 4, "nbytes": 8},
            {"name": "v", "dtype": "U8", "shape": [1, 4], "offset": 12, "nbytes": 4},
        ],
    }
    tensor = OpenedTensor(
        CodecNode.from_json(tree), Stored(CodecNode("x"), data).fetch, TensorSpec("e", "F32", (2, 8, 8))
    )
    found = tensor.delta(0, 2)
    assert found is not None
    assert torch.equal(found, 0.5 * torch.outer(torch.tensor(u).double(), torch.tensor(v).double()))
    assert torch.equal(tensor.served(1, 2, rows_of(torch.zeros(2, 8, 8)))[0], found[8:].float())


@pytest.mark.parametrize(
    ("slices", "match"),
    [
        ([1, 2, 3, 0], "steps of 5 slices"),
        ([1, 2, 3, 0, 0, 0], "steps of 5 slices"),
        ([1, 2, 3, 0, -1], "steps of 5 slices"),
        ([1, 2, 3, 0, True], "steps of 5 slices"),
        ([1, 2, 3, 0, 1.0], "steps of 5 slices"),
        (None, "steps of 5 slices"),
        (7, "steps of 5 slices"),
        ([2, 2, 3, 0, 1], "the 8 steps of its slices"),
    ],
)
def test_steps_that_are_not_those_of_the_slices_are_refused(slices: object, match: str) -> None:
    stack = ALL["lowrank int4"].cut((1, 2, 3, 0, 1))
    node = CodecNode(stack.node.codec, 1, {**stack.node.params, "slices": slices}, stack.node.parts)  # type: ignore[dict-item]
    with pytest.raises(ArtifactInvalid, match=match):
        OpenedTensor(node, stack.fetch, TensorSpec("experts", "BF16", (5, O, I)))


@pytest.mark.parametrize("shape", [(5, O * I), (95, 33), (5,), (), (5, 1, 627), (5, 19, 11, 3)])
def test_a_stack_in_a_tensor_that_is_none_is_refused(shape: tuple[int, ...]) -> None:
    stack = ALL["sparse bf16"].cut((1, 2, 3, 0, 1))
    with pytest.raises(ArtifactInvalid):
        OpenedTensor(stack.node, stack.fetch, TensorSpec("experts", "BF16", shape))


def test_arrays_that_are_not_those_of_the_steps_are_refused() -> None:
    stack = ALL["lowrank int4"].cut((1, 2, 3, 0, 1))
    spec = TensorSpec("experts", "BF16", (5, O, I))
    for changes in ({"shape": (6, 10)}, {"shape": ()}, {"nbytes": 1}, {"dtype": "U9"}):
        with pytest.raises(ArtifactInvalid, match="array 'u'"):
            OpenedTensor(stack.with_part("u", **changes), stack.fetch, spec)
    narrow = OpenedTensor(stack.with_part("u", shape=(7, 5), nbytes=35), stack.fetch, spec)
    with pytest.raises(ArtifactInvalid, match="array 'u'"):
        narrow.delta(0, 5)


@pytest.mark.parametrize("dtype", ["F16", "F32"])
def test_rounding_counts_elements_of_the_whole_tensor(dtype: str) -> None:
    base = torch.randn(5, O, I, generator=generator(7)).to(torch_dtype(dtype))
    stack = ALL["lowrank bf16"].cut((2, 2, 1, 0, 3))
    tensor = OpenedTensor(stack.node, stack.fetch, TensorSpec("experts", dtype, (5, O, I)))
    whole = tensor.restored(0, 5, rows_of(base))
    pieces = torch.cat([tensor.restored(at, at + 1, rows_of(base)) for at in range(5)])
    assert bits(whole) == bits(pieces)
