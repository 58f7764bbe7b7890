"""Nothing of an adapter is ever silently dropped: each tensor is used by what is merged, or the adapter is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import write_adapter
from checkpoints import random_checkpoint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mfs_decompose.codec.adapter_params import read_adapter_params
from mfs_decompose.errors import SourceIncompatible
from mfs_decompose.source.adapter import Merge, resolve_adapter
from mfs_decompose.source.adapter_keys import sort_keys
from mfs_decompose.source.checkpoint import Checkpoint, open_checkpoint

Q = "base_model.model.m.layers.0.q"
BASE = {
    "m.layers.0.q.weight": torch.zeros(6, 4),
    "m.layers.0.q.bias": torch.zeros(6),
    "m.layers.1.q.weight": torch.zeros(6, 4),
    "m.norm.weight": torch.zeros(4),
    "m.embed_tokens.weight": torch.zeros(9, 4),
    "lm_head.weight": torch.zeros(9, 4),
    "m.layers.0.count": torch.zeros(3, dtype=torch.int64),
    "m.layers.1.coded.weight": torch.zeros(6, 4, dtype=torch.int8),
}
ADAPTER = {
    f"{Q}.lora_A.weight": torch.zeros(2, 4),
    f"{Q}.lora_B.weight": torch.zeros(6, 2),
    f"{Q}.base_layer.bias": torch.zeros(6),
    "base_model.model.m.embed_tokens.lora_embedding_A": torch.zeros(2, 9),
    "base_model.model.m.embed_tokens.lora_embedding_B": torch.zeros(4, 2),
    "base_model.model.m.norm.weight": torch.zeros(4),
    "base_model.model.lm_head.token_adapter.trainable_tokens_delta": torch.zeros(3, 4),
}
CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 2,
    "lora_alpha": 5,
    "bias": "lora_only",
    "modules_to_save": ["norm"],
    "trainable_token_indices": {"lm_head": [8, 0, 4]},
}


def opened(root: Path, tensors: dict[str, torch.Tensor], **fields: Any) -> tuple[Checkpoint, Checkpoint]:
    if not (root / "base").exists():
        random_checkpoint(root / "base", BASE)
    write_adapter(root / "adapter", tensors, {**CONFIG, **fields})
    return open_checkpoint(root / "adapter", "a"), open_checkpoint(root / "base", "base")


def refuse(root: Path, tensors: dict[str, torch.Tensor], gist: str, **fields: Any) -> SourceIncompatible:
    with pytest.raises(SourceIncompatible, match=gist) as caught:
        resolve_adapter(*opened(root, tensors, **fields))
    assert caught.value.exit_code == 12
    assert caught.value.hint
    return caught.value


def used(merge: Merge) -> set[str]:
    """Names of the adapter's tensors that the merged ones are made from."""
    found = [tensor.params for tensor in merge.tensors.values() if tensor.params is not None]
    return {name for params in found for name in read_adapter_params(params, "w").tensors}


def test_all_of_the_honest_one_is_used(tmp_path: Path) -> None:
    merge = resolve_adapter(*opened(tmp_path, ADAPTER))
    assert used(merge) == set(ADAPTER)
    assert list(merge.tensors) == sorted(BASE)
    changed = [name for name, tensor in merge.tensors.items() if tensor.params is not None]
    assert changed == [
        "lm_head.weight",
        "m.embed_tokens.weight",
        "m.layers.0.q.bias",
        "m.layers.0.q.weight",
        "m.norm.weight",
    ]
    for name, tensor in merge.tensors.items():
        assert (tensor.kind, tensor.common_rows) == ("same", tensor.spec.rows)
        assert tensor.spec == tensor.base
        assert tensor.spec.name == name


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_tensor_is_used_or_the_adapter_is_refused(tmp_path: Path, data: st.DataObject) -> None:
    tensors = dict(ADAPTER)
    for _ in range(data.draw(st.integers(1, 2), "mutations")):
        name = data.draw(st.sampled_from(sorted(tensors)), "tensor")
        value = tensors.pop(name)
        how = data.draw(st.sampled_from(["drop", "rename", "respell", "resize", "retype", "flatten"]), "how")
        if how == "rename":
            name = data.draw(st.sampled_from([name.replace("m.", "x."), name + ".more", "extra.weight"]))
        if how == "respell":
            name = data.draw(st.sampled_from([name.removeprefix("base_model.model."), name.replace("base_layer.", "")]))
        if how == "resize":
            grown = [size + data.draw(st.integers(-1, 2)) for size in value.shape]
            value = torch.zeros(grown)
        if how == "retype":
            value = value.to(data.draw(st.sampled_from([torch.bfloat16, torch.int64, torch.float8_e5m2])))
        if how == "flatten":
            value = value.reshape(-1)
        if how != "drop":
            tensors[name] = value
    if not tensors:
        return
    adapter, base = opened(tmp_path, tensors)
    try:
        merge = resolve_adapter(adapter, base)
    except SourceIncompatible as error:
        assert error.hint
        assert "\n" not in error.message
        return
    assert used(merge) | set(sort_keys(adapter.tensors, "").copies) == set(tensors)


class TestByName:
    def test_an_adapter_on_an_adapter(self, tmp_path: Path) -> None:
        adapter, _ = opened(tmp_path, ADAPTER)
        with pytest.raises(SourceIncompatible, match="expected a whole checkpoint as the base, found an adapter"):
            resolve_adapter(adapter, adapter)

    def test_a_base_of_other_values(self, tmp_path: Path) -> None:
        name = "m.layers.1.coded"
        tensors = {f"{name}.lora_A.weight": torch.zeros(2, 4), f"{name}.lora_B.weight": torch.zeros(6, 2)}
        assert "I8" in refuse(tmp_path, tensors, f"it changes {name}.weight, which the base has as I8").message

    def test_nothing_matches(self, tmp_path: Path) -> None:
        tensors = {"x.lora_A.weight": torch.zeros(2, 4), "x.lora_B.weight": torch.zeros(6, 2)}
        refuse(tmp_path, tensors, "none of 1 modules of the adapter in .* are in the base; not there: x")

    def test_a_lora_and_tokens_on_one_tensor(self, tmp_path: Path) -> None:
        stem = "base_model.model.lm_head"
        more = {f"{stem}.lora_A.weight": torch.zeros(2, 4), f"{stem}.lora_B.weight": torch.zeros(9, 2)}
        refuse(tmp_path, ADAPTER | more, "trainable_token_indices replaces rows of the same tensor")

    def test_both_spellings_of_a_bias(self, tmp_path: Path) -> None:
        refuse(tmp_path, ADAPTER | {f"{Q}.bias": torch.zeros(6)}, "a second time under another spelling")

    def test_an_unknown_method(self, tmp_path: Path) -> None:
        refuse(tmp_path, ADAPTER, "found peft_type 'LOHA'", peft_type="LOHA")

    def test_tokens_of_another_number(self, tmp_path: Path) -> None:
        refuse(tmp_path, ADAPTER, "for 2 tokens", trainable_token_indices={"lm_head": [8, 0]})

    def test_nesting_without_parameters(self, tmp_path: Path) -> None:
        stem = "base_model.model.m.layers.1.q.base_layer"
        more = {f"{stem}.lora_A.weight": torch.zeros(2, 4), f"{stem}.lora_B.weight": torch.zeros(6, 2)}
        refuse(tmp_path, ADAPTER | more, r"not there: m\.layers\.1\.q\.base_layer")


def test_a_dry_resolution_needs_no_torch(tmp_path: Path) -> None:
    import subprocess
    import sys

    opened(tmp_path, ADAPTER)
    program = "import sys\nfrom mfs_decompose.source.checkpoint import open_checkpoint as o\n"
    program += "from mfs_decompose.source.adapter import resolve_adapter as r\n"
    program += "print(len(r(o(sys.argv[1], 'a'), o(sys.argv[2], 'b')).tensors), 'torch' in sys.modules)"
    words = [sys.executable, "-c", program, str(tmp_path / "adapter"), str(tmp_path / "base")]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout.split() == ["8", "False"]
