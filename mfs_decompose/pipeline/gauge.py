"""What measures drift while a run decides: passed in from above, since pipeline never imports fidelity."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from mfs_decompose.source.checkpoint import Checkpoint

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Drift:
    """Drift of a variant as served against its own original.

    `kl` in nats a token; `ln_ppl` is the upper end of the paired 95 % interval of `|ln ppl ratio|`, None where the text
    is too short for one; `tokens` were scored.
    """

    kl: float
    ln_ppl: float | None
    tokens: int


@dataclass(frozen=True)
class TextAmount:
    """Tokens of the text that are scored, and about how many an interval of the perplexity needs."""

    tokens: int
    needed: int


class Gauge(Protocol):
    """A variant in memory: tensors are put in place one by one, by their names in the checkpoint."""

    def put(self, name: str, values: torch.Tensor) -> None:
        """Compute with these values (fp32, the tensor's whole shape) from now on."""

    def measure(self) -> Drift:
        """Drift of the model as it stands."""


@dataclass(frozen=True)
class Gauges:
    """How drift is measured: `identity` is all that a figure depends on beside weights, plain JSON; `about` in words.

    `open` loads the original of a variant and what it answers to the text.
    """

    open: Callable[[Checkpoint], AbstractContextManager[Gauge]]
    identity: Mapping[str, Any]
    about: str
    count: Callable[[Checkpoint], TextAmount] | None = None
    """What a variant's tokenizer makes of the text, without its weights."""
