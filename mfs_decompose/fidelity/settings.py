"""How drift is measured; part of every result, since unlike settings are never compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mfs_decompose.errors import UsageError

BosPolicy = Literal["auto", "on", "off"]
ComputeDtype = Literal["float32", "bfloat16", "float16"]
Attention = Literal["eager", "sdpa"]
Padding = Literal["right", "left"]


@dataclass(frozen=True)
class EvalSettings:
    """Windows, BOS and arithmetic of a measurement.

    Attributes:
        window: text tokens in a window; a BOS token comes on top.
        stride: text tokens from the start of one window to the next; None means `window`.
        bos: auto puts before each window what the tokenizer itself puts before a text, on its BOS token, off nothing.
        max_tokens: text tokens taken from one corpus, scored or not, from its start.
        dtype: weights and activations of the models; figures are computed in float64 whatever this is.
        batch_size: windows in one forward pass, padded to the longest and masked.
        padding: where; changes nothing beyond rounding.
        attention: eager is the default because every architecture has it.

    Raises:
        UsageError: a number outside its range.
    """

    window: int = 512
    stride: int | None = None
    bos: BosPolicy = "auto"
    max_tokens: int = 8192
    dtype: ComputeDtype = "float32"
    batch_size: int = 1
    padding: Padding = "right"
    attention: Attention = "eager"

    def __post_init__(self) -> None:
        for name, value, least in (
            ("window", self.window, 2),
            ("max_tokens", self.max_tokens, 2),
            ("batch_size", self.batch_size, 1),
        ):
            if value < least:
                raise UsageError(f"expected {name} of at least {least}, found {value}", hint=f"use {least} or more")
        if self.stride is not None and not 1 <= self.stride <= self.window:
            raise UsageError(
                f"expected a stride from 1 to the window of {self.window} tokens, found {self.stride}",
                hint="leave the stride out: it is then the window",
            )

    @property
    def step(self) -> int:
        """The stride with its default filled in, in text tokens."""
        return self.window if self.stride is None else self.stride

    @property
    def itemsize(self) -> int:
        """Bytes of one weight or activation."""
        return 4 if self.dtype == "float32" else 2
