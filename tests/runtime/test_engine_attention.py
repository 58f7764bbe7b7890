"""Packed attention against one row at a time in fp64, and what it holds in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from mfs_decompose.errors import SourceIncompatible
from mfs_decompose.runtime.attention import AttentionStyle, PagedStep, packed_attention
from mfs_decompose.runtime.kv import KvCache, LayerShape, SequenceKv
from mfs_decompose.runtime.step_layout import Segment, StepLayout

HEADS, KEY_HEADS, SIZE = 6, 2, 5


class Layer:
    layer_idx = 3


def cache(
    window: int | None, *, tokens: int = 4096, block_size: int = 4, chunk: int = 64, value_size: int = SIZE
) -> KvCache:
    shape = LayerShape(KEY_HEADS, SIZE, value_size, window, torch.float32, torch.device("cpu"))
    return KvCache({3: shape}, tokens=tokens, block_size=block_size, sequences=64, chunk=chunk)


def one_row(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, style: AttentionStyle) -> torch.Tensor:
    """query [H, D] of the last of keys [n, Hkv, D], in fp64; answers [H, Dv]."""
    out = []
    scaling = query.shape[1] ** -0.5 if style.scaling is None else style.scaling
    for head in range(query.shape[0]):
        own = head // (query.shape[0] // keys.shape[1])
        scores = keys[:, own].double() @ query[head].double() * scaling
        if style.softcap is not None:
            scores = style.softcap * torch.tanh(scores / style.softcap)
        if style.window is not None:
            scores = scores[-style.window :]
        if style.sinks is not None:
            scores = torch.cat([scores, style.sinks[head : head + 1].double()])
        weights = scores.softmax(0)[: len(scores) - (style.sinks is not None)]
        out.append(weights @ values[-len(weights) :, own].double())
    return torch.stack(out)


class Sequence:
    """All keys and values a sequence ever had, and its blocks."""

    def __init__(self, kv: KvCache) -> None:
        self.blocks: SequenceKv = kv.open()
        self.keys = torch.zeros(0, KEY_HEADS, SIZE)
        self.values = torch.zeros(0, KEY_HEADS, kv.layers[3].values.shape[3])


def run_step(
    kv: KvCache, sequences: list[Sequence], counts: list[int], style: AttentionStyle, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Answers [T, H, Dv] of a step in which each sequence gets so many rows, and those of the oracle."""
    segments, expected, start = [], [], 0
    total = sum(counts)
    query = torch.randn(1, HEADS, total, SIZE, generator=generator)
    key = torch.randn(1, KEY_HEADS, total, SIZE, generator=generator)
    value = torch.randn(1, KEY_HEADS, total, kv.layers[3].values.shape[3], generator=generator)
    for sequence, count in zip(sequences, counts, strict=True):
        if not count:
            continue
        past = len(sequence.keys)
        assert kv.reserve(sequence.blocks, past + count)
        segments.append(Segment(sequence.blocks, start, count, past))
        sequence.keys = torch.cat([sequence.keys, key[0, :, start : start + count].transpose(0, 1)])
        sequence.values = torch.cat([sequence.values, value[0, :, start : start + count].transpose(0, 1)])
        for at in range(count):
            seen = past + at + 1
            expected.append(one_row(query[0, :, start + at], sequence.keys[:seen], sequence.values[:seen], style))
        start += count
    kv.clean()
    out = PagedStep(kv, StepLayout(kv, segments)).attend(Layer, query, key, value, style)
    for segment in segments:
        past = segment.past + segment.length
        kv.publish(segment.kv, b"digest", list(range(past)), past)
    return out, torch.stack(expected)


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.lists(st.sampled_from([0, 1, 1, 1, 2, 5, 13]), min_size=5, max_size=5), min_size=1, max_size=6),
    window=st.sampled_from([None, 1, 3, 6, 40]),
    softcap=st.sampled_from([None, None, 2.0]),
    sinks=st.booleans(),
    scaling=st.sampled_from([None, 0.3]),
    block_size=st.sampled_from([1, 3, 4, 16]),
    value_size=st.sampled_from([SIZE, 7]),
)
def test_every_row_sees_its_own_sequence(
    steps: list[list[int]],
    window: int | None,
    softcap: float | None,
    sinks: bool,
    scaling: float | None,
    block_size: int,
    value_size: int,
) -> None:
    kv = cache(window, block_size=block_size, value_size=value_size)
    generator = torch.Generator().manual_seed(1)
    style = AttentionStyle(scaling, window, softcap, torch.randn(HEADS, generator=generator) if sinks else None)
    sequences = [Sequence(kv) for _ in range(5)]
    for counts in steps:
        if sum(counts):
            out, expected = run_step(kv, sequences, counts, style, generator)
            torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("past", [0, 700])
def test_rows_that_are_cut_into_parts(window: int | None, softcap: float | None, past: int) -> None:
    """Longer than the parts in which masks and scores are made."""
    kv = cache(window, block_size=16, chunk=800)
    generator = torch.Generator().manual_seed(2)
    style = AttentionStyle(None, window, softcap, None)
    sequences = [Sequence(kv), Sequence(kv)]
    if past:
        run_step(kv, sequences, [past, 3], style, generator)
    out, expected = run_step(kv, sequences, [600, 1], style, generator)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)


class Largest(TorchDispatchMode):
    """The most elements of any tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize(
    ("window", "softcap", "value_size", "past"),
    [
        (None, None, SIZE, 0),
        (None, None, SIZE, 7000),
        (512, None, SIZE, 0),
        (None, 2.0, SIZE, 7000),
        (None, None, 7, 7000),
    ],
)
def test_100_and_8000_tokens_in_one_step(window: int | None, softcap: float | None, value_size: int, past: int) -> None:
    """No tensor of 8,000 x 8,000, and no short sequence padded to 8,000."""
    kv = cache(window, tokens=20000, block_size=16, chunk=8000, value_size=value_size)
    sequences = [Sequence(kv) for _ in range(12)]
    long = sequences[0]
    generator = torch.Generator().manual_seed(3)
    total = 8000 - past + sum(range(100, 111))
    query, key = torch.randn(1, HEADS, total, SIZE, generator=generator), torch.randn(1, KEY_HEADS, total, SIZE)
    value = torch.randn(1, KEY_HEADS, total, value_size)
    segments, start = [], 0
    for at, sequence in enumerate(sequences):
        count, before = (8000 - past, past) if sequence is long else (99 + at, 0)
        assert kv.reserve(sequence.blocks, before + count)
        segments.append(Segment(sequence.blocks, start, count, before))
        start += count
    kv.clean()
    style = AttentionStyle(None, window, softcap, None)
    scored = softcap is not None or value_size != SIZE
    with Largest() as prefill:
        PagedStep(kv, StepLayout(kv, segments)).attend(Layer, query, key, value, style)
    pool = kv.layers[3].values.numel()
    assert prefill.elements <= max(8000 * (64 * HEADS if scored else 256), pool)
    decode = [Segment(s.blocks, at, 1, segments[at].past + segments[at].length) for at, s in enumerate(sequences)]
    for sequence, segment in zip(sequences, decode, strict=True):
        assert kv.reserve(sequence.blocks, segment.past + 1)
    with Largest() as single:
        layout = StepLayout(kv, decode)
        PagedStep(kv, layout).attend(Layer, query[:, :, :12], key[:, :, :12], value[:, :, :12], style)
    batches = layout.group(0, torch.device("cpu")).decodes
    assert sorted(len(batch.table) for batch in batches) == [1, 11]
    assert single.elements <= max(pool, 8016 * HEADS * value_size)


def test_no_numbers_of_one_sequence_stay_there() -> None:
    """A block that held NaN is padding or the rest of a block for the next sequence, and a masked NaN is a NaN."""
    kv = cache(None, tokens=32)
    generator = torch.Generator().manual_seed(4)
    bad, style = Sequence(kv), AttentionStyle(None, None, None, None)
    assert kv.reserve(bad.blocks, 32)
    nan = torch.full((1, KEY_HEADS, 32, SIZE), torch.nan)
    step = PagedStep(kv, StepLayout(kv, [Segment(bad.blocks, 0, 32, 0)]))
    step.attend(Layer, torch.zeros(1, HEADS, 32, SIZE), nan, nan, style)
    kv.close(bad.blocks)
    sequences = [Sequence(kv), Sequence(kv)]
    for counts in ([5, 1], [1, 1], [1, 1]):
        out, expected = run_step(kv, sequences, counts, style, generator)
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)


def test_a_neighbour_without_numbers_harms_nobody() -> None:
    kv = cache(None, tokens=64)
    generator = torch.Generator().manual_seed(5)
    style = AttentionStyle(None, None, None, None)
    sequences = [Sequence(kv), Sequence(kv)]
    run_step(kv, sequences, [6, 3], style, generator)
    kv.layers[3].keys[sequences[1].blocks.tables[0][0]] = torch.nan
    kv.layers[3].values[sequences[1].blocks.tables[0][0]] = torch.nan
    out, expected = run_step(kv, sequences, [1, 1], style, generator)
    torch.testing.assert_close(out[:1].double(), expected[:1], rtol=1e-4, atol=1e-5)
    assert bool(out[1].isnan().any())


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"head_mask": torch.ones(1)}, "head_mask"),
        ({"dropout": 0.1}, "dropout"),
        ({"is_causal": False}, "is_causal=False"),
    ],
)
def test_what_is_not_done_is_refused_by_name(extra: dict[str, Any], named: str) -> None:
    rows = torch.zeros(1, 2, 3, 4)
    with pytest.raises(SourceIncompatible, match=named):
        packed_attention(torch.nn.Linear(1, 1), rows, rows, rows, None, **extra)
    with pytest.raises(SourceIncompatible, match="attention_mask"):
        packed_attention(torch.nn.Linear(1, 1), rows, rows, rows, torch.zeros(1))
