"""`mfs.bench.runtime/1`: what `mfs bench runtime` measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

MOST_OVERHEAD = 1.5
"""A step of variants is worth its mix while it takes at most this many times the step of base rows alone."""


@dataclass(frozen=True)
class Mixed:
    """Steps of equally many rows that belong to so many distinct variants; none are base rows only.

    Attributes:
        step_seconds: median of the decode steps of the best round.
        prefill_seconds: of the prompts of all rows, in that round.
        tokens_per_second: generated, over prefill and decode.
        overhead: `step_seconds` over that of base rows only.
    """

    variants: int
    step_seconds: float
    prefill_seconds: float
    tokens_per_second: float
    overhead: float


@dataclass(frozen=True)
class Single:
    """The same with all rows of one variant: what its codecs cost."""

    id: str
    codecs: tuple[str, ...]
    forms: Mapping[str, int]
    step_seconds: float
    overhead: float


@dataclass(frozen=True)
class Peer:
    """The same requests by other means.

    Attributes:
        ratio: tokens a second of the mixed batch over these; None where there is nothing to compare.
        note: what it leaves out, or why it was not measured.
    """

    name: str
    tokens_per_second: float | None
    ratio: float | None
    note: str | None = None


@dataclass(frozen=True)
class RuntimeBench:
    """One run.

    Attributes:
        memory: bytes by part: base, shared, variants, keys and values, total, and of as many whole models.
        cap: the most distinct variants whose step takes at most MOST_OVERHEAD times that of base rows; at least 1.
    """

    schema: ClassVar[str] = "mfs.bench.runtime/1"

    artifact_digest: str
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    settings: Mapping[str, Any]
    memory: Mapping[str, Any]
    mixed: tuple[Mixed, ...]
    single: tuple[Single, ...]
    peers: tuple[Peer, ...]
    cap: int

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return {"schema": self.schema, **asdict(self), "most_overhead": MOST_OVERHEAD}


def recommend_cap(mixed: tuple[Mixed, ...]) -> int:
    """The most distinct variants, counted up without a gap, that stay within MOST_OVERHEAD; at least 1."""
    cap = 1
    for one in sorted(mixed, key=lambda one: one.variants):
        if one.variants and one.overhead > MOST_OVERHEAD:
            break
        cap = max(cap, one.variants)
    return cap
