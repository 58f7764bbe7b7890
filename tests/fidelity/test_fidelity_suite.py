from __future__ import annotations

import re
import zipfile
from pathlib import Path

import pytest
from fidelity_models import make_tokenizer

from mfs_decompose.errors import RecipeError, SourceNotFound, UsageError
from mfs_decompose.fidelity.settings import EvalSettings
from mfs_decompose.fidelity.suite import eval_folder, load_suite, suite_names
from mfs_decompose.fidelity.text import read_corpus
from mfs_decompose.fidelity.tokenizer import TextEncoder
from mfs_decompose.fidelity.windows import token_limit, tokenize_corpus

ROOT = Path(__file__).parents[2]


def write(folder: Path, text: str, name: str = "own.yaml") -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


def mistake(folder: Path, text: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load_suite(write(folder, text))
    return caught.value.message.replace(str(folder), "")


ONE = "corpora:\n  - corpus: math\n"
HEAD = "schema: mfs.suite/1\n"


def test_the_shipped_suites() -> None:
    assert suite_names() == ("ci", "full", "smoke")
    for name in suite_names():
        suite = load_suite(name)
        assert suite.name == name
        assert suite.settings.bos == "auto"
        assert suite.settings.window >= 256
        assert len({corpus.name for corpus in suite.corpora}) == len(suite.corpora) >= 2
        assert suite.settings.max_tokens == max(corpus.max_tokens or 0 for corpus in suite.corpora)
        head = (eval_folder() / "suites" / f"{name}.yaml").read_text()
        assert head.startswith("# What: ") and "\n# When: " in head


def test_a_shipped_corpus_is_read_by_its_fields() -> None:
    (prose, python) = load_suite("smoke").corpora
    assert (prose.name, python.name) == ("prose-1", "python")
    path = ROOT / "eval" / "corpora" / "python.jsonl"
    assert python.documents == read_corpus(f"{path}:prompt+solution").documents
    assert prose.documents == read_corpus(str(ROOT / "eval/corpora/prose-1.jsonl")).documents


def test_every_shipped_corpus_is_licensed_and_in_a_suite() -> None:
    texts = {path.stem for path in (eval_folder() / "corpora").glob("*.jsonl")}
    assert {corpus.name for corpus in load_suite("full").corpora} == texts
    assert "MIT License" in (eval_folder() / "corpora" / "README.md").read_text()


def test_a_suite_file_names_texts_beside_it(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("one document")
    (tmp_path / "b.jsonl").write_text('{"q": "1+1", "a": "=2"}\n')
    suite = load_suite(
        write(
            tmp_path,
            "schema: mfs.suite/1\nabout: mine\nwindow: 128\nstride: 32\nbos: off\nbatch_size: 3\n"
            "corpora:\n  - file: texts/a.txt\n    max_tokens: 70\n"
            "  - {file: b.jsonl, name: sums, fields: [q, a]}\n  - corpus: chat\n    fields: [user]\n",
        )
    )
    assert suite.name == "own"
    assert suite.settings == EvalSettings(window=128, stride=32, bos="off", max_tokens=8192, batch_size=3)
    a, b, chat = suite.corpora
    assert (a.name, a.documents, a.max_tokens) == ("a", ("one document",), 70)
    assert (b.name, b.documents, b.max_tokens) == ("sums", ("1+1=2",), 8192)
    assert chat.name == "chat" and len(chat.documents) > 400


@pytest.mark.parametrize("word", ["on", "off", "auto"])
def test_yaml_words_for_true_and_false_are_policies_here(tmp_path: Path, word: str) -> None:
    for spelled in (word, f"'{word}'"):
        assert load_suite(write(tmp_path, HEAD + f"bos: {spelled}\n" + ONE)).settings.bos == word


def test_a_texts_own_limit_counts(tmp_path: Path) -> None:
    suite = load_suite(write(tmp_path, HEAD + "window: 16\ncorpora:\n  - {corpus: math, max_tokens: 90}\n"))
    (corpus,) = suite.corpora
    assert token_limit(corpus, EvalSettings(max_tokens=5)) == 90
    encoder = TextEncoder(make_tokenizer(bos=False), (1,), "<s>")
    assert tokenize_corpus(corpus, encoder, suite.settings).tokens == 90


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(RecipeError, match=r"there is no suite named 'smok'; did you mean 'smoke'\?") as caught:
        load_suite("smok")
    assert caught.value.hint == "name one of ci, full, smoke, or a file that ends in .yaml"
    assert caught.value.exit_code == 10


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"expected a suite at .*absent\.yaml, found nothing there"):
        load_suite(str(tmp_path / "absent.yaml"))
    with pytest.raises(RecipeError, match="found nothing there"):
        load_suite("./smoke")
    with pytest.raises(RecipeError, match="cannot read the suite"):
        (tmp_path / "folder.yaml").mkdir()
        load_suite(str(tmp_path / "folder.yaml"))
    (tmp_path / "latin.yaml").write_bytes(b"about: \xe9")
    with pytest.raises(RecipeError, match="expected text in UTF-8"):
        load_suite(str(tmp_path / "latin.yaml"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ONE, "/own.yaml:1: schema: is missing"),
        ("schema: mfs.suite/2\n" + ONE, "/own.yaml:1: schema: expected mfs.suite/1, found 'mfs.suite/2'"),
        (HEAD + "windw: 7\n" + ONE, "/own.yaml:2: windw: unknown key; did you mean 'window'?"),
        (HEAD + "window: 1\n" + ONE, "/own.yaml:2: window: expected at least 2, found 1"),
        (HEAD + "window: '64'\n" + ONE, "/own.yaml:2: window: expected a whole number, found '64'"),
        (HEAD + "window: true\n" + ONE, "/own.yaml:2: window: expected a whole number, found True"),
        (HEAD + "window: 64\nstride: 65\n" + ONE, "expected a stride of at most the window of 64, found 65"),
        (HEAD + "bos: sometimes\n" + ONE, "/own.yaml:2: bos: expected auto, on or off, found 'sometimes'"),
        (HEAD, "/own.yaml:1: corpora: is missing"),
        (HEAD + ONE + "window: 8\nwindow: 9\n", "/own.yaml:5: window: given twice, first on line 4"),
        (
            HEAD + ONE + "    file: x.txt\n",
            "/own.yaml:3: corpora[0]: expected one of corpus (shipped with mfs) and file (beside the suite)",
        ),
        (HEAD + "corpora:\n  - name: x\n", "expected one of corpus (shipped with mfs) and file (beside the suite)"),
        (HEAD + ONE + "    field: [text]\n", "/own.yaml:4: corpora[0].field: unknown key; did you mean 'fields'?"),
        (HEAD + ONE + "    colour: red\n", "corpora[0].colour: unknown key; corpus, file, name, fields, max_tokens"),
        (HEAD + ONE + "    max_tokens: 1\n", "/own.yaml:4: corpora[0].max_tokens: expected at least 2, found 1"),
        (HEAD + ONE + "  - {file: math.txt}\n", "/own.yaml:4: corpora[1]: a second text named 'math'"),
        ("[1, 2]", "/own.yaml:1: expected a mapping of keys to values at the top"),
        (HEAD + "corpora: [\n", "not YAML"),
    ],
)
def test_mistakes_are_named_with_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    assert message in mistake(tmp_path, text)


def test_several_mistakes_are_said_at_once(tmp_path: Path) -> None:
    said = mistake(tmp_path, HEAD + "window: 1\nbos: no idea\nbatch_size: 0\n" + ONE)
    assert said.startswith("3 mistakes in /own.yaml:\n  /own.yaml:2: window")
    assert re.findall(r":(\d):", said) == ["2", "3", "4"]


def test_a_corpus_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no shipped corpus named 'maths'; did you mean 'math'") as caught:
        load_suite(write(tmp_path, HEAD + "corpora:\n  - corpus: maths\n"))
    assert "prose-1, prose-2" in (caught.value.hint or "")
    with pytest.raises(SourceNotFound, match="expected a text file at"):
        load_suite(write(tmp_path, HEAD + "corpora:\n  - file: absent.txt\n"))
    with pytest.raises(UsageError, match="expected the field 'answer' on line 1"):
        load_suite(write(tmp_path, HEAD + "corpora:\n  - {corpus: chat, fields: [user, answer]}\n"))


def test_an_empty_list_of_fields_is_a_mistake(tmp_path: Path) -> None:
    assert "fields" in mistake(tmp_path, HEAD + ONE + "    fields: []\n")
    assert "corpora" in mistake(tmp_path, HEAD + "corpora: []\n")


def test_suites_and_corpora_are_in_the_wheel(tmp_path: Path) -> None:
    builder = pytest.importorskip("hatchling.builders.wheel").WheelBuilder
    (wheel,) = builder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
    for path in (ROOT / "eval").rglob("*.*"):
        assert f"mfs_decompose/_data/eval/{path.relative_to(ROOT / 'eval')}" in names
