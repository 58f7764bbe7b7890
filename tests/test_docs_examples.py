"""The Python blocks of docs/python.md run as they stand, one after another."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import read_weights
from example_folder import fill_example_folder

import mfs_decompose

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "python.md"
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks_of(page: Path) -> Iterator[tuple[int, str]]:
    """The code of every ```python block, with the number of its first line on the page."""
    text = page.read_text(encoding="utf-8")
    for match in _BLOCK.finditer(text):
        yield text.count("\n", 0, match.start(1)) + 1, match[1]


def run_block(line: int, code: str, names: dict[str, Any]) -> None:
    """Run a block in `names`; a traceback shows the line of the page."""
    exec(compile("\n" * (line - 1) + code, str(PAGE), "exec"), names)


def test_the_blocks_of_the_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(fill_example_folder(tmp_path))
    names: dict[str, Any] = {}
    said = []
    for line, code in blocks_of(PAGE):
        run_block(line, code, names)
        said.append(capsys.readouterr().out)
    assert [bool(text) for text in said] == ["print(" in code for _, code in blocks_of(PAGE)]

    # What the first block promises.
    assert names["report"].written
    assert [variant.id for variant in names["report"].variants] == ["code", "math"]
    assert all(0 < variant.footprint <= 0.05 for variant in names["report"].variants)
    assert names["restored"].checked
    assert read_weights(tmp_path / "math-restored").keys() == read_weights(tmp_path / "math").keys()
    assert [line.split(":")[0] for line in said[0].splitlines()[:2]] == ["code", "math"]
    assert "code served" in {line.split(":")[0] for line in said[0].splitlines()}

    # What the others promise.
    kept, given = read_weights(tmp_path / "math-kept"), read_weights(tmp_path / "math")
    assert kept.keys() == given.keys() and all(torch.equal(kept[name], given[name]) for name in given)
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "lora" / file).read_bytes() == (tmp_path / "tuned-lora" / file).read_bytes()
    assert read_weights(tmp_path / "lora-merged").keys() == read_weights(tmp_path / "base").keys()
    exact, original = read_weights(tmp_path / "math-exact"), read_weights(tmp_path / "math")
    assert exact.keys() == original.keys()
    assert all(torch.equal(exact[name], original[name]) for name in original)
    assert names["document"]["schema"] == "mfs.eval/1"
    assert [result["through"] for result in names["document"]["results"]] == ["served"]
    assert any("did you mean 'math'" in text and "(exit code 2)" in text for text in said)
    assert not (tmp_path / "nowhere").exists()
    assert {weight.dtype for weight in read_weights(tmp_path / "code-restored").values()} == {torch.float32}


def test_the_page_names_all_of_the_api_and_the_readme_names_the_page() -> None:
    code = "".join(code for _, code in blocks_of(PAGE))
    public = set(mfs_decompose.__all__) - {"__version__"}
    assert all(re.search(rf"\b{name}[(.]", code) for name in public)
    assert "(docs/python.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
