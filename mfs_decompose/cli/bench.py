"""`mfs bench`: how fast a family answers, beside other ways to answer the same requests."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mfs_decompose.cli.options import (
    ArtifactArgument,
    BaseOption,
    DeviceOption,
    ScratchOption,
    ThreadsOption,
    VariantOption,
    output_of,
)
from mfs_decompose.cli.out import Output
from mfs_decompose.cli.progress import make_sink
from mfs_decompose.errors import OutputBusy
from mfs_decompose.units import format_bytes

if TYPE_CHECKING:
    from mfs_decompose.bench.measured import RuntimeBench


def command(
    ctx: typer.Context,
    what: Annotated[Literal["runtime"], typer.Argument(show_default=False, help="runtime: mixed batches of variants.")],
    artifact: ArtifactArgument,
    variant: VariantOption = None,
    rows: Annotated[int, typer.Option("--rows", min=1, metavar="N", help="Requests of a batch.")] = 8,
    prompt: Annotated[int, typer.Option("--prompt", min=1, metavar="N", help="Tokens of a prompt.")] = 32,
    tokens: Annotated[int, typer.Option("--tokens", min=2, metavar="N", help="Tokens of an answer.")] = 16,
    rounds: Annotated[int, typer.Option("--rounds", min=1, metavar="N", help="Rounds; the best of each counts.")] = 3,
    peers: Annotated[
        bool, typer.Option("--peers/--no-peers", help="Also whole models in transformers, and adapters in PEFT.")
    ] = True,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Draw the overhead against the number of variants here, as SVG."),
    ] = None,
    base: BaseOption = None,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    scratch: ScratchOption = None,
) -> None:
    """Measure batches of base rows only, of one to all variants mixed, and of each variant alone.

    All batches have equally many rows, of random token ids. Overhead is the median decode step over that of base rows.

    Examples:
      mfs bench runtime art --rows 4 --prompt 8 --tokens 4 --rounds 1
      mfs bench runtime art --no-peers --tokens 3 --rounds 1 --plot overhead.svg
    """
    from mfs_decompose.bench.runtime import BenchRequest, bench_runtime
    from mfs_decompose.pipeline.device import choose_device

    assert what == "runtime"
    output = output_of(ctx)
    if plot is not None and (plot.is_dir() or not plot.absolute().parent.is_dir()):
        raise OutputBusy(f"expected a file to write at --plot {plot}, found no place for one", hint="choose another")
    with tempfile.TemporaryDirectory(prefix="mfs-bench-", dir=scratch) as folder:
        request = BenchRequest(
            artifact,
            rows=rows,
            prompt=prompt,
            tokens=tokens,
            rounds=rounds,
            variants=None if variant is None else [variant],
            base=base,
            device=choose_device(device),
            scratch=Path(folder) if peers else None,
        )
        with _threads(threads):
            found = bench_runtime(request, make_sink(output))
    if plot is not None:
        from mfs_decompose.artifact.atomic import write_file
        from mfs_decompose.cli.bench_plot import draw_overhead

        write_file(plot, draw_overhead(found))
    output.document(found.to_json() | {"plot": None if plot is None else str(plot)})
    _show(output, found)


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """So many threads inside."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _show(output: Output, found: RuntimeBench) -> None:
    settings, machine = found.settings, found.machine
    output.line(
        f"{settings['rows']} rows of {settings['prompt']} + {settings['tokens']} tokens on {machine['cpu']}, "
        f"{settings['threads']} threads, load {machine['load_before']} before"
    )
    output.table(
        ("variants in a batch", "step", "overhead", "tokens/s"),
        [
            (
                str(one.variants) if one.variants else "0 (base rows)",
                _milliseconds(one.step_seconds),
                f"{one.overhead:.2f}",
                f"{one.tokens_per_second:.1f}",
            )
            for one in found.mixed
        ],
        right=("step", "overhead", "tokens/s"),
    )
    output.line()
    output.table(
        ("all rows of", "step", "overhead", "in memory", "forms"),
        [
            (
                one.id,
                _milliseconds(one.step_seconds),
                f"{one.overhead:.2f}",
                format_bytes(sum(one.forms.values())),
                ", ".join(one.forms),
            )
            for one in found.single
        ],
        right=("step", "overhead", "in memory"),
    )
    output.line()
    for peer in found.peers:
        speed = "not measured" if peer.tokens_per_second is None else f"{peer.tokens_per_second:.1f} tokens/s"
        ratio = "" if peer.ratio is None else f"; the mixed batch is {peer.ratio:.2f} times as fast"
        output.line(f"{peer.name}: {speed}{ratio}{f' ({peer.note})' if peer.note else ''}")
    memory = found.memory
    output.line(
        f"memory: base {format_bytes(memory['base'])}, deltas {format_bytes(memory['shared'] + memory['variants'])}, "
        f"keys and values {format_bytes(memory['keys_and_values'])}"
    )
    many = f"{memory['models']} variants as whole models" if memory["models"] > 1 else "the variant as a whole model"
    output.line(
        f"base and deltas take {memory['ratio']:.2f} times less than {many} in fp32, "
        f"{format_bytes(memory['whole_models'])} (keys and values on neither side, and no model for the base)"
    )
    output.line(f"recommended: at most {found.cap} distinct variants a step")


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"
