"""Rounding boxes, predictions and classes against the arithmetic that merges do."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfs_decompose.linalg.grid import GRIDS, Doubles, nearest, neighbours, ordered, to_values, to_words
from mfs_decompose.linalg.margins import (
    DISTANCES,
    POSITIONED,
    Merge,
    box,
    coarsest,
    distance_classes,
    farthest,
    pool_small,
    positioned_classes,
    predict,
)

_MERGES: list[Merge] = ["once", "twice"]


def _pair(name: str, count: int = 3000, seed: int = 1) -> tuple[Doubles, Doubles]:
    draw = np.random.default_rng(seed)
    scale = np.exp2(draw.integers(-12, 3, count).astype(np.float64))
    return nearest(draw.normal(0, 0.02, count) * scale, GRIDS[name]), draw.normal(0, 1e-4, count) * scale


def _merge(base: Doubles, delta: Doubles, name: str, merge: Merge) -> Doubles:
    grid = GRIDS[name]
    return nearest(base + (nearest(delta, grid) if merge == "twice" else delta), grid)


@pytest.mark.parametrize("merge", _MERGES)
@pytest.mark.parametrize("name", ["BF16", "F16"])
def test_the_box_is_exactly_what_rounds_to_the_weight(name: str, merge: Merge) -> None:
    base, delta = _pair(name)
    own = _merge(base, delta, name, merge)
    low, high = box(own, base, GRIDS[name], merge)
    assert (low <= delta).all() and (delta <= high).all()
    room = (high - low) * 1e-3
    for inside in (low + room, high - room):
        np.testing.assert_array_equal(_merge(base, inside, name, merge), own)
    assert (_merge(base, low - room, name, merge) < own).all()
    assert (_merge(base, high + room, name, merge) > own).all()


@pytest.mark.parametrize("merge", _MERGES)
@pytest.mark.parametrize("name", sorted(GRIDS))
def test_a_prediction_is_the_merge(name: str, merge: Merge) -> None:
    base, delta = _pair(name)
    grid = GRIDS[name]
    found = predict(base, delta, grid, merge)
    own = _merge(base, delta, name, merge)
    np.testing.assert_array_equal(found.words, ordered(to_words(own, grid)))
    low, high = box(own, base, grid, merge)
    np.testing.assert_array_equal(found.distance, np.minimum(delta - low, high - delta).clip(min=0))
    np.testing.assert_array_equal(found.up, high - delta < delta - low)


@pytest.mark.parametrize("merge", _MERGES)
def test_the_nearer_edge_is_crossed_first(merge: Merge) -> None:
    base, delta = _pair("BF16")
    found = predict(base, delta, GRIDS["BF16"], merge)
    step = np.where(found.up, 1, -1) * found.distance * 1.001
    beyond = predict(base, delta + step, GRIDS["BF16"], merge)
    moved = beyond.words.astype(np.int64) - found.words.astype(np.int64)
    assert (np.sign(moved) == np.where(found.up, 1, -1)).mean() > 0.999  # distances at the resolution of fp64 remain


def test_what_is_not_finite_predicts_something() -> None:
    base = np.array([np.nan, np.inf, -np.inf, 3e38, -0.0, 1e-45, 1.0])
    delta = np.array([1.0, np.nan, np.inf, 1e308, -0.0, 1e-46, -1.0])
    for grid in GRIDS.values():
        for merge in _MERGES:
            found = predict(base, delta, grid, merge)
            assert np.isfinite(found.distance).all() and (found.distance >= 0).all()
            for classes in (
                distance_classes(found, farthest(found)),
                positioned_classes(found, coarsest(found)),
            ):
                assert classes.dtype == np.uint8


def test_classes_stay_in_range_whatever_the_top() -> None:
    found = predict(*_pair("BF16"), GRIDS["BF16"], "once")
    for top in (0, 1, 1000, 2044, 65_535):
        assert int(distance_classes(found, top).max()) < DISTANCES
        assert int(positioned_classes(found, top).max()) < POSITIONED


def test_classes_follow_distance_and_position() -> None:
    base, delta = _pair("BF16")
    found = predict(base, delta, GRIDS["BF16"], "once")
    by_distance = distance_classes(found, farthest(found))
    order = np.argsort(found.distance, kind="stable")
    assert (np.diff(by_distance[order].astype(int)) >= 0).all()
    assert int(by_distance.max()) == DISTANCES - 1
    positions = positioned_classes(found, coarsest(found))
    _, above = neighbours(
        np.abs(to_values(to_words(nearest(base + delta, GRIDS["BF16"]), GRIDS["BF16"]), GRIDS["BF16"])), GRIDS["BF16"]
    )
    assert above.size == positions.size
    for exponent in np.unique(positions // 8):
        members = positions // 8 == exponent
        share = found.distance[members] * np.exp2(1023.0 - found.units[members])
        edges = np.exp2(-1.0 - (positions[members] % 8))
        assert (share <= np.where(positions[members] % 8 == 0, 1.0, edges)).all()


@given(st.lists(st.integers(0, 9), max_size=4000), st.integers(0, 3))
def test_pooled_classes_have_members_enough(members: list[int], spread: int) -> None:
    classes = np.array(members * (1 + 7 * spread), np.uint8)
    pooled, count = pool_small(classes, 10)
    assert pooled.shape == classes.shape
    sizes = np.bincount(pooled, minlength=count)
    assert sizes.size == count and count >= 1
    if classes.size >= 512:
        assert (sizes >= 512).all()
    # Pooling joins neighbours: it never turns the order of two classes round.
    lookup = {int(a): int(b) for a, b in zip(classes, pooled, strict=True)}
    images = [lookup[key] for key in sorted(lookup)]
    assert images == sorted(images)
