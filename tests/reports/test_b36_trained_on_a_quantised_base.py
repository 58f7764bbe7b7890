"""B36: an adapter trained against a 4-bit base, on the 16-bit one: merged, with a warning."""

from __future__ import annotations

from pathlib import Path

import pytest
from adapter_cases import Q, factors, merge, toy_base, write
from adapters import merged_weights


@pytest.mark.parametrize(
    ("name", "warned"),
    [
        ("unsloth/llama-3-8b-bnb-4bit", True),
        ("someone/Model-GPTQ", True),
        ("org/model-AWQ", True),
        ("org/model_8bit", True),
        ("meta-llama/Llama-3.1-8B", False),
        ("org/rabbit-4bits-of-advice", False),
        ("", False),
    ],
)
def test_by_the_name_of_its_base(tmp_path: Path, name: str, warned: bool) -> None:
    _, found = merge(tmp_path, toy_base(), factors(Q, 12, 8, 4), {"base_model_name_or_path": name})
    notes = [note for note in found.warnings if "trained on a quantised base" in note]
    assert bool(notes) == warned
    assert all(name in note for note in notes)


@pytest.mark.parametrize(
    ("card", "warned"),
    [("- load_in_4bit: True\n", True), ('"load_in_8bit": true', True), ("- load_in_4bit: False\n", False), ("", False)],
)
def test_by_its_card(tmp_path: Path, card: str, warned: bool) -> None:
    write(tmp_path, toy_base(), factors(Q, 12, 8, 4), {})
    (tmp_path / "adapter" / "README.md").write_text("The following config was used:\n" + card)
    _, found = merged_weights(tmp_path / "adapter", tmp_path / "base")
    assert any("README.md says load_in_" in note for note in found.warnings) == warned
