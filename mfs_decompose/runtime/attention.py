"""Attention over one packed step: every row sees the earlier tokens of its own sequence, and of no other.

The model is called with [1, T] tokens of many sequences and without a mask. Its attention layers reach
`packed_attention` through transformers' registry, and that finds the step that runs on the module itself, put there for
the time of one call (`running`): nothing is global, and outside of a step the model is as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F  # noqa: N812

from mfs_decompose.errors import SourceIncompatible
from mfs_decompose.runtime.kv import KvCache, LayerStore
from mfs_decompose.runtime.ops.pages import can_attend
from mfs_decompose.runtime.step_layout import DecodeBatch, GroupLayout, StepLayout

IMPLEMENTATION = "mfs_packed"
_STEP = "_mfs_packed_step"
_HARMLESS = {
    "position_ids",
    "cache_position",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
    "is_causal",
    "deterministic",
}
"""Arguments that change nothing here. Others that are not None are refused: they would be silently without effect."""
_MASKED_ROWS, _SCORED_ROWS = 256, 64
"""Query rows at a time where a mask, or all scores, are held: memory stays linear in the length."""


class AttentionStyle(NamedTuple):
    """How one layer scores: `scaling` None is 1 / sqrt(D); `sinks` [H] are scores of a key without a value."""

    scaling: float | None
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None

    def fused(self, key: torch.Tensor, value: torch.Tensor) -> bool:
        """Whether torch's kernel that never holds all scores does this: values as wide as keys, and nothing extra."""
        return self.softcap is None and self.sinks is None and key.shape[-1] == value.shape[-1]


class AttentionStep(Protocol):
    """What answers the attention layers of one call of the model."""

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, style: AttentionStyle
    ) -> torch.Tensor:
        """query [1, H, T, D], key and value [1, Hkv, T, D]; answers [T, H, D]."""


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """The function that transformers calls; [1, T, H, D] comes back.

    Raises:
        SourceIncompatible: the layer wants something that is not done here; the argument is named.
    """
    unknown = sorted(name for name, given in others.items() if given is not None and name not in _HARMLESS)
    if attention_mask is not None:
        unknown.append("attention_mask")
    if dropout:
        unknown.append("dropout")
    if others.get("is_causal") is False:
        unknown.append("is_causal=False")
    if unknown:
        raise SourceIncompatible(
            f"expected causal attention without extras, {type(module).__name__} asks for {', '.join(unknown)}",
            hint="this architecture cannot be served; `mfs restore` gives its variants back",
        )
    step: AttentionStep | None = module.__dict__.get(_STEP)
    assert step is not None, "packed attention outside of a step"
    style = AttentionStyle(scaling, sliding_window or None, softcap, s_aux)
    return step.attend(module, query, key, value, style)[None], None


class PackedModel:
    """A model whose attention can be handed to a step for the time of one call."""

    def __init__(self, model: Any) -> None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        # No mask function is registered under this name: transformers then builds no mask at all.
        ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, packed_attention)
        self.model = model
        self._layers = [module for module in model.modules() if "layer_idx" in module.__dict__]
        configs: list[Any] = [module.config for module in model.modules() if hasattr(module, "config")]
        self._configs = list({id(config): config for config in configs}.values())

    @contextmanager
    def running(self, step: AttentionStep) -> Iterator[None]:
        """Attention layers ask `step` inside; before and after they do what they did."""
        before = [config._attn_implementation_internal for config in self._configs]
        for layer in self._layers:
            layer.__dict__[_STEP] = step
        for config in self._configs:
            config._attn_implementation_internal = IMPLEMENTATION
        try:
            yield
        finally:
            for config, implementation in zip(self._configs, before, strict=True):
                config._attn_implementation_internal = implementation
            for layer in self._layers:
                layer.__dict__.pop(_STEP, None)


class PagedStep:
    """One step over paged keys and values: the new ones are written, then every row attends."""

    def __init__(self, kv: KvCache, layout: StepLayout) -> None:
        self._kv = kv
        self._layout = layout
        self.calls = 0

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, style: AttentionStyle
    ) -> torch.Tensor:
        store = self._kv.layers[module.layer_idx]
        layout = self._layout.group(store.group, query.device)
        assert layout.window == style.window and query.shape[2] == self._layout.rows
        self.calls += 1
        query_THD = query[0].transpose(0, 1)
        whole = layout.decodes[0] if len(layout.decodes) == 1 and layout.decodes[0].rows is None else None
        new = key[0], value[0]
        if whole is not None and _reads_pages(query, store, style) and all(_can_be_written(one) for one in new):
            return whole.pages.attend(query_THD, store.keys, store.values, style.scaling, new)
        keys_THD, values_THD = key[0].transpose(0, 1), value[0].transpose(0, 1)
        store.keys.flatten(0, 1).index_copy_(0, layout.slots, keys_THD.to(store.keys.dtype))
        store.values.flatten(0, 1).index_copy_(0, layout.slots, values_THD.to(store.values.dtype))
        if whole is not None:
            return _decode(query_THD, store, whole, style)
        out = query.new_empty(query.shape[2], query.shape[1], value.shape[3])
        for batch in layout.decodes:
            assert batch.rows is not None
            out.index_copy_(0, batch.rows, _decode(query_THD.index_select(0, batch.rows), store, batch, style))
        for chunk in layout.chunks:
            start, stop = chunk.start, chunk.start + chunk.length
            if chunk.table is None:
                seen = key[:, :, start:stop], value[:, :, start:stop]
            else:
                seen = (
                    _gather(store.keys, chunk.table, chunk.keys),
                    _gather(store.values, chunk.table, chunk.keys),
                )
            _prefill(out[start:stop], query[:, :, start:stop], *seen, layout, style)
        return out


def _reads_pages(query: torch.Tensor, store: LayerStore, style: AttentionStyle) -> bool:
    return style.fused(store.keys, store.values) and can_attend(query, store.keys, store.values)


def _can_be_written(rows: torch.Tensor) -> bool:
    return rows.dtype == torch.float32 and rows.stride(2) == 1


def _decode(query_BHD: torch.Tensor, store: LayerStore, batch: DecodeBatch, style: AttentionStyle) -> torch.Tensor:
    """One row a sequence, batched: the blocks of all are gathered side by side, shorter ones padded and masked."""
    rows, heads, size = query_BHD.shape
    if _reads_pages(query_BHD, store, style):
        return batch.pages.attend(query_BHD, store.keys, store.values, style.scaling)
    key, value = (_gather(pages, batch.table, batch.keys) for pages in (store.keys, store.values))
    groups = heads // key.shape[1]
    # The query heads of one key head become rows of one head: no key is repeated.
    grouped = query_BHD.reshape(rows, key.shape[1], groups, size)
    mask = batch.mask_for(query_BHD.dtype)
    if style.fused(key, value):
        answers = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=style.scaling)
    else:
        answers = _scored(grouped, key, value, mask, style)
    return answers.reshape(rows, heads, value.shape[3])


def _gather(pages: torch.Tensor, table: torch.Tensor, keys: int) -> torch.Tensor:
    """[B, heads, keys, D] of `table` [B, blocks]; a copy."""
    taken = pages.index_select(0, table.flatten())
    return taken.view(table.shape[0], -1, *pages.shape[2:])[:, :keys].transpose(1, 2)


def _prefill(
    out_LHD: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: GroupLayout,
    style: AttentionStyle,
) -> None:
    """One sequence's new rows, query [1, H, L, D], over key and value [1, Hkv, keys, D], the last L its own."""
    length, keys = query.shape[2], key.shape[2]
    grouped = query.shape[1] != key.shape[1]
    fused = style.fused(key, value)
    if fused and length == keys and (style.window is None or length <= style.window):
        answers = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=style.scaling, enable_gqa=grouped
        )
        out_LHD.copy_(answers[0].transpose(0, 1))
        return
    step = _MASKED_ROWS if fused else _SCORED_ROWS
    for at in range(0, length, step):
        rows = query[:, :, at : at + step]
        last = keys - length + at + rows.shape[2]
        first = 0 if style.window is None else max(0, keys - length + at - style.window + 1)
        mask = layout.causal_mask(rows.shape[2], last - first, query.dtype)
        part = key[:, :, first:last], value[:, :, first:last]
        if fused:
            answers = F.scaled_dot_product_attention(
                rows, *part, attn_mask=mask, scale=style.scaling, enable_gqa=grouped
            )
        else:
            by_key_head = rows.reshape(1, key.shape[1], -1, rows.shape[3])
            answers = _scored(by_key_head, *part, mask, style).reshape(*rows.shape[:3], value.shape[3])
        out_LHD[at : at + step] = answers[0].transpose(0, 1)


def _scored(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, style: AttentionStyle
) -> torch.Tensor:
    """Attention with its scores in hand, as transformers' eager functions: softcap (Gemma 2) and sinks (gpt-oss).

    query [B, Hkv, H / Hkv * L, D]: under each key head come its query heads, each with L rows; mask [B, 1, L, keys].
    """
    batch, heads, rows, size = query.shape
    scores = query @ key.transpose(2, 3) * (size**-0.5 if style.scaling is None else style.scaling)
    if style.softcap is not None:
        scores = torch.tanh(scores / style.softcap) * style.softcap
    if mask is not None:
        scores = (scores.view(batch, heads, -1, *mask.shape[2:]) + mask[:, :, None]).view(scores.shape)
    keys = scores.shape[3]
    if style.sinks is not None:
        sinks = style.sinks.view(1, heads, -1, 1).expand(batch, heads, -1, rows * heads // style.sinks.shape[0])
        scores = torch.cat([scores, sinks.reshape(batch, heads, rows, 1).to(scores.dtype)], dim=3)
    weights = torch.softmax(scores, dim=3, dtype=torch.float32).to(query.dtype)
    return weights[..., :keys] @ value
