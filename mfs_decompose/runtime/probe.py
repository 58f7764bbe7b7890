"""What a model keeps for each token, and whether packed attention gives its answers: asked once, when it is loaded.

Configurations name windows and heads in many ways; a call of the model says what is really passed. And a layer that
mixes tokens by other means (recurrent states, convolutions) gives the right answer for one sequence and a wrong one for
two: so two sequences, one in pieces, are compared with the model alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from mfs_decompose.errors import MfsError, SourceIncompatible
from mfs_decompose.runtime.attention import AttentionStep, AttentionStyle, PackedModel, PagedStep
from mfs_decompose.runtime.batch_plan import BASE, BatchPlan, PlanSlot
from mfs_decompose.runtime.kv import KvCache, LayerShape
from mfs_decompose.runtime.step_layout import Segment, StepLayout

_LENGTH = 9
_TOLERANCE = 0.02
"""Of the spread of the logits: bf16 models differ by this much between batch shapes, wrong attention by far more."""
_ROPE_BY_LENGTH = ("dynamic", "longrope")


def probe_layers(packed: PackedModel, slot: PlanSlot) -> dict[int, LayerShape]:
    """The shapes of keys and values by layer index, taken from one call with a few tokens of the base.

    Raises:
        SourceIncompatible: rotary embeddings that depend on the longest sequence of a batch, or no attention layer
            that goes through transformers' registry.
    """
    refuse_rope_by_length(packed.model)
    probe = _Probe()
    _call_packed(packed, probe, slot, _some_ids(packed.model), range(_LENGTH))
    if not probe.shapes:
        raise SourceIncompatible(
            f"expected attention layers of transformers' registry, found none in {type(packed.model).__name__}",
            hint="this architecture cannot be served; `mfs restore` gives its variants back",
        )
    return probe.shapes


def refuse_rope_by_length(model: Any) -> None:
    config = model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    for settings in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        if settings.get("rope_type") in _ROPE_BY_LENGTH:
            raise SourceIncompatible(
                f"expected rotary embeddings of single positions, found rope_type {settings['rope_type']}, which looks "
                "at the longest sequence of a batch",
                hint="serve a variant with other RoPE settings, or restore it and run it alone",
            )


def check_packing(packed: PackedModel, slot: PlanSlot, shapes: dict[int, LayerShape]) -> None:
    """Compare the model alone with a packed run: in pieces, beside another sequence.

    Raises:
        SourceIncompatible: the answers differ, so that some layer mixes rows of different sequences.
    """
    ids = _some_ids(packed.model)
    alone = _call(packed.model, slot, ids, range(_LENGTH))
    kv = KvCache(shapes, tokens=64, block_size=4, sequences=2, chunk=_LENGTH, share_prefixes=False)
    other, sequence = kv.open(), kv.open()
    for past, stop in ((0, 4), (4, _LENGTH - 1), (_LENGTH - 1, _LENGTH)):
        new = stop - past
        for tables in (other, sequence):
            assert kv.reserve(tables, stop)
        kv.clean()
        segments = [Segment(other, 0, new, past), Segment(sequence, new, new, past)]
        step = PagedStep(kv, StepLayout(kv, segments))
        pair = [*ids[::-1][past:stop], *ids[past:stop]]
        both = _call_packed(packed, step, slot, pair, [*range(past, stop)] * 2)
    if step.calls != len(shapes) or not _alike(both[-1], alone[-1]):
        raise SourceIncompatible(
            f"expected every layer of {type(packed.model).__name__} to keep sequences apart through attention, "
            "found one that does not",
            hint="this architecture cannot be served; `mfs restore` gives its variants back",
        )


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether logits [vocabulary] are the same; -inf are ids that the base does not have."""
    there = other.isfinite()
    if not torch.equal(one.isfinite(), there):
        return False
    spread = float(other[there].std()) + 1e-6
    return float((one - other)[there].abs().max()) <= _TOLERANCE * spread


def _some_ids(model: Any) -> list[int]:
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    return [(7 + 13 * at) % vocabulary for at in range(_LENGTH)]


def _call(model: Any, slot: PlanSlot, ids: list[int], positions: Iterable[int]) -> torch.Tensor:
    """Logits [T, vocabulary] of the base in fp32."""
    device = model.device
    with torch.inference_mode(), slot.use(BatchPlan.only(BASE, len(ids))):
        logits: torch.Tensor = model(
            input_ids=torch.tensor([ids], device=device),
            position_ids=torch.tensor([list(positions)], device=device),
            use_cache=False,
        ).logits
    return logits[0].float()


def _call_packed(
    packed: PackedModel, step: AttentionStep, slot: PlanSlot, ids: list[int], positions: Iterable[int]
) -> torch.Tensor:
    try:
        # The slot first: it is what keeps another engine on this model out.
        with slot.use(BatchPlan.only(BASE, len(ids))), packed.running(step):
            return _call(packed.model, slot, ids, positions)
    except MfsError:
        raise
    except Exception as error:
        raise SourceIncompatible(
            f"expected {type(packed.model).__name__} to leave attention to transformers' registry, "
            f"found that it needs more: {error}",
            hint="this architecture cannot be served; `mfs restore` gives its variants back",
        ) from error


class _Probe:
    """Attention of one sequence that writes down what it is given."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, style: AttentionStyle
    ) -> torch.Tensor:
        _, heads, _, size = key.shape
        shape = LayerShape(heads, size, value.shape[3], style.window, key.dtype, key.device)
        if module.layer_idx in self.shapes:
            raise SourceIncompatible(
                f"expected one attention in each layer, found two in layer {module.layer_idx}",
                hint="this architecture cannot be served; `mfs restore` gives its variants back",
            )
        self.shapes[module.layer_idx] = shape
        answers = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return answers[0].transpose(0, 1)
