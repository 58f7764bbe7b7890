"""Resident forms against what an artifact serves: every codec, every kind of adapter, byte for byte counted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from every_codec import ADAPTERS, make_artifacts
from hypothesis import given
from hypothesis import strategies as st

from mfs_decompose.artifact.reader import Family
from mfs_decompose.artifact.values import open_tensor
from mfs_decompose.codec.banded import Banded
from mfs_decompose.linalg.svd import truncated_svd
from mfs_decompose.runtime.memory import count_memory
from mfs_decompose.runtime.ops.dense import to_dense
from mfs_decompose.runtime.resident import Resident, SharedForms, make_resident, own_resident, served_whole
from mfs_decompose.runtime.resident_forms import Factor, LowRank, Packed, Rows, cut_rows
from mfs_decompose.runtime.resident_read import dense_form, read_forms


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_artifacts(tmp_path_factory.mktemp("codecs"))


def served_by(family: Family, resident: Resident) -> torch.Tensor:
    """The tensor that forms make of the base, in fp64."""
    shape = resident.shape
    values = torch.zeros(shape, dtype=torch.float64)
    if resident.base is not None:
        known = family.manifest.base.tensors[resident.base].shape
        rows = min(known[0], shape[0])
        values[:rows] = family.base_rows(resident.base, 0, rows).to(torch.float64)
    for one in resident.placed:
        part = values if one.slice is None else values[one.slice]
        rows = part[one.start : one.stop]
        dense = to_dense(one.form, one.stop - one.start).to(torch.float64)
        if isinstance(one.form, Rows) and one.form.own:
            at = slice(None) if one.form.index is None else one.form.index.to(torch.int64)
            rows[at] = dense[at]
        else:
            rows += dense
    return values


def matrices(family: Family) -> Iterator[tuple[str, str]]:
    for id in family.variant_ids:
        for name, record in family.variant(id).tensors.items():
            if len(record.shape) in (2, 3) and record.dtype in ("BF16", "F32", "F16"):
                yield id, name


@pytest.mark.parametrize("kind", ["lossy", "exact", *ADAPTERS])
def test_forms_are_what_is_served(artifacts: dict[str, Path], kind: str) -> None:
    seen = set()
    with Family.open(artifacts[kind]) as family:
        shared = SharedForms(family)
        for id, name in matrices(family):
            resident = make_resident(family, id, name, shared)
            wanted = served_whole(family, id, name).to(torch.float64)
            scale = float(wanted.abs().max()) + 1e-30
            assert float((served_by(family, resident) - wanted).abs().max()) <= 3e-7 * scale, name
            own = own_resident(family, id, name)
            assert torch.equal(served_by(family, own), wanted)
            seen |= {one.form.name for one in resident.placed}
    if kind == "lossy":
        assert seen == {
            "low rank int8", "low rank int16", "low rank bfloat16", "sparse rows", "packed 1 bit", "packed 1.6 bit",
            "packed 2 bit", "packed 3 bit", "delta rows int8", "own rows bfloat16", "own rows float32",
            *(seen & DEADZONE),
        }  # fmt: skip
        assert seen & DEADZONE


DEADZONE = {"packed 8 bit", "packed 4 bit", "delta rows float32", "sparse entries"}


def test_bytes_are_those_of_the_codec(artifacts: dict[str, Path]) -> None:
    with Family.open(artifacts["lossy"]) as family:
        shared = SharedForms(family)

        def size(name: str) -> int:
            resident = make_resident(family, "many", name, shared)
            return count_memory([], {"many": (resident.placed, ())}).total

        sign = family.variant("many").tensors["sign.weight"]
        rows, columns = sign.shape
        assert size("sign.weight") == rows * -(-columns // 8) + 2 * rows * -(-columns // 64) + 8
        few = family.tree("many", "few.weight")
        rows, columns = family.variant("many").tensors["few.weight"].shape
        steps = few.integer("steps")
        assert size("few.weight") == 3 * steps * rows + 2 * steps * -(-rows // 64)
        int4 = family.tree("many", "int4.weight")
        rows, columns = family.variant("many").tensors["int4.weight"].shape
        groups = -(-rows // 64) + -(-columns // 64)
        assert size("int4.weight") == int4.integer("steps") * (rows + columns + 4 * groups)
        raw = family.variant("many").tensors["raw.weight"]
        assert size("raw.weight") == 2 * raw.shape[0] * raw.shape[1]
        assert make_resident(family, "plain", "raw.weight", shared).placed == ()
        tied = [make_resident(family, "many", name, shared) for name in ("model.embed_tokens.weight", "lm_head.weight")]
        assert tied[0].tensor == tied[1].tensor


@pytest.mark.parametrize("shape", [(130, 33), (33, 130), (200, 101)])
def test_bands_along_and_across_from_a_vocabulary(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mfs_decompose.linalg.shapes.LONG_SIDE", 100)
    delta = torch.randn(*shape, generator=torch.Generator().manual_seed(9))
    found = truncated_svd(delta[None], 15, [3])[0]
    assert found is not None
    pieces: list[bytes] = []
    node = Banded().encode(found.left, found.right, (1, 2, 3, 4, 5), pieces.append)
    data = b"".join(pieces)

    def fetch(start: int, count: int) -> bytes:
        return data[start : start + count]

    (form,) = read_forms(node, fetch, shape, None)
    assert isinstance(form, LowRank)
    stored = Banded().open(node, fetch, shape).rows(0, shape[0])
    assert torch.allclose(
        to_dense(form, shape[0]).to(torch.float64), stored, rtol=0.0, atol=1e-6 * float(stored.abs().max())
    )
    short = form.right if shape[0] > shape[1] else form.left
    assert short.by_direction == (min(shape) <= 100)


def test_exact_rows_are_kept_only_where_they_differ() -> None:
    values = torch.zeros(7, 5, dtype=torch.float64)
    assert dense_form(lambda a, b: values[a:b], (7, 5)) is None
    values[3] = torch.arange(5) * 0.37
    form = dense_form(lambda a, b: values[a:b], (7, 5))
    assert isinstance(form, Rows)
    assert form.index is not None
    assert form.index.tolist() == [3]


@given(st.floats(0, 0.3), st.integers(0, 9), st.booleans())
def test_few_entries_become_entries(density: float, seed: int, coarse: bool) -> None:
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(41, 67, generator=draw, dtype=torch.float64)
    values = (values.sign() if coarse else values) * (torch.rand(41, 67, generator=draw) < density)
    form = dense_form(lambda a, b: values[a:b], (41, 67))
    if form is None:
        assert not values.any()
        return
    assert torch.equal(to_dense(form, 41), values.to(torch.float32))
    held = sum(part.nbytes for part in form.tensors())
    entries = (3 if coarse else 6) * int(values.ne(0).sum()) + 4 * 42 + 12 * coarse
    assert held <= min(entries, 4 * values.numel(), 10_000 if not coarse else 41 * 14 + 14)
    start, stop = seed, 30
    assert torch.equal(to_dense(cut_rows(form, start, stop), stop - start), values[start:stop].to(torch.float32))


@given(st.integers(2, 400), st.integers(0, 9))
def test_few_values_become_codes(levels: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    values = torch.randint(0, levels, (40, 67), generator=draw).to(torch.float64) * 0.3 - 1
    form = dense_form(lambda a, b: values[a:b], (40, 67))
    assert form is not None
    assert isinstance(form, Packed) == (levels <= 256 or torch.unique(values).numel() <= 256)
    assert torch.equal(to_dense(form, 40), values.to(torch.float32))


@given(st.integers(1, 5), st.integers(1, 150), st.integers(1, 70), st.booleans(), st.data())
def test_cut_rows_are_those_rows(rank: int, rows: int, columns: int, half: bool, data: st.DataObject) -> None:
    draw = torch.Generator().manual_seed(rows)
    sides = [
        Factor(
            torch.randint(-128, 128, (rank, length), generator=draw, dtype=torch.int8),
            torch.rand(rank, -(-length // 64), generator=draw),
            half,
        )
        for length in (rows, columns)
    ]
    form = LowRank(sides[0], sides[1])
    start = data.draw(st.integers(0, rows - 1))
    stop = data.draw(st.integers(start + 1, rows))
    whole = to_dense(form, rows)
    assert torch.allclose(to_dense(cut_rows(form, start, stop), stop - start), whole[start:stop], rtol=1e-5, atol=1e-2)


def test_stored_tensors_stay_readable_beside(artifacts: dict[str, Path]) -> None:
    with Family.open(artifacts["lossy"]) as family:
        assert open_tensor(family, "many", "raw.weight").exact
