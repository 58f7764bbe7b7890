"""BitDelta's scales as published: trained on the squared error of the logits, nothing else of the model moving.

Published: AdamW, 100 to 200 steps of 4 x 128 tokens; its code also trains embeddings, head and norms, which are left
alone here. Steps are of one window of 128 tokens, Adam moves the logarithm of each scale: deltas here are smaller than
any absolute rate that suits larger models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.frontier.judge import ATTENTION
from benchmarks.frontier.work import Work
from mfs_decompose.fidelity.model import load_model, predict_windows
from mfs_decompose.fidelity.settings import EvalSettings
from mfs_decompose.fidelity.windows import Window

WINDOW, RATE, BETAS = 128, 0.03, (0.9, 0.95)


def distill_scales(work: Work, variant: Path, windows: Sequence[Window], steps: int) -> list[float]:
    """Fill `work.scales`, starting from mean magnitudes; returns the loss of each step."""
    model = load_model(variant, "original", EvalSettings(attention=ATTENTION))
    targets = [predict_windows(model, [window])[0].clone() for window in windows]
    network = model.network.requires_grad_(False)
    modules, scales = dict(network.named_modules()), {}
    for name in work.linears:
        delta = work.delta(name)
        scales[name] = delta.abs().mean().clamp(min=1e-12).log().requires_grad_()
        module = modules[name.removesuffix(".weight")]
        module.weight.copy_(work.base[name])
        module.register_forward_hook(partial(_add, torch.where(delta >= 0, 1.0, -1.0), scales[name]))
    optimiser = torch.optim.Adam(scales.values(), lr=RATE, betas=BETAS)
    losses = []
    with torch.enable_grad():
        for step in range(steps):
            losses.append(_step(network, windows[step % len(windows)], targets[step % len(windows)], optimiser))
    work.scales.update({name: float(scale.detach().exp()) for name, scale in scales.items()})
    return losses


def _add(signs_OI: torch.Tensor, log_scale: torch.Tensor, _: Any, given: tuple[Any, ...], out: Any) -> Any:
    """What a linear layer gives, and the scaled signs beside its weight."""
    return out + log_scale.exp() * torch.nn.functional.linear(given[0], signs_OI)


def _step(network: Callable[..., Any], window: Window, target_TV: torch.Tensor, optimiser: Any) -> float:
    logits = network(input_ids=torch.tensor([window.inputs]), use_cache=False).logits[0, -len(window.targets) :]
    loss = (logits - target_TV).square().mean()
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    return float(loss.detach())
