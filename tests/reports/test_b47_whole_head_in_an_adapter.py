"""B47: whole weights inside an adapter are legal: they replace the base's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from adapter_cases import Q, delta, draw, factors, merge, refuse, toy_base

HEAD = "base_model.model.lm_head"


@pytest.mark.parametrize("end", [".weight", ".modules_to_save.weight", ".modules_to_save.default.weight"])
def test_a_head_beside_a_lora(tmp_path: Path, end: str) -> None:
    base, tensors = toy_base(), factors(Q, 12, 8, 4) | {HEAD + end: draw("h", 512, 8)}
    weights, found = merge(tmp_path, base, tensors, {"modules_to_save": ["lm_head"]})
    assert torch.equal(weights["lm_head.weight"], tensors[HEAD + end].double())
    torch.testing.assert_close(weights[f"{Q}.weight"], base[f"{Q}.weight"].double() + delta(tensors, Q, 2.5))
    assert found.tensors["lm_head.weight"].params == {"replace": HEAD + end}
    assert found.notes[0] == "adapter: changes 2 of the base's 6 tensors"


def test_an_adapter_of_whole_weights_alone(tmp_path: Path) -> None:
    tensors = {HEAD + ".weight": draw("h", 512, 8)}
    weights, _ = merge(tmp_path, toy_base(), tensors, {"modules_to_save": ["lm_head"]})
    assert torch.equal(weights["lm_head.weight"], tensors[HEAD + ".weight"].double())


def test_a_head_that_the_base_has_not(tmp_path: Path) -> None:
    tensors = factors(Q, 12, 8, 4) | {"base_model.model.score.weight": draw("s", 3, 8).to(torch.float16)}
    weights, found = merge(tmp_path, toy_base(), tensors, {"modules_to_save": ["classifier", "score"]})
    assert torch.equal(weights["score.weight"], tensors["base_model.model.score.weight"].double())
    score = found.tensors["score.weight"]
    assert (score.kind, score.base, score.common_rows, score.spec.dtype) == ("only_in_variant", None, 0, "F16")
    assert any("brings score.weight" in note for note in found.notes)


def test_whole_weights_that_nothing_accounts_for(tmp_path: Path) -> None:
    tensors = factors(Q, 12, 8, 4) | {"base_model.model.something.weight": draw("s", 3, 8)}
    assert "not there: something.weight" in refuse(tmp_path, toy_base(), tensors).message
