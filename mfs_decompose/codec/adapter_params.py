"""Parameters of the codec `adapter`, checked: an artifact may come from a stranger.

    {
      "replace": T,                         T takes the base's place
      "factors": [{"a": A, "b": B, "scale": s, "orientation": "out_in" | "in_out",
                   "experts": E,            A and B hold E pairs: A [E * R, I], B [O, R * E], B's experts innermost
                   "of": [e, f],            those of experts e to f only, one a slice of the tensor
                   "out": [o, p], "in": [i, j],    rows o to p and columns i to j of the product
                   "at": [[...], ...]}],    the box of the tensor where that lies; without these four, all of it
      "add": [{"tensor": T, "scale": s}],   of vectors
      "magnitude": M,                       outputs are scaled to these norms
      "tokens": {"tensor": T, "rows": [...]}       rows of T take the place of these rows
    }

All names are those of tensors in the adapter's files. The product `B @ A` is [O, I]; `in_out` lays its transpose into
the tensor. Factors of more than two dimensions are those of a convolution and mean the flattened tensor [O, I * k].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from mfs_decompose.errors import ArtifactInvalid

Span = tuple[int, int]

_MAX_ENTRIES = 65_536
_FIELDS = {"replace", "factors", "add", "magnitude", "tokens"}
_FACTOR_FIELDS = {"a", "b", "scale", "orientation", "experts", "of", "out", "in", "at"}


@dataclass(frozen=True, slots=True)
class FactorParams:
    """One product of two factors; `at` None is the whole tensor."""

    a: str
    b: str
    scale: float
    transposed: bool
    experts: int | None
    of: Span | None
    out: Span | None
    into: Span | None
    at: tuple[Span, ...] | None

    def elements(self, shape: tuple[int, ...]) -> int:
        """How many elements of a tensor of `shape` it changes."""
        return math.prod(shape if self.at is None else (stop - start for start, stop in self.at))


@dataclass(frozen=True, slots=True)
class AdapterParams:
    """All that is done to one tensor."""

    replace: str | None
    factors: tuple[FactorParams, ...]
    add: tuple[tuple[str, float], ...]
    magnitude: str | None
    tokens: tuple[str, tuple[int, ...]] | None

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the adapter's tensors that are needed, each once."""
        names = [self.replace, self.magnitude, self.tokens[0] if self.tokens else None]
        names += [name for factor in self.factors for name in (factor.a, factor.b)]
        names += [name for name, _ in self.add]
        return tuple(dict.fromkeys(name for name in names if name is not None))


def read_adapter_params(params: Mapping[str, object], tensor: str) -> AdapterParams:
    """Check the parameters by themselves; `tensor` is for messages.

    Raises:
        ArtifactInvalid: they are no parameters of this codec.
    """
    try:
        if set(params) - _FIELDS or not params:
            raise ValueError("unknown or no fields")
        tokens = params.get("tokens")
        return AdapterParams(
            replace=_optional_name(params.get("replace")),
            factors=tuple(_factor(entry) for entry in _list(params.get("factors", []))),
            add=tuple(_vector(entry) for entry in _list(params.get("add", []))),
            magnitude=_optional_name(params.get("magnitude")),
            tokens=None if tokens is None else _tokens(tokens),
        )
    except ValueError as error:
        raise ArtifactInvalid(f"codec 'adapter' of {tensor!r} cannot be read: {error}") from None


def _factor(entry: object) -> FactorParams:
    fields = _object(entry, _FACTOR_FIELDS)
    orientation, experts = fields.get("orientation"), fields.get("experts")
    if orientation not in ("out_in", "in_out"):
        raise ValueError("an orientation that is neither out_in nor in_out")
    if experts is not None and (type(experts) is not int or not 1 <= experts <= _MAX_ENTRIES):
        raise ValueError("a number of experts that is none")
    at = fields.get("at")
    box = None if at is None else tuple(_span(span) for span in _list(at))
    if box is not None and len(box) not in (2, 3):
        raise ValueError("a box that is neither of a matrix nor of a stack")
    of, out, into = (None if fields.get(key) is None else _span(fields[key]) for key in ("of", "out", "in"))
    if (of is not None and experts is None) or (box is None and (of or out or into)):
        raise ValueError("parts of a product without a place")
    return FactorParams(
        _name(fields.get("a")),
        _name(fields.get("b")),
        _number(fields.get("scale")),
        orientation == "in_out",
        experts,
        of,
        out,
        into,
        box,
    )


def _vector(entry: object) -> tuple[str, float]:
    fields = _object(entry, {"tensor", "scale"})
    return _name(fields.get("tensor")), _number(fields.get("scale"))


def _tokens(entry: object) -> tuple[str, tuple[int, ...]]:
    fields = _object(entry, {"tensor", "rows"})
    rows = [row for row in _list(fields.get("rows"), limit=2**31) if type(row) is int and 0 <= row < 2**31]
    if len(rows) != len(_list(fields.get("rows"), limit=2**31)) or len(set(rows)) != len(rows):
        raise ValueError("rows that are none, or twice the same")
    return _name(fields.get("tensor")), tuple(rows)


def _object(value: object, known: set[str]) -> dict[str, object]:
    if not isinstance(value, dict) or set(value) - known:
        raise ValueError("an entry with unknown fields")
    return value


def _list(value: object, limit: int = _MAX_ENTRIES) -> list[object]:
    if not isinstance(value, list) or len(value) > limit:
        raise ValueError("a list that is none, or too long")
    return value


def _optional_name(value: object) -> str | None:
    return None if value is None else _name(value)


def _name(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("a tensor without a name")
    return value


def _number(value: object) -> float:
    if type(value) not in (int, float) or not math.isfinite(number := float(str(value))):
        raise ValueError("a scale that is no number")
    return number


def _span(value: object) -> Span:
    if isinstance(value, list) and len(value) == 2:
        start, stop = value
        if type(start) is int and type(stop) is int and 0 <= start < stop <= 2**40:
            return start, stop
    raise ValueError("a range that is none")
