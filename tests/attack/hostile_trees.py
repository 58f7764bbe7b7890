"""Mutations of codec trees: lies that a manifest can tell about a tensor."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from attack_artifacts import nodes_of

Json = Any
Edit = Callable[[Json], None]

_NESTED: Json = []
for _ in range(50):
    _NESTED = [_NESTED]

HOSTILE: tuple[Json, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 64, 255, 256, 65_535, 65_536, 2**31, 2**32, 10**9, 2**53, 2**62, 2**63 - 1,
    -(2**62), 0.0, -0.0, 0.5, -1.5, 1e308, 5e-324, 1e-38, 3e38, "", "x", "base", "none", "int4", "bf16", "group",
    "x" * 5000, "\x1b[2J\0", [], [0], [-1], [1.5], [None], [2**62], [0] * 1000, [1] * 100_000, [[]], {}, {"a": {}},
    ["x"], _NESTED,
)  # fmt: skip
"""For any parameter. NaN and infinities cannot stand in canonical JSON, and depth 1000 is refused before parsing."""

_PART = {"name": "data", "dtype": "BF16", "shape": [1], "offset": 0, "nbytes": 2}

NODES: tuple[Json, ...] = (
    {"codec": "identical", "version": 1},
    {"codec": "raw", "version": 1},
    {"codec": "raw", "version": 1, "parts": [_PART]},
    {"codec": "alias", "version": 1, "params": {"of": "norm.weight"}},
    {"codec": "adapter", "version": 1, "params": {"add": []}},
    {"codec": "rows", "version": 1, "params": {"splits": [0, 1]}, "children": [{"codec": "identical", "version": 1}]},
    {"codec": "rows", "version": 1, "params": {"splits": []}},
    {"codec": "sum", "version": 1},
    {"codec": "corrected", "version": 1},
    {"codec": "lowrank", "version": 1, "params": {"steps": 0, "factors": "int4", "group": 64}},
    {"codec": "significant", "version": 1},
    {"codec": "lossless", "version": 3},
    {"codec": "lossless", "version": -1},
    {"codec": "lossless", "version": 2, "params": {"predictor": "none", "rows": 1, "sizes": []}},
    [], None, "lowrank",
)  # fmt: skip


def edits(tree: Json) -> Iterator[tuple[str, Edit]]:
    """Every single mutation of a tree, by a name that says what it does."""
    for at, node in enumerate(nodes_of(tree)):
        who = f"{at}:{node['codec']}"
        for key in node.get("params", {}):
            yield f"{who} without {key}", _on(at, lambda n, key=key: n["params"].pop(key))
            for value in (*HOSTILE, *near(node["params"][key])):
                what = f"{who} {key}={str(value)[:30]}"
                yield what, _on(at, lambda n, key=key, value=value: n["params"].update({key: value}))
        for number, part in enumerate(node.get("parts", [])):
            yield f"{who} without part {number}", _on(at, lambda n, number=number: n["parts"].pop(number))
            for key in part:
                for value in (*HOSTILE[::5], *near(part[key])):
                    what = f"{who} part {number} {key}={str(value)[:30]}"
                    yield what, _on(at, lambda n, i=number, key=key, value=value: n["parts"][i].update({key: value}))
            yield f"{who} part {number} twice", _on(at, lambda n, i=number: n["parts"].append(dict(n["parts"][i])))
        for number in range(len(node.get("children", []))):
            yield f"{who} without child {number}", _on(at, lambda n, i=number: n["children"].pop(i))
            yield f"{who} child {number} twice", _on(at, lambda n, i=number: n["children"].append(n["children"][i]))
            for other in NODES:
                yield (
                    f"{who} child {number}={str(other)[:40]}",
                    _on(at, lambda n, i=number, other=other: n["children"].__setitem__(i, other)),
                )
        for codec in ("lowrank", "banded", "sparse", "sign", "kbit", "fixed", "deadzone", "rowsparse", "sum", "rows",
                      "corrected", "raw", "identical", "lossless", "alias", "adapter", "nonsense"):  # fmt: skip
            yield f"{who} as {codec}", _on(at, lambda n, codec=codec: n.update(codec=codec))
        for version in (0, -1, 1, 2, 3, 2**62, "1", 1.0, None):
            yield f"{who} version {version}", _on(at, lambda n, version=version: n.update(version=version))


def sampled(tree: Json, count: int, seed: int) -> list[tuple[str, Edit]]:
    """At most `count` of them, of every kind about as many."""
    found = list(edits(tree))
    random.Random(seed).shuffle(found)
    return found[:count]


def near(value: Json) -> list[Json]:
    """What looks right at first sight."""
    if type(value) is int:
        return [value + 1, value - 1, 2 * value, -value, float(value)]
    if isinstance(value, list) and all(type(one) is int for one in value) and value:
        return [
            value[:-1], [*value, 0], [*value, value[-1]], value[::-1], [value[0] + 1, *value[1:]],
            [*value[:-1], value[-1] + 1], [value[0] - 1, *value[1:]], [2 * one for one in value],
            [*value[:-1], 2**40], [float(one) for one in value],
        ]  # fmt: skip
    if isinstance(value, float):
        return [-value, value * 1.001, value * 1e300, value * 1e-300]
    return []


def _on(at: int, change: Callable[[Json], Any]) -> Edit:
    def edit(tree: Json) -> None:
        change(list(nodes_of(tree))[at])

    return edit
