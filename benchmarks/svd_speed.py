"""Rank 16 of a pair of layers: our time, stage by stage, beside the full SVD of each matrix that extractors do.

    python benchmarks/svd_speed.py                       # 4096x4096 and 14336x4096: the full SVDs take minutes
    python benchmarks/svd_speed.py --scale 16 --name try # 256x256 and 896x256, to try

The delta of each layer is a power law over `DIRECTIONS` and a flat tail, as full fine-tunes have (rank 16 leaves about
0.85 of its norm), added to weights N(0, 0.02) and rounded to bf16; seeded. Both ways start from the files. Ours runs
the codec on the units of the plan of `mfs decompose`: a large matrix is read in row blocks, once for each pass. The
other way reads, subtracts in fp32 and calls `torch.linalg.svd(full_matrices=False)`, which also gives the least
residual there is. Ways run one after the other at `--threads` torch threads. Beside them: one whole `mfs decompose` of
the pair, which also digests, encodes, measures and writes. Writes results/NAME.json (default svd_speed).
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from measure import machine, say, versions, write_result
from safetensors.torch import save_file
from stage_clock import STAGES, StageClock

from mfs_decompose import base_extraction
from mfs_decompose.codec.base import Fit
from mfs_decompose.codec.lowrank import LowRank
from mfs_decompose.linalg import svd
from mfs_decompose.linalg.packing import unpack_int4
from mfs_decompose.linalg.quantise import Quantised, dequantise
from mfs_decompose.linalg.seeds import stream_key
from mfs_decompose.linalg.sums import squared_norm
from mfs_decompose.pipeline.allocator import keep_freed_memory
from mfs_decompose.pipeline.decompose import decompose
from mfs_decompose.pipeline.prepare import prepare
from mfs_decompose.pipeline.reading import Sources
from mfs_decompose.pipeline.request import DecomposeRequest
from mfs_decompose.plan.model import Unit
from mfs_decompose.recipe.load import load_recipe
from mfs_decompose.source.checkpoint import TensorReader, open_checkpoint

LAYERS = {"attention.weight": (4096, 4096), "mlp.weight": (14336, 4096)}
RANK, DIRECTIONS, EXPONENT, FLAT, RMS = 16, 1024, 0.5, 0.35, 3e-4
"""Of the delta: directions of the power law, its exponent, the share of the flat tail in ||delta||^2, rms."""
PACKAGES = ("mfs_decompose", "torch", "numpy", "safetensors")


def make_pair(folder: Path, layers: dict[str, tuple[int, int]]) -> None:
    """Write `folder/base` and `folder/variant`."""
    base: dict[str, torch.Tensor] = {}
    variant: dict[str, torch.Tensor] = {}
    draw = torch.Generator().manual_seed(0)
    for name, (rows, columns) in layers.items():
        count = min(DIRECTIONS, rows // 2, columns // 2)
        strength = torch.arange(1, count + 1) ** -EXPONENT
        left, right = torch.randn(rows, count, generator=draw), torch.randn(count, columns, generator=draw)
        delta = (left * strength) @ right
        noise = torch.randn(rows, columns, generator=draw)
        delta *= math.sqrt(1 - FLAT) / delta.square().mean().sqrt()
        delta += math.sqrt(FLAT) * noise
        base[name] = (0.02 * torch.randn(rows, columns, generator=draw)).to(torch.bfloat16)
        variant[name] = (base[name].to(torch.float32) + RMS * delta).to(torch.bfloat16)
    for id, tensors in (("base", base), ("variant", variant)):
        (folder / id).mkdir()
        (folder / id / "config.json").write_text('{"model_type": "layers"}\n')
        save_file(tensors, str(folder / id / "model.safetensors"), {"format": "pt"})


def read_delta(sources: Sources, name: str) -> torch.Tensor:
    return base_extraction.delta_rows(sources.variants["variant"].rows(name), sources.base.rows(name))


def run_ours(sources: Sources, unit: Unit) -> Fit:
    """The low rank codec as pass 1 runs it on a unit of one matrix."""
    (item,) = unit.items
    codec, key = LowRank(), stream_key(0, "sketch", item.name)
    assert item.matrix is not None and item.steps == RANK
    if unit.kind == "batch":
        delta = read_delta(sources, item.name)
        found = codec.fit(delta[None], item.steps, [key], item.params)[0]
    else:
        found = codec.fit_blocks(
            lambda: sources.fitted_blocks(item, lambda _: None), item.matrix, item.steps, key, item.params
        )
    assert found is not None
    return found


@contextmanager
def kept(truncations: list[svd.Truncation]) -> Iterator[None]:
    """Keep the factors as they are before they are quantised."""
    from mfs_decompose.codec import lowrank

    before = lowrank._fit

    def watched(found: svd.Truncation, fmt: Any) -> Any:
        truncations.append(found)
        return before(found, fmt)

    lowrank._fit = watched
    try:
        yield
    finally:
        lowrank._fit = before


def residual(delta: torch.Tensor, left_RM: torch.Tensor, right_RN: torch.Tensor) -> float:
    """`||delta - left^T right||_F^2`, the long way."""
    return math.fsum(
        squared_norm(delta[at : at + 512].to(torch.float64) - left_RM[:, at : at + 512].mT @ right_RN)
        for at in range(0, delta.shape[0], 512)
    )


def measure(sources: Sources, unit: Unit, turns: int) -> dict[str, Any]:
    """One layer both ways; of ours the median of some turns, after one to warm up."""
    name, shape = unit.items[0].name, unit.items[0].matrix
    assert shape is not None
    truncations: list[svd.Truncation] = []
    taken: list[tuple[float, float, dict[str, float]]] = []
    for _ in range(turns + 1):
        clock, begun, cpu = StageClock(), time.perf_counter(), time.process_time()
        with clock.running(), kept(truncations):
            fit = run_ours(sources, unit)
        taken.append((time.perf_counter() - begun, time.process_time() - cpu, clock.seconds))
    median = sorted(taken[1:], key=lambda one: one[0])[turns // 2]
    say(f"{name} {shape[0]}x{shape[1]}: ours {median[0]:.2f} s")
    begun, cpu = time.perf_counter(), time.process_time()
    delta = read_delta(sources, name)
    _u, sigma, _vt = torch.linalg.svd(delta, full_matrices=False)
    full, full_cpu = time.perf_counter() - begun, time.process_time() - cpu
    total, squares = squared_norm(delta), sigma.to(torch.float64).square()
    least = float(squares[RANK:].sum())
    found = truncations[-1]
    measured = residual(delta, found.left.to(torch.float64), found.right.to(torch.float64))
    left, right = (decoded(fit, side, length) for side, length in zip("uv", shape, strict=True))
    quantised = residual(delta, left, right)
    say(f"    full SVD {full:.1f} s: {full / median[0]:.0f} times; residual {measured / least:.5f} of the least")
    return {
        "shape": list(shape),
        "row_blocks": unit.kind == "blocks",
        "ours_seconds": median[0],
        "ours_cpu_seconds": median[1],
        "full_svd_seconds": full,
        "full_svd_cpu_seconds": full_cpu,
        "times_faster": full / median[0],
        "times_less_cpu": full_cpu / median[1],
        "stages": median[2],
        "rel_error_least": math.sqrt(least / total),
        "residual_over_least": measured / least,
        "reported_over_measured": found.residual(RANK) / measured,
        "residual_quantised_over_least": quantised / least,
        "energy_of_rank_4_and_64": [float(squares[:count].sum()) / total for count in (4, 64)],
    }


def decoded(fit: Fit, side: str, length: int) -> torch.Tensor:
    return dequantise(Quantised(unpack_int4(fit.arrays[side], length), fit.arrays[side + "s"]))


def asked(folder: Path, threads: int) -> DecomposeRequest:
    return DecomposeRequest(
        {"variant": str(folder / "variant")},
        folder / "artifact",
        load_recipe(None, {"objective.rank": RANK, "base.store": "reference"}),
        str(folder / "base"),
        threads=threads,
        device="cpu",
    )


def compare(folder: Path, request: DecomposeRequest, turns: int) -> dict[str, Any]:
    """Every layer both ways, the units as the plan cuts them."""
    units = sorted(prepare(request).plan.units, key=lambda unit: unit.items[0].name)
    with (
        TensorReader(open_checkpoint(folder / "variant", "variant")) as own,
        TensorReader(open_checkpoint(folder / "base", "base")) as base,
    ):
        sources = Sources(base, {"variant": own})
        return {unit.items[0].name: measure(sources, unit, turns) for unit in units}


def whole_run(request: DecomposeRequest) -> dict[str, Any]:
    """Seconds of `mfs decompose --rank 16` of the pair, with everything else that it does."""
    begun = time.perf_counter()
    report = decompose(request)
    return {"seconds": time.perf_counter() - begun, "stages": report.stages}


def summary(layers: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    ours = sum(layer["ours_seconds"] for layer in layers.values())
    full = sum(layer["full_svd_seconds"] for layer in layers.values())
    stages = {stage: sum(layer["stages"][stage] for layer in layers.values()) for stage in STAGES}
    return {
        "ours_seconds": ours,
        "full_svd_seconds": full,
        "times_faster": full / ours,
        "times_less_cpu": sum(layer["full_svd_cpu_seconds"] for layer in layers.values())
        / sum(layer["ours_cpu_seconds"] for layer in layers.values()),
        "whole_decompose_times_faster": full / whole["seconds"],
        "worst_residual_over_least": max(layer["residual_over_least"] for layer in layers.values()),
        "stage_shares": {stage: seconds / sum(stages.values()) for stage, seconds in stages.items()},
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=3, help="of ours")
    parser.add_argument("--scale", type=int, default=1, help="divides every side")
    parser.add_argument("--name", default="svd_speed")
    args = parser.parse_args(argv)
    facts = machine()
    torch.set_num_threads(args.threads)
    layers = {name: (rows // args.scale, columns // args.scale) for name, (rows, columns) in LAYERS.items()}
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        make_pair(folder, layers)
        request = asked(folder, args.threads)
        keep_freed_memory()  # as the pipeline does
        found = compare(folder, request, args.turns)
        whole = whole_run(request)
    result = {
        "schema": "mfs.bench.svd_speed/1",
        "machine": facts | {"load_after": round(os.getloadavg()[0], 2)},
        "versions": versions(Path(sys.executable), PACKAGES),
        "threads": args.threads,
        "rank": RANK,
        "delta": {"directions": DIRECTIONS, "exponent": EXPONENT, "flat_share": FLAT, "rms": RMS},
        "layers": found,
        "whole_decompose": whole,
        **summary(found, whole),
    }
    for stage, share in result["stage_shares"].items():
        say(f"{stage:18}{share:7.1%}")
    for key in ("times_faster", "times_less_cpu", "whole_decompose_times_faster", "worst_residual_over_least"):
        say(f"{key}: {result[key]:.4g}")
    say(f"wrote {write_result(args.name, result).name}")


if __name__ == "__main__":
    main()
