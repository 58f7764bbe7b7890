"""The main path on a device of small memory: the same artifact, byte for byte, whatever fits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from fake_device import FakeDevice
from pipeline_runs import NORM, Tensors, contents, moved, run, toy

from mfs_decompose.errors import UsageError
from mfs_decompose.linalg.device_batches import Lane
from mfs_decompose.pipeline import device, reading, stack, survey
from mfs_decompose.pipeline.device import choose_device, crowded_out
from mfs_decompose.plan import units

BATCHED, LARGE = (31, 23), (120, 41)
SIZE = BATCHED[0] * BATCHED[1]


def tensors() -> Tensors:
    """Four matrices of one shape, a stack of five, a large one, and a norm."""
    generator = torch.Generator().manual_seed(3)
    shapes = {f"layers.{at}.weight": BATCHED for at in range(4)}
    shapes |= {"experts.weight": (5, 19, 27), "large.weight": LARGE, NORM: (31,)}
    return {name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in shapes.items()}


@pytest.fixture
def family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, dict[str, Path]]:
    """With the large one in blocks of five rows, and at most five matrices in a batch."""
    monkeypatch.setattr(units, "BLOCK_ELEMENTS", 5 * SIZE)
    monkeypatch.setattr(reading, "ROW_BLOCK_ELEMENTS", 5 * LARGE[1])
    base = tensors()
    return toy(tmp_path / "base", base), {id: toy(tmp_path / id, moved(base, seed)) for seed, id in enumerate("ab", 1)}


def use(monkeypatch: pytest.MonkeyPatch, lane: Lane) -> None:
    for module in (survey, stack):
        monkeypatch.setattr(module, "lane_of", lambda wanted: lane)


RECIPES = [{"objective.rank": 4}, {"objective.budget": "10%"}, {"deltas.default.codec": "sparse"}]


@pytest.mark.parametrize("recipe", RECIPES, ids=["rank", "budget", "sparse"])
@pytest.mark.parametrize("capacity", [10**6, LARGE[0] * LARGE[1] - 1, 2 * SIZE, SIZE])
def test_what_fits_changes_no_byte(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: tuple[Path, dict[str, Path]],
    recipe: dict[str, object],
    capacity: int,
) -> None:
    run(tmp_path / "plain", *family, recipe)
    fake = FakeDevice(capacity)
    lane = Lane("cpu", fake)
    use(monkeypatch, lane)
    run(tmp_path / "small", *family, recipe, threads=3)
    assert contents(tmp_path / "small") == contents(tmp_path / "plain")
    assert fake.used == 0 and 0 < fake.most <= capacity
    assert (lane.halvings > 0) == (capacity < 5 * SIZE)
    assert lane.left_to_cpu == 0
    # With room enough, every matrix and every block is copied once.
    total = sum(weight.numel() for name, weight in tensors().items() if name != NORM)
    assert sum(fake.sizes) == 2 * total if capacity == 10**6 else sum(fake.sizes) >= 2 * total


def test_without_any_room_the_cpu_does_it_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: tuple[Path, dict[str, Path]]
) -> None:
    run(tmp_path / "plain", *family, RECIPES[0])
    lane = Lane("cpu", FakeDevice(100))
    use(monkeypatch, lane)
    run(tmp_path / "none", *family, RECIPES[0])
    assert contents(tmp_path / "none") == contents(tmp_path / "plain")
    assert lane.left_to_cpu == 2 * (4 + 5 + 1)
    monkeypatch.setattr("mfs_decompose.linalg.device_batches.lane_of", lambda wanted: lane)
    said = crowded_out("cuda:0")
    assert said is not None and said.startswith("20 matrices were factorised on the CPU for want of memory on cuda:0")
    assert crowded_out("cuda:0") is None
    lane.left_to_cpu = 1
    assert (crowded_out("cuda:0") or "").startswith("1 matrix was factorised")


# The choice.


@pytest.mark.parametrize("wanted", ["cuda", "cuda:0", "cuda:3"])
def test_a_machine_without_cuda_says_so_in_a_sentence(monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError) as caught:
        choose_device(wanted)
    built = "" if torch.version.cuda else r" \(this torch, \S+, is built without CUDA\)"
    assert re.fullmatch(
        rf"expected {wanted} to be one of this machine's CUDA devices, found 0{built}", str(caught.value)
    )
    assert caught.value.hint == "Use --device cpu."


def test_a_device_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device.choose_device("cuda:1") == "cuda:1"
    assert device.choose_device("auto") == "cuda:0"
    with pytest.raises(UsageError, match="found 2") as caught:
        choose_device("cuda:2")
    assert caught.value.hint == "Use --device cuda:1 or a smaller index."
