"""Directions of at most 4 bits, two in a byte: half the memory of int8, for two passes over a matrix that is used."""

from __future__ import annotations

from dataclasses import replace

import torch

from mfs_decompose.runtime.resident_forms import Factor, Form, LowRank

LARGE = 1 << 12
"""Codes of a factor that is packed: a smaller one takes little memory, and two passes take as long as its product."""

NIBBLE = 16
"""How many times their value codes are that were spread as `spread` does."""


def pack_nibbles(form: Form) -> Form:
    """Factors of int8, of which large ones hold directions of at most 4 bits as nibbles.

    Those directions then come last on both sides. Across from a vocabulary all have 8 bits: one side may do.
    """
    if not isinstance(form, LowRank) or not (_packs(form.left) and _packs(form.right)):
        return form
    sides = (form.left, form.right)
    best: tuple[int, tuple[bool, bool], list[int]] = (0, (False, False), [])
    few = [_is_small(side) for side in sides]
    for chosen in ((True, True), (True, False), (False, True)):
        packed = [(side, small) for side, small, packs in zip(sides, few, chosen, strict=True) if packs]
        if any(side.codes.numel() < LARGE for side, _ in packed):
            continue
        small = torch.stack([one for _, one in packed]).all(dim=0).nonzero().flatten().tolist()
        small = small[len(small) % 2 :]
        saved = len(small) * sum(side.codes.shape[1] for side, _ in packed)
        best = max(best, (saved, chosen, small), key=lambda found: found[0])
    _, chosen, small = best
    if not small:
        return form
    rest = set(small)
    whole = [at for at in range(form.left.rank) if at not in rest]
    left, right = (_packed(side, whole, small, packs) for side, packs in zip(sides, chosen, strict=True))
    return LowRank(left, right)


def spread(codes: torch.Tensor, nibbles: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """int8 [R, N]: codes as they are, then those of the low and of the high halves, sixteenfold; in `out` if given.

    Sixteenfold a half needs one pass each, and stays signed.
    """
    pairs, first = nibbles.shape[0], codes.shape[0]
    if not pairs:
        return codes
    if out is None:
        out = codes.new_empty(first + 2 * pairs, nibbles.shape[1])
    if first:
        out[:first].copy_(codes)
    torch.mul(nibbles, NIBBLE, out=out[first : first + pairs])  # wraps: what was in the high half is gone
    torch.bitwise_and(nibbles, -NIBBLE, out=out[first + pairs :])
    return out


def _packs(factor: Factor) -> bool:
    return factor.codes.dtype == torch.int8 and factor.nibbles is None


def _is_small(factor: Factor) -> torch.Tensor:
    if not factor.codes.shape[1]:
        return torch.zeros(factor.rank, dtype=torch.bool)
    return (factor.codes.amin(dim=1) >= -8) & (factor.codes.amax(dim=1) <= 7)


def _packed(factor: Factor, whole: list[int], small: list[int], packs: bool) -> Factor:
    codes, half = factor.codes, len(small) // 2
    scales = None if factor.scales is None else factor.scales[whole + small]
    if not packs:
        return replace(factor, codes=codes[whole + small], scales=scales)
    nibbles = (codes[small[:half]] & 15).bitwise_or_(codes[small[half:]] * NIBBLE)
    return replace(factor, codes=codes[whole], scales=scales, nibbles=nibbles)
