from __future__ import annotations

from pathlib import Path

import pytest

from mfs_decompose.cli.options import named_refs
from mfs_decompose.errors import UsageError


def test_a_reference_is_named_by_hand_or_by_its_last_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    values = ["code=/models/a", "/ft/math/", "chat-v2", "./x=1/deep", "eq=a=b", "."]
    assert named_refs(values, "--variants") == {
        "code": "/models/a", "math": "/ft/math/", "chat-v2": "chat-v2", "deep": "./x=1/deep", "eq": "a=b", "here": ".",
    }  # fmt: skip
    assert named_refs([], "--variants") == {}


def test_a_link_keeps_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    link = tmp_path / "latest"
    link.symlink_to(tmp_path / "target")
    assert named_refs([str(link)], "--variants") == {"latest": str(link)}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["a=x", "a=y"], "--variants: the id 'a' names both x and y"),
        (["/one/math", "/two/math"], "--variants: the id 'math' names both /one/math and /two/math"),
        (["base=x"], "not base or all), found 'base'"),
        (["/models/all"], "not base or all), found 'all'"),
        (["a b=x"], "found 'a b'"),
        ([".hidden=x"], "found '.hidden'"),
        (["=x"], "found ''"),
        (["/"], "found ''"),
        (["a="], "--variants: expected ID=REF, found 'a='"),
        (["\u4e2d=x"], "expected an id of letters, digits"),
    ],
)
def test_an_id_must_be_one_and_usable(values: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        named_refs(values, "--variants")
    assert message in caught.value.message


def test_the_hint_shows_how_to_name_it() -> None:
    with pytest.raises(UsageError) as caught:
        named_refs(["/models/my model"], "--against")
    assert caught.value.hint == "name it yourself: --against ID=/models/my model"
