"""What an engine has done, and what it holds now."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from mfs_decompose.runtime.kv import KvCache
from mfs_decompose.runtime.tiers import TierStats


@dataclass(frozen=True)
class EngineStats:
    """A moment of one engine.

    Attributes:
        prompt_tokens: computed, with those computed again after a preemption; `cached_tokens` were found instead.
        seconds: spent in steps.
        tokens_per_second: generated ones, over `seconds`.
        variants_per_step: steps by their number of distinct variants, the base not counted.
        kv_bytes_reserved, kv_bytes_used: of the pools, and of the blocks that sequences hold.
        blocks: used, known but unused, and in all, of the first group of layers.
        tiers: where deltas are and what moving them took; None where they do not move.
    """

    steps: int
    seconds: float
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    tokens_per_second: float
    waiting: int
    running: int
    finished: int
    failed: int
    cancelled: int
    preemptions: int
    variants_per_step: dict[int, int]
    blocks: tuple[int, int, int]
    kv_bytes_reserved: int
    kv_bytes_used: int
    tiers: TierStats | None = None


@dataclass
class Counts:
    """What only grows."""

    steps: int = 0
    seconds: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    variants_per_step: Counter[int] = field(default_factory=Counter)

    def snapshot(
        self, kv: KvCache, *, waiting: int, running: int, preemptions: int, tiers: TierStats | None = None
    ) -> EngineStats:
        pool = kv.groups[0].pool
        return EngineStats(
            steps=self.steps,
            seconds=self.seconds,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            generated_tokens=self.generated_tokens,
            tokens_per_second=self.generated_tokens / self.seconds if self.seconds else 0.0,
            waiting=waiting,
            running=running,
            finished=self.finished,
            failed=self.failed,
            cancelled=self.cancelled,
            preemptions=preemptions,
            variants_per_step=dict(sorted(self.variants_per_step.items())),
            blocks=(pool.used, pool.index.idle, pool.blocks - 1),
            kv_bytes_reserved=kv.bytes_reserved,
            kv_bytes_used=kv.bytes_used,
            tiers=tiers,
        )
