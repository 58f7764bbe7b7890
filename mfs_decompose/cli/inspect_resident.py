"""What `mfs inspect --resident` shows: the form and bytes that deltas would have in memory."""

from __future__ import annotations

from pathlib import Path

from mfs_decompose.cli.out import Output
from mfs_decompose.cli.progress import make_sink
from mfs_decompose.units import format_bytes, format_fraction


def show_resident(output: Output, artifact: Path, variant: str | None, base: str | None) -> None:
    """Read, count and print.

    Raises:
        MfsError: as `report_resident` does.
    """
    from mfs_decompose.runtime.resident_report import report_resident

    document = report_resident(artifact, variant, base, make_sink(output))
    output.document(document)
    for number, one in enumerate(document["variants"]):
        if number:
            output.line()
        share = format_fraction(one["share"])
        output.line(f"{one['id']}: {format_bytes(one['bytes'])} in memory, {share} of its checkpoint in fp32")
        output.table(
            ("codec", "form", "tensors", "in memory", "stored"),
            [
                (
                    entry["codec"],
                    entry["form"],
                    str(entry["tensors"]),
                    format_bytes(entry["bytes"]),
                    format_bytes(entry["stored_bytes"]),
                )
                for entry in one["forms"]
            ],
            right=("tensors", "in memory", "stored"),
        )
    output.line()
    shared = f", shared delta {format_bytes(document['shared_bytes'])}" if document["shared_bytes"] else ""
    output.line(
        f"base in fp32 {format_bytes(document['base_bytes'])}{shared}; together {format_bytes(document['total_bytes'])}"
    )
