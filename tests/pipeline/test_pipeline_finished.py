"""A finished artifact: the same command writes nothing, any other is refused or replaces it as a whole."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import EMBEDDING, INDEX, Family, read_weights
from interruptions import PASS_2, Interrupting, interrupted, partial, rewritten, touched
from pipeline_runs import Recording, contents, copied, run
from safetensors.torch import save_file

from mfs_decompose.errors import OutputBusy
from mfs_decompose.source.checkpoint import open_checkpoint


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    """When every file and folder was last changed, and which inode it is."""
    found = [folder, *folder.rglob("*")]
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_ino) for path in found}


def test_the_same_command_again_writes_nothing(tmp_path: Path, family: Family) -> None:
    out = tmp_path / "art"
    first = run(out, family.base, family.variants)
    before = stamps(tmp_path)
    sink = Recording()
    again = run(out, family.base, dict(reversed(family.variants.items())), sink=sink, threads=2)
    assert stamps(tmp_path) == before
    assert (again.written, again.bytes_read, sink.advanced, sink.stages) == (False, 0, 0, [])
    assert (again.artifact_digest, again.variants, again.total_bytes) == (
        first.artifact_digest,
        first.variants,
        first.total_bytes,
    )


def testtouched_sources_are_compared_by_their_digests(tmp_path: Path, family: Family) -> None:
    base, math = copied(family.base, tmp_path / "base"), copied(family.variants["math"], tmp_path / "math")
    run(tmp_path / "art", base, {"math": math})
    for folder in (base, math):
        touched(folder)
    before = stamps(tmp_path)
    sink = Recording()
    assert not run(tmp_path / "art", base, {"math": math}, sink=sink).written
    assert stamps(tmp_path) == before
    assert sink.stages == ["comparing math with the artifact", "comparing base with the artifact"]
    assert sink.advanced == sum(open_checkpoint(folder, "x").tensor_bytes for folder in (base, math))


def test_the_originals_elsewhere_with_other_times(tmp_path: Path, family: Family) -> None:
    run(tmp_path / "art", family.base, {"code": family.variants["code"]})
    folders = [
        shutil.copytree(folder, tmp_path / name, copy_function=shutil.copyfile)
        for name, folder in (("base", family.base), ("code", family.variants["code"]))
    ]
    assert not run(tmp_path / "art", folders[0], {"code": folders[1]}).written


def test_without_run_json_digests_decide(tmp_path: Path, family: Family) -> None:
    run(tmp_path / "art", family.base, {"code": family.variants["code"]})
    (tmp_path / "art" / "run.json").unlink()
    sink = Recording()
    assert not run(tmp_path / "art", family.base, {"code": family.variants["code"]}, sink=sink).written
    assert len(sink.stages) == 2


def _side_file(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ other }}")


def _index(folder: Path) -> None:
    index = folder / INDEX
    index.write_text(json.dumps(json.loads(index.read_text())))


def _weights(folder: Path) -> None:
    rewritten(folder, EMBEDDING, keep_time=False)


def _headers(folder: Path) -> None:
    weights = read_weights(folder)
    for path in (*folder.glob("*.safetensors"), folder / INDEX):
        path.unlink()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("change", [_side_file, _index, _weights, _headers])
def test_a_finished_artifact_of_something_else_is_nottouched(
    tmp_path: Path, family: Family, change: Callable[[Path], None]
) -> None:
    out, math = tmp_path / "art", copied(family.variants["math"], tmp_path / "math")
    run(out, family.base, {"math": math})
    change(math)
    before = stamps(out)
    with pytest.raises(OutputBusy, match="finished artifact that was made from something else") as caught:
        run(out, family.base, {"math": math})
    assert caught.value.exit_code == 14
    assert caught.value.hint is not None and "--overwrite" in caught.value.hint
    assert stamps(out) == before
    report = run(out, family.base, {"math": math}, overwrite=True)
    assert report.written
    assert not run(out, family.base, {"math": math}).written


def test_another_request_on_a_finished_artifact(tmp_path: Path, family: Family) -> None:
    out = tmp_path / "art"
    variants = {id: family.variants[id] for id in ("code", "math")}
    run(out, family.base, variants)
    before = stamps(out)
    others: list[tuple[Path | None, dict[str, Path], dict[str, object]]] = [
        (family.base, variants, {"objective.budget": "6%"}),
        (family.base, variants, {"base.store": "reference"}),
        (family.base, {"code": variants["code"]}, {}),
        (family.base, {"code": variants["math"], "math": variants["code"]}, {}),
        (family.variants["code"], variants, {}),
        (None, variants, {}),
    ]
    for base, chosen, recipe in others:
        with pytest.raises(OutputBusy, match="made from something else"):
            run(out, base, chosen, recipe)
    assert stamps(out) == before


def test_overwriting(tmp_path: Path, art: Path, family: Family) -> None:
    out = tmp_path / "art"
    run(out, family.base, family.variants, {"deltas.default.codec": "raw"})
    old = contents(out)
    with pytest.raises(KeyboardInterrupt):
        run(out, family.base, family.variants, sink=Interrupting(PASS_2, 9), overwrite=True)
    assert contents(out) == old  # until the new one is whole
    report = run(out, family.base, family.variants, overwrite=True)
    assert report.resumed_units > 0
    assert contents(out) == contents(art)
    assert [path.name for path in tmp_path.iterdir()] == ["art"]


def test_a_finished_run_under_its_working_name(tmp_path: Path, art: Path, family: Family) -> None:
    """Killed just before the rename: the same command gives the artifact its name and does no work."""
    out = tmp_path / "art"
    interrupted(out, family, "publishing")
    sink = Recording()
    report = run(out, family.base, family.variants, sink=sink)
    assert (report.written, sink.stages) == (False, [])
    assert contents(out) == contents(art)
    assert not partial(out).exists()
