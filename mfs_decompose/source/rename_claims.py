"""Which prefixes could have been exchanged for which others, by names and shapes alone.

Two names with a common ending have exactly one rule: what stands before their longest common ending. The parts that
are numbers are the places of layers and experts; no wrapper changes those, and neither does a rule.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from mfs_decompose.source.comparable import comparable
from mfs_decompose.source.dtypes import is_float
from mfs_decompose.source.header import TensorSpec
from mfs_decompose.source.tying import vocabulary_role

Rule = tuple[str, str]
"""(prefix in the base, prefix in the variant), each empty or ending in a dot."""

Specs = Mapping[str, TensorSpec]

_MOST_FOR_ONE_ENDING = 4096  # `weight` ends everything: an ending that so many names share says nothing
_MOST_CLAIMS = 256
_INDEX = "#"

_Ending = tuple[str, tuple[object, ...]]
"""A name's last parts, and what the tensor is."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A rule and what it would rename: `pairs` from names of the base to names of the variant, one to one."""

    rule: Rule
    pairs: Mapping[str, str]
    likeness: float | None = None

    @property
    def text(self) -> str:
        return describe_rule(self.rule)


def describe_rule(rule: Rule) -> str:
    """A rule for people: `model. -> language_model.model.`."""
    return " -> ".join(prefix or "(no prefix)" for prefix in rule)


def propose_claims(base: Specs, variant: Specs, denied: Collection[Rule] = ()) -> list[Claim]:
    """All claims between two sets of tensors but those of `denied` rules, those that explain most first.

    A name is considered with the names that it shares the longest ending with, if it is among the best for them too:
    `model.visual.norm.weight` is no candidate for `visual.norm.weight` and `text.norm.weight` alike. Numbers count as
    equal here, so that a stack of layers is looked at once.
    """
    ours, theirs = _endings(base), _endings(variant)
    found: Counter[Rule] = Counter()
    best_ours = _best_endings(ours, theirs, set(denied))
    best_theirs = _best_endings(theirs, ours, {(new, old) for old, new in denied})
    for ending in best_ours.keys() & best_theirs.keys():
        froms, tos = best_ours[ending], best_theirs[ending]
        if len(froms) * len(tos) > _MOST_FOR_ONE_ENDING:
            continue
        rules = ((one, other) for one in froms for other in tos if one != other and _INDEX not in one + other)
        found.update(rule for rule in rules if rule not in denied)
    chosen = sorted(found, key=lambda rule: (-found[rule], rule))[:_MOST_CLAIMS]
    names = sorted(base)
    claims = [Claim(rule, _apply(rule, names, base, variant)) for rule in chosen]
    return sorted((claim for claim in claims if claim.pairs), key=lambda claim: (-len(claim.pairs), claim.rule))


def _apply(rule: Rule, names: list[str], base: Specs, variant: Specs) -> dict[str, str]:
    old, new = rule
    pairs = {}
    for name in names[bisect_left(names, old) :]:
        if not name.startswith(old):
            break
        other = variant.get(new + name[len(old) :])
        if other is not None and _nature(base[name]) == _nature(other) and comparable(base[name], other):
            pairs[name] = other.name
    return pairs


def _endings(tensors: Specs) -> dict[_Ending, set[tuple[str, str]]]:
    """For each ending the (prefix, whole name) of those that have it, numbers written as `#`."""
    found: defaultdict[_Ending, set[tuple[str, str]]] = defaultdict(set)
    for name, nature in {(_without_numbers(spec.name), _nature(spec)) for spec in tensors.values()}:
        parts = name.split(".")
        for cut in range(len(parts)):
            prefix = "".join(part + "." for part in parts[:cut])
            found[".".join(parts[cut:]), nature].add((prefix, name))
    return found


def _best_endings(
    own: Mapping[_Ending, set[tuple[str, str]]],
    others: Mapping[_Ending, set[tuple[str, str]]],
    denied: Collection[Rule],
) -> dict[_Ending, list[str]]:
    """For each ending the prefixes of those of our names that have no longer ending in common with another's."""
    longest: dict[tuple[str, tuple[object, ...]], tuple[int, _Ending, str]] = {}
    for ending in own.keys() & others.keys():
        for prefix, name in own[ending]:
            key = (name, ending[1])
            if denied and all((prefix, other) in denied for other, _ in others[ending]):
                continue
            if key not in longest or len(prefix) < longest[key][0]:
                longest[key] = (len(prefix), ending, prefix)
    found: defaultdict[_Ending, list[str]] = defaultdict(list)
    for _, ending, prefix in longest.values():
        found[ending].append(prefix)
    return found


def _without_numbers(name: str) -> str:
    return ".".join(_INDEX if part.isdecimal() else part for part in name.split("."))


def _nature(spec: TensorSpec) -> tuple[object, ...]:
    """What must be equal on both sides: the kind of number, and the shape, but for the length of a vocabulary."""
    kind = "float" if is_float(spec.dtype) else spec.dtype
    role = vocabulary_role(spec.name)
    return (kind, role, *spec.shape[1:]) if role and len(spec.shape) >= 2 else (kind, role, *spec.shape)
