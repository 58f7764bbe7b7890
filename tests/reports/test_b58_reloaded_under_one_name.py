"""B58: weights loaded anew under an old name were answered from the old ones' cache: what is cached has a digest."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from checkpoints import fine_tune, make_llama

sys.path.append(str(Path(__file__).parents[1] / "runtime"))

from runtime_families import store


def test_new_weights_bring_a_new_digest(tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base", seed=1)
    tuned = [fine_tune(base, tmp_path / f"tuned-{seed}", seed=seed) for seed in (2, 3)]
    first, again, other = (
        store(tmp_path, base, {"math": folder}, name=name).load()
        for folder, name in ((tuned[0], "a"), (tuned[0], "b"), (tuned[1], "c"))
    )
    assert first.variant("math").digest == again.variant("math").digest
    assert first.variant("math").digest != other.variant("math").digest
    assert first.variant("math").digest != first.variant("base").digest
    with first.use("math"), torch.inference_mode():
        one = first.model(input_ids=torch.tensor([[5, 6, 7]]), use_cache=False).logits
    with other.use("math"), torch.inference_mode():
        assert not torch.equal(one, other.model(input_ids=torch.tensor([[5, 6, 7]]), use_cache=False).logits)
