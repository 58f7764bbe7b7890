"""YAML with the line of every value: no duplicate keys, no anchors, only plain types."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

Path = tuple[str | int, ...]

# A recipe is a page of text; the limit keeps a wrong file from being read whole.
MAX_BYTES = 1 << 20

_PLAIN_TAGS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
_MERGE_TAG = "tag:yaml.org,2002:merge"


@dataclass(frozen=True, slots=True)
class Mistake:
    """One thing that is wrong, where it is in the tree, and its line where it came from a file."""

    path: Path
    message: str
    line: int | None = None


@dataclass(slots=True)
class Document:
    """The values of a YAML file, the line of each, and what was wrong with it."""

    data: dict[str, Any] = field(default_factory=dict)
    lines: dict[Path, int] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)

    def line_of(self, path: Path) -> int | None:
        """The line of the value at `path`, or of the nearest one around it."""
        return next((self.lines[path[:n]] for n in range(len(path), -1, -1) if path[:n] in self.lines), None)


class _Loader(yaml.SafeLoader):
    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, "anchors and aliases are not read", mark)
        return super().compose_node(parent, index)


def read_document(text: str) -> Document:
    """Read one YAML document whose top is a mapping; mistakes are collected, never raised."""
    document = Document()
    if len(text) > MAX_BYTES:
        document.mistakes.append(Mistake((), f"expected at most {MAX_BYTES:,} bytes, found {len(text):,}"))
        return document
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if not isinstance(root, yaml.MappingNode):
            document.mistakes.append(Mistake((), "expected a mapping of keys to values at the top", 1))
            return document
        document.data = dict(_mapping(loader, root, (), document))
    except yaml.YAMLError as error:
        document.mistakes.append(Mistake((), _reason(error), _line_of_error(error)))
    except RecursionError:
        document.mistakes.append(Mistake((), "nested too deeply", 1))
    return document


def read_scalar(text: str) -> Any:
    """Read the value of `--set key=value` as YAML: `5%` is text, `16` a number, `[a, b]` a list.

    Raises:
        ValueError: the text is not YAML.
    """
    document = read_document(f"value: {text}")
    if document.mistakes:
        raise ValueError(document.mistakes[0].message)
    if len(document.data) != 1:
        raise ValueError("expected one value")
    return document.data["value"]


def _value(loader: yaml.SafeLoader, node: Any, path: Path, document: Document) -> Any:
    line = node.start_mark.line + 1
    document.lines.setdefault(path, line)
    if not isinstance(node, yaml.ScalarNode) and node.tag not in _PLAIN_TAGS:
        document.mistakes.append(Mistake(path, f"expected a plain value, found the tag {node.tag}", line))
        return None
    if isinstance(node, yaml.MappingNode):
        return dict(_mapping(loader, node, path, document))
    if isinstance(node, yaml.SequenceNode):
        return [_value(loader, item, (*path, i), document) for i, item in enumerate(node.value)]
    return _scalar(loader, node, path, document)


def _mapping(loader: yaml.SafeLoader, node: Any, path: Path, document: Document) -> Iterator[tuple[str, Any]]:
    document.lines.setdefault(path, node.start_mark.line + 1)
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        key = _key(loader, key_node, path, document)
        if not isinstance(key, str):
            document.mistakes.append(Mistake(path, f"expected a word as key, found {key!r}", line))
            continue
        here = (*path, key)
        if here in document.lines:
            document.mistakes.append(Mistake(here, f"given twice, first on line {document.lines[here]}", line))
            continue
        document.lines[here] = line
        yield key, _value(loader, value_node, here, document)


def _key(loader: yaml.SafeLoader, node: Any, path: Path, document: Document) -> Any:
    if not isinstance(node, yaml.ScalarNode):
        return None
    # `<<` would need an anchor: it is a word like any other here, and an unknown one.
    return node.value if node.tag == _MERGE_TAG else _scalar(loader, node, path, document)


def _scalar(loader: yaml.SafeLoader, node: Any, path: Path, document: Document) -> Any:
    try:
        return loader.construct_object(node)
    except ValueError:  # a date such as 2024-13-45, or thousands of digits
        message = f"not a value that can be read: {node.value[:40]!r}"
        document.mistakes.append(Mistake(path, message, node.start_mark.line + 1))
        return None


def _reason(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError):
        return f"not YAML: {error.problem or error.context}"
    return "not YAML: " + " ".join(str(error).split())


def _line_of_error(error: yaml.YAMLError) -> int | None:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    return mark.line + 1 if mark is not None else None
