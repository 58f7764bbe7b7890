"""Where a model stops: the ids that end its answers, and which file says so.

They stand in up to four places, and published checkpoints contradict themselves. All of them count: the stop ids are
the union. The order of precedence is generation_config.json, config.json, its text_config, tokenizer; it decides which
id comes first, and whom the others contradict: transformers stops at what the first of them says, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mfs_decompose.source.checkpoint import CONFIG
from mfs_decompose.source.side_files import GENERATION_CONFIG, SideFiles
from mfs_decompose.source.tokenizer_facts import SPECIAL_MAP, TOKENIZER_CONFIG, TokenizerFacts, token_text

_KEY = "eos_token_id"
_ROLE = "eos_token"
_MAX_IDS = 1000
_END = 2**31


@dataclass(frozen=True, slots=True)
class StopSource:
    """One place that names stop ids; `token` is the text that was looked up where a file names that and no id."""

    file: str
    key: str
    ids: tuple[int, ...]
    token: str | None = None


@dataclass(frozen=True, slots=True)
class StopIds:
    """The union of all places, in their order of precedence, and a sentence for each thing that is wrong."""

    ids: tuple[int, ...]
    sources: tuple[StopSource, ...]
    warnings: tuple[str, ...]


def find_stop_ids(files: SideFiles, tokenizer: TokenizerFacts) -> StopIds:
    """Gather the stop ids of a model from its side files; files that are absent or cannot be read name none."""
    sources: list[StopSource] = []
    warnings: list[str] = []
    config = files.parse(CONFIG)
    generation = files.parse(GENERATION_CONFIG)
    for name, parsed in ((GENERATION_CONFIG, generation), (CONFIG, config)):
        if parsed.problem:
            warnings.append(f"{name} cannot be read: {parsed.problem}")
    _take(generation.value, GENERATION_CONFIG, "", sources, warnings)
    _take(config.value, CONFIG, "", sources, warnings)
    nested = (config.value or {}).get("text_config")
    _take(nested if isinstance(nested, Mapping) else None, CONFIG, "text_config.", sources, warnings)
    _look_up(files, tokenizer, sources, warnings)
    union = tuple(dict.fromkeys(id for source in sources for id in source.ids))
    return StopIds(union, tuple(sources), (*warnings, *_contradictions(sources)))


def _take(
    config: Mapping[str, object] | None, file: str, at: str, sources: list[StopSource], warnings: list[str]
) -> None:
    value = (config or {}).get(_KEY)
    if value is None:
        return
    listed = value if isinstance(value, list) else [value]
    good = [id for id in listed[:_MAX_IDS] if isinstance(id, int) and not isinstance(id, bool) and 0 <= id < _END]
    if good:
        sources.append(StopSource(file, at + _KEY, tuple(dict.fromkeys(good))))
    if len(good) < len(listed):
        warnings.append(f"{file}: expected {at}{_KEY} to be an id or a list of ids, found {_cut(value)}")


def _look_up(files: SideFiles, tokenizer: TokenizerFacts, sources: list[StopSource], warnings: list[str]) -> None:
    text = tokenizer.special.get(_ROLE)
    if not isinstance(text, str):
        return
    own = token_text((files.parse(TOKENIZER_CONFIG).value or {}).get(_ROLE))
    file = TOKENIZER_CONFIG if own is not None else SPECIAL_MAP
    id = tokenizer.ids.get(text)
    if id is not None and 0 <= id < _END:
        sources.append(StopSource(file, _ROLE, (id,), text))
    elif tokenizer.ids:  # without one, all that is there is a model that is not opened
        warnings.append(f"{file}: the {_ROLE} {_cut(text)} is no token of the vocabulary")


def _contradictions(sources: Sequence[StopSource]) -> list[str]:
    """Ids that some place names and the first one does not: whoever reads that one alone runs past them."""
    if not sources:
        return []
    first, *others = sources
    found = []
    for other in others:
        extra = [id for id in other.ids if id not in first.ids]
        if extra:
            token = f" ({_cut(other.token)})" if other.token is not None else ""
            found.append(
                f"{other.file} ends at {_few(extra)}{token} and {first.file} at {_few(first.ids)} alone: "
                "what reads one of them runs past the other"
            )
    return found


def _few(ids: Sequence[int]) -> str:
    return ", ".join(str(id) for id in ids[:8]) + (f" and {len(ids) - 8} more" if len(ids) > 8 else "")


def _cut(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
