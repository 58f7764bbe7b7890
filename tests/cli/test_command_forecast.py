"""`mfs decompose --dry-run --spectra` and `mfs inspect --frontier`: tables, documents, plots, and what is left."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from adapters import make_adapter
from checkpoints import Family
from e2e_program import LADDER, RUNG, SHAPES, check_document, refused, succeeded, tree

from mfs_decompose.cli.forecast import LEFT, show_variants
from mfs_decompose.cli.forecast_plot import draw_frontier
from mfs_decompose.cli.out import Output
from mfs_decompose.pipeline import forecast_ladder
from mfs_decompose.pipeline.forecast_frontier import Spent, VariantFrontier
from mfs_decompose.pipeline.forecast_ladder import Rung, TargetRung, VariantForecast

NAMESPACE = "{http://www.w3.org/2000/svg}"


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast_ladder, "BUDGETS", (0.005, 0.09, 0.3))


@pytest.fixture(scope="module")
def art(tmp_path_factory: pytest.TempPathFactory, family: Family) -> Path:
    """Two variants at the default."""
    out = tmp_path_factory.mktemp("frontier") / "art"
    refs = [f"{id}={family.variants[id]}" for id in ("math", "code")]
    succeeded("decompose", "--base", family.base, "--variants", *refs, "--out", out)
    return out


def words(family: Family, out: Path, *more: object) -> tuple[object, ...]:
    return ("decompose", "--base", family.base, "--variants", family.variants["math"], "--out", out, *more)


def test_tables_and_the_document(family: Family, tmp_path: Path) -> None:
    plain = succeeded(*words(family, tmp_path / "art", "--dry-run", "--spectra"))
    lines = [re.sub(" {2,}", "|", line.strip()) for line in plain.out.splitlines()]
    assert lines[0].startswith("math: ") and LEFT in lines[0]
    assert f"budget|bytes|{LEFT}" in lines
    assert "0.5 %|too small|-" in lines
    assert any(line.startswith("30 %|") and line.endswith("+") for line in lines)
    assert "give --calibrate FILE" in plain.out
    assert "nothing was encoded" in plain.err and "art.partial" in plain.err
    assert not (tmp_path / "art").exists()

    document = succeeded(*words(family, tmp_path / "art", "--dry-run", "--spectra", "--json")).document
    check_document(document)
    (variant,) = document["variants"]
    assert variant["targets"] is None
    assert variant["planned"].keys() == RUNG.keys()
    assert document["resumed_units"] > 0 and document["bytes_read"] == 0  # the run before had read it all
    written = succeeded(*words(family, tmp_path / "art", "--json")).document
    assert written["resumed_units"] > 0
    assert not (tmp_path / "art.partial").exists()
    message, hint = refused(14, *words(family, tmp_path / "art", "--dry-run", "--spectra"))
    assert "no run left to foresee" in message and "--frontier" in hint


def test_adapters_are_kept_as_they_are(family: Family, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "lora", "linear", family.base).adapter
    more = ("--variants", f"lora={adapter}", "--dry-run", "--spectra")
    document = succeeded(*words(family, tmp_path / "art", *more, "--json")).document
    kept = next(one for one in document["variants"] if one["id"] == "lora")
    assert kept["adapter"] and kept["budgets"] == [] and kept["planned"]["left"] == 0.0
    assert "kept as it is" in succeeded(*words(family, tmp_path / "art", *more)).out


def test_what_makes_no_sense_is_refused(family: Family, art: Path, tmp_path: Path) -> None:
    assert "--dry-run" in refused(2, *words(family, tmp_path / "art", "--spectra"))[0]
    more = ("--dry-run", "--spectra", "--save-plan", tmp_path / "plan.json")
    assert "--save-plan" in refused(2, *words(family, tmp_path / "art", *more))[0]
    assert "no --frontier" in refused(2, "inspect", art, "--plot", tmp_path / "x.svg")[0]
    assert "both" in refused(2, "inspect", art, "--frontier", "--spectrum")[0]
    assert "all" in refused(2, "inspect", art, "--frontier", "--spectrum", "--resident")[0]
    assert "--frontier" in refused(2, "inspect", art, "--frontier", "--out", tmp_path)[0]
    assert ".svg" in refused(14, "inspect", art, "--frontier", "--plot", tmp_path / "x.png")[0]
    assert "inside" in refused(14, "inspect", art, "--frontier", "--plot", art / "x.svg")[0]
    assert "place" in refused(14, "inspect", art, "--frontier", "--plot", tmp_path / "no" / "x.svg")[0]
    assert list(tmp_path.iterdir()) == []


def test_where_the_bytes_went_and_other_sizes(art: Path, tmp_path: Path) -> None:
    before = tree(art)
    document = succeeded("inspect", art, "--frontier", "--plot", tmp_path / "f.svg", "--json").document
    check_document(document)
    assert tree(art) == before
    assert document["no_ladder"] is None and document["plot"] == str(tmp_path / "f.svg")
    held = succeeded("inspect", art, "--json").document["variants"]
    for one, known in zip(document["variants"], held, strict=True):
        assert (one["bytes"], one["rel_error"]) == (known["bytes"], known["rel_error"])
        tensors = succeeded("inspect", art, "--variant", one["id"], "--json").document["tensors"]
        for parts in (one["codecs"], one["layers"], one["depths"]):
            assert sum(part["tensors"] for part in parts) == len(tensors)
            assert sum(part["bytes"] for part in parts) == sum(tensor["bytes"] for tensor in tensors)
        assert {part["name"]: part["tensors"] for part in one["codecs"]} == known["codecs"]
        assert one["ladder"].keys() == LADDER.keys()
        planned = one["ladder"]["planned"]
        assert planned["budget"] == pytest.approx(0.05, rel=1e-3)
    root = ElementTree.fromstring((tmp_path / "f.svg").read_text())
    ids = {element.get("id") for element in root.iter(f"{NAMESPACE}g")}
    assert {"ladder:math", "ladder:code", "stored:math", "stored:code"} <= ids
    assert "bytes:math:query" in (tmp_path / "f.svg").read_text()


def test_sources_that_are_away_or_others_leave_the_artifacts_own_points(
    art: Path, family: Family, tmp_path: Path
) -> None:
    shutil.copytree(art, tmp_path / "art")
    (tmp_path / "art" / "run.json").unlink()
    ran = succeeded("inspect", tmp_path / "art", "--frontier", "--variant", "math")
    assert "nobody knows where math, base is" in ran.out
    assert "query" in ran.out and "foreseen from the sources" not in ran.out

    given = ("--originals", f"math={family.variants['math']}", "--base", family.base, "--variant", "math")
    assert "foreseen from the sources read again" in succeeded("inspect", tmp_path / "art", "--frontier", *given).out
    other = ("--originals", f"math={family.variants['code']}", "--base", family.base, "--variant", "math")
    assert "is not what the artifact was made from" in refused(12, "inspect", tmp_path / "art", "--frontier", *other)[0]

    hints = json.loads((art / "run.json").read_text())
    hints["hints"]["variants"]["math"] = str(family.variants["code"])
    (tmp_path / "art" / "run.json").write_text(json.dumps(hints))
    out = succeeded("inspect", tmp_path / "art", "--frontier", "--variant", "math", "--plot", tmp_path / "f.svg").out
    assert "the sources are not at hand" in out and "differs" in out
    assert "As stored" in (tmp_path / "f.svg").read_text()


def test_artifacts_of_older_versions_and_of_fixed_sizes(family: Family, tmp_path: Path) -> None:
    golden = Path(__file__).parents[1] / "artifact" / "golden"
    document = succeeded("inspect", golden, "--frontier", "--json").document
    check_document(document)
    assert document["no_ladder"]
    succeeded(*words(family, tmp_path / "art", "--codec", "lossless"))
    assert "fixes every size" in succeeded("inspect", tmp_path / "art", "--frontier").out


def test_the_same_figures_give_the_same_plot(tmp_path: Path) -> None:
    program = (
        "from test_command_forecast import made\nfrom mfs_decompose.cli.forecast_plot import draw_frontier\n"
        "sys.stdout.buffer.write(draw_frontier([made('math'), made('a<b&$x$')]))"
    )
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    code = f"import sys; sys.path[:0] = {paths!r}\n{program}"
    drawn = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=tmp_path).stdout
    assert drawn == draw_frontier([made("math"), made("a<b&$x$")]) == draw_frontier([made("math"), made("a<b&$x$")])
    texts = [element.text for element in ElementTree.fromstring(drawn).iter(f"{NAMESPACE}text")]
    assert "a<b&$x$: foreseen" in texts
    alone = draw_frontier([replace(made("math"), ladder=None, rel_error=float("inf"))])
    assert b"As stored" in alone and b"ladder:" not in alone


def test_targets_are_shown_where_drift_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    targets = (TargetRung(1e-2, 120, 0.4, True), TargetRung(1e-3, 340, 0.1, False), TargetRung(1e-5, None, None, False))
    show_variants(Output(), [replace(ladder("math"), targets=targets, measured=True)])
    rows = [re.sub(" {2,}", "|", line.strip()) for line in capsys.readouterr().out.splitlines()]
    assert f"target KL|bytes|footprint|{LEFT}" in rows
    assert "1e-02|120 B|12 %|40 %" in rows and "1e-03|340 B+|34 %|10 %" in rows
    assert "1e-05|out of reach|-|-" in rows
    assert f"budget|bytes|{LEFT}|KL foreseen" in rows and "5 %|50 B|25 %|0.012" in rows
    assert not any("--calibrate" in row for row in rows)


def test_every_key_stands_in_the_docs() -> None:
    docs = (Path(__file__).parents[2] / "docs" / "json.md").read_text(encoding="utf-8")
    for schema in ("mfs.forecast/1", "mfs.frontier/1"):
        section = docs.partition(f"`{schema}`\n")[2].partition("\n## ")[0]
        missing = keys(SHAPES[schema]) - set(re.findall(r"\w+", section))
        assert missing == set(), (schema, missing)


def keys(shape: Any) -> set[str]:
    if isinstance(shape, list):
        return keys(shape[0])
    if isinstance(shape, dict):
        return set(shape) | {key for inner in shape.values() for key in keys(inner)}
    return set()


def ladder(id: str) -> VariantForecast:
    rungs = (
        Rung(0.01, 10, None, None, None, True),
        Rung(0.05, 50, 50, 0.25, 0.012, True),
        Rung(0.3, 300, 290, 0.0, 0.0, False),
    )
    return VariantForecast(id, 1000, 0, False, rungs[1], rungs, (), False, 0)


def made(id: str) -> VariantFrontier:
    parts = (Spent("query", 3, 20, 2.0, 0.5), Spent("other", 2, 0, 0.0, 0.0))
    return VariantFrontier(id, 61, 0, 1000, 0.061, 0.5, parts, parts, parts, ladder(id))
