"""Tensors that hold what the other side holds in another number of pieces: fused or split, and no rename."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from mfs_decompose.source.rename_claims import Rule, Specs


def find_other_pieces(base: Specs, variant: Specs, pairs: Mapping[str, str], rules: Sequence[Rule]) -> frozenset[str]:
    """Names of the variant's tensors without a partner whose module holds as many elements in the base, otherwise cut.

    `pairs` are the renames, base to variant, and `rules` their prefixes, the longest first. Only said to people: which
    element lies where is never guessed, since shapes alone cannot tell (of experts with H = 2 I not even the axes).
    """
    taken = set(pairs.values())
    strange = {name: spec.numel for name, spec in variant.items() if name not in base and name not in taken}
    left = {
        _renamed(name, rules): spec.numel for name, spec in base.items() if name not in variant and name not in pairs
    }
    ours, theirs = _totals(left), _totals(strange)
    found = set()
    for name in strange:
        module = next((module for module in _modules(name) if module in ours), None)
        if module and ours[module][0] == theirs[module][0] and ours[module][1] != theirs[module][1]:
            found.add(name)
    return frozenset(found)


def _renamed(name: str, rules: Sequence[Rule]) -> str:
    return next((new + name[len(old) :] for old, new in rules if name.startswith(old)), name)


def _totals(numels: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """For each module the elements and the number of the tensors in it."""
    found: defaultdict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for name, numel in numels.items():
        for module in _modules(name):
            elements, count = found[module]
            found[module] = (elements + numel, count + 1)
    return dict(found)


def _modules(name: str) -> Iterator[str]:
    """The modules that a tensor lies in, the nearest first."""
    cut = name.rfind(".")
    while cut > 0:
        yield name[:cut]
        cut = name.rfind(".", 0, cut)
