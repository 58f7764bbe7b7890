"""`mfs verify`: is the artifact what it was when it was written?"""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from mfs_decompose.cli.options import INPUTS, ArtifactArgument, BaseOption, VariantOption, named_refs, output_of
from mfs_decompose.cli.progress import make_sink

AgainstOption = Annotated[
    list[str] | None,
    typer.Option(
        "--against",
        metavar="ID=REF",
        help="Compare with the variants' own checkpoints and print the errors; takes several.",
        rich_help_panel=INPUTS,
    ),
]


def command(
    ctx: typer.Context,
    artifact: ArtifactArgument,
    level: Annotated[
        Literal["quick", "checksums", "values"],
        typer.Option("--level", help="Structure; every byte; every decoded tensor."),
    ] = "checksums",
    variant: VariantOption = None,
    against: AgainstOption = None,
    base: BaseOption = None,
) -> None:
    """Check an artifact; damage is exit code 20 and names the file.

    `quick` checks structure and sizes, `checksums` every byte of every file, `values` decodes every tensor and
    compares it with the digest recorded when it was written.

    Examples:
      mfs verify art
      mfs verify art --level values --against math=./math
    """
    from mfs_decompose.artifact.verify import verify
    from mfs_decompose.errors import ArtifactInvalid
    from mfs_decompose.pipeline.against import compare_with_originals
    from mfs_decompose.pipeline.scheduler import one_torch_thread
    from mfs_decompose.units import format_bytes

    output = output_of(ctx)
    sink = make_sink(output)
    originals = named_refs(against or [], "--against")
    report = verify(artifact, level, base=base, variants=None if variant is None else [variant], progress=sink)
    document = {"schema": "mfs.verify/1", **report.to_json()}
    compared = []
    if originals and report.ok:
        with one_torch_thread():
            compared = compare_with_originals(artifact, originals, base=base, progress=sink)
        document["against"] = [one.to_json() for one in compared]
        document["ok"] = report.ok and all(one.ok for one in compared)
    output.document(document)
    for problem in report.problems:
        where = f"{problem.file}: {problem.tensor}" if problem.tensor else problem.file
        output.line(f"{where}: {problem.what}")
    if compared:
        output.table(
            ("variant", "tensors", "bit-exact", "relative error", "as recorded"),
            [(c.id, str(c.tensors), str(c.exact), f"{c.rel_error:.6g}", "yes" if c.ok else "NO") for c in compared],
            right=("tensors", "bit-exact", "relative error"),
        )
    if not report.ok:
        files = sorted({problem.file for problem in report.problems})
        raise ArtifactInvalid(
            f"{artifact} is damaged: {', '.join(files[:5])}{' and more' if len(files) > 5 else ''}",
            hint="Get the artifact again from where it came from.",
        )
    if not all(one.ok for one in compared):
        bad = [one.id for one in compared if not one.ok]
        raise ArtifactInvalid(f"the errors of {', '.join(bad)} are not those recorded in {artifact}")
    output.say(f"{artifact} is whole ({level}): {format_bytes(report.checked_bytes)} checked")
