"""Tensors that a variant has under other names than the base: wrappers of multimodal models, renamed trees.

`model.layers.*` may be `language_model.model.layers.*` elsewhere, and transformers 5 renamed whole trees: several
prefixes in one model. Only what has no partner of its own name is looked at; shapes and kinds must agree; numbers in
names, the places of layers and experts, never change; and every tensor has one partner at most. Fused tensors and
split ones (qkv, gate and up, experts) are no renames: a shape alone does not say which part lies where.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mfs_decompose.source.comparable import comparable
from mfs_decompose.source.rename_choice import is_confirmed, is_refuted, keep_sound, narrow_rule, settle
from mfs_decompose.source.rename_claims import Claim, Rule, Specs, describe_rule, propose_claims
from mfs_decompose.source.rename_weights import Cosine, likeness

_LEAST_DOUBT = 0.01  # of a variant's bytes: what is in doubt and less than that is stored whole, and said
_MOST_ROUNDS = 4  # after a denial by the weights the next best endings have their turn


@dataclass(frozen=True, slots=True)
class Renaming:
    """What is called otherwise in one variant.

    Attributes:
        pairs: from names of the base to names of the variant, one to one; names that are equal are not among them.
        rules: the prefixes that explain all pairs, (base, variant), the longest first.
        unconfirmed: those of the rules that rest on names and shapes alone.
        doubts: what looks like a rename and is none, or cannot be told, in words.
        refusal: of those, the one that too much of the variant hangs on to go on.
    """

    pairs: Mapping[str, str] = field(default_factory=dict)
    rules: tuple[Rule, ...] = ()
    unconfirmed: tuple[Rule, ...] = ()
    doubts: tuple[str, ...] = ()
    refusal: str | None = None


def find_renames(base: Specs, variant: Specs, cosine: Cosine | None = None) -> Renaming:
    """Find the tensors of the base that a variant has under other names.

    `cosine` compares a tensor of the base with one of the variant. With it a rule is confirmed or denied by at most 8
    of its matrices; without it names and shapes must do: see `keep_sound` for what counts as no coincidence.
    """
    claims, denied = _weigh(_without_partner(base, variant), _without_partner(variant, base), cosine)
    won, undecided = settle(claims)
    kept = keep_sound(won, base, variant)
    pairs = {old: new for claim in kept for old, new in claim.pairs.items()}
    doubts = [_describe_denial(claim) for claim in denied if _is_missed(claim, pairs, base, variant)]
    grave = None
    serious = keep_sound([*kept, *(claim for tie in undecided for claim in tie)], base, variant)
    for one, other in undecided:
        if any(claim is one for claim in serious):
            question = _describe_tie(one, other)
            doubts.append(f"{question}: not renamed")
            if grave is None and _bytes(variant, one.pairs.values()) >= _LEAST_DOUBT * _bytes(variant, variant):
                grave = question
    return Renaming(
        pairs=pairs,
        rules=_rules(kept),
        unconfirmed=_rules([claim for claim in kept if not is_confirmed(claim)]),
        doubts=tuple(doubts),
        refusal=grave,
    )


def _without_partner(own: Specs, others: Specs) -> Specs:
    return {name: spec for name, spec in own.items() if name not in others or not comparable(spec, others[name])}


def _weigh(base: Specs, variant: Specs, cosine: Cosine | None) -> tuple[list[Claim], list[Claim]]:
    """The claims that the weights leave standing, and those that they deny."""
    denied: dict[Rule, Claim] = {}
    measured: dict[Rule, float | None] = {}
    for _ in range(_MOST_ROUNDS):
        claims = propose_claims(base, variant, denied.keys()) if base and variant else []
        if cosine is None:
            return claims, []
        for claim in claims:
            if claim.rule not in measured:
                measured[claim.rule] = likeness(claim.pairs, base, cosine)
        claims = [replace(claim, likeness=measured[claim.rule]) for claim in claims]
        refuted = [claim for claim in claims if is_refuted(claim)]
        denied |= {claim.rule: claim for claim in refuted}
        if not refuted:
            break
    return [claim for claim in claims if not is_refuted(claim)], list(denied.values())


def _rules(claims: Sequence[Claim]) -> tuple[Rule, ...]:
    return tuple(sorted({narrow_rule(claim) for claim in claims}, key=lambda rule: (-len(rule[0]), rule)))


def _is_missed(claim: Claim, pairs: Mapping[str, str], base: Specs, variant: Specs) -> bool:
    """Whether a claim that the weights deny would stand by its names, and nothing better came up for its tensors."""
    used = set(pairs.values())
    rest = {old: new for old, new in claim.pairs.items() if old not in pairs and new not in used}
    return 2 * len(rest) > len(claim.pairs) and bool(keep_sound([replace(claim, pairs=rest)], base, variant))


def _describe_denial(claim: Claim) -> str:
    return (
        f"{_count(claim)} would fit {describe_rule(narrow_rule(claim))} by name and shape, but the weights do not "
        f"(cosine {claim.likeness:.3f}): not renamed"
    )


def _describe_tie(one: Claim, other: Claim) -> str:
    how = "name, shape and weights" if is_confirmed(one) else "name and shape"
    rules = f"{describe_rule(narrow_rule(one))} and {describe_rule(narrow_rule(other))}"
    return f"{_count(one)} fit both {rules} by {how}, and nothing tells which"


def _count(claim: Claim) -> str:
    return f"{len(claim.pairs)} tensor{'' if len(claim.pairs) == 1 else 's'}"


def _bytes(specs: Specs, names: Iterable[str]) -> int:
    return sum(specs[name].nbytes for name in names)
