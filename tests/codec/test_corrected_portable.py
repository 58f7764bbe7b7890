"""Corrections that one machine writes another reads to the original's bytes, whatever its threads and kernels.

Encoded here with two threads, decoded in processes with one thread, other vector instructions and other kernels of the
matrix library. A predictor planted in fp32 must be caught.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import portable_corrected
import pytest
import torch
from codec_entries import bits, generator, rows_of
from other_machines import ENVIRONMENTS, decode_elsewhere
from portable_corrected import Entry, delta_rows

from mfs_decompose.codec.corrected import encode_corrected, with_child
from mfs_decompose.codec.fixed import encode_fixed
from mfs_decompose.linalg.deround import balance
from mfs_decompose.linalg.fixed_point import FixedFactors, quantise_fixed
from mfs_decompose.linalg.margins import Merge
from mfs_decompose.source.dtypes import torch_dtype
from mfs_decompose.source.header import TensorSpec

_SHAPE = (300, 203)
_RANK = 64
_CASES: list[tuple[str, Merge]] = [("BF16", "once"), ("BF16", "twice"), ("F16", "once"), ("F32", "once")]


def _factors() -> FixedFactors:
    draw = generator(1)
    left = torch.randn(_SHAPE[0], _RANK, generator=draw) * torch.logspace(0, -2, _RANK)
    right = torch.randn(_SHAPE[1], _RANK, generator=draw) * 1e-3
    found = quantise_fixed(*balance(left, right), 1e-8)
    assert found is not None and found.rank == _RANK
    return found


def _make() -> tuple[list[Entry], dict[str, str]]:
    """Honest and planted entries, and the digests of the originals."""
    factors, entries, originals = _factors(), [], {}
    draw = generator(2)
    for kind in ("honest", "planted"):
        for dtype, merge in _CASES:
            spec = TensorSpec(f"{kind}.{dtype}.{merge}", dtype, _SHAPE)
            base = (torch.randn(_SHAPE, generator=draw) * 0.02).to(torch_dtype(dtype))
            noise = torch.randn(_SHAPE, generator=draw, dtype=torch.float64) * 1e-5
            own = (base.double() + factors.rows(0, _SHAPE[0]) + noise).to(base.dtype)
            pieces: list[bytes] = []
            child = encode_fixed(factors, pieces.append)
            delta = delta_rows(spec.name, factors)
            node = encode_corrected(rows_of(own), rows_of(base), delta, spec, pieces.append, merge)
            entries.append(Entry(spec, with_child(node, child), b"".join(pieces), bits(base)))
            originals[spec.name] = hashlib.sha256(bits(own)).hexdigest()
    return entries, originals


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The folder of what was encoded here with two threads, and the originals' digests."""
    folder = tmp_path_factory.mktemp("corrected")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        entries, originals = _make()
    finally:
        torch.set_num_threads(before)
    portable_corrected.save(folder, entries)
    return folder, originals


@pytest.fixture(scope="module")
def elsewhere(here: tuple[Path, dict[str, str]]) -> dict[str, dict[str, Any]]:
    """What it decodes to in each of the other environments; their processes run side by side."""
    return decode_elsewhere(Path(portable_corrected.__file__), here[0])


def test_everything_decodes_here(here: tuple[Path, dict[str, str]]) -> None:
    found = portable_corrected.decode(portable_corrected.load(here[0]))
    assert {name: found[name] for name in found if name.startswith("honest")} == {
        name: digest for name, digest in here[1].items() if name.startswith("honest")
    }


def test_the_environments_are_what_they_say(elsewhere: dict[str, dict[str, Any]]) -> None:
    assert elsewhere["one thread"]["threads"] == 1
    assert elsewhere["plain vector instructions"]["capability"] == "DEFAULT"


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_corrections_decode_to_the_original(
    here: tuple[Path, dict[str, str]], elsewhere: dict[str, dict[str, Any]], environment: str
) -> None:
    for name, digest in here[1].items():
        if name.startswith("honest"):
            assert elsewhere[environment]["found"][name] == digest, name


_CHOOSABLE = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]


@pytest.mark.skipif(not _CHOOSABLE, reason="needs a matrix library whose kernels can be chosen")
def test_a_planted_fp32_predictor_is_caught(
    here: tuple[Path, dict[str, str]], elsewhere: dict[str, dict[str, Any]]
) -> None:
    caught = {
        name for name, digest in here[1].items() if any(found["found"][name] != digest for found in elsewhere.values())
    }
    # An fp32 weight shows the last bit of its predictor; of a shorter one the classes must change, which is rarer.
    assert "planted.F32.once" in caught
    assert all(name.startswith("planted") for name in caught)
