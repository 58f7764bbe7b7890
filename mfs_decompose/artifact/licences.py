"""Under which licence each checkpoint of a family came, as far as its own side files say.

Only what is said is repeated: no licence is guessed from a text, and none is worked out for the family.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from mfs_decompose.artifact.records import BaseRecord, SourceRecord, VariantRecord
from mfs_decompose.recipe.strict_yaml import read_document
from mfs_decompose.source.strict_json import parse_strict_object

MAX_SOURCE_BYTES: Final = 1_000_000
"""Of a side file, how much is looked at; the front matter of large model cards stays under it."""

_LONGEST: Final = 80
_MOST: Final = 8
_MAX_ENTRY: Final = 4096
_KEYS: Final = frozenset({"license", "license_name"})
_LINE_END = re.compile(r"\r\n|\r|\n")
_TEXT_NAME = re.compile(r"licen[cs]e([._-].*)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Licence:
    """What a checkpoint says of its licence.

    Attributes:
        name: as written there; None where it says nothing.
        files: names of the side files that say it, or that look like the text of a licence.
    """

    name: str | None
    files: tuple[str, ...]


def read_licences(
    base: BaseRecord, variants: Sequence[VariantRecord], read: Callable[[str], bytes]
) -> dict[str, Licence]:
    """The licence of `base`, unless it is a mean and has no files, and of each variant, by id.

    Args:
        read: the content of a side file by its sha256, at least the first `MAX_SOURCE_BYTES` of it.
    """
    sources = {} if base.source is None else {"base": base.source}
    sources.update((variant.id, variant.source) for variant in variants)
    return {id: _licence_of(source, read) for id, source in sources.items()}


def _licence_of(source: SourceRecord, read: Callable[[str], bytes]) -> Licence:
    texts = [name for name in sorted(source.files) if _TEXT_NAME.fullmatch(name)]
    for file, find in (("README.md", _in_front_matter), ("config.json", _in_config)):
        name = find(read(source.files[file])[:MAX_SOURCE_BYTES]) if file in source.files else None
        if name:
            return Licence(name, (file, *texts))
    return Licence(None, tuple(texts))


def _in_front_matter(data: bytes) -> str | None:
    """`license` of a model card, with `license_name` where the licence is none of the Hub's list."""
    entry = _licence_lines(data.decode("utf-8-sig", "replace"))
    if not entry or len(entry) > _MAX_ENTRY:
        return None
    document = read_document(entry)
    if document.mistakes:
        return None
    said, own = _words(document.data.get("license")), _words(document.data.get("license_name"))
    return f"{said}: {own}" if said == "other" and own else said


def _licence_lines(text: str) -> str:
    """The entries of `_KEYS` alone: the rest may be megabytes of results, and need not be YAML that we read."""
    lines = _LINE_END.split(text)
    closing = next((at for at, line in enumerate(lines) if at and line.rstrip() == "---"), None)
    if lines[0].rstrip() != "---" or closing is None:
        return ""
    kept, wanted = [], False
    for line in lines[1:closing]:
        if line and line[0] not in " \t-#":
            wanted = line.partition(":")[0].strip("\"' ") in _KEYS
        if wanted:
            kept.append(line)
    return "\n".join(kept)


def _in_config(data: bytes) -> str | None:
    try:
        return _words(parse_strict_object(data).get("license"))
    except ValueError:  # too long, or no JSON: nothing is said
        return None


def _words(value: object) -> str | None:
    """A name or a list of names on one line, cut where it is no name any more."""
    values = value if isinstance(value, list) else [value]
    names = [" ".join(one.split()) for one in values if isinstance(one, str)]
    return ", ".join(name[:_LONGEST] for name in names[:_MOST] if name) or None
