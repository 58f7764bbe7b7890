"""`mfs restore`: an artifact back into checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from mfs_decompose.cli.options import ArtifactArgument, BaseOption, OutOption, output_of
from mfs_decompose.cli.progress import make_sink


def command(
    ctx: typer.Context,
    artifact: ArtifactArgument,
    variant: Annotated[
        str,
        typer.Option("--variant", metavar="ID|all|base", show_default=False, help="Which one; `all` is every variant."),
    ],
    out: OutOption,
    dtype: Annotated[
        Literal["original", "float32"],
        typer.Option("--dtype", help="The original's dtype, or what is served, in fp32."),
    ] = "original",
    rounding: Annotated[
        Literal["stochastic", "nearest"],
        typer.Option("--rounding", help="How to round; nearest snaps small changes back to the base."),
    ] = "stochastic",
    layout: Annotated[
        Literal["original", "single"],
        typer.Option("--layout", help="The original's files, or one model.safetensors."),
    ] = "original",
    exact: Annotated[bool, typer.Option("--exact", help="Refuse unless every tensor has the original's bits.")] = False,
    form: Annotated[
        Literal["checkpoint", "adapter"],
        typer.Option("--as", help="Of an adapter: its merge with the base, or the adapter as it was given."),
    ] = "checkpoint",
    base: BaseOption = None,
) -> None:
    """Write a variant back as a checkpoint that transformers loads.

    Weights come in the files and the order of the original; config, tokenizer, generation config and chat
    template are its own, byte for byte. The same artifact restores to the same bytes every time.

    Examples:
      mfs restore art --variant math --out ./math-restored
      mfs restore art --variant all --out ./restored
      mfs restore art --variant lora --as adapter --out ./adapter
    """
    from mfs_decompose.artifact.reader import Family
    from mfs_decompose.pipeline.restore import RestoreOptions, restore
    from mfs_decompose.units import format_bytes

    output = output_of(ctx)
    ids = [variant]
    if variant == "all":
        with Family.open(artifact) as family:
            ids = list(family.variant_ids)
    options = RestoreOptions(dtype=dtype, rounding=rounding, layout=layout, exact=exact, form=form)
    done = restore(
        artifact, ids, Path(out), options, base=base,
        nested=variant == "all", progress=make_sink(output),
    )  # fmt: skip
    output.document(
        {
            "schema": "mfs.restore/1",
            "restored": [
                {
                    "id": one.id,
                    "folder": str(one.folder),
                    "bytes": one.bytes,
                    "tensors": one.tensors,
                    "exact": one.exact,
                    "checked": one.checked,
                }
                for one in done
            ],
        }
    )
    rows = [
        (one.id, str(one.folder), format_bytes(one.bytes), str(one.tensors), "yes" if one.exact else "no")
        for one in done
    ]
    output.table(("id", "folder", "bytes", "tensors", "bit-exact"), rows, right=("bytes", "tensors"))
    if dtype == "original" and not all(one.exact for one in done):
        how = "stochastically, always to the same bits" if rounding == "stochastic" else "to nearest"
        output.say(f"not bit-exact: weights are rounded {how}; --dtype float32 gives them as they are served")
    if dtype == "float32":
        output.say("config.json says float32, so that transformers does not round the weights; all else is untouched")
