"""Open deltas: bands for their strong directions, a coded rest under one step, all bits where those are no dearer.

Drift of a direction grows faster than its energy. A fine-tune's delta is a sum of gradients times activations, so its
strong directions are those that activations have, and leaving one out shifts all tokens in one sense. What was measured
on a light and on a heavy full fine-tune, over four decades of KL, low rank, banded and with a coded rest alike, follows

    drift = e^2 * sum over directions left out of s^2 (s / s_1)^4, where a dead zone that codes them loses the part e
          + WHITE * e (1 - e) * (energy of the rest) * (mean of (s / s_1)^4), which coding spreads over all directions
          + NOISY * e^2 * noise of the bands, weighted alike

within a factor of 1.25 (docs/decisions/0014), before bands alone made up for what they leave out (MADE_UP). It says how
to split bytes between bands and rests. Between tensors, plain energy a byte orders bands better than it does, and keeps
doing that.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from mfs_decompose.linalg.bands import WIDTHS, Bands, bands_bytes, errors, made_up
from mfs_decompose.linalg.dead_curve import LEAST, RATIOS, DeadCurve, place_of

STEEP = 2.0
"""The power of (s / s_1)^2 that the energy of a direction is weighted with."""

WHITE = 0.02
NOISY = 0.02

MADE_UP = 0.6
"""Bands alone that are enlarged to make up for what they leave out (`linalg.bands.made_up`) have less drift by this
times the root of what they are enlarged by: .04 to .28 less where it was measured. What is coded above bands makes up
for it of itself, and is what the other constants were fitted to."""

SAMPLED = 1 << 17
"""Elements of an open tensor that its curves are measured on, at most."""

_NOTHING: Bands = (0,) * len(WIDTHS)


@dataclass(frozen=True, slots=True)
class Mix:
    """How one delta is stored: `exact` with all bits, else as bands and, where `step` is not 0, a coded rest.

    `peeled` is a merged LoRA stored as its factors: all bits, but what is served lacks the rounding of the merge.
    """

    bands: Bands = _NOTHING
    step: float = 0.0
    exact: bool = False
    peeled: bool = False

    @property
    def keeps_bits(self) -> bool:
        return self.exact or self.peeled

    @property
    def sized(self) -> bool:
        """Whether its bytes are known only once it is encoded."""
        return self.keeps_bits or self.step > 0.0


@dataclass(frozen=True)
class MixCandidate:
    """What allocation knows of a delta [O, I] of squared norm `energy`.

    `explained` are its squared singular values as far as they were fitted, `curves` (rank, curve of the rest beyond
    that many directions) by rising rank, `exact_bytes` about what all bits cost, None where that is not on offer, and
    `peeled` what they cost as a merged LoRA, with its rank.
    `entry_bytes` are the header that its first byte costs; `weight` is the drift of a unit of missing energy.
    """

    shape: tuple[int, int]
    energy: float
    explained: Sequence[float]
    curves: Sequence[tuple[int, DeadCurve]]
    exact_bytes: float | None
    entry_bytes: int
    weight: float = 1.0
    peeled: tuple[int, int] | None = None

    @property
    def elements(self) -> int:
        return self.shape[0] * self.shape[1]

    @cached_property
    def sums(self) -> tuple[float, ...]:
        """Energy of the first i directions."""
        return tuple(accumulate(self.explained, initial=0.0))

    @cached_property
    def heavy(self) -> tuple[float, ...]:
        """Drift of the first i directions."""
        return tuple(accumulate((one * self._steep(one) for one in self.explained), initial=0.0))

    @cached_property
    def beyond(self) -> float:
        """Drift of what was not fitted, at most: as if all of it lay in directions as strong as the last that was."""
        last = self.explained[-1] if self.explained else 0.0
        return max(self.energy - self.sums[-1], 0.0) * (self._steep(last) if self.explained else 1.0)

    @cached_property
    def mean_steep(self) -> float:
        """Mean weight of a unit of energy that is spread over all directions."""
        count = min(self.shape)
        last = self._steep(self.explained[-1]) if self.explained else 1.0
        known = math.fsum(map(self._steep, self.explained))
        return (known + (count - len(self.explained)) * last) / count

    @property
    def peeled_rank(self) -> int:
        """Directions of the merged LoRA, as far as they were fitted."""
        assert self.peeled is not None, "no LoRA was peeled off"
        return min(self.peeled[1], len(self.explained))

    def left(self, rank: int) -> float:
        """Energy beyond the first directions."""
        return max(self.energy - self.sums[rank], 0.0)

    def _steep(self, energy: float) -> float:
        strongest = self.explained[0]
        return (energy / strongest) ** STEEP if strongest > 0.0 else 1.0


def mix_drift(candidate: MixCandidate, mix: Mix) -> float:
    """The predicted drift of one way to store a delta, in weighted energy."""
    if mix.exact:
        return 0.0
    rank = candidate.peeled_rank if mix.peeled else sum(mix.bands)
    tail = candidate.heavy[-1] - candidate.heavy[rank] + candidate.beyond
    if mix.peeled:
        return candidate.weight * tail
    noise = _noise(candidate, candidate.heavy, mix.bands)
    if not mix.step:
        times = made_up(candidate.explained, candidate.energy, candidate.shape, rank)
        return candidate.weight * (1.0 - MADE_UP * math.sqrt(times - 1.0)) * (tail + NOISY * noise)
    _, error = _at(candidate, mix)
    white = WHITE * error * (1.0 - error) * _rest(candidate, mix.bands) * candidate.mean_steep
    return candidate.weight * (error * error * (tail + NOISY * noise) + white)


def energy_lost(candidate: MixCandidate, mix: Mix) -> float:
    """What a mix loses of a delta's squared norm."""
    if mix.peeled:
        return candidate.left(candidate.peeled_rank)
    return 0.0 if mix.exact else rest_error(candidate, mix) * _rest(candidate, mix.bands)


def mix_bytes(candidate: MixCandidate, mix: Mix) -> float:
    """What one way to store a delta takes, without the header of its entry."""
    if mix.exact:
        assert candidate.exact_bytes is not None, "all bits are not on offer"
        return candidate.exact_bytes
    if mix.peeled:
        assert candidate.peeled is not None, "no LoRA was peeled off"
        return float(candidate.peeled[0])
    return bands_bytes(candidate.shape, mix.bands) + rest_bits(candidate, mix) * candidate.elements / 8


def rest_error(candidate: MixCandidate, mix: Mix) -> float:
    """The part of a rest's energy that coding loses: 1 where it is not coded."""
    return _at(candidate, mix)[1]


def rest_bits(candidate: MixCandidate, mix: Mix) -> float:
    """Bits that coding a rest takes for each of its elements."""
    return _at(candidate, mix)[0]


def corrected(candidate: MixCandidate, mix: Mix, nbytes: int) -> MixCandidate:
    """The candidate once it is known what a mix of it really takes: a sample may miss what a tensor is like."""
    if mix.exact:
        return replace(candidate, exact_bytes=float(nbytes))
    if mix.peeled:
        return candidate
    foretold = rest_bits(candidate, mix) * candidate.elements / 8
    if foretold <= 0.0:
        return candidate
    ratio = max(nbytes - bands_bytes(candidate.shape, mix.bands), 1) / foretold
    curves = [(rank, replace(one, bits=tuple(bits * ratio for bits in one.bits))) for rank, one in candidate.curves]
    return replace(candidate, curves=curves)


def between(one: Mix, two: Mix, part: float) -> Mix:
    """A step between those of two mixes, geometrically; the first where they differ in more than that."""
    if one.step <= 0.0 or two.step <= 0.0 or one.bands != two.bands:
        return one
    return replace(one, step=_on_grid(one.step ** (1 - part) * two.step**part, round))


def split(
    candidates: Mapping[tuple[str, str], MixCandidate],
    bands: Mapping[tuple[str, str], Bands],
    budget: float,
) -> dict[tuple[str, str], Mix]:
    """Bands as given, and what is left of a budget for their rests, all coded under one step: one lambda for all.

    A rest of which nothing would be coded is left uncoded. Steps are finer by the root of a candidate's weight.
    """
    left = budget - math.fsum(
        bands_bytes(one.shape, bands[key]) + one.entry_bytes for key, one in candidates.items() if sum(bands[key])
    )
    rests = {key: _rest_of(one, bands[key]) for key, one in candidates.items()}
    largest = max((rms for rms, _ in rests.values()), default=0.0)
    if left <= 0.0 or largest <= 0.0:
        return {key: Mix(bands[key]) for key in candidates}

    def step_of(key: tuple[str, str], step: float) -> float:
        own = _on_grid(step / math.sqrt(candidates[key].weight))
        return own if _coded(*rests[key], own)[0] >= _LEAST_BITS else 0.0

    def rest_bytes(key: tuple[str, str], step: float) -> float:
        header = 0 if sum(bands[key]) else candidates[key].entry_bytes
        return _coded(*rests[key], step)[0] * candidates[key].elements / 8 + header if step else 0.0

    taken = _taken_by_step([(candidates[key], bool(sum(bands[key])), *rests[key]) for key in candidates])
    low, high = math.log2(largest) - 24.0, math.log2(largest) + 8.0
    for _ in range(_TURNS):
        middle = (low + high) / 2
        low, high = (middle, high) if taken(2.0**middle) > left else (low, middle)
    steps = {key: step_of(key, 2.0**high) for key in candidates}
    left -= math.fsum(rest_bytes(key, step) for key, step in steps.items())
    for key in sorted(steps):  # steps are few: what is left takes one tensor after the other to its next one
        finer = _finer(steps[key]) if steps[key] else 0.0
        cost = rest_bytes(key, finer) - rest_bytes(key, steps[key])
        if cost <= left:
            steps[key], left = finer, left - cost
    return {key: Mix(bands[key], steps[key]) for key in candidates}


def _taken_by_step(
    rests: Sequence[tuple[MixCandidate, bool, float, DeadCurve | None]],
) -> Callable[[float], float]:
    """Bytes of all rests, headers of those without bands included, under one step: many at once, see `_coded`."""
    import numpy as np

    coded = [(one, banded, rms, curve) for one, banded, rms, curve in rests if curve is not None]
    logs_KN = np.log2(np.maximum([curve.bits for *_, curve in coded], LEAST)).reshape(len(coded), len(RATIOS))
    rms_K = np.array([rms for *_, rms, _ in coded])
    root_K = np.sqrt([one.weight for one, *_ in coded])
    octets_K = np.array([one.elements / 8 for one, *_ in coded])
    header_K = np.array([0 if banded else one.entry_bytes for one, banded, *_ in coded])
    every_K = np.arange(len(coded))

    def taken(step: float) -> float:
        part_K, power_K = np.frexp(step / root_K)
        own_K = np.ldexp(np.ceil(part_K * 256), power_K - 8)
        place_K = np.clip(place_of(np.log2(own_K / rms_K)), 0.0, len(RATIOS) - 1.0)
        low_K = np.minimum(place_K.astype(np.int64), len(RATIOS) - 2)
        one_K, two_K = logs_KN[every_K, low_K], logs_KN[every_K, low_K + 1]
        bits_K = 2.0 ** (one_K + (two_K - one_K) * (place_K - low_K))
        bits_K += np.maximum(np.log2(RATIOS[0] * rms_K / own_K), 0.0)
        return float(np.where(bits_K >= _LEAST_BITS, bits_K * octets_K + header_K, 0.0).sum())

    return taken


def _on_grid(step: float, whole: Callable[[float], int] = math.ceil) -> float:
    """The next step, from this one up, of the 8 significant bits that a dead zone keeps."""
    part, power = math.frexp(step)
    return math.ldexp(whole(part * 256), power - 8)


def _finer(step: float) -> float:
    """The step on the grid below one that lies on it."""
    part, power = math.frexp(step)
    return math.ldexp(round(part * 256) - 1, power - 8)


_TURNS = 40
_LEAST_BITS = 2e-3  # an element: below this models and headers are most of it


def _at(candidate: MixCandidate, mix: Mix) -> tuple[float, float]:
    return _coded(*_rest_of(candidate, mix.bands), mix.step) if mix.step > 0.0 else (0.0, 1.0)


def _rest_of(candidate: MixCandidate, bands: Bands) -> tuple[float, DeadCurve | None]:
    """Root mean square of what bands leave, and the curve of coding it; none where nothing is left, or none known."""
    rms = math.sqrt(_rest(candidate, bands) / candidate.elements)
    return rms, _curve_at(candidate, sum(bands)) if rms > 0.0 else None


def _coded(rms: float, curve: DeadCurve | None, step: float) -> tuple[float, float]:
    """Of a rest that is coded under a step: bits an element, and what part of its energy is lost."""
    if curve is None or step <= 0.0:
        return 0.0, 1.0
    ratio = step / rms
    bits, error = curve.at(ratio)
    finer = max(RATIOS[0] / ratio, 1.0)  # than was measured: a bit for each halving
    return bits + math.log2(finer), error / finer**2


def _rest(candidate: MixCandidate, bands: Bands) -> float:
    """Energy of what is left to be coded: directions left out, and the noise of those kept."""
    return candidate.left(sum(bands)) + _noise(candidate, candidate.sums, bands)


def _noise(candidate: MixCandidate, sums: Sequence[float], bands: Bands) -> float:
    taken, noise, error = 0, 0.0, errors(candidate.shape)
    for count, bits in zip(bands, WIDTHS, strict=True):
        noise += error[bits] * (sums[taken + count] - sums[taken])
        taken += count
    return noise


def _curve_at(candidate: MixCandidate, rank: int) -> DeadCurve | None:
    """The curve of the rest beyond `rank` directions: between two that were measured, in between.

    Not between none and the first that were taken: a delta of a few units of bf16 is another thing without any of them.
    """
    curves = candidate.curves
    if not curves:
        return None
    after = min(bisect_left(curves, rank, key=lambda curve: curve[0]), len(curves) - 1)
    if after == 0 or curves[after][0] <= rank or curves[after - 1][0] == 0:
        return curves[after][1]
    (low, one), (high, two) = curves[after - 1], curves[after]
    part = (rank - low) / (high - low)
    return DeadCurve(_between(one.bits, two.bits, part), _between(one.error, two.error, part))


def _between(one: Sequence[float], two: Sequence[float], part: float) -> tuple[float, ...]:
    return tuple(a * (1 - part) + b * part for a, b in zip(one, two, strict=True))
