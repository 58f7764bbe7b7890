"""The engine, base only, beside transformers' generate at equal batch: tokens a second and the ratio, in one run.

    python benchmarks/engine_speed.py MODEL_FOLDER [--batches 1 2 4 8] [--prompt 64] [--tokens 32] [--rounds 3]

Both decode the same prompts greedily, in turn, and the best round of each counts; prefill and decode are timed apart by
running with one token as well. The result goes to benchmarks/results/engine_speed.json.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from measure import machine, say, versions, write_result

from mfs_decompose.runtime.batch_plan import BASE, PlanSlot
from mfs_decompose.runtime.engine import Engine
from mfs_decompose.runtime.requests import Request, SamplingParams, VariantInfo
from mfs_decompose.runtime.scheduler import Limits


def seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def prompts_of(count: int, length: int, vocabulary: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocabulary, (count, length), generator=generator).tolist()  # type: ignore[no-any-return]


def with_transformers(model: Any, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    ids = torch.tensor(prompts)
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )
    return out[:, ids.shape[1] :].tolist()  # type: ignore[no-any-return]


def with_engine(engine: Engine, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    params = SamplingParams(max_tokens=tokens, ignore_stop_ids=True)
    return [handle.tokens for handle in engine.generate([Request("base", prompt, params) for prompt in prompts])]


def measure(model: Any, batch: int, arguments: argparse.Namespace) -> dict[str, Any]:
    limits = Limits(tokens=max(512, batch * arguments.prompt))
    engine = Engine(model, PlanSlot(), [VariantInfo("base", BASE, b"base")], limits=limits, share_prefixes=False)
    vocabulary = model.config.get_text_config().vocab_size
    best: dict[tuple[str, int], float] = {}
    same = 0
    for round in range(arguments.rounds):
        prompts = prompts_of(batch, arguments.prompt, vocabulary, round)
        for tokens in (1, arguments.tokens):
            answers: dict[str, list[list[int]]] = {}

            def run(
                name: str, tokens: int = tokens, prompts: list[list[int]] = prompts, answers: Any = answers
            ) -> None:
                if name == "engine":
                    answers[name] = with_engine(engine, prompts, tokens)
                else:
                    answers[name] = with_transformers(model, prompts, tokens)

            for name in ("transformers", "engine"):
                taken = seconds(lambda name=name, run=run: run(name))  # type: ignore[misc]
                best[name, tokens] = min(taken, best.get((name, tokens), taken))
        same += sum(a == b for a, b in zip(answers["engine"], answers["transformers"], strict=True))
    row: dict[str, Any] = {"batch": batch, "same_answers": same, "answers": arguments.rounds * batch}
    for name in ("transformers", "engine"):
        decode = best[name, arguments.tokens] - best[name, 1]
        row[name] = {
            "prefill_s": best[name, 1],
            "decode_ms_per_step": 1000 * decode / (arguments.tokens - 1),
            "tokens_per_s": batch * arguments.tokens / best[name, arguments.tokens],
        }
    row["engine_over_transformers"] = row["engine"]["tokens_per_s"] / row["transformers"]["tokens_per_s"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    rows = []
    for batch in arguments.batches:
        rows.append(measure(model, batch, arguments))
        say(json.dumps(rows[-1]))
    settings = {name: getattr(arguments, name) for name in ("prompt", "tokens", "rounds", "threads")}
    used = versions(Path(sys.executable), ("torch", "transformers"))
    write_result("engine_speed", {"settings": settings, "machine": machine(), "versions": used, "rows": rows})


if __name__ == "__main__":
    main()
