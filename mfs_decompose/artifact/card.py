"""The model card of an artifact: bytes, recorded errors, licences, commands; no time, no path, no later measurement.

It is in the file table, so it must come out the same for the same records and side files.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from mfs_decompose.artifact.commands import LOCAL, decompose_command
from mfs_decompose.artifact.licences import Licence
from mfs_decompose.artifact.records import BaseRecord, PlatformRecord, ToolRecord, VariantRecord
from mfs_decompose.artifact.shared_delta import SharedRecord
from mfs_decompose.artifact.target_record import TargetRecord
from mfs_decompose.codec.tree import CodecNode
from mfs_decompose.units import format_bytes, format_fraction

# With : and @ and the dot of www, which readers make links of where nothing marks them as such.
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>()#+!|~&$:@]|(?<=www)\.)", re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

_TEXT = """\
# A family of {count} in one artifact

One base and {count}, each stored as a compact difference from it by `mfs_decompose`, in the format `mfs.family/1`.
Transformers does not load it as it is: restore a checkpoint first.

| variant | footprint | bytes | of its checkpoint | relative error | codecs |
|---|---:|---:|---:|---:|---|
{rows}

*Footprint*: the variant's shard files, whole,{answered} over the tensor bytes of its own checkpoint. *Relative error*:
‖Δ̂−Δ‖ / ‖Δ‖ over all its tensors, recorded when they were written, of the weights as served (0: nothing was lost). It
is no measure of behaviour: `mfs eval` measures that.

{base} All weights together: {total}.

## Licences

| checkpoint | licence | see its |
|---|---|---|
{licences}

As the checkpoints' own files name them; *unknown*: they name none.

## Commands

In the artifact's folder:

```
mfs verify . --level values{found}
mfs restore . --variant {example} --out DIR{found}
```

What made it ({local} is the folder of a checkpoint that was not taken from the Hub, DIR is a new one):

```
{decompose}
```

The same checkpoints give the same bytes on {device} with the CPU capability {capability} and
{tools}.
"""


def render_card(
    base: BaseRecord,
    variants: Sequence[VariantRecord],
    *,
    recipe: Mapping[str, Any],
    tool: ToolRecord,
    platform: PlatformRecord,
    licences: Mapping[str, Licence],
    shared: SharedRecord | None = None,
    target: TargetRecord | None = None,
) -> str:
    """The text of README.md, from records and licences alone; text that came from users is escaped.

    Args:
        base: the record of the base.
        variants: records sorted by id.
        recipe: the effective recipe, as the manifest keeps it.
        licences: by `base` and the ids of the variants, from `read_licences`.
        shared: what the variants have in common, if that is stored.
        target: the drift that variants were cut to hold, if they were: the command then needs its text.
    """
    count = f"{len(variants)} variant{'' if len(variants) == 1 else 's'}"
    total = base.bytes + sum(variant.bytes for variant in variants) + (shared.bytes if shared is not None else 0)
    is_elsewhere = base.store == "reference" and not (base.source and base.source.repo)
    body = _TEXT.format(
        count=count,
        rows="\n".join(_row(variant) for variant in variants),
        base=_describe_base(base) + _describe_shared(shared),
        answered=" and its part of what is stored for all," if shared is not None else "",
        total=format_bytes(total),
        licences="\n".join(_licence_row(id, licences.get(id)) for id in ("base", *(v.id for v in variants))),
        found=f" --base {LOCAL}" if is_elsewhere else "",
        example=variants[0].id if variants else "base",
        local=LOCAL,
        decompose=decompose_command(base, variants, recipe, platform.device, target),
        tools=", ".join(f"{name} {version}" for name, version in _versions(tool)),
        device=platform.device,
        capability=escape_markdown(platform.capability),
    )
    return f"{_front_matter(base)}\n{body}"


def codec_counts(variant: VariantRecord) -> dict[str, int]:
    """How many tensors of a variant are stored by each codec tree, by the tree's text, sorted by it."""
    texts = Counter(CodecNode.from_json(tensor.tree).text() for tensor in variant.tensors.values())
    return dict(sorted(texts.items()))


def escape_markdown(text: str) -> str:
    """Text from users inside a line of Markdown or a cell of a table: no markup, HTML, or control character is left."""
    return _SPECIAL.sub(r"\\\1", _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text))


def _front_matter(base: BaseRecord) -> str:
    lines = ["---", "library_name: mfs_decompose", "tags:", "- mfs-family", "- delta-compression"]
    if base.source and base.source.repo:
        # A JSON string is a YAML string, whatever is in it.
        lines.append(f"base_model: {json.dumps(base.source.repo)}")
    return "\n".join([*lines, "---", ""])


def _row(variant: VariantRecord) -> str:
    codecs = ", ".join(f"{escape_markdown(text)} × {count}" for text, count in codec_counts(variant).items())
    cells = (
        escape_markdown(variant.id),
        format_fraction(variant.footprint),
        format_bytes(variant.bytes),
        format_bytes(variant.checkpoint_bytes),
        f"{variant.rel_error:.3g}",
        codecs,
    )
    return f"| {' | '.join(cells)} |"


def _versions(tool: ToolRecord) -> list[tuple[str, str]]:
    names = ("torch", "numpy", "safetensors", "zstandard")
    versions = [("mfs_decompose", tool.version), *((name, getattr(tool, name)) for name in names)]
    return [(f"`{name}`", escape_markdown(version)) for name, version in versions]


def _licence_row(id: str, licence: Licence | None) -> str:
    name = (licence and licence.name) or "unknown"
    files = ", ".join(licence.files) if licence and licence.files else "-"
    return f"| {escape_markdown(id)} | {escape_markdown(name)} | {escape_markdown(files)} |"


def _describe_base(base: BaseRecord) -> str:
    name = ""
    if base.source and base.source.repo:
        name = f" {escape_markdown(base.source.repo)} at revision {base.source.revision}"
    if base.store == "reference":
        return (
            f"The base{name} is not in the artifact: it is known by the digests of its tensors, and found by `--base`."
        )
    origin = {"mean": "is the mean of the variants", "refined": "was found from the variants"}.get(
        base.mode, "was given"
    )
    return f"The base{name} {origin} and is in the artifact ({format_bytes(base.bytes)})."


def _describe_shared(shared: SharedRecord | None) -> str:
    if shared is None:
        return ""
    return (
        f" What the variants have in common beside it is stored once, for {len(shared.tensors)} of its tensors "
        f"({format_bytes(shared.bytes)}); each that uses it answers for an equal part."
    )
