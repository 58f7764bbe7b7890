"""`mfs inspect --spectrum`: tables, the document, and plots whose curves are the measured ones."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import fine_tune, make_llama
from e2e_program import SHAPES, check_document, refused, run, succeeded, tree

from mfs_decompose.cli import spectrum_plots
from mfs_decompose.pipeline.delta_class import Facts, Verdict
from mfs_decompose.pipeline.spectra import VariantSpectra
from mfs_decompose.pipeline.spectra_summary import summarise
from mfs_decompose.pipeline.spectra_tensor import Measured

PLOTS = ("energy", "singular-values", "effective-rank")
NAMESPACE = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def art(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, a low-rank and a dense variant, and one that changed the norms alone."""
    root = tmp_path_factory.mktemp("spectrum")
    base = make_llama(root / "base", seed=41)
    refs = [
        f"math={fine_tune(base, root / 'math', seed=42)}",
        f"code={fine_tune(base, root / 'code', seed=43, kind='dense', scale=0.02)}",
        f"norms={fine_tune(base, root / 'norms', seed=44, kind='norms')}",
    ]
    succeeded("decompose", "--base", base, "--variants", *refs, "--out", root / "art")
    return root / "art"


@pytest.fixture(scope="module")
def plotted(art: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The document, and the folder of the plots made along with it."""
    folder = tmp_path_factory.mktemp("plots") / "new"
    return succeeded("inspect", art, "--spectrum", "--out", folder, "--json", "--threads", 1).document, folder


def variant(document: Mapping[str, Any], id: str) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in document["variants"] if one["id"] == id)
    return found


def test_the_document_is_as_documented(plotted: tuple[dict[str, Any], Path]) -> None:
    document, _ = plotted
    check_document(document)
    for one in document["variants"]:
        assert sum(one["classes"].values()) + one["unclassified"] == len(one["tensors"])
        assert one["energy"] == pytest.approx(math.fsum(tensor["energy"] for tensor in one["tensors"]))
        for family in one["families"]:
            members = [tensor for tensor in one["tensors"] if tensor["family"] == family["family"]]
            assert family["matrices"] == len(members)
            if family["curve"] is not None:
                curve = family["curve"]
                assert curve.keys() == {"direction", "cumulative", "singular_value", "noise_level"}
                assert len(curve["direction"]) == len(curve["cumulative"]) == len(curve["singular_value"])
                assert curve["cumulative"] == sorted(curve["cumulative"])
                assert curve["cumulative"][-1] == pytest.approx(1.0)


def test_every_key_stands_in_the_docs() -> None:
    docs = (Path(__file__).parents[2] / "docs" / "json.md").read_text(encoding="utf-8")
    section = docs.partition("`mfs.spectrum/1`")[2].partition("\n## ")[0]

    def keys(shape: Any) -> set[str]:
        if isinstance(shape, list):
            return keys(shape[0])
        return (
            set(shape) | {key for inner in shape.values() for key in keys(inner)}
            if isinstance(shape, Mapping)
            else set()
        )

    words = set(re.findall(r"\w+", section))
    assert keys(SHAPES["mfs.spectrum/1"]) - words == set()


def test_tables_tell_the_class_and_whose_delta_it_is(art: Path) -> None:
    ran = succeeded("inspect", art, "--spectrum")
    assert "code: flat (delta of the original)" in ran.out
    assert "norms: " in ran.out
    lines = [re.sub(" {2,}", "|", line) for line in ran.out.splitlines()]
    assert lines[1].startswith("family|class|matrices|effective rank|50 %|90 %|99 %|unchanged|noise")
    assert sum(line.startswith("q_proj|") for line in lines) == 3
    assert "q_proj|identical|identical x 2|-|-|-|-|100 %|-" in lines
    assert "because" not in ran.out


def test_one_variant_is_told_tensor_by_tensor(art: Path) -> None:
    out = succeeded("inspect", art, "--spectrum", "--variant", "code", "--tensors", "*_proj.weight", "--top", 3).out
    rows = [line for line in out.splitlines() if line.startswith("model.layers.")]
    assert len(rows) == 3
    assert all("directions, as far as they are above the noise, hold" in row for row in rows)
    assert "11 more changed matrices: --top 14" in out
    assert "embed_tokens" not in out


def test_stored_is_said_to_be_stored(art: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(art, tmp_path / "art")
    (tmp_path / "art" / "run.json").unlink()
    ran = succeeded("inspect", tmp_path / "art", "--spectrum", "--variant", "math", "--out", tmp_path / "plots")
    assert "math: " in ran.out
    assert "(delta as stored)" in ran.out
    assert "Energy" not in ran.err
    svg = (tmp_path / "plots" / "math-energy.svg").read_text()
    assert "Cumulative energy: math, delta as stored" in svg


# Plots.


def elements(path: Path) -> dict[str, ElementTree.Element]:
    """Every element of an SVG that has an id."""
    root = ElementTree.fromstring(path.read_text(encoding="utf-8"))
    assert root.tag == f"{NAMESPACE}svg"
    return {one.get("id", ""): one for one in root.iter() if one.get("id")}


def points(group: ElementTree.Element) -> list[tuple[float, float]]:
    """The corners of a drawn line."""
    path = group.find(f"{NAMESPACE}path")
    assert path is not None
    numbers = [float(word) for word in re.findall(r"-?\d+(?:\.\d+)?", path.get("d", ""))]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def check_linear(drawn: list[float], meant: list[float]) -> None:
    """Drawn coordinates are one linear image of what is meant, to the width of a line."""
    slope, offset = np.polyfit(meant, drawn, 1)
    assert np.abs(slope * np.array(meant) + offset - drawn).max() < 0.05
    assert abs(slope) > 1.0


def curves_of(document: Mapping[str, Any], id: str) -> dict[str, Any]:
    return {one["family"]: one["curve"] for one in variant(document, id)["families"] if one["curve"] is not None}


@pytest.mark.parametrize("id", ["math", "code"])
def test_the_energy_curves_are_those_measured(plotted: tuple[dict[str, Any], Path], id: str) -> None:
    document, folder = plotted
    drawn, curves = elements(folder / f"{id}-energy.svg"), curves_of(document, id)
    assert {name.removeprefix("energy:") for name in drawn if name.startswith("energy:")} == curves.keys()
    xs: list[float] = []
    ys: list[float] = []
    directions: list[float] = []
    shares: list[float] = []
    for family, curve in curves.items():
        found = points(drawn[f"energy:{family}"])
        assert len(found) == len(curve["direction"])
        xs += [x for x, _ in found]
        ys += [y for _, y in found]
        directions += [math.log10(k) for k in curve["direction"]]
        shares += curve["cumulative"]
    check_linear(xs, directions)
    check_linear(ys, shares)


def test_the_singular_values_and_their_noise_are_those_measured(plotted: tuple[dict[str, Any], Path]) -> None:
    document, folder = plotted
    drawn, curves = elements(folder / "math-singular-values.svg"), curves_of(document, "math")
    ys: list[float] = []
    values: list[float] = []
    for family, curve in curves.items():
        found = points(drawn[f"singular:{family}"])
        kept = [value for value in curve["singular_value"] if value > 0.0]
        assert len(found) == len(kept)
        noise = {y for _, y in points(drawn[f"noise:{family}"])}
        assert len(noise) == 1
        ys += [*(y for _, y in found), *noise]
        values += [*map(math.log10, kept), math.log10(curve["noise_level"])]
    check_linear(ys, values)


def test_the_cells_hold_the_effective_ranks(plotted: tuple[dict[str, Any], Path]) -> None:
    document, folder = plotted
    drawn = elements(folder / "code-effective-rank.svg")
    tensors = [one for one in variant(document, "code")["tensors"] if one["effective_rank"] is not None]
    cells = {f"cell:{one['layer']}:{one['family']}": one["effective_rank"] for one in tensors}
    assert len(cells) == len(tensors)
    assert cells.keys() == {name for name in drawn if name.startswith("cell:")}
    for name, rank in cells.items():
        text = "".join(drawn[name].itertext()).split()
        assert text == [f"{rank:.3g}"]


def test_plots_say_what_they_show(plotted: tuple[dict[str, Any], Path]) -> None:
    _, folder = plotted
    wanted = {
        "energy": ("Cumulative energy", "strongest directions (count)", "share of the delta's energy (fraction"),
        "singular-values": ("Singular values", "direction (number, strongest first)", "singular value (units of the"),
        "effective-rank": ("Effective rank", "tensors (family)", "layer (number)"),
    }
    for kind, (title, x, y) in wanted.items():
        texts = [one.text or "" for one in ElementTree.parse(folder / f"math-{kind}.svg").iter(f"{NAMESPACE}text")]
        assert f"{title}: math, delta of the original" in texts
        assert x in texts
        assert any(text.startswith(y) for text in texts)
        assert "q_proj" in texts
        assert not any("$" in text or "mathdefault" in text for text in texts)


def test_plots_are_told_of_and_always_the_same(art: Path, plotted: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    document, folder = plotted
    wanted = {f"{id}-{kind}.svg" for id in ("code", "math") for kind in PLOTS}
    assert {path.name for path in folder.iterdir()} == wanted
    assert {Path(path).name for path in document["plots"]} == wanted
    for turn in range(2):  # into a folder that is new, and over what is there
        ran = succeeded("inspect", art, "--spectrum", "--out", tmp_path / "plots", "--threads", 2)
        assert {line for line in ran.talk if line.startswith("wrote ")} == {
            f"wrote {tmp_path / 'plots' / name}" for name in wanted
        }
        assert "norms: nothing has a spectrum to plot" in ran.talk
        assert tree(tmp_path / "plots") == tree(folder), turn
    for name in wanted:
        text = (folder / name).read_text(encoding="utf-8")
        assert not re.search(r"dc:date|Matplotlib v|\b20\d\d-\d\d-\d\d", text)


def one_matrix(name: str) -> VariantSpectra:
    energies = np.array([4.0, 1.0, 0.25, 0.0])
    facts = Facts((4, 9), 36, 2, float(energies.sum()), 0.01, energies)
    measured = Measured(name, None, (4, 9), "F32", "stored", 0, facts, Verdict("flat", "why"))
    return VariantSpectra("odd.id_1", "stored", (measured,))


@pytest.mark.parametrize(
    "name",
    [
        "_hidden.weight",
        "$x^2$.weight",
        "a<b>&\"c'",
        "x\x1b[31m\u202ey\u0000.weight",
        "重み.weight",
        "l" * 500,
        "3",
        "\ud800",
    ],
)
def test_strangers_names_do_not_break_a_plot(name: str) -> None:
    for file, svg in spectrum_plots.draw(summarise(one_matrix(name))).items():
        assert re.fullmatch(r"odd\.id_1-[a-z-]+\.svg", file)
        root = ElementTree.fromstring(svg)
        text = " ".join("".join(one.itertext()) for one in root.iter(f"{NAMESPACE}text"))
        if name in ("_hidden.weight", "$x^2$.weight", "重み.weight"):
            assert name.removesuffix(".weight") in text


def test_settings_of_the_user_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib

    summary = summarise(one_matrix("a.weight"))
    plain = spectrum_plots.draw(summary)
    with matplotlib.rc_context({"lines.linewidth": 9, "svg.hashsalt": "x", "font.size": 30, "axes.facecolor": "red"}):
        assert spectrum_plots.draw(summary) == plain
        assert matplotlib.rcParams["lines.linewidth"] == 9  # and theirs are left as they were


def test_nothing_changed_is_nothing_to_plot() -> None:
    facts = Facts((4, 9), 36, 36, 0.0, 0.0)
    same = Measured("a", None, (4, 9), "F32", "original", 0, facts, Verdict("identical", "why"))
    assert spectrum_plots.draw(summarise(VariantSpectra("same", "original", (same,)))) == {}


# Refusals.


def test_what_does_not_go_together_is_refused(art: Path, tmp_path: Path) -> None:
    options: list[tuple[str, ...]] = [
        ("--tensors", "*"),
        ("--out", str(tmp_path / "plots")),
        ("--originals", f"math={tmp_path}"),
        ("--base", str(tmp_path)),
        ("--offline",),
        ("--device", "cpu"),
        ("--threads", "1"),
    ]
    for words in options:
        message, hint = refused(2, "inspect", art, *words)
        assert message.startswith(f"{words[0]} says what --spectrum is to do")
        assert hint == "Add --spectrum."
    assert list(tmp_path.iterdir()) == []


def test_places_that_cannot_be_written_are_refused_first(art: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    before = tree(art)
    refused(14, "inspect", art, "--spectrum", "--out", tmp_path / "file")
    message, _ = refused(14, "inspect", art, "--spectrum", "--out", art / "plots")
    assert "lies inside the artifact" in message
    assert tree(art) == before
    refused(2, "inspect", art, "--spectrum", "--tensors", "nothing*", "--out", tmp_path / "plots")
    refused(2, "inspect", art, "--spectrum", "--variant", "mth")
    refused(11, "inspect", art, "--spectrum", "--originals", f"math={tmp_path / 'nowhere'}")
    assert run("inspect", art, "--spectrum", "--originals", f"math={art.parent / 'code'}").code == 12
    assert not (tmp_path / "plots").exists()


def test_matplotlib_is_there_for_plots_alone(art: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from mfs_decompose.cli.app import main; code = main(sys.argv[1:]); "
        "sys.exit(code or 10 * ('matplotlib' in sys.modules))"
    )

    def code(*words: str) -> int:
        command = [sys.executable, "-c", program, "inspect", str(art), "--spectrum", "--tensors", "*q_proj*", *words]
        return subprocess.run(command, capture_output=True, check=False).returncode

    runs: Callable[..., int] = code
    assert runs() == 0
    assert runs("--out", str(tmp_path / "plots")) == 10
