"""`mfs eval`: how far the stored variants have drifted from their originals, on text."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mfs_decompose.cli.options import (
    INPUTS,
    MACHINE,
    ArtifactArgument,
    BaseOption,
    DeviceOption,
    OriginalsOption,
    VariantOption,
    named_refs,
    output_of,
)
from mfs_decompose.cli.out import Output
from mfs_decompose.cli.progress import make_sink
from mfs_decompose.errors import OutputBusy

if TYPE_CHECKING:
    from mfs_decompose.fidelity.result import DriftResult

TextOption = Annotated[
    list[str],
    typer.Option(
        "--text",
        metavar="FILE[:FIELD+FIELD]...",
        show_default=False,
        help="A .txt is one document, a .jsonl one a line, fields joined; takes several.",
        rich_help_panel=INPUTS,
    ),
]


def command(
    ctx: typer.Context,
    artifact: ArtifactArgument,
    text: TextOption,
    variant: VariantOption = None,
    through: Annotated[
        Literal["served", "restored", "both"],
        typer.Option("--through", help="Base plus delta in fp32, the restored checkpoint, or both."),
    ] = "both",
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=2, metavar="N", help="Tokens of each file.")] = 8192,
    window: Annotated[int, typer.Option("--window", min=2, metavar="N", help="Tokens of a window.")] = 512,
    bos: Annotated[
        Literal["auto", "on", "off"], typer.Option("--bos", help="Begin windows with BOS; auto: as the tokenizer does.")
    ] = "auto",
    originals: OriginalsOption = None,
    base: BaseOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write the JSON document here as well.")
    ] = None,
    device: DeviceOption = "auto",
    scratch: Annotated[
        Path | None,
        typer.Option(
            "--scratch", metavar="DIR", help="Where checkpoints are restored to meanwhile.", rich_help_panel=MACHINE
        ),
    ] = None,
) -> None:
    """Measure the drift of the variants against their own originals: KL, perplexity, top-1 agreement.

    Original, base, served and restored run on the same batches of the same tokens in fp32. `recovered` is
    1 - KL(original, x) / KL(original, base).

    Examples:
      mfs eval art --text humaneval.jsonl:prompt+canonical_solution
      mfs eval art --variant math --text notes.txt --originals math=./math --base ./base
    """
    from mfs_decompose.fidelity.artifact_drift import DriftRequest, measure_artifact
    from mfs_decompose.fidelity.document import EvalDocument, describe_settings
    from mfs_decompose.fidelity.settings import EvalSettings
    from mfs_decompose.fidelity.text import read_corpus
    from mfs_decompose.pipeline.device import choose_device

    output = output_of(ctx)
    given = named_refs(originals or [], "--originals")
    _check_places(out, scratch)
    _check_ids(artifact, given)
    settings = EvalSettings(window=window, bos=bos, max_tokens=max_tokens)
    corpora = [read_corpus(one) for one in text]
    kinds: tuple[Literal["served", "restored"], ...] = ("served", "restored") if through == "both" else (through,)
    chosen = choose_device(device)
    with tempfile.TemporaryDirectory(prefix="mfs-eval-", dir=scratch) as folder:
        request = DriftRequest(
            artifact=artifact,
            corpora=corpora,
            settings=settings,
            through=kinds,
            scratch=Path(folder),
            variants=None if variant is None else [variant],
            originals=given,
            base=base,
            device=chosen,
        )
        results, digest = measure_artifact(request, make_sink(output))
    document = EvalDocument(tuple(results), describe_settings(settings, results, chosen), digest).to_json()
    if out is not None:
        from mfs_decompose.artifact.atomic import write_file

        write_file(out, (json.dumps(document, indent=2, allow_nan=False) + "\n").encode())
    output.document(document)
    show_results(output, results)
    for note in document["settings"]["notes"]:
        output.line(f"note: {note}")


def _check_places(out: Path | None, scratch: Path | None) -> None:
    """Refuse before hours of measuring what could not be written after them."""
    if out is not None and (out.is_dir() or not out.absolute().parent.is_dir()):
        found = "a folder" if out.is_dir() else f"no folder {out.parent}"
        raise OutputBusy(f"expected a file to write at --out {out}, found {found}", hint="choose another --out")
    if scratch is not None and not scratch.is_dir():
        raise OutputBusy(
            f"expected a folder at --scratch {scratch}, found none", hint="make it, or leave --scratch out"
        )


def _check_ids(artifact: Path, originals: Mapping[str, str]) -> None:
    """An original whose id is mistyped must not be left out in silence."""
    from mfs_decompose.artifact.reader import Family

    with Family.open(artifact) as family:
        for id in originals:
            family.variant(id)


def show_results(output: Output, results: Sequence[DriftResult]) -> None:
    """The table of `mfs eval`, also the demo's."""
    columns = ("variant", "through", "text", "tokens", "KL", "recovered", "top-1", "perplexity", "original", "base")
    output.table(
        columns,
        [
            (
                r.variant,
                r.through,
                r.corpus,
                str(r.tokens),
                _number(r.kl_mean, "{:.3g}"),
                _number(r.recovered, "{:.4f}"),
                _number(r.top1, "{:.4f}"),
                _number(r.ppl_x, "{:.4f}"),
                _number(r.ppl_original, "{:.4f}"),
                _number(r.ppl_base, "{:.4f}"),
            )
            for r in results
        ],
        right=columns[3:],
    )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
