from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fidelity_models import RecordingSink, StoredFamily
from safetensors.torch import load_file, save_file

from mfs_decompose.errors import SourceIncompatible
from mfs_decompose.events import NullSink
from mfs_decompose.fidelity import self_check
from mfs_decompose.fidelity.artifact_drift import DriftRequest, measure_artifact
from mfs_decompose.fidelity.evaluate import measure_drift
from mfs_decompose.fidelity.self_check import MARGIN, SelfCheck, SelfCheckFailed, check_measurement, refuse_unseen
from mfs_decompose.fidelity.settings import EvalSettings
from mfs_decompose.fidelity.text import Corpus
from mfs_decompose.pipeline.decompose import decompose
from mfs_decompose.pipeline.request import DecomposeRequest
from mfs_decompose.recipe.load import load_recipe

PROSE = Corpus(
    "prose", tuple(f"Line {i}: the quick brown fox jumps over {i * i} lazy dogs, and sleeps." for i in range(60))
)
CODE = Corpus("code", ("for i in range(9): total += i * i",))
CORRUPTIONS = ["layers-swapped", "delta-doubled", "delta-of-another-variant"]


def asked(stored: StoredFamily, tmp_path: Path, *variants: str, **changes: Any) -> DriftRequest:
    request = DriftRequest(
        artifact=stored.artifact,
        corpora=[PROSE, CODE],
        settings=EvalSettings(window=64, max_tokens=3400),
        through=("served",),
        scratch=tmp_path,
        variants=variants or None,
    )
    return replace(request, **changes)


def test_three_corruptions_of_a_variant_are_seen(stored: StoredFamily, tmp_path: Path) -> None:
    checks = check_measurement(asked(stored, tmp_path, "math"), NullSink())
    assert [check.corruption for check in checks] == CORRUPTIONS
    stored_result = measure_artifact(asked(stored, tmp_path, "math", corpora=[PROSE]), NullSink())[0][0]
    assert stored_result.kl_ci is not None
    for check in checks:
        assert (check.variant, check.corpus, check.seen, check.note) == ("math", "prose", True, None)
        assert check.limit == pytest.approx(MARGIN * stored_result.kl_ci[1], rel=1e-4)  # of the runtime; it restores
        assert check.kl_mean is not None and check.kl_mean > 5 * check.limit
    refuse_unseen(checks)
    assert {path.name for path in tmp_path.iterdir()} == {"base"}, "of the measurement; the check cleans up"


def test_the_first_variant_is_taken_and_nothing_else_is_written(stored: StoredFamily, tmp_path: Path) -> None:
    (check, *_) = check_measurement(asked(stored, tmp_path), NullSink())
    assert check.variant == "code"
    assert list(tmp_path.iterdir()) == []


def test_a_corruption_that_hides_behind_the_variants_own_drift_is_refused(stored: StoredFamily, tmp_path: Path) -> None:
    """`code` is dense and stored at a budget that holds little of it: twice its delta is as far as none."""
    checks = check_measurement(asked(stored, tmp_path, "code"), NullSink())
    assert [check.seen for check in checks] == [True, False, True]
    with pytest.raises(SelfCheckFailed, match="did not see delta-doubled in variant 'code' on prose: KL ") as caught:
        refuse_unseen(checks)
    assert (caught.value.exit_code, caught.value.code) == (21, "self-check-failed")
    assert caught.value.hint is not None and "larger budget" in caught.value.hint


def test_undecided_bounds_fall_back_on_the_mean(stored: StoredFamily, tmp_path: Path) -> None:
    few = asked(stored, tmp_path, "vocab", settings=EvalSettings(window=64, max_tokens=200))
    checks = check_measurement(few, NullSink())
    result = measure_artifact(replace(few, corpora=[PROSE]), NullSink())[0][0]
    assert result.kl_ci is None and result.kl_mean is not None
    assert [check.limit for check in checks] == [pytest.approx(MARGIN * result.kl_mean, rel=1e-4)] * len(checks)
    assert all(check.seen for check in checks)


def small_family(stored: StoredFamily, root: Path, variants: dict[str, Path]) -> StoredFamily:
    recipe = load_recipe(None, {"deltas.default.codec": "lossless"})
    texts = {id: str(folder) for id, folder in variants.items()}
    decompose(
        DecomposeRequest(
            variants=texts, out=root / "art", recipe=recipe, base=str(stored.base), device="cpu", threads=1
        )
    )
    return StoredFamily(root / "art", stored.base, variants)


def test_lossless_is_measured_against_the_noise_floor(stored: StoredFamily, tmp_path: Path) -> None:
    exact = small_family(stored, tmp_path / "lossless", {id: stored.variants[id] for id in ("math", "code")})
    checks = check_measurement(asked(exact, tmp_path / "scratch", "math"), NullSink())
    assert [check.seen for check in checks] == [True, True, True]
    assert all(0 < check.limit < 1e-9 for check in checks)


def test_what_cannot_be_planted_is_said_and_is_no_failure(stored: StoredFamily, tmp_path: Path) -> None:
    same = Path(shutil.copytree(stored.base, tmp_path / "same"))
    single = small_family(stored, tmp_path / "single", {"same": same})
    checks = check_measurement(asked(single, tmp_path / "scratch"), NullSink())
    assert [(check.seen, check.kl_mean) for check in checks[1:]] == [(None, None), (None, None)]
    assert [check.note for check in checks] == [
        None, "it changes no weight of this variant", "the artifact has no other variant",
    ]  # fmt: skip
    refuse_unseen(checks)


def test_logits_that_are_not_finite_are_seen(
    stored: StoredFamily, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_check, "double_delta", lambda base: lambda name, tensor: tensor * float("inf"))
    check = check_measurement(asked(stored, tmp_path, "math"), NullSink())[1]
    assert (check.seen, check.kl_mean) == (True, None)
    assert check.note is not None and "not finite" in check.note


def test_a_measurement_that_is_blind_is_found_out(
    stored: StoredFamily, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the check is for: a measurement that always reads the original's own weights."""
    real = measure_drift

    def blind(original: Path, candidates: dict[str, Path], *rest: Any, **more: Any) -> Any:
        return real(original, dict.fromkeys(candidates, original), *rest, **more)

    monkeypatch.setattr(self_check, "measure_drift", blind)
    checks = check_measurement(asked(stored, tmp_path, "math"), NullSink())
    assert [check.seen for check in checks] == [False, False, False]
    with pytest.raises(SelfCheckFailed, match="did not see layers-swapped"):
        refuse_unseen(checks)


def test_the_original_is_checked_first(stored: StoredFamily, tmp_path: Path) -> None:
    foreign = Path(shutil.copytree(stored.variants["code"], tmp_path / "foreign"))
    weights = load_file(foreign / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] + torch.ones(1).to(torch.bfloat16)
    save_file(weights, foreign / "model.safetensors", {"format": "pt"})
    sink = RecordingSink()
    with pytest.raises(SourceIncompatible, match="is not the original of variant 'code'"):
        check_measurement(asked(stored, tmp_path / "s", "code", originals={"code": str(foreign)}), sink)
    assert [stage for stage, _, _ in sink.stages] == ["check the original of code"]


def test_plain_json() -> None:
    check = SelfCheck("math", "prose", "delta-doubled", 0.5, 0.1, True)
    assert check.to_json() == {
        "variant": "math", "corpus": "prose", "corruption": "delta-doubled", "kl_mean": 0.5, "limit": 0.1,
        "seen": True, "note": None,
    }  # fmt: skip
