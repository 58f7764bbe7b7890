"""What checkpoints say of their licences: repeated where it is plain, unknown where it is not, never guessed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from artifact_families import Made, make_artifact
from hypothesis import given
from hypothesis import strategies as st

from mfs_decompose.artifact.files import FileRecord
from mfs_decompose.artifact.licences import MAX_SOURCE_BYTES, Licence, read_licences
from mfs_decompose.artifact.manifest import Manifest
from mfs_decompose.artifact.reader import Family
from mfs_decompose.artifact.records import SourceRecord
from mfs_decompose.artifact.verify import verify
from mfs_decompose.artifact.writer import finish_artifact, store_content
from mfs_decompose.errors import ArtifactInvalid


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    with Family.open(make_artifact(tmp_path_factory.mktemp("licences")).path) as family:
        return family.manifest


def with_files(source: SourceRecord, files: Mapping[str, bytes]) -> SourceRecord:
    return source.model_copy(update={"files": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}})


def licence_of(manifest: Manifest, files: Mapping[str, bytes]) -> Licence:
    """That of a variant with these side files alone."""
    contents = {hashlib.sha256(data).hexdigest(): data for data in files.values()}
    variant = manifest.variants[0]
    variant = variant.model_copy(update={"source": with_files(variant.source, files)})
    base = manifest.base.model_copy(update={"mode": "mean", "source": None})
    found = read_licences(base, [variant], contents.__getitem__)
    assert list(found) == ["alpha"]
    return found["alpha"]


def card(front: str, newline: str = "\n") -> bytes:
    return newline.join(["---", *front.split("\n"), "---", "# A model", "license: not-here"]).encode()


@pytest.mark.parametrize(
    ("front", "name"),
    [
        ("license: apache-2.0", "apache-2.0"),
        ("language: en\nlicense: mit\ntags:\n- license\n- x", "mit"),
        ('"license": "cc-by-4.0"', "cc-by-4.0"),
        ("license:\n- mit\n- apache-2.0\nlanguage: en", "mit, apache-2.0"),
        ("license:\n  - mit\n  # a remark\n\n  - gpl-3.0", "mit, gpl-3.0"),
        ("license: [mit, bsd]", "mit, bsd"),
        ("license: other\nlicense_name: llama3.1\nlicense_link: LICENSE", "other: llama3.1"),
        ("license: other", "other"),
        ("license: mit\nlicense_name: ignored", "mit"),
        ("license: >-\n  a licence\n  of two lines", "a licence of two lines"),
        ("license: unknown", "unknown"),
        ("results: [not, {closed\nlicense: mit", "mit"),
        ("a: &a [x]\nb: *a\nlicense: mit", "mit"),
    ],
)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_the_front_matter_says_it(manifest: Manifest, front: str, name: str, newline: str) -> None:
    assert licence_of(manifest, {"README.md": card(front, newline)}) == Licence(name, ("README.md",))
    assert licence_of(manifest, {"README.md": b"\xef\xbb\xbf" + card(front, newline)}).name == name


@pytest.mark.parametrize(
    "readme",
    [
        b"",
        b"# A model\nlicense: mit\n",
        b"---\nlicense: mit\n",
        b"\n---\nlicense: mit\n---\n",
        b"----\nlicense: mit\n----\n",
        card("licenses: mit"),
        card("model-index:\n  license: mit"),
        card("license:"),
        card("license: null"),
        card("license: no"),
        card("license: 3"),
        card("license: {name: mit}"),
        card("license: [[mit]]"),
        card("license: mit\nlicense: gpl"),
        card("license: *alias"),
        card("license: !!python/object/apply:os.system [true]"),
        card("license: [mit"),
        card("license: '" + "x" * 9000 + "'"),
        card("license: " + "[" * 3000),
        card("license: \x07bell"),
        b"---\nlicense: \xff\xfe\n",
        b"---\nx: " + b"y" * MAX_SOURCE_BYTES + b"\nlicense: mit\n---\n",
    ],
)
def test_what_is_not_plainly_said_is_unknown(manifest: Manifest, readme: bytes) -> None:
    assert licence_of(manifest, {"README.md": readme}) == Licence(None, ())


def test_long_names_are_cut(manifest: Manifest) -> None:
    name = licence_of(manifest, {"README.md": card("license: [" + ", ".join(["long" * 50] * 12) + "]")}).name
    assert name == ", ".join(["long" * 20] * 8)


def test_a_config_says_it_where_the_readme_does_not(manifest: Manifest) -> None:
    config = json.dumps({"license": "mit"}).encode()
    assert licence_of(manifest, {"config.json": config}) == Licence("mit", ("config.json",))
    files = {"config.json": config, "README.md": b"# A model"}
    assert licence_of(manifest, files) == Licence("mit", ("config.json",))
    files["README.md"] = card("license: gpl-3.0")
    assert licence_of(manifest, files) == Licence("gpl-3.0", ("README.md",))
    for broken in (b"{", b"[]", b'{"license": 1}', b'{"license": "a", "license": "b"}', b"\xff", b"[" * 100_000):
        assert licence_of(manifest, {"config.json": broken}).name is None


def test_files_with_its_text_are_named_and_not_interpreted(manifest: Manifest) -> None:
    names = ("LICENSE", "LICENSE.txt", "LICENSE-MIT", "license.txt", "LICENCE.md")
    files = dict.fromkeys((*names, "NOTICE", "licensed.txt", "tokenizer.json"), b"Apache License, Version 2.0")
    assert licence_of(manifest, files) == Licence(None, tuple(sorted(names)))
    found = licence_of(manifest, {**files, "README.md": card("license: mit")})
    assert found == Licence("mit", ("README.md", *sorted(names)))


@given(st.binary(max_size=200) | st.text(max_size=80).map(lambda text: card(f"license: {text}")))
def test_no_readme_stops_the_run(manifest: Manifest, readme: bytes) -> None:
    name = licence_of(manifest, {"README.md": readme}).name
    assert name is None or (name.strip() and len(name) <= 700)


def finish_with(made: Made, given: Mapping[str, Mapping[str, bytes]]) -> Manifest:
    """The artifact again, whose sources have more side files."""
    manifest = Family.open(made.path).manifest
    files = [FileRecord(p, e.size, e.sha256) for p, e in manifest.files.items() if p != "README.md"]

    def more(id: str, source: SourceRecord) -> SourceRecord:
        stored = {name: store_content(made.path, data) for name, data in given.get(id, {}).items()}
        files.extend(stored.values())
        return source.model_copy(
            update={"files": {**source.files, **{name: record.sha256 for name, record in stored.items()}}}
        )

    assert manifest.base.source is not None
    changes: dict[str, Any] = {
        "base": manifest.base.model_copy(update={"source": more("base", manifest.base.source)}),
        "variants": [v.model_copy(update={"source": more(v.id, v.source)}) for v in manifest.variants],
    }
    return finish_artifact(
        made.path,
        tool=manifest.tool,
        platform=manifest.platform,
        recipe=manifest.recipe,
        coverage=manifest.coverage,
        files=files,
        **changes,
    )


def test_the_card_of_an_artifact_names_them(tmp_path: Path) -> None:
    made = make_artifact(tmp_path)
    hostile = card('license: "mit | evil\\n# Big\\n<b>"')
    finish_with(made, {"base": {"README.md": card("license: apache-2.0")}, "zeta": {"README.md": hostile}})
    assert verify(made.path).problems == ()
    lines = (made.path / "README.md").read_text(encoding="utf-8").splitlines()
    assert "| base | apache-2.0 | README.md |" in lines
    assert "| alpha | unknown | - |" in lines
    assert r"| zeta | mit \| evil \# Big \<b\> | README.md |" in lines
    with Family.open(made.path) as family:
        again = read_licences(family.manifest.base, family.manifest.variants, family.file_bytes)
    assert again["base"] == Licence("apache-2.0", ("README.md",))


def test_a_surrogate_in_a_licence_does_not_stop_the_run(tmp_path: Path) -> None:
    made = make_artifact(tmp_path)
    finish_with(made, {"alpha": {"README.md": card(r'license: "a\ud800b"')}})
    assert "| alpha | a\N{REPLACEMENT CHARACTER}b | README.md |" in (made.path / "README.md").read_text("utf-8")


def test_a_side_file_that_is_not_there_is_not_published(tmp_path: Path) -> None:
    made = make_artifact(tmp_path)
    readme = card("license: mit")
    manifest = finish_with(made, {"alpha": {"README.md": readme}})
    (made.path / "files" / hashlib.sha256(readme).hexdigest()).unlink()
    with pytest.raises(ArtifactInvalid, match="found no whole files/"):
        finish_artifact(
            made.path,
            tool=manifest.tool,
            platform=manifest.platform,
            recipe=manifest.recipe,
            base=manifest.base,
            variants=manifest.variants,
            coverage=manifest.coverage,
            files=[],
        )
