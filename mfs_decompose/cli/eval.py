"""`mfs eval`: how far the stored variants have drifted from their originals, on text."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mfs_decompose.cli.eval_card import check_card_place, repeat_command, write_card
from mfs_decompose.cli.options import (
    INPUTS,
    ArtifactArgument,
    BaseOption,
    DeviceOption,
    OriginalsOption,
    ScratchOption,
    VariantOption,
    named_refs,
    output_of,
    text_option,
)
from mfs_decompose.cli.out import Output
from mfs_decompose.cli.progress import make_sink
from mfs_decompose.errors import OutputBusy, UsageError

if TYPE_CHECKING:
    from mfs_decompose.fidelity.result import DriftResult
    from mfs_decompose.fidelity.self_check import SelfCheck
    from mfs_decompose.fidelity.suite import Suite

TextOption = Annotated[
    list[str] | None, text_option("A .txt is one document, a .jsonl one a line, fields joined; takes several.")
]


def command(
    ctx: typer.Context,
    artifact: ArtifactArgument,
    text: TextOption = None,
    suite: Annotated[
        str | None,
        typer.Option(
            "--suite",
            metavar="NAME|FILE",
            help="Texts and settings of a suite, instead of --text: smoke, ci, full, or a .yaml file.",
            rich_help_panel=INPUTS,
        ),
    ] = None,
    variant: VariantOption = None,
    through: Annotated[
        Literal["served", "restored", "both"],
        typer.Option("--through", help="Base plus delta in fp32, as it is served; the restored checkpoint; or both."),
    ] = "served",
    engine: Annotated[
        Literal["auto", "runtime", "restore"],
        typer.Option(
            "--engine",
            help="What answers as served: the runtime, or an fp32 restore in transformers; auto restores what the "
            "runtime refuses.",
        ),
    ] = "auto",
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=2, metavar="N", help="Tokens of each file; 8192 by default.")
    ] = None,
    window: Annotated[
        int | None, typer.Option("--window", min=2, metavar="N", help="Tokens of a window; 512 by default.")
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option("--stride", min=1, metavar="N", help="Tokens from window to window; by default the window."),
    ] = None,
    bos: Annotated[
        Literal["auto", "on", "off"] | None,
        typer.Option("--bos", help="Begin windows with BOS; auto, the default: as the tokenizer does."),
    ] = None,
    self_check: Annotated[
        bool,
        typer.Option("--self-check", help="Also plant three corruptions in a variant, and fail if one is not seen."),
    ] = False,
    originals: OriginalsOption = None,
    base: BaseOption = None,
    reference: Annotated[
        Path | None,
        typer.Option(
            "--reference",
            metavar="FILE",
            help="A saved reference, in place of its variant's original.",
            rich_help_panel=INPUTS,
        ),
    ] = None,
    save_reference: Annotated[
        Path | None,
        typer.Option(
            "--save-reference",
            metavar="FILE",
            help="Also keep all that one variant's original answers: a logit per scored token and vocabulary entry.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="FILE", help="Write the JSON document here as well; a run that was stopped goes on."
        ),
    ] = None,
    card: Annotated[
        Path | None,
        typer.Option(
            "--card", metavar="FILE", help="Write a model card with the drift, outside of the artifact: Markdown."
        ),
    ] = None,
    device: DeviceOption = "auto",
    scratch: ScratchOption = None,
) -> None:
    """Measure the drift of the variants against their own originals: KL, perplexity, top-1 agreement.

    Original, base, served and restored run on the same batches of the same tokens in fp32. `recovered` is
    1 - KL(original, x) / KL(original, base). Intervals are 95 % bootstrap intervals over runs of 64 tokens.

    Examples:
      mfs eval art --suite ci --out drift.json
      mfs eval art --text humaneval.jsonl:prompt+canonical_solution
      mfs eval art --variant math --text notes.txt --originals math=./math --base ./base
      mfs eval art --variant math --suite ci --save-reference math.reference
      mfs eval art --suite ci --card CARD.md
    """
    from mfs_decompose.fidelity.artifact_drift import DriftRequest, measure_artifact, save_artifact_reference
    from mfs_decompose.fidelity.document import EvalDocument, describe_settings
    from mfs_decompose.fidelity.self_check import check_measurement, refuse_unseen
    from mfs_decompose.pipeline.device import choose_device

    output = output_of(ctx)
    given = named_refs(originals or [], "--originals")
    if card is not None:
        check_card_place(card, artifact, {"--out": out, "--save-reference": save_reference})
    _check_places({"--out": out, "--save-reference": save_reference, "--card": card}, scratch)
    _check_ids(artifact, given)
    given_settings = {"max_tokens": max_tokens, "window": window, "stride": stride, "bos": bos}
    chosen_suite = _choose_texts(text, suite, {name: value for name, value in given_settings.items() if value})
    settings = chosen_suite.settings
    kinds: tuple[Literal["served", "restored"], ...] = ("served", "restored") if through == "both" else (through,)
    chosen = choose_device(device)
    with tempfile.TemporaryDirectory(prefix="mfs-eval-", dir=scratch) as folder:
        request = DriftRequest(
            artifact=artifact,
            corpora=chosen_suite.corpora,
            settings=settings,
            through=kinds,
            scratch=Path(folder),
            variants=None if variant is None else [variant],
            originals=given,
            base=base,
            device=chosen,
            out=out,
            reference=reference,
            engine=engine,
        )
        if save_reference is not None:
            save_artifact_reference(request, save_reference, make_sink(output))
        results, digest = measure_artifact(request, make_sink(output))
        checks = check_measurement(request, make_sink(output)) if self_check else None
    measured = EvalDocument(
        tuple(results),
        describe_settings(settings, results, chosen, suite=chosen_suite.name or None),
        digest,
        self_check=None if checks is None else tuple(check.to_json() for check in checks),
    )
    document = measured.to_json()
    if out is not None:
        _write(out, document)
    if card is not None:
        named: dict[str, object] = {"--variant": variant, "--through": through}
        named |= {"--engine": None if engine == "auto" else engine}
        named |= {f"--{name.replace('_', '-')}": value for name, value in given_settings.items()}
        named |= {"--reference": reference and reference.name, "--device": chosen.partition(":")[0]}
        refs = {"--originals": [f"{id}={ref}" for id, ref in given.items()], "--base": [base] if base else []}
        again = repeat_command(text=text, suite=suite, options=named, refs=refs, self_check=self_check)
        write_card(card, artifact, measured, again)
    output.document(document)
    show_results(output, results)
    for note in document["settings"]["notes"]:
        output.line(f"note: {note}")
    if checks is not None:
        _show_checks(output, checks)
        refuse_unseen(checks)


def _choose_texts(text: Sequence[str] | None, suite: str | None, given: Mapping[str, object]) -> Suite:
    """The suite that was named, or one without a name made of --text and the options."""
    from mfs_decompose.fidelity.settings import EvalSettings
    from mfs_decompose.fidelity.suite import Suite, load_suite
    from mfs_decompose.fidelity.text import read_corpus

    if bool(text) == bool(suite):
        found = "both" if text else "none"
        raise UsageError(f"expected --text FILE or --suite NAME, found {found}", hint="--suite smoke needs no file")
    if suite:
        if given:
            option = f"--{next(iter(given)).replace('_', '-')}"
            raise UsageError(
                f"{option} does not go with --suite, which sets it", hint="copy the suite's file and change it there"
            )
        return load_suite(suite)
    changed: dict[str, Any] = dict(given)
    return Suite("", EvalSettings(**changed), tuple(read_corpus(one) for one in text or ()))


def _write(out: Path, document: Mapping[str, Any]) -> None:
    from mfs_decompose.artifact.atomic import write_file
    from mfs_decompose.fidelity.result_log import discard_result_log

    write_file(out, (json.dumps(document, indent=2, allow_nan=False) + "\n").encode())
    discard_result_log(out)


def _check_places(files: Mapping[str, Path | None], scratch: Path | None) -> None:
    """Refuse before hours of measuring what could not be written after them."""
    for option, path in files.items():
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            found = "a folder" if path.is_dir() else f"no folder {path.parent}"
            raise OutputBusy(
                f"expected a file to write at {option} {path}, found {found}", hint=f"choose another {option}"
            )
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
    columns = (
        "variant", "through", "text", "tokens", "KL", "KL 95 %", "recovered", "top-1", "perplexity", "original", "base",
    )  # fmt: skip
    output.table(
        columns,
        [
            (
                r.variant,
                r.through,
                r.corpus,
                str(r.tokens),
                _number(r.kl_mean, "{:.3g}"),
                "-" if r.kl_ci is None else f"{r.kl_ci[0]:.3g}..{r.kl_ci[1]:.3g}",
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


def _show_checks(output: Output, checks: Sequence[SelfCheck]) -> None:
    words = {True: "seen", False: "NOT SEEN", None: "not planted"}
    output.line()
    output.table(
        ("planted in", "corruption", "text", "KL", "must be above", ""),
        [
            (c.variant, c.corruption, c.corpus, _number(c.kl_mean, "{:.3g}"), f"{c.limit:.3g}", words[c.seen])
            for c in checks
        ],
        right=("KL", "must be above"),
    )
    for check in checks:
        if check.note:
            output.line(f"note: {check.corruption}: {check.note}")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
