"""The same requests without the runtime: one whole model after another, and PEFT's batch of mixed adapters."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mfs_decompose.events import ProgressSink
from mfs_decompose.pipeline.restore import RestoreOptions, restore
from mfs_decompose.runtime.loaded import LoadedFamily
from mfs_decompose.runtime.resident_forms import LowRank
from mfs_decompose.source.quiet import quiet_transformers

if TYPE_CHECKING:
    from mfs_decompose.bench.runtime import BenchRequest


def measure_isolated(
    request: BenchRequest, ids: Sequence[str], prompts: Sequence[Sequence[int]], progress: ProgressSink
) -> float:
    """Tokens a second of transformers' generate, each variant with its share of the prompts, loading not counted."""
    assert request.scratch is not None and len(prompts) % len(ids) == 0
    taken = 0.0
    for at, id in enumerate(ids):
        own = prompts[at :: len(ids)]
        folder = request.scratch / "whole"
        restore(request.artifact, [id], folder, RestoreOptions(dtype="float32"), base=request.base, progress=progress)
        model = load_whole(folder, request.device)
        taken += _best(lambda model=model, own=own: generate(model, own, request.tokens), request.rounds)  # type: ignore[misc]
        del model
        shutil.rmtree(folder)
    return len(prompts) * request.tokens / taken


def measure_peft(
    request: BenchRequest,
    family: LoadedFamily,
    ids: Sequence[str],
    prompts: Sequence[Sequence[int]],
    progress: ProgressSink,
) -> tuple[float | None, str | None]:
    """Tokens a second of PEFT with the low-rank part of every variant as an adapter, and what that leaves out.

    None, and why, where PEFT is not there or a variant has a linear layer that is not low rank.
    """
    assert request.scratch is not None
    try:
        import peft  # noqa: F401
    except ImportError:
        return None, "peft is not installed"
    found = {id: _adapter_of(family, id) for id in ids}
    unfit = next((id for id, adapter in found.items() if not adapter.factors or adapter.others), None)
    if unfit is not None:
        return None, f"{unfit}: {found[unfit].others or 'nothing'} of its linear layers cannot be an adapter of PEFT"
    folder = request.scratch / "base"
    restore(request.artifact, ["base"], folder, RestoreOptions(dtype="float32"), base=request.base, progress=progress)
    # By number: names become names of modules, which ids with a dot cannot be.
    model = _with_adapters(
        load_whole(folder, request.device), {f"v{at}": found[id].factors for at, id in enumerate(ids)}
    )
    names = [f"v{at % len(ids)}" for at in range(len(prompts))]
    taken = _best(lambda: generate(model, prompts, request.tokens, adapter_names=names), request.rounds)
    shutil.rmtree(folder)
    left = sorted({kind for adapter in found.values() for kind in adapter.left})
    note = f"without what is no linear layer: {', '.join(left)}" if left else None
    return len(prompts) * request.tokens / taken, note


class _Adapter(NamedTuple):
    """Path -> (A [R, I], B [O, R]); how many linear layers changed otherwise; what else changed."""

    factors: dict[str, tuple[torch.Tensor, torch.Tensor]]
    others: int
    left: set[str]


def _adapter_of(family: LoadedFamily, id: str) -> _Adapter:
    factors: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    others = 0
    left: set[str] = set()
    head = family.model.get_output_embeddings()
    for path, change in family.tiers.held()[id].items():
        if change.kind != "linear" or family.model.get_submodule(path) is head:
            left.add("head" if change.kind == "linear" else change.kind)
            continue
        forms = [] if change.matrix is None else [one.form for one in change.matrix.placed]
        low = [form for form in forms if isinstance(form, LowRank)]
        if len(low) != len(forms) or change.matrix is None or change.matrix.transposed or change.bias is not None:
            others += 1
            continue
        a = torch.cat([form.right.values() for form in low])
        b = torch.cat([form.left.values().mT for form in low], dim=1)
        rows, width = family.model.get_submodule(path).weight.shape
        if (b.shape[0], a.shape[1]) != (rows, width):
            others += 1
            continue
        factors[path] = (a, b.contiguous())
    return _Adapter(factors, others, left)


def _with_adapters(model: Any, adapters: dict[str, dict[str, tuple[torch.Tensor, torch.Tensor]]]) -> Any:
    from peft import LoraConfig, get_peft_model

    wrapped: Any = None
    for id, factors in adapters.items():
        ranks = {path: a.shape[0] for path, (a, _) in factors.items()}
        config = LoraConfig(
            r=1, lora_alpha=1, target_modules=list(factors), rank_pattern=ranks, alpha_pattern=ranks, lora_dropout=0.0
        )
        if wrapped is None:
            wrapped = get_peft_model(model, config, adapter_name=id)
        else:
            wrapped.add_adapter(id, config)
        for path, (a, b) in factors.items():
            layer = wrapped.base_model.model.get_submodule(path)
            layer.lora_A[id].weight.data = a.to(layer.weight.device)
            layer.lora_B[id].weight.data = b.to(layer.weight.device)
    return wrapped.eval()


def load_whole(folder: Path, device: str) -> Any:
    """A checkpoint in fp32, as transformers loads it."""
    from transformers import AutoModelForCausalLM

    with quiet_transformers():
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False, use_safetensors=True
        )
    return model.to(device).eval()


@torch.inference_mode()
def generate(model: Any, prompts: Sequence[Sequence[int]], tokens: int, **more: Any) -> torch.Tensor:
    """`tokens` more of each prompt, greedily: [rows, prompt + tokens]."""
    ids = torch.tensor([list(prompt) for prompt in prompts], device=model.device)
    with quiet_transformers():
        found: torch.Tensor = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens,
            do_sample=False, pad_token_id=0, **more,
        )  # fmt: skip
    return found


def _best(run: Callable[[], object], rounds: int) -> float:
    """Seconds of the best round, after one that warms up."""
    taken = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        run()
        taken.append(time.perf_counter() - started)
    return min(taken[1:])
