"""`--calibrate FILE`: the text that weights of drift are fitted on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from mfs_decompose.cli.options import INPUTS

if TYPE_CHECKING:
    from mfs_decompose.pipeline.gauge import Gauges

TOKENS = 1024
"""Of each file, by default: a probe costs a pass over them, and there are about two dozen a variant."""

CalibrateOption = Annotated[
    list[str] | None,
    typer.Option(
        "--calibrate",
        metavar="FILE[:FIELD+FIELD]...",
        show_default=False,
        help="Text to fit weights of drift on, by probes of the KL: not the text you will measure on. Takes several.",
        rich_help_panel=INPUTS,
    ),
]


def calibration_gauges(texts: Sequence[str] | None, device: str, max_tokens: int | None = None) -> Gauges | None:
    """What measures drift on the texts of --calibrate; None without any.

    Raises:
        SourceNotFound, UsageError: a text that cannot be read.
    """
    if not texts:
        return None
    from mfs_decompose.fidelity.gauge import make_gauges
    from mfs_decompose.fidelity.settings import EvalSettings
    from mfs_decompose.fidelity.text import read_corpus
    from mfs_decompose.pipeline.device import choose_device

    settings = EvalSettings(max_tokens=max_tokens or TOKENS)
    return make_gauges([read_corpus(text) for text in texts], settings, choose_device(device))
