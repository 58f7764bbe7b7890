"""How fast a family answers in mixed batches: base rows only, one to all variants mixed, each variant alone."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from mfs_decompose.artifact.reader import Family
from mfs_decompose.bench.machine import describe_machine, describe_versions
from mfs_decompose.bench.measured import Mixed, Peer, RuntimeBench, Single, recommend_cap
from mfs_decompose.bench.peers import measure_isolated, measure_peft
from mfs_decompose.errors import UsageError
from mfs_decompose.events import ProgressSink
from mfs_decompose.runtime.engine import Engine
from mfs_decompose.runtime.load import LoadedFamily, load_family
from mfs_decompose.runtime.open_engine import open_engine
from mfs_decompose.runtime.requests import Request, SamplingParams
from mfs_decompose.runtime.scheduler import Limits

PACKAGES = ("mfs-decompose", "torch", "transformers", "peft")
_FLOAT = 4


@dataclass(frozen=True)
class BenchRequest:
    """What to measure. `rows` is rounded up to a multiple of the number of variants; prompts are random token ids.

    `scratch` is where checkpoints for the peers are restored to; None measures no peers.
    """

    artifact: Path
    rows: int = 8
    prompt: int = 32
    tokens: int = 16
    rounds: int = 3
    variants: Sequence[str] | None = None
    base: str | None = None
    device: str = "cpu"
    scratch: Path | None = None

    def __post_init__(self) -> None:
        for name, value, least in (("rows", self.rows, 1), ("prompt", self.prompt, 1), ("tokens", self.tokens, 2)):
            if value < least:
                raise UsageError(f"{name}: expected at least {least}, found {value}", hint=f"measure more {name}")


class Timed(NamedTuple):
    """One round: seconds of the prompts, and the median of the decode steps; `seconds` of all."""

    prefill: float
    step: float
    seconds: float


def bench_runtime(request: BenchRequest, progress: ProgressSink) -> RuntimeBench:
    """Measure a family.

    Every kind of batch runs once a round, and the best round of each counts.

    Raises:
        UsageError: no variants, or prompt and answer longer than the model's context.
        SourceIncompatible, ArtifactInvalid, ResourceShortage: as `load_family` does.
    """
    machine = describe_machine()
    family = load_family(
        request.artifact,
        variants=request.variants,
        base=request.base,
        device=request.device,
    )
    ids = [id for id in family.variants if id != "base"]
    if not ids:
        raise UsageError("expected at least one variant to measure, found none", hint="`mfs inspect ART` lists them")
    rows = -(-request.rows // len(ids)) * len(ids)
    limits = Limits(tokens=max(512, rows * request.prompt), sequences=rows, variants=len(ids))
    blocks = -(-(request.prompt + request.tokens) // 16) + 1
    engine = open_engine(family, limits=limits, kv_tokens=16 * blocks * rows, share_prefixes=False)
    counts = [0, *range(1, len(ids) + 1)]
    batches = {str(count): [ids[at % count] if count else "base" for at in range(rows)] for count in counts}
    batches |= {f"only {id}": [id] * rows for id in ids}
    best = _best_rounds(engine, family, batches, request, progress)
    base = best["0"].step
    made = rows * request.tokens
    mixed = tuple(
        Mixed(count, found.step, found.prefill, made / found.seconds, found.step / base)
        for count in counts
        for found in [best[str(count)]]
    )
    peers = _peers(request, family, ids, rows, mixed[-1].tokens_per_second, progress)
    return RuntimeBench(
        artifact_digest=family.digest,
        machine=machine,
        versions=describe_versions(PACKAGES),
        settings={
            "rows": rows, "prompt": request.prompt, "tokens": request.tokens, "rounds": request.rounds,
            "threads": torch.get_num_threads(), "device": request.device, "dtype": "float32",
            "ops": family.ops,
        },
        memory=_memory(request, family, engine, ids),
        mixed=mixed,
        single=_single(request, family, ids, best, base),
        peers=peers,
        cap=recommend_cap(mixed),
    )  # fmt: skip


def random_prompts(rows: int, length: int, vocabulary: int, seed: int) -> list[list[int]]:
    """Token ids, the same for everybody that is measured with them."""
    generator = torch.Generator().manual_seed(seed)
    found: list[list[int]] = torch.randint(
        min(3, vocabulary - 1), vocabulary, (rows, length), generator=generator
    ).tolist()
    return found


def _best_rounds(
    engine: Engine, family: LoadedFamily, batches: dict[str, list[str]], request: BenchRequest, progress: ProgressSink
) -> dict[str, Timed]:
    vocabulary = min(variant.vocabulary for variant in family.variants.values())
    best: dict[str, Timed] = {}
    progress.start("measure batches", None)
    for round in range(request.rounds + 1):  # the first one warms up
        for name, owners in batches.items():
            prompts = random_prompts(len(owners), request.prompt, vocabulary, round)
            found = _time(engine, owners, prompts, request.tokens)
            if round and (name not in best or found.step < best[name].step):
                best[name] = found
    progress.finish()
    return best


def _time(engine: Engine, owners: Sequence[str], prompts: Sequence[Sequence[int]], tokens: int) -> Timed:
    params = SamplingParams(max_tokens=tokens, ignore_stop_ids=True)
    handles = [engine.submit(Request(id, prompt, params)) for id, prompt in zip(owners, prompts, strict=True)]
    started = time.perf_counter()
    while not all(handle.tokens or handle.done for handle in handles):
        engine.step()
    prefill = time.perf_counter() - started
    steps = []
    while not all(handle.done for handle in handles):
        at = time.perf_counter()
        engine.step()
        steps.append(time.perf_counter() - at)
    short = next((handle for handle in handles if len(handle.tokens) != tokens), None)
    if short is not None:
        raise UsageError(
            f"expected answers of {tokens} tokens, found {len(short.tokens)}: {short.error or 'the context is full'}",
            hint="measure shorter prompts, or fewer tokens",
        )
    return Timed(prefill, statistics.median(steps), time.perf_counter() - started)


def _peers(
    request: BenchRequest, family: LoadedFamily, ids: Sequence[str], rows: int, ours: float, progress: ProgressSink
) -> tuple[Peer, ...]:
    if request.scratch is None:
        return ()
    vocabulary = min(variant.vocabulary for variant in family.variants.values())
    prompts = random_prompts(rows, request.prompt, vocabulary, 1)
    isolated = measure_isolated(request, ids, prompts, progress)
    peft, note = measure_peft(request, family, ids, prompts, progress)
    return (
        Peer("transformers, one variant after another", isolated, ours / isolated),
        Peer("PEFT, mixed adapters in one batch", peft, None if peft is None else ours / peft, note),
    )


def _single(
    request: BenchRequest, family: LoadedFamily, ids: Sequence[str], best: dict[str, Timed], base: float
) -> tuple[Single, ...]:
    forms = family.memory()
    with Family.open(request.artifact, base=request.base) as opened:
        codecs = {
            id: tuple(sorted({opened.tree(id, name).text() for name in opened.variant(id).tensors})) for id in ids
        }
    return tuple(
        Single(id, codecs[id], dict(forms.variants[id]), best[f"only {id}"].step, best[f"only {id}"].step / base)
        for id in ids
    )


def _memory(request: BenchRequest, family: LoadedFamily, engine: Engine, ids: Sequence[str]) -> dict[str, object]:
    """Whole models are the variants alone, without the base; each as transformers would hold it in fp32."""
    held = family.memory()
    with Family.open(request.artifact, base=request.base) as opened:
        models = sum(
            _FLOAT * math.prod(tensor.shape)
            for id in ids
            for name, tensor in opened.variant(id).tensors.items()
            if opened.tree(id, name).codec != "alias"  # a tied head, held once
        )
    return {
        "base": held.base,
        "shared": sum(held.shared.values()),
        "variants": sum(sum(forms.values()) for forms in held.variants.values()),
        "keys_and_values": engine.stats().kv_bytes_reserved,
        "total": held.total,
        "models": len(ids),
        "whole_models": models,
        "ratio": models / held.total,
    }
