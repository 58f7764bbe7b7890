"""What becomes of a tied head and embedding when an adapter changes one of the two.

The rule is what the unmerged adapter computes in PEFT: a LoRA, or a module's own copy (modules_to_save), acts on its
module alone, so the other one keeps the weights it had; what replaces the shared tensor itself, and replaced token
rows, act on both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mfs_decompose.errors import SourceIncompatible
from mfs_decompose.source.adapter_draft import Change, Draft
from mfs_decompose.source.checkpoint import Checkpoint
from mfs_decompose.source.tying import vocabulary_role

_TEXT_CONFIGS = ("text_config", "language_config", "llm_config")
_WITH_HEAD = ("ForCausalLM", "LMHead", "ForConditionalGeneration", "ForImageTextToText")
_WITH_ANOTHER_HEAD = ("ForMaskedLM", "ForPreTraining")


@dataclass(frozen=True, slots=True)
class Ends:
    """The names of the base's input embeddings and head; `tied` if they are one in the model.

    A tied base need not store its head: `has_head` says whether it does, and `head` is "" where this version does not
    know what it is called.
    """

    embedding: str
    head: str
    has_head: bool
    tied: bool


def find_ends(base: Checkpoint, draft: Draft, where: str) -> Ends | None:
    """The embeddings and the head that belong together; None where there is not one of each, as in an encoder.

    Raises:
        SourceIncompatible: the adapter changes one of several that may be tied.
    """
    embeddings = [name for name in base.tensors if vocabulary_role(name) == "embedding"]
    heads = [name for name in base.tensors if vocabulary_role(name) == "head"]
    flags = [config["tie_word_embeddings"] for config in _configs(base.config) if "tie_word_embeddings" in config]
    named = [name for name in draft.changes if vocabulary_role(name) is not None]
    new = [name for name in named if name not in base.tensors]
    if not embeddings and new:  # the head of a tied base, found by the map of its names
        embeddings = [start.name for name in new if (start := draft.starts[name]) is not None]
    if (len(embeddings) > 1 or len(heads) > 1) and named and False not in flags:
        raise _cannot_untie(where, named[0])
    if len(embeddings) != 1 or len(heads) > 1:
        return None
    if heads:
        return Ends(embeddings[0], heads[0], True, True in flags)
    head = next((name for name in named if vocabulary_role(name) == "head"), _head_beside(embeddings[0], base.config))
    return None if False in flags or head is None else Ends(embeddings[0], head, False, True)


def settle_tying(draft: Draft, ends: Ends, base: Checkpoint, *, keep_tied: bool, where: str) -> bool:
    """Complete the changes of a tied pair, in place; whether the two are apart from now on.

    Raises:
        SourceIncompatible: they would have to come apart, and this architecture cannot be loaded that way.
    """
    embedding, head = draft.changes.get(ends.embedding), draft.changes.get(ends.head)
    if not ends.tied or (embedding is None and head is None):
        return False
    start = base.tensors[ends.embedding].spec
    if embedding is None and head is not None and head.direct and not head.factors:
        embedding, head = draft.change(ends.embedding, start), None  # it is the shared tensor under its other name
        embedding.replace, embedding.direct = draft.changes.pop(ends.head).replace, True
    apart = head is not None or (embedding is not None and not keep_tied and _acts_alone(embedding))
    if not apart:
        if ends.has_head and embedding is not None:
            draft.changes[ends.head] = replace(embedding)
            draft.starts[ends.head] = base.tensors[ends.head].spec
        return False
    if base.config.get("is_encoder_decoder") or not ends.head:  # a T5 that is not tied scales its logits otherwise
        raise _cannot_untie(where, ends.embedding if embedding is not None else ends.head)
    head = draft.change(ends.head, base.tensors[ends.head].spec if ends.has_head else start)
    if embedding is not None:
        if head.replace is None and embedding.direct:
            head.replace, head.direct = embedding.replace, True
        if head.tokens is None and not head.factors and head.replace is None:
            head.tokens = embedding.tokens
    return True


def config_changes(
    base: Checkpoint, ends: Ends | None, shapes: Mapping[str, tuple[int, ...]], *, apart: bool, where: str
) -> dict[str, object]:
    """What the base's config.json has to say differently; objects inside are to be merged, not replaced.

    Raises:
        SourceIncompatible: embeddings and head would have other numbers of tokens.
    """
    changes: dict[str, object] = {}
    if ends is None:
        return changes
    if apart:
        changes = _set(base.config, changes, "tie_word_embeddings", False, always=True)
    rows, head_rows = shapes[ends.embedding][0], shapes.get(ends.head, shapes[ends.embedding])[0]
    if rows == base.tensors[ends.embedding].rows and head_rows == rows:
        return changes
    if rows != head_rows:
        raise SourceIncompatible(
            f"the adapter in {where} leaves {ends.embedding} with {rows} tokens and {ends.head} with {head_rows}",
            hint="Give the base with its embeddings resized as for the training, or save the adapter with both.",
        )
    return _set(base.config, changes, "vocab_size", rows, always=False)


def _acts_alone(change: Change) -> bool:
    return bool(change.factors) or (change.replace is not None and not change.direct)


def _cannot_untie(where: str, name: str) -> SourceIncompatible:
    return SourceIncompatible(
        f"the adapter in {where} changes {name} and not what may be tied to it, which this version cannot write apart "
        "for this architecture",
        hint="Train it with ensure_weight_tying=True, or without embeddings and head.",
    )


def _head_beside(embedding: str, config: Mapping[str, object]) -> str | None:
    """The name under which transformers looks for a head that the base does not store; None where there is none."""
    architectures = str(config.get("architectures") or "")
    if any(part in architectures for part in _WITH_ANOTHER_HEAD):
        return ""
    if architectures and not any(part in architectures for part in _WITH_HEAD):
        return None
    if embedding.endswith("embed_in.weight"):
        return "embed_out.weight"
    wrapped = "language_model." if embedding.startswith("language_model.model.") else ""
    return f"{wrapped}lm_head.weight"


def _configs(config: Mapping[str, object]) -> list[Mapping[str, object]]:
    inner = [config[name] for name in _TEXT_CONFIGS if name in config]
    return [config, *(part for part in inner if isinstance(part, dict))]


def _set(
    config: Mapping[str, object], changes: Mapping[str, object], key: str, value: object, *, always: bool
) -> dict[str, object]:
    """Set a key wherever the config has it; if it has it nowhere and `always`, at the top and in each text config."""
    found = dict(changes)
    everywhere = always and not any(key in part for part in _configs(config))
    if key in config or everywhere:
        found[key] = value
    for name in _TEXT_CONFIGS:
        inner = config.get(name)
        if isinstance(inner, dict) and (key in inner or everywhere or always):
            kept = found.get(name)
            found[name] = {**(kept if isinstance(kept, dict) else {}), key: value}
    if always:
        found[key] = value
    return found
