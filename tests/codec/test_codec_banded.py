"""Banded factors: bytes, errors, exact decoding, and entries that are not what they say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from codec_entries import Stored, decaying, generator, part_bytes
from hypothesis import given
from hypothesis import strategies as st

from mfs_decompose.codec import banded
from mfs_decompose.codec.banded import Banded
from mfs_decompose.codec.tree import CodecNode
from mfs_decompose.errors import ArtifactInvalid
from mfs_decompose.linalg.band_codes import decode_codes
from mfs_decompose.linalg.bands import (
    ERROR,
    ERROR_LONG,
    NOISE,
    WIDTHS,
    Bands,
    bands_bytes,
    direction_bytes,
    errors,
    loss,
)
from mfs_decompose.linalg.midrise import Quantiser, dequantise_levels
from mfs_decompose.linalg.svd import Truncation, truncated_svd

_CODEC = Banded()
_SHAPES = [(65, 33), (40, 131), (64, 64)]


def factor(delta: torch.Tensor, rank: int = 24) -> Truncation:
    found = truncated_svd(delta[None], rank, [3])[0]
    assert found is not None
    return found


def store(found: Truncation, bands: Bands) -> Stored:
    pieces: list[bytes] = []
    node = _CODEC.encode(found.left, found.right, bands, pieces.append)
    return Stored(node, b"".join(pieces))


def decode(stored: Stored, shape: tuple[int, int]) -> torch.Tensor:
    return _CODEC.open(stored.node, stored.fetch, shape).rows(0, shape[0])


def only(bits: int, count: int) -> Bands:
    return tuple(count if one == bits else 0 for one in WIDTHS)


@pytest.mark.parametrize("shape", _SHAPES)
@pytest.mark.parametrize("bands", [(0,) * 5, (1, 2, 3, 4, 5), (0, 0, 0, 0, 9), (3, 0, 0, 2, 0), (0, 1, 0, 0, 0)])
def test_bytes_are_those_of_the_shape_and_bands(bands: Bands, shape: tuple[int, int]) -> None:
    stored = store(factor(decaying(*shape, seed=1)), bands)
    assert stored.node.nbytes == len(stored.data) == bands_bytes(shape, bands)
    assert CodecNode.from_json(stored.node.to_json()) == stored.node
    assert decode(stored, shape).shape == shape


@pytest.mark.parametrize("bits", WIDTHS)
def test_the_error_of_a_width_is_what_the_allocation_counts_on(bits: int) -> None:
    delta = torch.randn(500, 300, generator=generator(2))
    found = factor(delta, 24)
    kept = found.left.to(torch.float64).mT @ found.right.to(torch.float64)
    error = float((decode(store(found, only(bits, 24)), (500, 300)) - kept).square().sum() / kept.square().sum())
    assert 0.8 * ERROR[bits] < error < 1.2 * ERROR[bits]


@pytest.mark.parametrize("shape", _SHAPES)
def test_the_whole_error_is_truncation_and_noise(shape: tuple[int, int]) -> None:
    delta = decaying(*shape, seed=3)
    found = factor(delta)
    bands = (2, 3, 5, 6, 8)
    decoded = decode(store(found, bands), shape)
    widths = [bits for bits, count in zip(WIDTHS, bands, strict=True) for _ in range(count)]
    noise = sum(float(energy) * ERROR[bits] for energy, bits in zip(found.energy, widths, strict=True))
    left_over = found.total - float(found.energy.sum())
    error = float((decoded - delta).square().sum())
    assert error < left_over + 2 * noise


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_directions_do_not_shrink(bits: int) -> None:
    """Along the fitted directions the stored delta has their strength; least squares would lose up to a fifth."""
    delta = torch.randn(500, 300, generator=generator(4))
    found = factor(delta, 40)
    decoded = decode(store(found, only(bits, 40)), (500, 300))
    left, right = (
        side.to(torch.float64) / side.to(torch.float64).norm(dim=1, keepdim=True) for side in (found.left, found.right)
    )
    strength = torch.einsum("ro,oi,ri->r", left, decoded, right) / found.energy.sqrt()
    assert float((strength - 1).abs().mean()) < 0.02
    assert float((strength - 1).abs().max()) < 0.1


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_error_of_the_first_factor_is_fed_into_the_second(bits: int) -> None:
    """On the input directions of the fit, the left factor with the quantised right one has the fit's own effect."""
    found = factor(torch.randn(300, 200, generator=generator(5)), 50)
    right = found.right.to(torch.float64)
    vs = [Quantiser(found.right, bits).levels()]
    wanted = found.left.to(torch.float64).mT @ right @ right.mT
    errors = []
    for left in (banded._feed_back(found.left, found.right, vs), found.left):
        errors.append(float((left.to(torch.float64).mT @ dequantise_levels(vs[0]) @ right.mT - wanted).norm()))
    assert errors[0] < 1e-5 * float(wanted.norm())
    assert errors[1] > 1e-2 * float(wanted.norm())


def test_feedback_gives_way_where_it_would_amplify() -> None:
    found = factor(torch.randn(32, 32, generator=generator(6)), 32)
    right = found.right.clone()
    right[1] = right[0]  # singular: no left factor can tell the two apart
    pieces: list[bytes] = []
    node = _CODEC.encode(found.left, right, only(3, 32), pieces.append)
    decoded = decode(Stored(node, b"".join(pieces)), (32, 32))
    kept = found.left.to(torch.float64).mT @ right.to(torch.float64)
    assert float((decoded - kept).norm()) < 0.6 * float(kept.norm())


def by_hand(stored: Stored, row: int, column: int, shape: tuple[int, int], bands: Bands) -> Fraction:
    """One element as a sum of fractions, from the bytes."""
    gains = torch.frombuffer(bytearray(part_bytes(stored, stored.node.part("gain"))), dtype=torch.bfloat16).tolist()
    power = Fraction(2) ** int(stored.node.params["exponent"])  # type: ignore[arg-type]
    widths = [bits for bits, count in zip(WIDTHS, bands, strict=True) for _ in range(count)]
    factors = []
    names = [part.name for part in stored.node.parts]
    for side, length, at in (("u", shape[0], row), ("v", shape[1], column)):
        scales = part_bytes(stored, stored.node.part(side + "s")) if side + "s" in names else None
        start, values = 0, []
        across = scales is None and len(names) > 3  # from a side with scales: all have 8 bits
        given = [8] * len(widths) if across else widths
        if side in names:
            codes = part_bytes(stored, stored.node.part(side))
            found = []
            for bits in given:
                width = -(-length * bits // 8)
                found.append((int.from_bytes(codes[start : start + width], "little") >> (bits * at)) % (1 << bits))
                start += width
        else:
            coded = part_bytes(stored, stored.node.part(side + "c"))
            each = decode_codes(coded, [(1, bits) for bits in given], length, scales is not None)
            found = [int(one[0, at]) for one in each]
        for r, (code, bits) in enumerate(zip(found, given, strict=True)):
            odd = 2 * code + 1 - (1 << bits)
            values.append(odd * (1 if scales is None else scales[r * -(-length // 64) + at // 64]))
        factors.append(values)
    return sum((Fraction(g) * u * v for g, u, v in zip(gains, *factors, strict=True)), Fraction()) * power


@pytest.mark.parametrize("shape", _SHAPES)
def test_decoding_is_the_exact_sum(shape: tuple[int, int]) -> None:
    bands = (2, 2, 3, 4, 9)
    stored = store(factor(decaying(*shape, seed=7)), bands)
    decoded = decode(stored, shape)
    for row in (0, 31, shape[0] - 1):
        for column in (0, 17, shape[1] - 1):
            assert Fraction(float(decoded[row, column])) == by_hand(stored, row, column, shape, bands)


@pytest.mark.parametrize("shape", _SHAPES)
def test_any_window_and_any_order_give_the_same_bits(shape: tuple[int, int]) -> None:
    stored = store(factor(decaying(*shape, seed=8)), (2, 2, 3, 4, 9))
    opened = _CODEC.open(stored.node, stored.fetch, shape)
    whole = opened.rows(0, shape[0])
    for start, stop in ((0, 0), (0, 1), (5, 39), (shape[0] - 1, shape[0])):
        assert torch.equal(opened.rows(start, stop), whole[start:stop])
    # The sum in another order: all directions backwards, one product at a time.
    backwards = torch.zeros(shape, dtype=torch.float64)
    u_RO = torch.cat([banded.integers(u.codes, u.bits, u.scales) for u in opened._us])  # type: ignore[attr-defined]
    for r in reversed(range(20)):
        backwards += torch.outer(u_RO[r] * opened._gains[r], opened._v_RI[r])  # type: ignore[attr-defined]
    assert torch.equal(backwards, whole)


@given(
    st.tuples(st.integers(8, 70), st.integers(8, 70)),
    st.integers(0, 8),
    st.lists(st.integers(0, 4), min_size=5, max_size=5),
    st.sampled_from([1e-42, 1e-30, 1e-3, 1e25, 1e37]),
    st.integers(0, 99),
)
def test_any_delta_decodes_to_something_finite(
    shape: tuple[int, int], rank: int, counts: list[int], scale: float, seed: int
) -> None:
    draw = generator(seed)
    delta = torch.randn(shape[0], rank, generator=draw) @ torch.randn(rank, shape[1], generator=draw)
    delta = (delta / max(float(delta.abs().max()) if rank else 1.0, 1.0) * scale).contiguous()
    found = factor(delta, 20)
    taken, bands = 0, []
    for count in counts:
        bands.append(min(count, found.rank - taken))
        taken += bands[-1]
    stored = store(found, tuple(bands))
    assert len(stored.data) == bands_bytes(shape, tuple(bands))
    decoded = decode(stored, shape)
    assert bool(torch.isfinite(decoded).all())
    error, whole = (float((x.to(torch.float64) / scale).norm()) for x in (decoded - delta, delta))
    assert error <= whole * 1.2 + 1e-3


def test_a_wide_range_of_strengths_stays_exact() -> None:
    """Directions 2^-60 of the strongest are below what a sum can hold beside it: they go, and decoding stays exact."""
    found = factor(torch.randn(80, 70, generator=generator(9)), 20)
    strength = torch.logspace(0, -18, 20)[:, None]
    stored = store(Truncation(found.left * strength, found.right, found.energy, found.total), (20, 0, 0, 0, 0))
    gains = torch.frombuffer(bytearray(part_bytes(stored, stored.node.part("gain"))), dtype=torch.bfloat16)
    assert float(gains[0]) > 0 and float(gains[-1]) == 0
    assert Fraction(float(decode(stored, (80, 70))[3, 4])) == by_hand(stored, 3, 4, (80, 70), (20, 0, 0, 0, 0))


def test_encoding_twice_gives_the_same_bytes() -> None:
    found = factor(decaying(65, 33, seed=10))
    assert store(found, (1, 2, 3, 4, 5)) == store(found, (1, 2, 3, 4, 5))


def entry() -> Stored:
    return store(factor(decaying(65, 33, seed=11)), (1, 2, 3, 4, 5))


@pytest.mark.parametrize(
    "params",
    [
        {"bands": None},
        {"bands": [1, 2, 3, 4]},
        {"bands": [1, 2, 3, 4, 6]},
        {"bands": [1, 2, 3, 4, -5]},
        {"bands": [1, 2, 3, 4, True]},
        {"bands": [0, 0, 0, 0, 34]},
        {"bands": [20, 20, 0, 0, 0]},
        {"bands": [1 << 62, 0, 0, 0, 0]},
        {"group": 64},
        {"exponent": None},
        {"exponent": 501},
        {"exponent": -9999},
        {"exponent": 1.0},
        {"exponent": "x" * 9000},
    ],
)
def test_hostile_parameters_are_refused(params: dict[str, object]) -> None:
    stored = entry()
    with pytest.raises(ArtifactInvalid):
        _CODEC.open(stored.with_params(**params), stored.fetch, (65, 33))


@pytest.mark.parametrize("name", ["gain", "u", "v"])
def test_hostile_arrays_are_refused(name: str) -> None:
    stored = entry()
    part = stored.node.part(name)
    for node in (
        stored.without_part(name),
        stored.with_part(name, dtype="I8"),
        stored.with_part(name, shape=(part.shape[0] + 1, *part.shape[1:]), nbytes=part.nbytes + 2),
        stored.with_part(name, nbytes=part.nbytes - 1),
    ):
        with pytest.raises(ArtifactInvalid):
            _CODEC.open(node, stored.fetch, (65, 33))
    with pytest.raises(ArtifactInvalid):
        _CODEC.open(stored.node, lambda offset, count: stored.data[offset : offset + count - 1], (65, 33))


@pytest.mark.parametrize("shape", [(66, 33), (65, 34), (33, 65)])
def test_another_shape_is_refused(shape: tuple[int, int]) -> None:
    stored = entry()
    with pytest.raises(ArtifactInvalid):
        _CODEC.open(replace(stored.node), stored.fetch, shape)


@pytest.mark.parametrize(
    ("gain", "message"),
    [(b"\xc0\x7f", "finite"), (b"\x80\x7f", "finite"), (b"\x00\x7f", "round"), (b"\x01\x00", "round")],
)
def test_gains_that_could_round_are_refused(gain: bytes, message: str) -> None:
    stored = entry()
    at = stored.node.part("gain").offset
    data = bytearray(stored.data)
    data[at : at + 2] = gain  # NaN, Inf, 2^127, the least subnormal
    with pytest.raises(ArtifactInvalid, match=message):
        _CODEC.open(stored.node, lambda offset, count: bytes(data[offset : offset + count]), (65, 33))


@pytest.mark.parametrize("bits", WIDTHS)
def test_directions_of_a_few_entries_add_no_more_than_they_explain(bits: int) -> None:
    """Half of all levels stand for nothing there: kept at full strength, noise of 2 bits is larger than the delta."""
    generator = torch.Generator().manual_seed(8)
    delta = torch.randn(200, 150, generator=generator) * (torch.rand(200, 150, generator=generator) < 0.002)
    found = factor(delta, 12)
    stored = decode(store(found, only(bits, 12)), (200, 150))
    fitted = found.left.double().mT @ found.right.double()
    left = float((stored - delta).square().sum() / delta.double().square().sum())
    without = float((fitted - delta).square().sum() / delta.double().square().sum())
    assert left < 1.15  # each direction adds at most what it explains, and the noise of all of them meets
    assert left >= without - 1e-9


KINDS = ("sparse", "constant", "signs", "uniform", "peak", "heavy", "normal", "uneven")


def assert_fits(kind: str, shape: tuple[int, int], bits: int, count: int) -> None:
    """Directions of a kind take no more than they are given, and come back finite."""
    draw = generator(32)

    def side(length: int) -> torch.Tensor:
        values = torch.randn(count, length, generator=draw)
        if kind == "sparse":
            return values * (torch.rand(count, length, generator=draw) < 0.01)
        if kind == "constant":
            return torch.ones(count, length)
        if kind == "signs":
            return values.sign() * 3
        if kind == "uniform":
            return torch.rand(count, length, generator=draw) - 0.5
        if kind == "peak":
            values[:, 0] = 1e6
        if kind == "uneven":
            values *= torch.logspace(-6, 0, length)
        return values**5 if kind == "heavy" else values

    pieces: list[bytes] = []
    node = _CODEC.encode(side(shape[0]), side(shape[1]), only(bits, count), pieces.append)
    stored = Stored(node, b"".join(pieces))
    assert len(stored.data) <= bands_bytes(shape, only(bits, count))
    assert bool(torch.isfinite(decode(stored, shape)).all())


class TestVocabularies:
    """A side that is longer than any layer is wide has scales."""

    BANDS: Bands = (1, 2, 3, 4, 5)

    @pytest.fixture(autouse=True)
    def _short(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setattr("mfs_decompose.linalg.shapes.LONG_SIDE", 100)
        direction_bytes.cache_clear()
        yield
        direction_bytes.cache_clear()

    @pytest.mark.parametrize(("shape", "parts"), [
        ((130, 33), ["gain", "us", "u", "v"]),
        ((33, 130), ["gain", "u", "vs", "v"]),
        ((180, 101), ["gain", "us", "u", "vs", "v"]),
        ((400, 33), ["gain", "us", "uc", "v"]),
    ])  # fmt: skip
    def test_bytes_and_values_are_those_of_the_format(self, shape: tuple[int, int], parts: list[str]) -> None:
        stored = store(factor(decaying(*shape, seed=21)), self.BANDS)
        assert [part.name for part in stored.node.parts] == parts
        given = bands_bytes(shape, self.BANDS)
        assert stored.node.nbytes == len(stored.data) <= given
        assert len(stored.data) == given or (shape[0] == 400 and len(stored.data) > 0.9 * given)
        decoded = decode(stored, shape)
        for row in (0, 31, shape[0] - 1):
            for column in (0, 17, shape[1] - 1):
                assert Fraction(float(decoded[row, column])) == by_hand(stored, row, column, shape, self.BANDS)
        opened = _CODEC.open(stored.node, stored.fetch, shape)
        assert torch.equal(opened.rows(5, 32), decoded[5:32])

    @pytest.mark.parametrize("name", ["gain", "us", "u", "v"])
    def test_hostile_arrays_are_refused(self, name: str) -> None:
        stored = store(factor(decaying(130, 33, seed=22)), self.BANDS)
        for node in (stored.without_part(name), stored.with_part(name, dtype="I8")):
            with pytest.raises(ArtifactInvalid):
                _CODEC.open(node, stored.fetch, (130, 33))

    def test_the_form_with_few_bits_across_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as before:
            before.setattr(banded, "side_bits", lambda length, other, bits: bits)
            stored = store(factor(decaying(130, 33, seed=23)), self.BANDS)
        with pytest.raises(ArtifactInvalid):
            _CODEC.open(stored.node, stored.fetch, (130, 33))

    @pytest.mark.parametrize("bits", WIDTHS)
    @pytest.mark.parametrize("kind", KINDS)
    def test_directions_of_any_kind_fit(self, kind: str, bits: int) -> None:
        """Also where the largest scale is the largest there is: steps grow without it."""
        for shape, count in (((400, 33), 1), ((400, 33), 7), ((33, 400), 5), ((300, 400), 3)):
            assert_fits(kind, shape, bits, count)

    def test_noise_counts_in_full_there(self) -> None:
        assert loss((130, 33), 2) == loss((33, 130), 2) == ERROR_LONG[2]
        assert loss((200, 130), 2) == loss((99, 33), 2) == NOISE * ERROR[2]

    @pytest.mark.parametrize("bits", WIDTHS)
    def test_the_error_of_a_width_is_what_the_allocation_counts_on(self, bits: int) -> None:
        delta = torch.randn(500, 90, generator=generator(2)) * 0.995 ** torch.arange(500).unsqueeze(1)
        for matrix in (delta, delta.mT.contiguous()):
            found, shape = factor(matrix, 24), (matrix.shape[0], matrix.shape[1])
            kept = found.left.to(torch.float64).mT @ found.right.to(torch.float64)
            error = float((decode(store(found, only(bits, 24)), shape) - kept).square().sum() / kept.square().sum())
            assert 0.5 * ERROR_LONG[bits] < error < 1.3 * ERROR_LONG[bits]
            assert errors(shape) is ERROR_LONG


def test_what_is_written_is_as_many_times_as_large() -> None:
    delta = decaying(90, 70, seed=12)
    found, bands = factor(delta), (2, 3, 4, 5, 6)
    pieces: list[bytes] = []
    node = _CODEC.encode(found.left, found.right, bands, pieces.append, 1.08)
    larger = decode(Stored(node, b"".join(pieces)), (90, 70))
    plain = decode(store(found, bands), (90, 70))
    assert float((larger - 1.08 * plain).norm() / plain.norm()) < 2**-8  # a gain's last bit
    assert node.nbytes == store(found, bands).node.nbytes


class TestCoded:
    """Sides of 192 values and more are range coded, into the bytes that a plan gave them."""

    BANDS: Bands = (1, 2, 3, 5, 9)
    SHAPES = ((300, 210), (192, 70), (70, 400))

    @pytest.mark.parametrize("shape", SHAPES)
    def test_bytes_are_at_most_those_given_and_values_those_of_the_format(self, shape: tuple[int, int]) -> None:
        stored = store(factor(decaying(*shape, seed=31)), self.BANDS)
        sides = [side + "c" * (length >= 192) for side, length in zip("uv", shape, strict=True)]
        assert [part.name for part in stored.node.parts] == ["gain", *sides]
        assert CodecNode.from_json(stored.node.to_json()) == stored.node
        given = bands_bytes(shape, self.BANDS)
        packed = sum(
            count * (2 + -(-shape[0] * bits // 8) - (-shape[1] * bits // 8))
            for count, bits in zip(self.BANDS, WIDTHS, strict=True)
        )
        assert 0.97 * given < len(stored.data) <= given < packed
        decoded = decode(stored, shape)
        for row in (0, 31, shape[0] - 1):
            for column in (0, 17, shape[1] - 1):
                assert Fraction(float(decoded[row, column])) == by_hand(stored, row, column, shape, self.BANDS)

    @given(
        st.sampled_from(KINDS),
        st.sampled_from(SHAPES),
        st.sampled_from(WIDTHS),
        st.integers(1, 12),
    )
    def test_directions_of_any_kind_fit(self, kind: str, shape: tuple[int, int], bits: int, count: int) -> None:
        assert_fits(kind, shape, bits, count)

    def test_steps_grow_no_more_than_they_must(self) -> None:
        """The second factor is given what the first one leaves, and half as many bytes again lower the error."""
        found = factor(torch.randn(400, 300, generator=generator(33)), 20)
        kept = found.left.double().mT @ found.right.double()
        errors = []
        for bits in (2, 3):
            stored = store(found, only(bits, 20))
            assert len(stored.data) > 0.995 * bands_bytes((400, 300), only(bits, 20))
            errors.append(float((decode(stored, (400, 300)) - kept).square().sum() / kept.square().sum()))
        assert errors[1] < 0.4 * errors[0]

    @pytest.mark.parametrize("name", ["gain", "uc", "vc"])
    def test_hostile_arrays_are_refused(self, name: str) -> None:
        shape = self.SHAPES[0]
        stored = store(factor(decaying(*shape, seed=34)), self.BANDS)
        part = stored.node.part(name)
        for node in (
            stored.without_part(name),
            stored.with_part(name, dtype="I8"),
            stored.with_part(name, shape=(part.shape[0] + 4,)),
            stored.with_part(name, shape=(part.shape[0] // 2,), nbytes=part.nbytes // 2),
            stored.with_part(name, shape=(0,), nbytes=0),
        ):
            with pytest.raises(ArtifactInvalid):
                _CODEC.open(node, stored.fetch, shape)

    def test_packed_codes_of_such_a_side_are_refused(self) -> None:
        """The form before codes were range coded."""
        shape = self.SHAPES[0]
        stored = store(factor(decaying(*shape, seed=35)), self.BANDS)
        parts = tuple(
            replace(part, name=part.name[0] if part.name[1:] == "c" else part.name) for part in stored.node.parts
        )
        with pytest.raises(ArtifactInvalid, match="uc"):
            _CODEC.open(replace(stored.node, parts=parts), stored.fetch, shape)
