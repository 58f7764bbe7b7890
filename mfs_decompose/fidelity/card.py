"""The model card with drift, which lies outside of the artifact: results carry the artifact's digest, not it theirs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mfs_decompose.artifact.card import escape_markdown, render_card
from mfs_decompose.artifact.commands import shell_line
from mfs_decompose.artifact.licences import read_licences
from mfs_decompose.artifact.reader import Family
from mfs_decompose.errors import ArtifactInvalid
from mfs_decompose.fidelity.document import EvalDocument
from mfs_decompose.fidelity.result import DriftResult
from mfs_decompose.fidelity.statistics import Interval

_DRIFT = """
## Drift

| variant | through | text | tokens | KL (95 %) | recovered | top-1 | perplexity ratio (95 %) |
|---|---|---|---:|---:|---:|---:|---:|
{rows}

Against each variant's own checkpoint, on the same batches of the same tokens. *Served*: base plus delta, not rounded.
*Restored*: what `mfs restore` writes. *KL*: the mean of KL(original‖x), nats a token. *Recovered*: 1 − KL(original‖x) /
KL(original‖base). *Top-1*: share of tokens with the same most likely token. *Perplexity ratio*: that of x over that of
the original. Intervals are bootstrap intervals over runs of up to 64 scored tokens of one document. -: there is none.

{remarks}Settings: {settings}.

Texts: {texts}.

Measured on the artifact with the digest `{digest}`, in whose folder this measures it again:

```
{command}
```
"""


def render_drift_card(family: Family, document: EvalDocument, command: Sequence[str]) -> str:
    """The artifact's card, made again from its records, and after it what was measured.

    Args:
        document: results of this artifact; a figure that is None is shown as `-`.
        command: the words that measure the same again, without paths.

    Raises:
        ArtifactInvalid: the results are of another artifact, or a side file is damaged.
    """
    if document.artifact_digest != family.artifact_digest:
        raise ArtifactInvalid(
            f"expected the artifact {document.artifact_digest} that was measured in {family.path}, found "
            f"{family.artifact_digest}",
            hint="it was replaced meanwhile; measure again",
        )
    manifest = family.manifest
    card = render_card(
        manifest.base,
        manifest.variants,
        recipe=manifest.recipe,
        tool=manifest.tool,
        platform=manifest.platform,
        licences=read_licences(manifest.base, manifest.variants, family.file_bytes),
        shared=manifest.shared,
    )
    return card + _DRIFT.format(
        rows="\n".join(_row(result) for result in document.results),
        remarks=_remarks(document),
        settings=_settings_line(document.settings),
        texts="; ".join(_text(name, text) for name, text in document.settings["texts"].items()),
        digest=family.artifact_digest,
        command=shell_line(command),
    )


def _row(result: DriftResult) -> str:
    cells = (
        escape_markdown(result.variant),
        escape_markdown(result.through),
        escape_markdown(result.corpus),
        f"{result.tokens:,}",
        _with_interval(result.kl_mean, result.kl_ci, ".3g"),
        _number(result.recovered, ".4f"),
        _number(result.top1, ".4f"),
        _with_interval(result.ppl_ratio, result.ppl_ratio_ci, ".5f"),
    )
    return f"| {' | '.join(cells)} |"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _with_interval(value: float | None, interval: Interval | None, form: str) -> str:
    if value is None:
        return "-"
    ends = "-" if interval is None else f"{interval[0]:{form}} to {interval[1]:{form}}"
    return f"{value:{form}} ({ends})"


def _remarks(document: EvalDocument) -> str:
    """What the results say of themselves, and of the planted corruptions, as a list."""
    lines = list(document.settings["notes"])
    words = {True: "seen", False: "NOT SEEN", None: "not planted"}
    lines += [
        f"self-check: {check['corruption']} in {check['variant']} on {check['corpus']}: {words[check['seen']]}"
        for check in document.self_check or ()
    ]
    return "".join(f"- {escape_markdown(line)}\n" for line in lines) + ("\n" if lines else "")


def _settings_line(settings: dict[str, Any]) -> str:
    stood = ", ".join(dict.fromkeys(settings["bos"].values())) or "none"
    words = (
        *([f"suite {settings['suite']}"] if settings["suite"] else []),
        f"window {settings['window']}",
        f"stride {settings['stride']}",
        f"BOS {settings['bos_policy']} ({stood})",
        f"{settings['dtype']}",
        f"batches of {settings['batch_size']}",
        f"{settings['padding']} padding",
        f"{settings['attention']} attention",
        f"{settings['device']}, threads {settings['threads']}",
        f"torch {settings['torch']}",
        f"transformers {settings['transformers']}",
    )
    return escape_markdown("; ".join(words))


def _text(name: str, text: dict[str, Any]) -> str:
    facts = (
        f"{text['documents']:,} documents" if "documents" in text else "",
        f"{text['bytes']:,} bytes" if "bytes" in text else "",
        f"at most {text['max_tokens']:,} tokens" if "max_tokens" in text else "",
        f"sha256 {text['sha256']}" if "sha256" in text else "",
    )
    known = ", ".join(fact for fact in facts if fact)
    return f"{escape_markdown(name)}{f' ({known})' if known else ''}"
