"""What one machine encodes another decodes to the same bytes, whatever its threads and its kernels.

The acceptance test of "decode is exact": encoded here with two threads, decoded in processes with one thread, with
other vector instructions in torch and with other kernels in the matrix library. A planted fp32 decode must be caught.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import portable_decode
import pytest
import torch
from codec_entries import LOSSY_FORMATS, Stored, bits, fit_one, generator, store_fit
from direct_entries import CASES, store_direct
from other_machines import ENVIRONMENTS, decode_elsewhere

from mfs_decompose.codec.banded import Banded
from mfs_decompose.codec.base import matrix_shape
from mfs_decompose.codec.summed import encode_residual, sum_node
from mfs_decompose.linalg.seeds import random_matrix
from mfs_decompose.linalg.svd import truncated_svd
from mfs_decompose.source.dtypes import torch_dtype
from mfs_decompose.source.header import TensorSpec

_MATRIX = (300, 203)
_TENSORS: list[tuple[str, tuple[int, ...]]] = [("BF16", (300, 203)), ("F16", (3, 100, 203))]
_STEPS = {"lowrank": 64, "sparse": 9}
_RESIDUALS = ("sign.row", "ternary.mse", "kbit.5.mse", "deadzone.0.0002")


def _make_entries() -> list[portable_decode.Entry]:
    """Every lossy codec and format, as a matrix and as a stack of matrices, at a rank where fp32 sums are inexact."""
    delta = random_matrix(1, *_MATRIX) * torch.logspace(0, -2, _MATRIX[1]) * 1e-2
    entries = []
    for codec, params in LOSSY_FORMATS:
        fit = fit_one(codec, delta, _STEPS[codec], params)
        assert fit.steps == _STEPS[codec]
        stored = store_fit(codec, fit, fit.steps, params)
        for dtype, shape in _TENSORS:
            assert matrix_shape(shape) == _MATRIX
            spec = TensorSpec(f"{codec}.{'.'.join(params.values())}.{dtype}", dtype, shape)
            base = torch.randn(shape, generator=generator(2)).to(torch_dtype(dtype))
            entries.append(portable_decode.Entry(spec.name, spec, stored.node, stored.data, bits(base)))
    spec = TensorSpec("delta", "F32", _MATRIX)
    for name, stored in _make_direct(delta).items():
        entries.append(portable_decode.Entry(name, replace(spec, name=name), stored.node, stored.data, b""))
    return entries


def _make_direct(delta: torch.Tensor) -> dict[str, Stored]:
    """Every direct codec and format, banded factors with all widths, and sums of these with some of those."""
    cases = {str(case): case for case in CASES if case.codec.name != "significant"}  # written as `sparse`
    found = {name: store_direct(case, delta) for name, case in cases.items()}
    factors = truncated_svd(delta[None], 100, [1])[0]
    assert factors is not None
    pieces: list[bytes] = []
    node = Banded().encode(factors.left, factors.right, (20, 20, 20, 20, 20), pieces.append)
    found["banded"] = Stored(node, b"".join(pieces))
    first = Banded().open(node, found["banded"].fetch, _MATRIX)
    for name in _RESIDUALS:
        case = cases[name]
        rest: list[bytes] = []
        residual = encode_residual(lambda a, b: delta[a:b], _MATRIX, first, case.codec, case.params, rest.append)
        found[f"sum.{name}"] = Stored(sum_node([node, residual]), found["banded"].data + b"".join(rest))
    return found


def _is_product(name: str) -> bool:
    return name.startswith(("lowrank", "banded", "sum"))


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of what was encoded here with two threads, and what it decodes to here."""
    folder = tmp_path_factory.mktemp("portable")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        entries = _make_entries()
        portable_decode.save(folder, entries)
        return folder, dict(portable_decode.decode_both_ways(entries))
    finally:
        torch.set_num_threads(before)


@pytest.fixture(scope="module")
def elsewhere(here: tuple[Path, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What it decodes to in each of the other environments; their processes run side by side."""
    return decode_elsewhere(Path(portable_decode.__file__), here[0])


def test_what_was_saved_is_what_is_loaded(here: tuple[Path, dict[str, Any]]) -> None:
    assert [entry.spec.name for entry in portable_decode.load(here[0])] == list(here[1]["honest"])
    assert len(here[1]["honest"]) == len(LOSSY_FORMATS) * len(_TENSORS) + len(CASES) + len(_RESIDUALS)


def test_the_environments_are_what_they_say(elsewhere: dict[str, dict[str, Any]]) -> None:
    assert elsewhere["one thread"]["threads"] == 1
    assert elsewhere["plain vector instructions"]["capability"] == "DEFAULT"


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_decoding_gives_the_same_bytes(
    here: tuple[Path, dict[str, Any]], elsewhere: dict[str, dict[str, Any]], environment: str
) -> None:
    found = elsewhere[environment]["honest"]
    for name, expected in here[1]["honest"].items():
        assert found[name] == expected, name


def test_a_planted_fp32_decode_changes_the_delta_here(here: tuple[Path, dict[str, Any]]) -> None:
    for name, honest in here[1]["honest"].items():
        planted = here[1]["planted"][name]
        assert (planted["delta"] != honest["delta"]) == _is_product(name)


_CHOOSABLE = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]


@pytest.mark.skipif(not _CHOOSABLE, reason="needs a matrix library whose kernels can be chosen")
def test_a_planted_fp32_decode_is_caught(
    here: tuple[Path, dict[str, Any]], elsewhere: dict[str, dict[str, Any]]
) -> None:
    caught = {
        name
        for name, expected in here[1]["planted"].items()
        if any(found["planted"][name] != expected for found in elsewhere.values())
    }
    # Products of two int8 values with their scales need 30 bits; those of the other formats fit into the 24 of fp32, so
    # that kernels can only differ by the order of their sums, which here they need not.
    assert {f"lowrank.int8.{dtype}" for dtype, _ in _TENSORS} <= caught
    assert all(_is_product(name) for name in caught)
