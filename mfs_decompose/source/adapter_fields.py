"""The fields of adapter_config.json (peft.LoraConfig of PEFT 0.21, and names of its earlier versions), one by one."""

from __future__ import annotations

MEANT = frozenset(
    {
        "peft_type",
        "r",
        "lora_alpha",
        "use_rslora",
        "use_dora",
        "rank_pattern",
        "alpha_pattern",
        "bias",
        "lora_bias",
        "fan_in_fan_out",
        "modules_to_save",
        "target_parameters",
        "trainable_token_indices",
        "ensure_weight_tying",
        "init_lora_weights",
        "base_model_name_or_path",
    }
)
"""What an adapter computes depends on them, or what a user should be told."""

HARMLESS = frozenset(
    {
        # Where to attach: the tensors in the file say the same by their names, and each of them is accounted for.
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "inference_mode",
        # Training alone. VeLoRA changes the backward pass; EVA is written out as ranks and alphas in the patterns.
        "lora_dropout",
        "runtime_config",
        "velora_config",
        "eva_config",
        "loftq_config",
        "corda_config",
        "lora_ga_config",
        "qalora_group_size",
        "megatron_core",
        # Notes.
        "auto_mapping",
        "revision",
        "task_type",
        "peft_version",
        "merge_weights",
    }
)
"""No value of theirs changes what the saved tensors mean: loftq, corda and lora_ga act through init_lora_weights."""

REFUSED = {
    "alora_invocation_tokens": "which acts on a part of the tokens only and has no merged weights",
    "arrow_config": "which routes between adapters for each token and has no merged weights",
    "kasa_config": "which removes singular directions from the base",
    "monteclora_config": "whose sampler this version does not read",
    "use_bdlora": "whose block-diagonal factors this version does not read",
    "use_qalora": "whose pooled inputs belong to a GPTQ base",
    "layer_replication": "which builds another stack of layers than the base's",
    "megatron_config": "whose parallel layers this version does not read",
    "enable_lora": "the fused layers of PEFT before 0.3",
}
"""Refused when set, and why."""

SELF_CONTAINED_STARTS = frozenset({"gaussian", "orthogonal", "eva", "mica", "true", "false"})
"""Values of init_lora_weights that leave the base as it is; others (pissa, olora, corda, loftq, lora_ga) change it."""
