"""Which claims become renames: what explains most, what is no coincidence, and what nobody can tell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from mfs_decompose.source.rename_claims import Claim, Rule, Specs
from mfs_decompose.source.rename_weights import LEAST_LIKENESS

_LEAST_SHARE = 0.5


def settle(claims: Sequence[Claim]) -> tuple[list[Claim], list[tuple[Claim, Claim]]]:
    """Give every tensor to one claim at most: the claims that won, and the pairs of claims that nothing
    decides, the first of each with the tensors in doubt.

    What the weights confirm goes first, then what explains more tensors. Two claims that are equal in both and want
    the same tensor get neither it nor the others they fight for. A claim that lost most of its tensors to better ones
    is none any more.
    """
    won: list[Claim] = []
    undecided: list[tuple[Claim, Claim]] = []
    before = {claim.rule: len(claim.pairs) for claim in claims}
    left = list(claims)
    while left:
        best = max(left, key=_strength)
        rivals = [claim for claim in left if claim is not best and _strength(claim) == _strength(best)]
        rivals = [rival for rival in rivals if _contested(best, rival)]
        if rivals:
            taken = {pair for rival in rivals for pair in _contested(best, rival)}
            in_doubt = {old: new for old, new in best.pairs.items() if (old, new) in taken}
            undecided.append((replace(best, pairs=in_doubt), rivals[0]))
        else:
            won.append(best)
            taken = set(best.pairs.items())
            left = [claim for claim in left if claim is not best]
        left = [_without(claim, taken) for claim in left]
        left = [claim for claim in left if 2 * len(claim.pairs) >= max(2, before[claim.rule])]
    return won, undecided


def keep_sound(claims: Sequence[Claim], base: Specs, variant: Specs) -> list[Claim]:
    """Drop the claims that may be coincidences; `base` and `variant` are all tensors, also those of equal names.

    A claim stands when the weights confirm it, when it holds half of the bytes of the base or of the variant, or when
    it maps more than half of the tensors under its prefix on both sides (those under a longer prefix of another rule
    not counted, those of equal names counted) and one of them with the name of its module, not of its parameter
    alone: that every `norm.weight` is like every other proves nothing about a tree that is otherwise aligned.
    """
    kept = list(claims)
    while True:
        ours = _domains(base, [claim.rule[0] for claim in kept])
        theirs = _domains(variant, [claim.rule[1] for claim in kept])
        sound = [
            claim
            for claim in kept
            if is_confirmed(claim)
            or _is_heavy(claim, base, variant)
            or (_names_a_module(claim) and _is_most(claim, ours, theirs))
        ]
        if len(sound) == len(kept):
            return kept
        kept = sound


def is_confirmed(claim: Claim) -> bool:
    return claim.likeness is not None and claim.likeness >= LEAST_LIKENESS


def is_refuted(claim: Claim) -> bool:
    return claim.likeness is not None and claim.likeness < LEAST_LIKENESS


def narrow_rule(claim: Claim) -> Rule:
    """The longest prefixes that still explain all pairs of a claim, ending before an index and before the last part."""
    old, new = claim.rule
    paths = [name[len(old) :].split(".")[:-1] for name in claim.pairs]
    common = ""
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1 or parts[0].isdecimal():
            break
        common += parts[0] + "."
    return old + common, new + common


def _strength(claim: Claim) -> tuple[bool, int]:
    return is_confirmed(claim), len(claim.pairs)


def _contested(one: Claim, other: Claim) -> set[tuple[str, str]]:
    """The pairs of either claim that have a tensor in common with the other; no pair is in both claims."""
    if len(one.pairs) > len(other.pairs):
        one, other = other, one
    back = {new: old for old, new in other.pairs.items()}
    found = set()
    for old, new in one.pairs.items():
        rivals = {(old, other.pairs[old])} if old in other.pairs else set()
        rivals |= {(back[new], new)} if new in back else set()
        if rivals:
            found |= rivals | {(old, new)}
    return found


def _without(claim: Claim, taken: Collection[tuple[str, str]]) -> Claim:
    olds, news = {old for old, _ in taken}, {new for _, new in taken}
    pairs = {old: new for old, new in claim.pairs.items() if old not in olds and new not in news}
    return claim if len(pairs) == len(claim.pairs) else replace(claim, pairs=pairs)


def _domains(tensors: Specs, prefixes: Collection[str]) -> Counter[str]:
    """How many tensors have each of the prefixes as the longest that they begin with."""
    known = set(prefixes)
    found: Counter[str] = Counter()
    for name in tensors:
        cut = len(name)
        while cut >= 0:
            cut = name.rfind(".", 0, cut)
            if name[: cut + 1] in known:
                found[name[: cut + 1]] += 1
                break
    return found


def _is_most(claim: Claim, ours: Mapping[str, int], theirs: Mapping[str, int]) -> bool:
    twice = 2 * len(claim.pairs)
    return twice > ours[claim.rule[0]] and twice > theirs[claim.rule[1]]


def _is_heavy(claim: Claim, base: Specs, variant: Specs) -> bool:
    sides = ((base, claim.pairs.keys()), (variant, claim.pairs.values()))
    for tensors, names in sides:
        total = sum(spec.nbytes for spec in tensors.values())
        if total and sum(tensors[name].nbytes for name in names) >= _LEAST_SHARE * total:
            return True
    return False


def _names_a_module(claim: Claim) -> bool:
    start = len(claim.rule[0])
    return any(not part.isdecimal() for name in claim.pairs for part in name[start:].split(".")[:-1])
