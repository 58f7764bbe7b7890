"""The runtime on a real family, SmolLM2-135M, with every codec: tokens and logits of fp32 restores in transformers.

    MFS_FAMILY=FOLDER make test-slow

FOLDER is that of test_real_family.py. Layers take turns at the codecs, and the artifacts under a budget their own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch

from mfs_decompose.pipeline.decompose import decompose
from mfs_decompose.pipeline.request import DecomposeRequest
from mfs_decompose.pipeline.restore import RestoreOptions, restore
from mfs_decompose.recipe.load import load_recipe
from mfs_decompose.runtime.engine import Engine
from mfs_decompose.runtime.load import load_family
from mfs_decompose.runtime.loaded import LoadedFamily
from mfs_decompose.runtime.requests import Request, SamplingParams
from mfs_decompose.runtime.scheduler import Limits

FAMILY = os.environ.get("MFS_FAMILY", "")
VARIANTS = {"code": "code", "math": "math", "lora": "lora-merged"}
LATER = {"legal": "legal", "heavy": "heavy"}
"""Taken where they are there."""

CODECS: tuple[Mapping[str, object], ...] = (
    {"codec": "auto"},
    {"codec": "lowrank", "factors": "banded"},
    {"codec": "lowrank", "factors": "int4", "rank": 24},
    {"codec": "lowrank", "factors": "int8", "rank": 24},
    {"codec": "lowrank", "factors": "bf16", "rank": 24},
    {"codec": "sparse", "values": "bf16"},
    {"codec": "sparse", "values": "int8"},
    {"codec": "sign", "scale": "group"},
    {"codec": "sign", "scale": "row"},
    {"codec": "ternary"},
    {"codec": "kbit", "bits": 2},
    {"codec": "kbit", "bits": 3},
    {"codec": "kbit", "bits": 4},
    {"codec": "deadzone", "step": 1e-4},
    {"codec": "rowsparse", "rows": 64},
    {"codec": "lowrank", "factors": "int4", "rank": 16, "residual": {"codec": "kbit", "bits": 2}},
    {"codec": "lossless"},
    {"codec": "lora-exact"},
    {"codec": "raw"},
)
NEW = 24
TIE = 1e-4

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FAMILY, reason="MFS_FAMILY names no folder with the 135M family"),
]


@dataclass
class Real:
    """An artifact, its variants, and fp32 restores of them."""

    artifact: Path
    ids: Sequence[str]
    scratch: Path

    @cached_property
    def family(self) -> LoadedFamily:
        return load_family(self.artifact, base=f"{FAMILY}/base")

    def alone(self, id: str) -> Any:
        from transformers import AutoModelForCausalLM

        folder = self.scratch / id
        if not folder.exists():
            restore(self.artifact, [id], folder, RestoreOptions(dtype="float32"), base=f"{FAMILY}/base")
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        return model.eval().requires_grad_(False)

    def encode(self, text: str) -> list[int]:
        from transformers import AutoTokenizer

        return list(AutoTokenizer.from_pretrained(f"{FAMILY}/base").encode(text))


def every_codec() -> dict[str, object]:
    rules = [{"match": f"*.layers.{layer}.*_proj.weight", **CODECS[layer % len(CODECS)]} for layer in range(30)]
    return {"objective.budget": "70%", "deltas.rules": rules}


RECIPES: Mapping[str, tuple[str | None, Mapping[str, object]]] = {
    "every": (None, every_codec()),
    "balanced": (None, {}),
    "serving": ("serving", {}),
    "exact": (None, {"deltas.default.codec": "lossless"}),
}


@pytest.fixture(scope="module", params=list(RECIPES))
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Real:
    root = tmp_path_factory.mktemp(f"real-{request.param}")
    name, changes = RECIPES[request.param]
    found = VARIANTS | {id: folder for id, folder in LATER.items() if (Path(FAMILY) / folder).is_dir()}
    places = {id: str(Path(FAMILY) / folder) for id, folder in found.items()}
    recipe = load_recipe(name, {"base.store": "reference", **changes})
    decompose(DecomposeRequest(places, root / "art", recipe, base=f"{FAMILY}/base", device="cpu"))
    return Real(root / "art", tuple(found), root / "alone")


def test_a_shuffled_batch_answers_as_every_variant_alone(real: Real) -> None:
    """Prompts of 3 to 300 tokens, prefilled in chunks, a long prefix shared by some; ties are counted."""
    family = real.family
    engine = Engine(family.model, family.slot, family.infos(), limits=Limits(tokens=96), kv_tokens=8192)
    prefix = real.encode("def solve(values):\n    # Sum up what is even, and leave the rest.\n" * 12)
    short = [real.encode(text) for text in ("The court held", "Q: 17 apples and 5 more are", "import os\n\n", "Once")]
    ids = ["base", *real.ids]
    asked = [(ids[at % len(ids)], short[at % len(short)]) for at in range(2 * len(ids))]
    asked += [(id, prefix + short[at % 3]) for at, id in enumerate(ids)]
    order = torch.randperm(len(asked), generator=torch.Generator().manual_seed(5)).tolist()
    wanted = SamplingParams(max_tokens=NEW, ignore_stop_ids=True)
    handles = {at: engine.submit(Request(asked[at][0], list(asked[at][1]), wanted)) for at in order}
    engine.run_until_done()
    ties = 0
    for id in ids:
        model = real.alone(id)
        for at, handle in handles.items():
            if asked[at][0] != id:
                continue
            prompt = asked[at][1]
            with torch.inference_mode():
                logits = model(input_ids=torch.tensor([[*prompt, *handle.tokens]])).logits[0, len(prompt) - 1 : -1]
            best = logits.max(dim=-1).values
            chosen = logits.gather(1, torch.tensor(handle.tokens)[:, None])[:, 0]
            assert len(handle.tokens) == NEW
            assert bool((best - chosen < TIE).all()), f"{id} differs by {float((best - chosen).max()):.2g}"
            ties += int((best > chosen).sum())
    print(f"{len(asked)} answers of {NEW} tokens, {ties} ties within {TIE}")  # noqa: T201


def test_logits_are_within_1e_6_of_a_restore(real: Real) -> None:
    text = real.encode("def mean(values):\n    return sum(values) / len(values)\n\nThe mean of 4, 8 and 12 is 8. " * 6)
    ids = torch.tensor([text])
    for id in real.ids:
        with torch.inference_mode():
            wanted = real.alone(id)(input_ids=ids).logits[0].double().log_softmax(-1)
            with real.family.use(id) as model:
                found = model(input_ids=ids).logits[0].double().log_softmax(-1)
        assert float((wanted.exp() * (wanted - found)).sum(-1).mean()) <= 1e-6
