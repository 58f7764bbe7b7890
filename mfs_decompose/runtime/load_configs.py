"""What a variant's config may say otherwise than the base's, and what it may not because the maths would be another."""

from __future__ import annotations

from typing import Any

from mfs_decompose.errors import SourceIncompatible
from mfs_decompose.source.config_diff import compare_configs

_WITHOUT_EFFECT = """
architectures torch_dtype dtype transformers_version use_cache initializer_range initializer_factor return_dict
output_attentions output_hidden_states output_router_logits router_aux_loss_coef router_jitter_noise pretraining_tp
attention_dropout attn_pdrop resid_pdrop embd_pdrop hidden_dropout hidden_dropout_prob attention_probs_dropout_prob
classifier_dropout dropout summary_first_dropout id2label label2id num_labels problem_type finetuning_task
bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id cls_token_id mask_token_id
chunk_size_feed_forward task_specific_params
"""
WITHOUT_EFFECT = frozenset(_WITHOUT_EFFECT.split())
"""Keys that training, generation or bookkeeping reads, and no answer to given tokens."""

SERVED = frozenset(
    {
        "vocab_size",  # per-variant rows and logits
        "tie_word_embeddings",  # each parameter has its own delta
        "attention_bias",
        "mlp_bias",
        "qkv_bias",  # the biases themselves are tensors
        "max_position_embeddings",  # a limit; where angles depend on it, they are compared
    }
)
ROPE = ("rope_parameters", "rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor")
"""Keys whose effect is in the angles, which are compared as numbers and served for each variant."""


def refuse_other_maths(id: str, base: Any, own: Any) -> None:
    """Compare two config objects of transformers, defaults filled in.

    Keys that the config's class does not know are read by no released code, and let pass.

    Raises:
        SourceIncompatible: naming the keys by which the variant would compute something else.
    """
    if type(own) is not type(base):
        raise SourceIncompatible(
            f"cannot serve variant {id!r} beside the base: expected the base's architecture {base.model_type}, "
            f"found {own.model_type}",
            hint="use `mfs restore` for it, and leave it out here",
        )
    known = _keys(type(base)().to_dict()) | _keys(base.to_dict())
    changes = compare_configs(base.to_dict(), own.to_dict()).changes
    wrong = [
        f"{change.key} {change.b!r} instead of {change.a!r}"
        for change in changes
        if not _is_served(change.key) and change.key.split(".")[0] in known
    ]
    if wrong:
        raise SourceIncompatible(
            f"cannot serve variant {id!r} beside the base: its config.json has {'; '.join(wrong)[:600]}",
            hint="use `mfs restore` for it, and leave it out here",
        )


def refuse_length_dependent_rope(id: str, config: Any) -> None:
    """Angles that depend on the longest position in a batch would make rows depend on their neighbours.

    Raises:
        SourceIncompatible: the config asks for such.
    """
    text = config.get_text_config()
    parameters = getattr(text, "rope_parameters", None) or {}
    groups = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    kinds = {group.get("rope_type") for group in groups}
    found = sorted(kind for kind in kinds if kind in ("dynamic", "longrope"))
    if found:
        raise SourceIncompatible(
            f"cannot serve {id!r}: its rotary embedding of type {found[0]} depends on the longest request of a batch",
            hint="use `mfs restore`, and a batch of one length",
        )


def _is_served(key: str) -> bool:
    parts = key.split(".")
    return parts[-1] in WITHOUT_EFFECT | SERVED or any(part in ROPE for part in parts)


def _keys(config: dict[str, Any]) -> set[str]:
    return set(config)
