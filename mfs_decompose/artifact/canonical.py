"""Canonical JSON: one document has one spelling, so every bit of its bytes counts.

Keys sorted by code point, no spaces, UTF-8 without escapes that are not needed, shortest floats, one newline at the
end.  A reader re-encodes what it parsed and compares bytes: a flipped bit in a place that JSON ignores (a space, the
case of an escape, a trailing zero) is found like any other.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from mfs_decompose.artifact.layout import MAX_JSON_DEPTH
from mfs_decompose.errors import ArtifactInvalid

DIGEST_FIELD: Final = "digest"
MAX_INTEGER: Final = 2**63 - 1
_LEAVES: Final = frozenset({str, float, bool, type(None)})

# Possessive, so that a string of 60 MB costs no backtracking memory; the closing quote is optional, so that an unclosed
# string is one token and not a new search at each of its escaped quotes.
_TOKENS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)


def canonical_bytes(document: Any) -> bytes:
    """Spell a JSON document canonically.

    Raises:
        ArtifactInvalid: it holds NaN, an infinity, an integer beyond 64 bits, text that is not Unicode, a key that is
            not text, or something JSON has no word for.
    """
    try:
        _check_values(document)
        return _spell(document)
    except UnicodeEncodeError:
        raise ArtifactInvalid("expected Unicode text in JSON, found a lone surrogate") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise ArtifactInvalid(f"expected a plain JSON document, found one that cannot be written: {error}") from None


def load_strict(data: bytes, what: str, limit: int) -> Any:
    """Parse JSON from someone else: at most `limit` bytes, depth 64, no duplicate key, NaN, or oversized number.

    Raises:
        ArtifactInvalid: naming `what` and the first thing that is wrong.
    """
    if len(data) > limit:
        raise ArtifactInvalid(f"expected {what} of at most {limit} bytes, found {len(data)}")
    if _depth(data) > MAX_JSON_DEPTH:
        raise ArtifactInvalid(f"expected {what} nested at most {MAX_JSON_DEPTH} deep, found more")
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            parse_int=_bounded,
        )
    except UnicodeDecodeError:
        raise ArtifactInvalid(f"expected UTF-8 in {what}, found other bytes") from None
    except (ValueError, RecursionError) as error:
        raise ArtifactInvalid(f"expected JSON in {what}, found: {error}") from None


def load_canonical(data: bytes, what: str, limit: int) -> Any:
    """Parse JSON that must be spelled canonically.

    Raises:
        ArtifactInvalid: it is not JSON within the limits, or has another spelling.
    """
    document = load_strict(data, what, limit)
    if not is_canonical(document, data):
        raise ArtifactInvalid(f"expected canonical JSON in {what}, found another spelling: it was edited or damaged")
    return document


def is_canonical(document: Any, data: bytes) -> bool:
    """Whether `data`, from which `load_strict` made `document`, is its canonical spelling."""
    try:
        return _spell(document) == data
    except UnicodeEncodeError:  # an escaped lone surrogate, which canonical JSON has no spelling for
        return False


def digest_of(document: Mapping[str, Any]) -> str:
    """sha256 of the canonical bytes of a document without its field `digest`."""
    body = {key: value for key, value in document.items() if key != DIGEST_FIELD}
    return hashlib.sha256(canonical_bytes(body)).hexdigest()


def _spell(document: Any) -> bytes:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8") + b"\n"


def _check_values(document: Any) -> None:
    """Refuse what `json.dumps` would spell silently: keys that are not text, and integers others cannot read."""
    pending: list[Any] = [[document]]
    while pending:
        holder = pending.pop()
        kinds = set(map(type, holder))  # keys, for an object
        if isinstance(holder, dict):
            if not kinds <= {str}:
                raise TypeError("a key is not text")
            holder = holder.values()
        elif kinds <= _LEAVES:  # long lists of figures are the bulk of a journal
            continue
        for value in holder:
            if type(value) in _LEAVES:
                continue
            if isinstance(value, dict | list | tuple):
                pending.append(value)
            elif isinstance(value, int) and abs(value) > MAX_INTEGER:
                raise ValueError("an integer needs more than 64 bits")


def _depth(data: bytes) -> int:
    # Counted on bytes before parsing: the parser recurses, and the depth of its recursion is the attacker's choice.
    if data.count(b"[") + data.count(b"{") <= MAX_JSON_DEPTH:
        return 0
    depth = deepest = 0
    for match in _TOKENS.finditer(data):
        token = match[0]
        if token in (b"[", b"{"):
            depth += 1
            deepest = max(deepest, depth)
        elif token in (b"]", b"}"):
            depth -= 1
    return deepest


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        double = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {double[:120]!r} twice in one object")
    return document


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"the number {text}")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]}, which is too large")
    return value


def _bounded(text: str) -> int:
    if len(text) > 20 or abs(int(text)) > MAX_INTEGER:
        raise ValueError(f"the integer {text[:40]}, which needs more than 64 bits")
    return int(text)
