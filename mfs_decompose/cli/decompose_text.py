"""`--target` and the text it is measured on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mfs_decompose.cli.options import INPUTS, text_option
from mfs_decompose.errors import UsageError

if TYPE_CHECKING:
    from mfs_decompose.artifact.target_record import HeldRecord
    from mfs_decompose.pipeline.gauge import Gauges
    from mfs_decompose.recipe.schema import Recipe

TextOption = Annotated[
    list[str] | None,
    text_option(
        "Text that --target is measured on, as mfs eval --text; that of --calibrate by default. Takes several."
    ),
]
MaxTokensOption = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        min=2,
        metavar="N",
        help="Tokens of each file of --text; 4096 by default.",
        rich_help_panel=INPUTS,
    ),
]


def target_gauges(
    recipe: Recipe,
    text: Sequence[str] | None,
    calibrate: Sequence[str] | None,
    max_tokens: int | None,
    device: str,
    out: Path,
    *,
    measure: bool,
) -> Gauges | None:
    """What measures drift on the text of a target; None for a recipe without one, or where not to `measure`.

    Raises:
        SourceNotFound, UsageError: a text that cannot be read; a target without text, or text without a target.
    """
    target = recipe.objective.target
    if target is None:
        given = [option for option, value in (("--text", text), ("--max-tokens", max_tokens)) if value]
        if given:
            raise UsageError(
                f"{given[0]} goes with a target, and the recipe has none", hint="Add --target kl=1e-3, or leave it out"
            )
        return None
    texts = text or calibrate
    if not texts:
        raise UsageError(
            f"the target {target} needs text to measure drift on, found none",
            hint="Add --text FILE.jsonl:field or --text FILE.txt",
        )
    from mfs_decompose.fidelity.text import read_corpus

    corpora = [read_corpus(one) for one in texts]
    if len({corpus.name for corpus in corpora}) < len(corpora):
        raise UsageError("two texts have the same name", hint="Name the files differently: results are by file name")
    if not measure:
        return None
    from mfs_decompose.fidelity.gauge import TARGET_TOKENS, make_gauges
    from mfs_decompose.fidelity.settings import EvalSettings
    from mfs_decompose.pipeline.device import choose_device
    from mfs_decompose.pipeline.workspace import scratch_folder

    settings = EvalSettings(max_tokens=max_tokens or TARGET_TOKENS)
    return make_gauges(corpora, settings, choose_device(device), scratch_folder(out))


def held_line(id: str, asked: str, held: HeldRecord | None, nbytes: int) -> str:
    """What a target came to for a variant, in a line."""
    from mfs_decompose.units import format_bytes

    if held is None:
        return f"{id}: kept as it is, at {format_bytes(nbytes)}"
    how = f"{held.evaluations} evaluation{'' if held.evaluations == 1 else 's'}"
    if not held.tokens:
        return f"{id}: {asked} holds with every bit kept, after {how}, at {format_bytes(nbytes)}"
    ppl = "" if held.ln_ppl is None else f", |ln ppl ratio| up to {held.ln_ppl:.3g}"
    smallest = ", the smallest possible" if held.smallest else ""
    return (
        f"{id}: {asked} holds: KL {held.kl:.3g}{ppl} over {held.tokens:,} tokens, after {how}, "
        f"at {format_bytes(nbytes)}{smallest}"
    )
