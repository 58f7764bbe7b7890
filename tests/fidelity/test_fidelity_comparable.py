from __future__ import annotations

import json
from typing import Any

import pytest

from mfs_decompose.fidelity.comparable import comparable
from mfs_decompose.fidelity.document import describe_settings
from mfs_decompose.fidelity.result import DriftResult
from mfs_decompose.fidelity.settings import EvalSettings

TEXT = {"sha256": "aa", "documents": 3, "bytes": 99, "max_tokens": 40}


def result(variant: str = "v", corpus: str = "prose", bos: str = "none", **text: Any) -> DriftResult:
    nothing: Any = dict.fromkeys(
        ("ppl_original", "ppl_x", "ppl_base", "ppl_ratio", "ppl_ratio_ci", "kl_base", "kl_mean", "kl_p99", "top1")
    )
    return DriftResult(
        variant, "served", corpus, 9, **nothing, recovered=None, units=50, bos=bos, text={**TEXT, **text}
    )


def settings(*results: DriftResult, device: str = "cpu", **changes: Any) -> dict[str, Any]:
    content = describe_settings(EvalSettings(**changes), results or (result(),), device)
    again: dict[str, Any] = json.loads(json.dumps(content))
    return again


def test_a_measurement_is_comparable_with_itself() -> None:
    found = comparable(settings(), settings())
    assert found
    assert found.differences == ()


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"window": 64}, "window: 512 and 64"),
        ({"stride": 32}, "stride: 512 and 32"),
        ({"bos": "off"}, "bos_policy: 'auto' and 'off'"),
        ({"dtype": "bfloat16"}, "dtype: 'float32' and 'bfloat16'"),
        ({"batch_size": 5}, "batch_size: 1 and 5"),
        ({"padding": "left"}, "padding: 'right' and 'left'"),
        ({"attention": "sdpa"}, "attention: 'eager' and 'sdpa'"),
    ],
)
def test_an_unlike_setting_is_named_with_both_values(changes: dict[str, Any], difference: str) -> None:
    found = comparable(settings(), settings(**changes))
    assert not found
    assert difference in found.differences
    assert len(found.differences) == 1 + ("window" in changes)  # the stride is the window's


def test_a_stride_written_out_is_the_default() -> None:
    assert comparable(settings(), settings(stride=512))


def test_devices_differ_by_kind() -> None:
    assert comparable(settings(device="cuda:0"), settings(device="cuda:3"))
    assert comparable(settings(), settings(device="cuda")).differences == ("device: cpu and cuda",)


@pytest.mark.parametrize(
    ("text", "difference"),
    [
        ({"max_tokens": 41}, "text prose: max_tokens 40 and 41"),
        ({"sha256": "bb"}, "text prose: sha256 'aa' and 'bb'"),
        ({"sha256": "bb", "bytes": 100}, "text prose: bytes 99 and 100"),
    ],
)
def test_another_text_of_the_same_name_is_named(text: dict[str, Any], difference: str) -> None:
    assert comparable(settings(), settings(result(**text))).differences == (difference,)


def test_the_bos_of_a_variant_counts_as_it_was_resolved() -> None:
    assert comparable(settings(), settings(result(bos="<s>"))).differences == ("bos of variant v: 'none' and '<s>'",)


def test_what_only_one_of_them_measured_does_not_count() -> None:
    other = settings(result(), result(variant="w", bos="<s>"), result(corpus="code", sha256="cc"))
    assert comparable(settings(), other)
    assert comparable(other, settings())


def test_versions_threads_notes_and_names_of_suites_do_not_count() -> None:
    other = {**settings(), "torch": "9", "transformers": "9", "threads": 77, "notes": ["x"], "suite": "ci"}
    assert comparable(settings(), other)


def test_a_setting_that_is_not_there_is_a_difference() -> None:
    other = settings()
    del other["convention"], other["device"]
    assert comparable(other, other).differences == ("convention: none and none",)
    assert len(comparable(settings(), other).differences) == 2
