"""Rank 16 of one fine-tune, ours against `mergekit-extract-lora`: time, memory, bytes and what is left over.

    python benchmarks/against_mergekit.py BASE VARIANT [--rank 16] [--repeats 3] [--threads N] [--venv DIR]

mergekit lives in a virtual environment of its own, made on the first run. Both sides start as one process a run, in
turns, with everything imported before the clock starts (timed_entry.py) and files in the page cache. mergekit's clock
stops when its adapter is complete: the model card it writes after that can fail without a network. Ours runs on to the
end: the base copied, hashed and synced, the manifest written. Both factor the linear layers; mergekit copies embedding
and head at full rank, ours factors them too. `whole_command` compares these two times; `read_and_factor` compares
mergekit's, which writes little besides, with the stages of ours that read and factor (--factor-stages).

Only a result with `quiet: true` is worth keeping. Beside one other busy core, mergekit with its default of two threads
took 37 to 152 s, and 13 to 15 s with one, so a busy machine flatters ours: run it with `--threads 1` (both sides) too.

Residuals are compared layer by layer with the least any rank-16 matrix can leave (residuals.py). Ours are read back
through `mfs restore --dtype float32`, mergekit's from its adapter. Writes results/against_mergekit*.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from measure import RESULTS, Timing, folder_bytes, machine, say, time_entry, versions, write_result
from residuals import residual_report

PACKAGES = ("mergekit", "mfs_decompose", "torch", "transformers", "safetensors", "numpy")
MERGEKIT_IMPORTS = ("torch", "transformers.models.llama.modeling_llama", "safetensors.torch")
OUR_IMPORTS = ("torch", "safetensors.torch", "numpy", "zstandard", "mfs_decompose.*")


def mergekit_python(folder: Path) -> Path:
    """The interpreter of mergekit's environment; torch goes in first, so that pip takes no other build of it."""
    python = folder / "bin" / "python"
    if not python.exists():
        say(f"making an environment with mergekit in {folder}")
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        for package in ("torch==2.13.0", "mergekit==0.1.5"):
            subprocess.run([python, "-m", "pip", "install", "--quiet", package], check=True)
    return python


def run_mergekit(python: Path, base: Path, variant: Path, rank: int, out: Path, threads: int | None) -> Timing:
    argv = ["--model", str(variant), "--base-model", str(base), "--out-path", str(out), "--max-rank", str(rank)]
    entry = "mergekit.scripts.extract_lora:main"
    run = time_entry(python, entry, MERGEKIT_IMPORTS, argv, until=out / "adapter_config.json", threads=threads)
    if not (out / "adapter_model.safetensors").exists() or not (out / "adapter_config.json").exists():
        raise RuntimeError(f"mergekit wrote no adapter:\n{run.log[-2000:]}")
    return run


def run_mfs(base: Path, variant: Path, rank: int, out: Path, threads: int | None) -> Timing:
    argv = ["decompose", "--base", str(base), "--variants", f"v={variant}", "--rank", str(rank)]
    argv += ["--set", "deltas.default.factors=bf16", "--progress", "none", "--out", str(out)]
    argv += [] if threads is None else ["--threads", str(threads)]
    run = time_entry(Path(sys.executable), "mfs_decompose.cli.app:main", OUR_IMPORTS, argv, threads=threads)
    if run.exit_code != 0:
        raise RuntimeError(f"mfs decompose ended with {run.exit_code}:\n{run.log[-2000:]}")
    return run


def restore_fp32(artifact: Path, out: Path) -> None:
    argv = ["restore", str(artifact), "--variant", "v", "--dtype", "float32", "--out", str(out)]
    subprocess.run([Path(sys.executable).with_name("mfs"), *argv], check=True)


def side(runs: Sequence[Timing]) -> dict[str, Any]:
    return {
        "wall_median": statistics.median(run.wall for run in runs),
        "wall_least": min(run.wall for run in runs),
        "cpu_median": statistics.median(run.cpu for run in runs),
        "peak_rss_max": max(run.peak_rss for run in runs),
        "runs": [run.numbers() for run in runs],
    }


def stage_seconds(artifact: Path, wall: float) -> dict[str, float]:
    """Seconds of each stage of one of our runs, from its run.json; `other` is planning and the like."""
    stages: dict[str, float] = json.loads((artifact / "run.json").read_text())["stages"]
    return stages | {"other": wall - sum(stages.values())}


def repeat(
    sides: dict[str, Callable[[Path], Timing]], work: Path, repeats: int
) -> tuple[dict[str, list[Timing]], list[dict[str, float]]]:
    """Run the sides in turns; also the stages of our runs. The last output of each side stays in `work/<side>`."""
    runs: dict[str, list[Timing]] = {name: [] for name in sides}
    stages: list[dict[str, float]] = []
    for index in range(repeats):
        for name, run in sides.items():
            shutil.rmtree(work / name, ignore_errors=True)
            timing = run(work / name)
            runs[name].append(timing)
            if name == "mfs":
                stages.append(stage_seconds(work / name, timing.wall))
            say(
                f"{name} run {index + 1} of {repeats}: {timing.wall:.2f} s, {timing.cpu:.2f} s CPU, "
                f"{timing.others:.2f} cores busy with other things"
            )
    return runs, stages


def compare(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    base, variant, rank = args.base.resolve(), args.variant.resolve(), args.rank
    sides: dict[str, Callable[[Path], Timing]] = {}
    result: dict[str, Any] = {"schema": "mfs.bench.against_mergekit/1", "machine": machine(), "rank": rank}
    result["threads"] = args.threads or "default"
    result["checkpoint_bytes"] = sum(path.stat().st_size for path in variant.glob("*.safetensors"))
    if args.only != "mfs":
        python = mergekit_python(args.venv)
        sides["mergekit"] = lambda out: run_mergekit(python, base, variant, rank, out, args.threads)
        result["versions_mergekit"] = versions(python, PACKAGES)
    if args.only != "mergekit":
        sides["mfs"] = lambda out: run_mfs(base, variant, rank, out, args.threads)
        result["versions_mfs"] = versions(Path(sys.executable), PACKAGES)
    runs, stages = repeat(sides, work, args.repeats)
    result["quiet"] = max(timing.others for timings in runs.values() for timing in timings) < 0.1
    for name, timings in runs.items():
        result[name] = side(timings) | {"output_bytes": folder_bytes(work / name)}
    if "mergekit" in runs:
        size = (work / "mergekit" / "adapter_model.safetensors").stat().st_size
        result["mergekit"] |= {"adapter_bytes": size, "adapter_share": size / result["checkpoint_bytes"]}
    if "mfs" in runs:
        result["mfs"] |= our_facts(work / "mfs", stages, args.factor_stages)
        restore_fp32(work / "mfs", work / "restored")
    if len(runs) == 2:
        result["times_faster"] = {
            "whole_command": result["mergekit"]["wall_median"] / result["mfs"]["wall_median"],
            "read_and_factor": result["mergekit"]["wall_median"] / result["mfs"]["factor_seconds"],
        }
    adapter = work / "mergekit" if "mergekit" in runs else None
    restored = work / "restored" if "mfs" in runs else None
    result["residuals"] = residual_report(base, variant, rank, restored=restored, adapter=adapter)
    return result


def our_facts(artifact: Path, runs: Sequence[dict[str, float]], factor_stages: Sequence[str]) -> dict[str, Any]:
    """Medians over the runs: seconds and share of each stage, seconds of the factor stages; bytes of the shards."""
    missing = sorted(set(factor_stages) - set(runs[0]))
    if missing:
        raise RuntimeError(f"run.json has the stages {', '.join(runs[0])}, not {', '.join(missing)}: --factor-stages")
    walls = [sum(stages.values()) for stages in runs]
    shares = {
        name: {
            "seconds": statistics.median(stages[name] for stages in runs),
            "share": statistics.median(stages[name] / wall for stages, wall in zip(runs, walls, strict=True)),
        }
        for name in runs[0]
    }
    return {
        "stages": shares,
        "factor_seconds": statistics.median(sum(stages[name] for name in factor_stages) for stages in runs),
        "variant_bytes": sum(path.stat().st_size for path in artifact.glob("v*.safetensors")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path)
    parser.add_argument("variant", type=Path)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, help="of both sides; default: what each takes by itself")
    parser.add_argument("--venv", type=Path, default=Path("build/mergekit-env"), help="environment of mergekit")
    parser.add_argument("--only", choices=("mergekit", "mfs"), help="one side alone, printed instead of stored")
    parser.add_argument("--factor-stages", nargs="+", default=["pass 1"], help="stages of run.json that count")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = compare(args, Path(folder))
    if args.only:
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
    else:
        name = "against_mergekit" if args.threads is None else f"against_mergekit_threads{args.threads}"
        say(f"wrote {write_result(name, result).relative_to(RESULTS.parent)}")


if __name__ == "__main__":
    main()
