from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fidelity_models import make_model
from safetensors.torch import save_file

from mfs_decompose.errors import ResourceShortage
from mfs_decompose.fidelity import residency
from mfs_decompose.fidelity.residency import ModelSize, available_memory, group_rivals, measure_model
from mfs_decompose.fidelity.settings import EvalSettings

SMALL = EvalSettings(window=2, batch_size=1)


def test_size_is_elements_times_the_compute_itemsize(family: dict[str, Path], tmp_path: Path) -> None:
    model = make_model()
    parameters = sum(weight.numel() for weight in model.parameters())
    assert measure_model(family["original"], 4) == ModelSize(4 * parameters, 131)  # bf16 on disk
    assert measure_model(family["near"], 2) == ModelSize(2 * parameters, 131)  # float32 on disk
    model.save_pretrained(tmp_path / "sharded", max_shard_size="60KB")
    assert measure_model(tmp_path / "sharded", 4) == ModelSize(4 * parameters, 131)


def test_only_shards_of_the_index_count(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path, max_shard_size="60KB")
    expected = measure_model(tmp_path, 4)
    save_file({"again": torch.ones(9999, 3)}, tmp_path / "consolidated.safetensors")
    assert measure_model(tmp_path, 4) == expected


def test_scalars_and_unreadable_folders_do_not_stop(tmp_path: Path) -> None:
    assert measure_model(tmp_path, 4) == ModelSize(0, 0)
    assert measure_model(tmp_path / "nowhere", 4) == ModelSize(0, 0)
    save_file({"scalar": torch.tensor(1.0), "matrix": torch.ones(7, 5)}, tmp_path / "a.safetensors")
    (tmp_path / "b.safetensors").write_bytes(b"junk")
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    assert measure_model(tmp_path, 4) == ModelSize(4 * 36, 7)


def test_all_together_if_they_fit_else_one_at_a_time_else_a_shortage() -> None:
    original = ModelSize(1000, 10)
    rivals = {"served": ModelSize(1000, 10), "restored": ModelSize(500, 10), "base": ModelSize(900, 10)}
    logits = 2 * 2 * 10 * 4
    all_of_them, largest_pair = int(1.1 * (3400 + logits)), int(1.1 * (2000 + logits))
    assert group_rivals(original, rivals, SMALL, all_of_them) == (("served", "restored", "base"),)
    alone = (("served",), ("restored",), ("base",))
    assert group_rivals(original, rivals, SMALL, all_of_them - 1) == alone
    assert group_rivals(original, rivals, SMALL, largest_pair) == alone
    with pytest.raises(ResourceShortage, match=r"the served checkpoint in memory together: expected 2\.38 kB, found"):
        group_rivals(original, rivals, SMALL, largest_pair - 1)


def test_wide_vocabularies_and_batches_need_room_for_logits() -> None:
    size = ModelSize(1000, 250_000)
    settings = EvalSettings(window=512, batch_size=4)
    needed = int(1.1 * (2000 + 2 * 4 * 512 * 250_000 * 4))
    assert group_rivals(size, {"served": size}, settings, needed)
    with pytest.raises(ResourceShortage):
        group_rivals(size, {"served": size}, settings, needed - 1)


def test_memory_of_this_machine() -> None:
    assert 0 < available_memory() < 2**50


def test_system_memory_reads_what_is_available(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 900 kB\nMemAvailable:     123 kB\n")
    assert residency._system_memory(meminfo) == 123 * 1024
    assert residency._system_memory(tmp_path / "nowhere") > 2**20


@pytest.mark.parametrize(
    ("names", "prefix"),
    [
        (("memory.max", "memory.current", "memory.stat"), ""),
        (("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"), "total_"),
    ],
)
def test_container_limit_counts_cached_files_as_free(tmp_path: Path, names: tuple[str, ...], prefix: str) -> None:
    (tmp_path / "memory").mkdir()
    stat = f"anon 1\n{prefix}inactive_file 30\n{prefix}active_file 4\n"
    for name, content in zip(names, ("1000\n", "700\n", stat), strict=True):
        (tmp_path / name).write_text(content)
    assert residency._cgroup_memory(tmp_path) == [1000 - 700 + 34]


def test_no_container_limit(tmp_path: Path) -> None:
    assert residency._cgroup_memory(tmp_path) == []
    for name, content in (("memory.max", "max"), ("memory.current", "5"), ("memory.stat", "inactive_file 1")):
        (tmp_path / name).write_text(content)
    assert residency._cgroup_memory(tmp_path) == []
