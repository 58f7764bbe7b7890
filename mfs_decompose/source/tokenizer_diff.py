"""Two tokenizers compared by what their files say."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mfs_decompose.source.config_diff import NOISE, Change, compare_objects
from mfs_decompose.source.tokenizer_facts import TokenizerFacts

_WHERE_FROM = {"name_or_path", "tokenizer_file", "special_tokens_map_file", "is_local", "local_files_only", "cache_dir"}
_NOISE = NOISE | _WHERE_FROM
EXAMPLES = 20
_MAX_TEMPLATE = 200_000
_MAX_LINES = 60
_WIDE = 160


@dataclass(frozen=True, slots=True)
class VocabularyDiff:
    """Sizes in tokens; how many are only in one, or have another id; and the first few of each, by id."""

    a: int
    b: int
    only_a: int
    only_b: int
    moved: int
    only_a_first: tuple[tuple[str, int], ...]
    only_b_first: tuple[tuple[str, int], ...]
    moved_first: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True)
class TemplateDiff:
    """A chat template that differs: a unified diff, cut to a screenful; empty where they are too large for one."""

    name: str
    in_a: bool
    in_b: bool
    diff: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TokenizerDiff:
    """What differs between two tokenizers.

    `merges` are (count in A, count in B, equal), None where neither has any; `settings` are changes of
    tokenizer_config.json, `pipeline` of tokenizer.json, vocabulary, added tokens and merges apart.
    """

    vocabulary: VocabularyDiff
    special: tuple[Change, ...]
    added: tuple[Change, ...]
    merges: tuple[int, int, bool] | None
    templates: tuple[TemplateDiff, ...]
    settings: tuple[Change, ...]
    pipeline: tuple[Change, ...]

    @property
    def equal(self) -> bool:
        """Whether both turn the same text into the same ids, as far as the files tell."""
        words = self.vocabulary
        changed = (words.only_a, words.only_b, words.moved, self.special, self.added, self.settings, self.pipeline)
        return not any(changed) and not self.templates and (self.merges is None or self.merges[2])


def compare_tokenizers(a: TokenizerFacts, b: TokenizerFacts) -> TokenizerDiff:
    """Compare two tokenizers; either may be empty, where a model has none."""
    merges = None
    if a.merges is not None or b.merges is not None:
        merges = (len(a.merges or ()), len(b.merges or ()), (a.merges or ()) == (b.merges or ()))
    return TokenizerDiff(
        vocabulary=_vocabulary(a.ids, b.ids),
        special=tuple(compare_objects(a.special, b.special, skipped=())),
        added=tuple(compare_objects(a.added, b.added, skipped=())),
        merges=merges,
        templates=tuple(_templates(a.templates, b.templates)),
        settings=tuple(compare_objects(a.settings, b.settings, skipped=_NOISE)),
        pipeline=tuple(compare_objects(a.pipeline, b.pipeline, skipped=())),
    )


def _vocabulary(a: Mapping[str, int], b: Mapping[str, int]) -> VocabularyDiff:
    only_a = sorted(((text, a[text]) for text in a.keys() - b.keys()), key=lambda one: (one[1], one[0]))
    only_b = sorted(((text, b[text]) for text in b.keys() - a.keys()), key=lambda one: (one[1], one[0]))
    moved = sorted((id, b[text], text) for text, id in a.items() if b.get(text, id) != id)
    return VocabularyDiff(
        a=len(a),
        b=len(b),
        only_a=len(only_a),
        only_b=len(only_b),
        moved=len(moved),
        only_a_first=tuple(only_a[:EXAMPLES]),
        only_b_first=tuple(only_b[:EXAMPLES]),
        moved_first=tuple((text, one, two) for one, two, text in moved[:EXAMPLES]),
    )


def _templates(a: Mapping[str, str], b: Mapping[str, str]) -> Iterator[TemplateDiff]:
    for name in sorted(a.keys() | b.keys()):
        one, two = a.get(name), b.get(name)
        if one != two:
            yield TemplateDiff(name, one is not None, two is not None, _unified(one or "", two or ""))


def _unified(a: str, b: str) -> tuple[str, ...]:
    if max(len(a), len(b)) > _MAX_TEMPLATE:
        return ()
    lines = list(difflib.unified_diff(_lines(a), _lines(b), "A", "B", n=1, lineterm=""))
    more = len(lines) - _MAX_LINES
    return (*lines[:_MAX_LINES], *([f"... and {more} more lines"] if more > 0 else []))


def _lines(template: str) -> list[str]:
    """A template's lines; where it is written in one long line, cut in front of its tags."""
    lines: list[str] = []
    for line in template.split("\n"):
        lines += re.split(r"(?<=.)(?=\{%)", line) if len(line) > _WIDE else [line]
    return lines
