"""Two models compared tensor by tensor, in blocks of rows; what digests on record already tell is not read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mfs_decompose.artifact.values import row_bytes
from mfs_decompose.codec.base import DECODE_ELEMENTS, block_rows
from mfs_decompose.errors import ArtifactInvalid
from mfs_decompose.events import ProgressSink
from mfs_decompose.pipeline.diff_sides import Side
from mfs_decompose.pipeline.difference import Sums, add_block
from mfs_decompose.source.header import TensorSpec

if TYPE_CHECKING:
    import torch

Verdict = Literal["equal", "changed", "retyped", "reshaped", "unknown"]


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """One tensor that both sides have.

    `equal` means the same bits, `retyped` another dtype (with values that may be equal: `changed` 0), `reshaped`
    another shape, `unknown` that the weights were not read. Of the `compared` elements (those of the rows in common,
    where only their number differs), `changed` is how many differ, `max_abs` the largest difference, `rel`
    ||A - B||_F / ||A||_F and `cosine` that of the two as vectors. The three are in fp64, over elements that are finite
    on both sides; `nonfinite` counts the others. None where it was not computed or is no number.
    """

    name: str
    a: TensorSpec
    b: TensorSpec
    verdict: Verdict
    compared: int | None = None
    changed: int | None = None
    max_abs: float | None = None
    rel: float | None = None
    cosine: float | None = None
    nonfinite: int | None = None
    squares: tuple[float, float] = (0.0, 0.0)
    """||A - B||^2 and ||A||^2."""


@dataclass(frozen=True, slots=True)
class TensorsDiff:
    """Names on one side alone, every tensor of both, and whether one side is what the other one was made from."""

    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    both: tuple[TensorDiff, ...]
    original: Literal["a", "b"] | None

    @property
    def equal(self) -> bool:
        """Whether every tensor is on both sides with the same bits."""
        return not (self.only_a or self.only_b) and all(one.verdict == "equal" for one in self.both)


def compare_tensors(a: Side, b: Side, *, weights: bool, progress: ProgressSink) -> TensorsDiff:
    """Compare all tensors; without `weights` only names, dtypes, shapes and digests on record.

    Raises:
        ArtifactInvalid: a tensor of an artifact is not what was recorded.
        MfsError: as reading either side does.
    """
    common = sorted(a.specs.keys() & b.specs.keys())
    originals = [bool(common), bool(common)]
    if weights:
        progress.start("comparing tensors", sum(a.specs[name].nbytes + b.specs[name].nbytes for name in common))
    both = tuple(_compare(a, b, name, weights, originals, progress) for name in common)
    if weights:
        progress.finish()
    whole = weights and len(common) == len(a.specs) == len(b.specs)
    original: Literal["a", "b"] | None = None
    if whole and any(originals):
        original = "a" if originals[0] else "b"
    return TensorsDiff(
        tuple(sorted(a.specs.keys() - b.specs.keys())), tuple(sorted(b.specs.keys() - a.specs.keys())), both, original
    )


def _compare(a: Side, b: Side, name: str, weights: bool, originals: list[bool], progress: ProgressSink) -> TensorDiff:
    one, two = a.specs[name], b.specs[name]
    alike = (one.dtype, one.shape) == (two.dtype, two.shape)
    known = (a.recorded.get(name), b.recorded.get(name))
    if weights and alike:
        known, matched = _hash_files(a, b, name, known)
        originals[0], originals[1] = originals[0] and matched[0], originals[1] and matched[1]
    else:
        originals[:] = [False, False]
    if alike and known[0] is not None and known[0] == known[1]:
        if weights:
            progress.advance(one.nbytes + two.nbytes)
        return TensorDiff(name, one, two, "equal", one.numel, 0, 0.0, 0.0, None, 0)
    verdict: Verdict = "reshaped" if one.shape != two.shape else "retyped" if one.dtype != two.dtype else "changed"
    if not weights:
        is_known = not alike or all(known)
        return TensorDiff(name, one, two, verdict if is_known else "unknown")
    rows = _common_rows(one, two)
    if rows is None:
        progress.advance(one.nbytes + two.nbytes)
        return TensorDiff(name, one, two, verdict)
    sums = _sum_up(a, b, name, rows, progress)
    if alike and sums.changed == 0:
        verdict = "equal"
    return TensorDiff(
        name,
        one,
        two,
        verdict,
        compared=sums.elements,
        changed=sums.changed,
        max_abs=sums.max_abs,
        rel=sums.rel,
        cosine=sums.cosine,
        nonfinite=sums.nonfinite,
        squares=sums.squares,
    )


def _hash_files(
    a: Side, b: Side, name: str, known: tuple[str | None, str | None]
) -> tuple[tuple[str | None, str | None], tuple[bool, bool]]:
    """Digests of both sides where hashing a file can save decoding, and whether each is the other's original."""
    found, matched = list(known), [False, False]
    for here, (side, other) in enumerate(((a, b), (b, a))):
        if side.raw is not None and other.raw is None:
            found[here] = _hash(side, name)
            matched[here] = found[here] == other.originals.get(name)
    return (found[0], found[1]), (matched[0], matched[1])


def _hash(side: Side, name: str) -> str:
    assert side.raw is not None
    digest = hashlib.sha256()
    for start, stop in _blocks(side.specs[name], side.specs[name].rows):
        digest.update(side.raw.raw(name, start, stop).numpy().data)
    return digest.hexdigest()


def _sum_up(a: Side, b: Side, name: str, rows: int, progress: ProgressSink) -> Sums:
    one, two = a.specs[name], b.specs[name]
    sums = Sums()
    open_a, open_b = a.open(name), b.open(name)
    proofs = [_Proof(a, name, rows), _Proof(b, name, rows)]
    for start, stop in _blocks(one, rows):
        x, y = open_a(start, stop), open_b(start, stop)
        proofs[0].add(x)
        proofs[1].add(y)
        add_block(sums, x, y)
        progress.advance((stop - start) * (one.row_bytes + two.row_bytes))
    for proof in proofs:
        proof.check()
    progress.advance((one.rows - rows) * one.row_bytes + (two.rows - rows) * two.row_bytes)
    return sums


class _Proof:
    """Holds what was decoded of an artifact's tensor against the digest it was recorded with."""

    def __init__(self, side: Side, name: str, rows: int) -> None:
        self._expected = side.recorded.get(name) if rows == side.specs[name].rows else None
        self._digest, self._side, self._name = hashlib.sha256(), side, name

    def add(self, block: torch.Tensor) -> None:
        if self._expected is not None:
            self._digest.update(row_bytes(block))

    def check(self) -> None:
        if self._expected is not None and self._digest.hexdigest() != self._expected:
            raise ArtifactInvalid(
                f"tensor {self._name[:200]!r} of {self._side.ref} is not what was recorded: the artifact is damaged",
                hint="mfs verify says which file; get the artifact again from where it came from.",
            )


def _common_rows(a: TensorSpec, b: TensorSpec) -> int | None:
    """How many rows both have, where a row is the same shape; None where they are not to be compared."""
    if len(a.shape) != len(b.shape) or a.shape[1:] != b.shape[1:]:
        return None
    return min(a.rows, b.rows)


def _blocks(spec: TensorSpec, rows: int) -> Iterator[tuple[int, int]]:
    step = block_rows(spec, DECODE_ELEMENTS)
    for start in range(0, rows, step):
        yield start, min(start + step, rows)
