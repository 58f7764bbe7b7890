"""Read evaluation text: `FILE.txt` is one document, `FILE.jsonl[:field+field]` is one document a line."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mfs_decompose.errors import SourceNotFound, UsageError

_FIELD_HINT = "name the fields after a colon, joined by +: --text {path}:{field}"


@dataclass(frozen=True)
class Corpus:
    """Text to measure on. `name` is the file's name without its suffix; no document is blank.

    `max_tokens` is this text's own limit; None leaves it to the settings.
    """

    name: str
    documents: tuple[str, ...]
    max_tokens: int | None = None

    def identity(self) -> dict[str, Any]:
        """What tells this text from another: a digest over its documents, and sizes. Plain JSON."""
        digest = hashlib.sha256()
        nbytes = 0
        for document in self.documents:
            data = document.encode("utf-8", "surrogatepass")
            # The length first: two documents are not one that holds both.
            digest.update(len(data).to_bytes(8, "little") + data)
            nbytes += len(data)
        return {"sha256": digest.hexdigest(), "documents": len(self.documents), "bytes": nbytes}


def read_corpus(spec: str) -> Corpus:
    """Read `FILE` or `FILE:field+field` as UTF-8.

    Fields are concatenated in the order given with nothing between them. Without fields, a .jsonl file is read by
    its only text field, or by `text`. Blank lines of a .jsonl file and blank documents are left out.

    Raises:
        SourceNotFound: there is no such file.
        UsageError: another suffix, text that is not UTF-8 or not JSON, a field that is not there, nothing to read.
    """
    path, fields = _split_spec(spec)
    return read_corpus_file(path, fields)


def read_corpus_file(
    path: Path, fields: list[str] | None, *, name: str | None = None, max_tokens: int | None = None
) -> Corpus:
    """Read a file as `read_corpus` does, under another name where one is given.

    Raises:
        SourceNotFound, UsageError: as `read_corpus`.
    """
    text = _read_text(path)
    suffix = path.suffix.lower()
    if suffix == ".txt":
        if fields is not None:
            raise UsageError(
                f"expected no fields for a .txt file, found {'+'.join(fields)!r} for {path}",
                hint="leave the fields out, or name a .jsonl file",
            )
        documents = [text]
    elif suffix == ".jsonl":
        documents = _read_lines(path, text, fields)
    else:
        raise UsageError(
            f"expected a .txt or .jsonl file, found {path}",
            hint="a .txt is one document; a .jsonl holds one JSON object a line",
        )
    kept = tuple(document for document in documents if document.strip())
    if not kept:
        raise UsageError(f"expected text in {path}, found none")
    return Corpus(name or path.stem, kept, max_tokens)


def _split_spec(spec: str) -> tuple[Path, list[str] | None]:
    # The last colon separates fields only where a file stands before it: C:\text.txt and a:b.txt are plain paths.
    if not _is_file(Path(spec)):
        head, colon, tail = spec.rpartition(":")
        if colon and _is_file(Path(head)):
            fields = tail.split("+")
            if not all(fields):
                raise UsageError(
                    f"expected fields joined by + after {head}:, found {tail!r}",
                    hint=_FIELD_HINT.format(path=head, field="prompt+answer"),
                )
            return Path(head), fields
    return Path(spec), None


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name too long, or a folder on the way that may not be entered
        return False


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise SourceNotFound(f"expected a text file at {path}, found nothing", hint="check the path") from None
    except IsADirectoryError:
        raise SourceNotFound(
            f"expected a text file, found the folder {path}", hint="pass one .txt or .jsonl file"
        ) from None
    except OSError as error:
        raise SourceNotFound(
            f"cannot read the text file {path}: {error.strerror}", hint="check the file's permissions"
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(
            f"expected UTF-8 text in {path}, found other bytes at offset {error.start}",
            hint="convert the file to UTF-8",
        ) from None


def _read_lines(path: Path, text: str, fields: list[str] | None) -> list[str]:
    documents = []
    # Only "\n" ends a line: JSON strings may hold U+2028 and other characters that str.splitlines() cuts at.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (json.JSONDecodeError, RecursionError):
            record = None
        if not isinstance(record, dict):
            raise UsageError(
                f"expected one JSON object on line {number} of {path}, found {line[:40]!r}",
                hint="a .jsonl file holds one JSON object a line",
            )
        if fields is None:
            fields = [_only_text_field(path, record)]
        documents.append("".join(_take(path, number, record, field) for field in fields))
    return documents


def _only_text_field(path: Path, record: dict[str, Any]) -> str:
    texts = [field for field, value in record.items() if isinstance(value, str)]
    if "text" in texts:
        return "text"
    if len(texts) == 1:
        return texts[0]
    raise UsageError(
        f"expected one text field in {path}, found {', '.join(texts) or 'none'}",
        hint=_FIELD_HINT.format(path=path, field="+".join(texts[:2]) or "FIELD"),
    )


def _take(path: Path, number: int, record: dict[str, Any], field: str) -> str:
    if field not in record:
        raise UsageError(
            f"expected the field {field!r} on line {number} of {path}, found {', '.join(record) or 'no fields'}",
            hint=_FIELD_HINT.format(path=path, field=next(iter(record), "FIELD")),
        )
    value = record[field]
    if not isinstance(value, str):
        raise UsageError(
            f"expected text in the field {field!r} on line {number} of {path}, found {type(value).__name__}",
            hint="name a field that holds text",
        )
    return value
