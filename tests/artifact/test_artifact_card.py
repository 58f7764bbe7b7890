"""The model card: the same for the same records, and no place for markup from users."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from artifact_families import PLATFORM, TOOL, make_artifact
from hypothesis import given
from hypothesis import strategies as st

from mfs_decompose.artifact import card as card_module
from mfs_decompose.artifact.card import codec_counts, escape_markdown
from mfs_decompose.artifact.licences import Licence
from mfs_decompose.artifact.manifest import Manifest
from mfs_decompose.artifact.reader import Family
from mfs_decompose.artifact.records import BaseRecord, VariantRecord
from mfs_decompose.codec.tree import CodecNode

RECIPE = {"schema": "mfs.recipe/1", "objective": {"rank": 6}, "seed": 7}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    with Family.open(make_artifact(tmp_path_factory.mktemp("card")).path) as family:
        return family.manifest


def render_card(base: BaseRecord, variants: Sequence[VariantRecord], **changes: Any) -> str:
    given = {"recipe": RECIPE, "tool": TOOL, "platform": PLATFORM, "licences": {}}
    return card_module.render_card(base, variants, **{**given, **changes})


def row_of(card: str, id: str, section: str) -> str:
    return next(line for line in card.split(section, 1)[1].splitlines() if line.startswith(f"| {id} "))


def hub_manifest(manifest: Manifest, repo: str) -> Manifest:
    assert manifest.base.source is not None
    source = manifest.base.source.model_copy(update={"kind": "hub", "repo": repo, "revision": COMMIT})
    return manifest.model_copy(update={"base": manifest.base.model_copy(update={"source": source})})


def front_matter(card: str) -> dict[str, object]:
    found = yaml.safe_load(card.split("---\n")[1])
    assert isinstance(found, dict)
    return found


def test_the_card_of_the_artifact_is_that_of_its_records(tmp_path: Path) -> None:
    made = make_artifact(tmp_path)
    with Family.open(made.path) as family:
        manifest = family.manifest
    again = render_card(
        manifest.base,
        manifest.variants,
        recipe=manifest.recipe,
        licences={id: Licence(None, ()) for id in ("base", "alpha", "zeta")},
    )
    assert (made.path / "README.md").read_text() == again


def test_a_row_states_what_was_recorded(manifest: Manifest) -> None:
    tensors = dict(manifest.variants[1].tensors)
    tensors["embed.weight"] = tensors["embed.weight"].model_copy(update={"energy": 2.0, "error": 0.02})
    tensors["layer.0.weight"] = tensors["layer.0.weight"].model_copy(update={"energy": 0.0})
    update = {"tensors": tensors, "bytes": 5_120_000, "checkpoint_bytes": 102_400_000}
    zeta = manifest.variants[1].model_copy(update=update)
    card = render_card(manifest.base, (manifest.variants[0], zeta))
    assert "| zeta | 5 % | 5.12 MB | 102 MB | 0.1 | identical × 5, raw × 2 |" in card
    assert "# A family of 2 variants" in card
    assert "mfs restore . --variant alpha --out DIR" in card
    assert "mfs verify . --level values" in card


def test_trees_are_named_by_their_composition(manifest: Manifest) -> None:
    variant = manifest.variants[0]
    tree = CodecNode("rows", children=(CodecNode("lowrank"), CodecNode("raw"))).to_json()
    tensors = {"a": variant.tensors["position"].model_copy(update={"tree": tree}), "b": variant.tensors["position"]}
    variant = variant.model_copy(update={"tensors": tensors})
    assert codec_counts(variant) == {"identical": 1, "rows(lowrank+raw)": 1}
    assert r"rows\(lowrank\+raw\) × 1" in render_card(manifest.base, (variant,))


def test_the_base_model_is_named_when_it_is_known(manifest: Manifest) -> None:
    assert "base_model" not in front_matter(render_card(manifest.base, manifest.variants))
    known = hub_manifest(manifest, "org/base-1B")
    card = render_card(known.base, known.variants)
    assert front_matter(card) == {
        "library_name": "mfs_decompose",
        "tags": ["mfs-family", "delta-compression"],
        "base_model": "org/base-1B",
    }
    assert f"at revision {COMMIT}" in card


@pytest.mark.parametrize(
    "repo", ['x"\nevil: yes', "a: b", "# c", "---", "[red]x[/]\x1b[2J<script>alert(1)</script>", "ü\u2028"]
)
def test_a_hostile_name_stays_text(manifest: Manifest, repo: str) -> None:
    known = hub_manifest(manifest, repo)
    card = render_card(known.base, known.variants)
    assert front_matter(card)["base_model"] == repo
    body = card.split("---\n", 2)[2]
    assert "<script>" not in body
    assert "\x1b" not in card
    assert "evil: yes" not in card.splitlines()


def test_a_codec_name_cannot_break_the_table(manifest: Manifest) -> None:
    variant = manifest.variants[0]
    odd = variant.tensors["position"].model_copy(update={"tree": {"codec": "a|b\n| evil |<i>", "version": 1}})
    variant = variant.model_copy(update={"tensors": {"t": odd}})
    row = next(line for line in render_card(manifest.base, (variant,)).splitlines() if line.startswith("| alpha"))
    assert row.replace("\\|", "").count("|") == 7
    assert "<i>" not in row.replace("\\<", "")


@pytest.mark.parametrize(
    ("update", "text"),
    [
        ({}, "was given and is in the artifact"),
        ({"mode": "mean", "source": None}, "is the mean of the variants and is in the artifact"),
        ({"store": "reference", "shards": (), "bytes": 0}, "is not in the artifact"),
    ],
)
def test_where_the_base_is(manifest: Manifest, update: dict[str, object], text: str) -> None:
    assert text in render_card(manifest.base.model_copy(update=update), manifest.variants)


def test_licences_are_named_or_said_to_be_unknown(manifest: Manifest) -> None:
    licences = {"base": Licence("apache-2.0", ("README.md", "LICENSE")), "alpha": Licence(None, ("LICENSE.txt",))}
    card = render_card(manifest.base, manifest.variants, licences=licences)
    assert row_of(card, "base", "## Licences") == "| base | apache-2.0 | README.md, LICENSE |"
    assert row_of(card, "alpha", "## Licences") == "| alpha | unknown | LICENSE.txt |"
    assert row_of(card, "zeta", "## Licences") == "| zeta | unknown | - |"


@pytest.mark.parametrize(
    "name",
    [
        "mit | evil |\n| base | mit",
        "<script>alert(1)</script>",
        "[free](https://evil.example)",
        "https://evil.example www.evil.example me@evil.example",
        "\x1b[2J\u202egnp.exe\ud800",
        "```\nrm -rf /\n```",
        "{base} {0} %s",
    ],
)
def test_a_hostile_licence_stays_text(manifest: Manifest, name: str) -> None:
    plain = render_card(manifest.base, manifest.variants)
    card = render_card(manifest.base, manifest.variants, licences={"alpha": Licence(name, (name,))})
    assert len(card.encode("utf-8").splitlines()) == len(plain.encode("utf-8").splitlines())
    row = row_of(card, "alpha", "## Licences")
    assert row.replace("\\|", "").count("|") == 4
    assert not {"\x1b", "\u202e"} & set(row)
    bare = re.sub(r"\\.", "", row)
    for markup in ("<script", "](", "`", "https:", "www.", "me@"):
        assert markup not in bare


def commands(card: str) -> list[str]:
    return re.findall(r"^```\n(.*?)\n```$", card, re.MULTILINE | re.DOTALL)


def test_the_commands_reproduce_and_use(manifest: Manifest) -> None:
    card = render_card(manifest.base, manifest.variants)
    use, made = commands(card)
    assert use == "mfs verify . --level values\nmfs restore . --variant alpha --out DIR"
    assert made.replace(" \\\n ", "").split() == [
        "mfs", "decompose", "--base", "PATH", "--variants", "alpha=PATH", "--variants", "zeta=PATH",
        "--set", "objective.rank=6", "--set", "seed=7", "--device", "cpu", "--out", "DIR",
    ]  # fmt: skip
    assert "`torch` 2.13.0, `numpy` 2.4, `safetensors` 0.8, `zstandard` 0.25." in card
    assert "on cpu with the CPU capability DEFAULT" in card


def test_sources_of_the_hub_are_named_and_pinned(manifest: Manifest) -> None:
    known = hub_manifest(manifest, "org/base-1B")
    assert f"  --base hf://org/base-1B@{COMMIT} \\\n" in commands(render_card(known.base, known.variants))[1]
    odd = hub_manifest(manifest, "org/x; rm -rf /\n```")
    assert "  --base PATH \\\n" in commands(render_card(odd.base, odd.variants))[1]


def test_a_base_that_lies_elsewhere_is_passed(manifest: Manifest) -> None:
    local = manifest.base.model_copy(update={"store": "reference", "shards": (), "bytes": 0})
    use = commands(render_card(local, manifest.variants))[0].splitlines()
    assert [line.endswith(" --base PATH") for line in use] == [True, True]
    hub = hub_manifest(manifest, "org/base-1B").base.model_copy(update={"store": "reference", "shards": (), "bytes": 0})
    assert "--base" not in commands(render_card(hub, manifest.variants))[0]


def test_a_mean_base_is_not_an_argument(manifest: Manifest) -> None:
    mean = manifest.base.model_copy(update={"mode": "mean", "source": None})
    card = render_card(mean, manifest.variants)
    assert "--base" not in commands(card)[1]
    assert row_of(card, "base", "## Licences") == "| base | unknown | - |"


def test_one_variant_is_singular(manifest: Manifest) -> None:
    assert "# A family of 1 variant in" in render_card(manifest.base, manifest.variants[:1])


@given(st.text(max_size=40))
def test_escaping_leaves_one_line_without_markup(text: str) -> None:
    escaped = escape_markdown(text)
    assert len(escaped.splitlines()) <= 1
    bare = escaped.replace("\\\\", "")
    for special in "`*_{}[]<>()#+!|~&$:@":
        assert bare.count(special) == bare.count("\\" + special)
