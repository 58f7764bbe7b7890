"""Codec trees: what the manifest says about the bytes of one tensor."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mfs_decompose.errors import ArtifactInvalid

Json = str | int | float | bool | None | list["Json"] | dict[str, "Json"]

_MAX_DEPTH = 8
_MAX_CHILDREN = 65_536
_MAX_NAME = 64


@dataclass(frozen=True, slots=True)
class Part:
    """One array inside a tensor's bytes: `offset` counts from the first byte of the tensor's entry."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class CodecNode:
    """A codec with its parameters, the arrays it needs, and the nodes it is made of."""

    codec: str
    version: int = 1
    params: Mapping[str, Json] = field(default_factory=dict)
    parts: tuple[Part, ...] = ()
    children: tuple[CodecNode, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays of the tree."""
        return sum(part.nbytes for part in self.parts) + sum(child.nbytes for child in self.children)

    def shifted(self, by: int) -> CodecNode:
        """The same tree with every array `by` bytes further on."""
        parts = tuple(replace(part, offset=part.offset + by) for part in self.parts)
        return replace(self, parts=parts, children=tuple(child.shifted(by) for child in self.children))

    def text(self) -> str:
        """The composition in one word, each kind of child once: `lowrank`, `rows(lowrank+raw)`."""
        if not self.children:
            return self.codec
        return f"{self.codec}({'+'.join(dict.fromkeys(child.text() for child in self.children))})"

    def integer(self, key: str) -> int:
        """A non-negative whole-number parameter.

        Raises:
            ArtifactInvalid: it is missing or something else.
        """
        value = self.params.get(key)
        if type(value) is not int or value < 0:
            raise ArtifactInvalid(f"codec {self.codec!r} needs a whole number {key!r}, found {shown(value)}")
        return value

    def part(self, name: str) -> Part:
        """The array called `name`.

        Raises:
            ArtifactInvalid: the node has none.
        """
        for part in self.parts:
            if part.name == name:
                return part
        found = shown([part.name for part in self.parts])
        raise ArtifactInvalid(f"codec {self.codec!r} needs an array {name!r}, found {found}")

    def to_json(self) -> dict[str, Json]:
        """Plain JSON; parts and children only where there are any."""
        document: dict[str, Json] = {"codec": self.codec, "version": self.version}
        if self.params:
            document["params"] = dict(self.params)
        if self.parts:
            document["parts"] = [
                {"name": p.name, "dtype": p.dtype, "shape": list(p.shape), "offset": p.offset, "nbytes": p.nbytes}
                for p in self.parts
            ]
        if self.children:
            document["children"] = [child.to_json() for child in self.children]
        return document

    @classmethod
    def from_json(cls, document: object, depth: int = 0) -> CodecNode:
        """Read what `to_json` wrote.

        Raises:
            ArtifactInvalid: it is not a codec tree.
        """
        if not isinstance(document, dict) or depth >= _MAX_DEPTH:
            raise ArtifactInvalid(f"expected a codec tree of at most {_MAX_DEPTH} levels, found {shown(document)}")
        extra = set(document) - {"codec", "version", "params", "parts", "children"}
        codec, version = document.get("codec"), document.get("version")
        params = document.get("params", {})
        parts, children = document.get("parts", []), document.get("children", [])
        sound = isinstance(codec, str) and len(codec) <= _MAX_NAME and type(version) is int and isinstance(params, dict)
        if extra or not sound or not isinstance(parts, list) or not isinstance(children, list):
            raise ArtifactInvalid(f"expected a codec tree, found {shown(document)}")
        if len(children) > _MAX_CHILDREN:
            raise ArtifactInvalid(
                f"expected at most {_MAX_CHILDREN} nodes below codec {codec!r}, found {len(children)}"
            )
        return cls(
            codec=str(codec),
            version=int(version or 0),
            params=params,
            parts=tuple(_read_part(part) for part in parts),
            children=tuple(cls.from_json(child, depth + 1) for child in children),
        )


def _read_part(document: object) -> Part:
    if isinstance(document, dict) and set(document) == {"name", "dtype", "shape", "offset", "nbytes"}:
        shape, numbers = document["shape"], (document["offset"], document["nbytes"])
        texts = (document["name"], document["dtype"])
        counts = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in (*shape, *numbers))
        if counts and all(isinstance(text, str) and len(text) <= _MAX_NAME for text in texts):
            return Part(texts[0], texts[1], tuple(shape), numbers[0], numbers[1])
    raise ArtifactInvalid(f"expected an array of a codec (name, dtype, shape, offset, nbytes), found {shown(document)}")


def shown(document: object) -> str:
    """What a message says of a value that a stranger wrote."""
    return reprlib.repr(document)[:80]  # a hostile document may be too deep for repr
