"""Beside a shared delta a variant stores what makes it itself, not what the shared one leaves of itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import read_weights
from interruptions import PASS_1, Interrupting, partial
from pipeline_runs import BASE, Tensors, back, codec_of, contents, manifest, run, toy
from shared_families import DOWN, EMBED, UP, base_tensors

from mfs_decompose.artifact.verify import verify
from mfs_decompose.pipeline import shared_survey
from mfs_decompose.pipeline.shared_survey import open_whole
from mfs_decompose.plan import shared_sizes

RECIPE = {"base.mode": "shared", "objective.budget": "3%"}
NAMES = (UP, DOWN, EMBED)
Family = tuple[Path, dict[str, Path]]


def noisy(root: Path, ids: str = "abc") -> Family:
    """All learnt the same: some directions and much noise; what each learnt is weaker than any direction of that."""
    base, generator = base_tensors(), torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    between = {
        name: w.float() + 0.02 * (draw(w.shape[0], 6) @ draw(6, w.shape[1]) + draw(*w.shape))
        for name, w in base.items()
        if w.dim() == 2
    }
    folders = {}
    for id in ids:
        own: Tensors = dict(base)
        for name, weight in between.items():
            own[name] = weight + 0.006 * draw(weight.shape[0], 2) @ draw(2, weight.shape[1])
        folders[id] = toy(root / id, {name: weight.to(torch.float32) for name, weight in own.items()})
    return toy(root / BASE, {name: weight.to(torch.float32) for name, weight in base.items()}), folders


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return noisy(tmp_path_factory.mktemp("noisy"))


@pytest.fixture(scope="module")
def art(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("own") / "art"
    run(out, *family, RECIPE)
    return out


def own_errors(art: Path, family: Family, scratch: Path) -> tuple[float, float]:
    """Parts that are lost, squared: of what makes variants differ, and of what they share."""
    weights = {id: read_weights(folder) for id, folder in family[1].items()}
    served = {id: back(art, id, scratch / id, dtype="float32")[1] for id in weights}
    base = read_weights(family[0])
    lost, all_own, missed, all_shared = 0.0, 0.0, 0.0, 0.0
    for name in NAMES:
        wanted = torch.stack([one[name] for one in weights.values()]).double()
        found = torch.stack([one[name] for one in served.values()]).double()
        apart, kept = wanted - wanted.mean(0), found - found.mean(0)
        lost, all_own = lost + float((apart - kept).square().sum()), all_own + float(apart.square().sum())
        common, stored = wanted.mean(0) - base[name].double(), found.mean(0) - base[name].double()
        missed += float((common - stored).square().sum())
        all_shared += float(common.square().sum())
    return lost / all_own, missed / all_shared


def test_what_makes_a_variant_itself_is_kept_though_it_is_the_weakest(
    art: Path, family: Family, tmp_path: Path
) -> None:
    own, shared = own_errors(art, family, tmp_path)
    assert {codec_of(art, id, name) for id in family[1] for name in NAMES} == {"sum(shared+banded)"}
    assert own < 0.1 < shared
    assert verify(art, "values").ok


def test_plain_energy_would_spend_its_bytes_on_what_is_shared(
    art: Path, family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_sizes, "OWN", 0.0)
    run(tmp_path / "plain", *family, RECIPE)
    own, shared = own_errors(art, family, tmp_path / "own")
    plain_own, plain_shared = own_errors(tmp_path / "plain", family, tmp_path / "other")
    assert own < 0.5 * plain_own and plain_shared <= shared
    both = [manifest(folder)["shared"]["bytes"] for folder in (art, tmp_path / "plain")]
    assert both[0] < both[1]


def test_the_record_says_what_the_stored_delta_misses_of_all_that_is_common(art: Path) -> None:
    for facts in manifest(art)["shared"]["tensors"].values():
        assert facts["energy"] > facts["error"] > 0.05 * facts["energy"]


def test_the_budget_is_kept(art: Path, family: Family) -> None:
    for variant in manifest(art)["variants"]:
        whole = sum(weight.numel() * 4 for weight in read_weights(family[1][variant["id"]]).values())
        files = sum(manifest(art)["files"][name]["size"] for name in variant["shards"])
        assert files + variant["shared_bytes"] <= 0.03 * whole


@pytest.mark.parametrize("damage", ["changed", "gone"])
def test_what_is_common_is_found_again_where_its_scratch_was_lost(
    art: Path, family: Family, tmp_path: Path, damage: str
) -> None:
    out = tmp_path / "art"
    with pytest.raises(KeyboardInterrupt):
        run(out, *family, RECIPE, Interrupting(PASS_1, 1))
    kept = sorted((partial(out) / "scratch").glob("shared-common-*.bin"))
    assert len(kept) == 3
    if damage == "gone":
        kept[0].unlink()
    else:
        kept[0].write_bytes(b"\x01" + kept[0].read_bytes()[1:])
    run(out, *family, RECIPE)
    assert contents(out) == contents(art)
    assert not partial(out).exists()


def test_a_scratch_file_is_written_before_it_is_mapped(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk then is an error; through a mapping it would be a signal that ends the process."""
    sizes: list[bool] = []

    def look(path: Path, shape: tuple[int, int]) -> torch.Tensor:
        sizes.append(path.exists() and path.stat().st_size == 2 * shape[0] * shape[1])
        return open_whole(path, shape)

    monkeypatch.setattr(shared_survey, "open_whole", look)
    run(tmp_path / "art", *family, RECIPE)
    assert sizes and all(sizes)
