"""What a user should know about an adapter on its base, one sentence each."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from mfs_decompose.errors import SourceIncompatible
from mfs_decompose.source.adapter_attach import Attacher
from mfs_decompose.source.adapter_promises import describe_incomplete
from mfs_decompose.source.checkpoint import Checkpoint, read_sidecar
from mfs_decompose.source.config_diff import compare_configs
from mfs_decompose.source.naming import first_few

_QUANTISED_NAME = re.compile(r"(?i)(^|[-_./])(bnb|[48]-?bit|nf4|fp4|int[48]|gptq|awq)([-_./]|$)")
_QUANTISED_CARD = re.compile(r"load_in_([48])bit\W{1,4}true", re.IGNORECASE)
_MAX_CARD = 2**20
_OWN_CONFIG = "adapter: the config.json beside it is not the base's, which is what the merge keeps; they differ in {}"


def describe(
    attached: Attacher, adapter: Checkpoint, base: Checkpoint, changed: Sequence[str], *, apart: bool
) -> tuple[str, ...]:
    """The notes of one adapter, the count of changed tensors first; for what is no more than a fact of it."""
    own = sum(name in base.tensors for name in changed)
    notes = [f"adapter: changes {own} of the base's {len(base.tensors)} tensors"]
    if _is_another(attached.config.trained_on, base):
        said = base.repo or base.root.absolute().name
        notes.append(f"adapter: says it was trained on {attached.config.trained_on[:200]}; the base given is {said}")
    ways = Counter(attached.names.ways.values())
    total = sum(ways.values())
    if ways["renamed"]:
        notes.append(f"adapter: {ways['renamed']} of {total} names match under another prefix: {attached.names.rule}")
    if ways["mapped"]:
        notes.append(f"adapter: found by transformers' own map of the base's names: {ways['mapped']} of {total}")
    if attached.new:
        notes.append(f"adapter: brings {first_few(sorted(attached.new))}, which the base lacks")
    if apart:
        notes.append("adapter: embeddings and head differ from now on, stored apart (tie_word_embeddings false)")
    if attached.keys.copies:
        notes.append(f"adapter: {len(attached.keys.copies)} tensors of its file are copies and not used")
    differing = _differing_keys(adapter, base)
    if differing and not _rope(differing):
        notes.append(_OWN_CONFIG.format(first_few(differing)))
    return tuple(notes)


def warn(attached: Attacher, adapter: Checkpoint, base: Checkpoint) -> tuple[str, ...]:
    """What may be wrong with it, without a proof."""
    rope = _rope(_differing_keys(adapter, base))
    return (
        *describe_incomplete(attached, adapter, base),
        *_quantised(attached.config.trained_on, adapter),
        *([_OWN_CONFIG.format(first_few(rope))] if rope else []),
    )


def _differing_keys(adapter: Checkpoint, base: Checkpoint) -> list[str]:
    """Of the config.json that some trainers write beside an adapter."""
    if not adapter.config or not base.config:
        return []
    return [change.key for change in compare_configs(base.config, adapter.config).changes]


def _rope(keys: Sequence[str]) -> list[str]:
    """Those without which a model trained for longer texts computes something else."""
    return [key for key in keys if "rope" in key or key.rpartition(".")[2] == "max_position_embeddings"]


def _is_another(trained_on: str, base: Checkpoint) -> bool:
    """Whether the model that an adapter names goes by another name than the base: often a copy of it, at times not."""
    name = trained_on.replace("\\", "/").rstrip("/").rpartition("/")[2].casefold()
    place = base.repo or str(base.root.resolve())
    # A snapshot in the Hub's cache lies in models--org--name/snapshots/<commit>.
    names = {base.root.absolute().name.casefold(), *(part.casefold() for part in re.split(r"[/\\]|--", place))}
    return bool(name) and name not in names


def _quantised(trained_on: str, adapter: Checkpoint) -> list[str]:
    reason = f"it names {trained_on[:100]!r}" if _QUANTISED_NAME.search(trained_on) else _card(adapter)
    if not reason:
        return []
    return [
        f"adapter: trained on a quantised base ({reason}); on these weights it computes something slightly else, "
        "which can matter as much as the adapter itself"
    ]


def _card(adapter: Checkpoint) -> str:
    card = next((sidecar for sidecar in adapter.sidecars if sidecar.name == "README.md"), None)
    if card is None or card.size > _MAX_CARD:
        return ""
    try:
        text = read_sidecar(adapter, card).decode("utf-8", "replace")
    except SourceIncompatible:  # of a model of the Hub whose files are not there yet: a dry run
        return ""
    found = _QUANTISED_CARD.search(text)
    return f"its README.md says load_in_{found[1]}bit" if found else ""
