"""Two models, or two artifacts, held against each other."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from mfs_decompose.errors import UsageError
from mfs_decompose.events import NullSink, ProgressSink
from mfs_decompose.pipeline.diff_artifacts import ArtifactsDiff, compare_artifacts
from mfs_decompose.pipeline.diff_files import FilesDiff, compare_files, files_to_json
from mfs_decompose.pipeline.diff_sides import Named, Side, open_side, parse_side
from mfs_decompose.pipeline.diff_tensors import TensorDiff, TensorsDiff, compare_tensors

SCHEMA = "mfs.diff/1"


@dataclass(frozen=True)
class ModelsDiff:
    """Everything that differs between two models, A and B."""

    a: Side
    b: Side
    weights: bool
    tensors: TensorsDiff
    files: FilesDiff

    @property
    def equal(self) -> bool:
        """No difference that means something: every tensor has the same bits, every file says the same."""
        return self.tensors.equal and self.files.equal

    @property
    def most_changed(self) -> list[TensorDiff]:
        """Tensors of both sides that are not equal, the most changed first."""
        unlike = [one for one in self.tensors.both if one.verdict != "equal"]
        return sorted(unlike, key=lambda one: (-(math.inf if one.rel is None else one.rel), one.name))

    @property
    def rel(self) -> float | None:
        """||A - B||_F / ||A||_F over all tensors that differ in their values; None where it is no number."""
        changed = [one.squares for one in self.tensors.both if one.changed and max(one.squares) < math.inf]
        energy = math.fsum(square for _, square in changed)
        return math.sqrt(math.fsum(square for square, _ in changed) / energy) if energy else None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, schema `mfs.diff/1`: see docs/json.md."""
        return {
            "schema": SCHEMA,
            "equal": self.equal,
            "a": _side(self.a),
            "b": _side(self.b),
            "weights_compared": self.weights,
            "tensors": {
                "only_a": list(self.tensors.only_a),
                "only_b": list(self.tensors.only_b),
                "equal": sum(one.verdict == "equal" for one in self.tensors.both),
                "unknown": sum(one.verdict == "unknown" for one in self.tensors.both),
                "rel": self.rel,
                "changes": [_tensor(one) for one in self.most_changed],
                "original": self.tensors.original,
            },
            **files_to_json(self.files),
        }


def diff(
    a: str,
    b: str,
    *,
    weights: bool = True,
    base: str | None = None,
    offline: bool = False,
    progress: ProgressSink | None = None,
) -> ModelsDiff | ArtifactsDiff:
    """Compare what `a` and `b` mean; `diff_sides` says what that may be. Two whole artifacts are not decoded.

    `base` is where the base lies that an artifact refers to; `weights` false reads no weights.

    Raises:
        UsageError: a whole artifact is held against one model, or an artifact has no such variant.
        MfsError: as opening and reading either side does.
    """
    sink = progress or NullSink()
    one, two = parse_side(a), parse_side(b)
    if one.whole and two.whole:
        assert one.artifact is not None and two.artifact is not None
        return compare_artifacts(one.artifact, two.artifact)
    for named, other in ((one, two), (two, one)):
        if named.whole:
            raise _which_one(named, other)
    from mfs_decompose.pipeline.scheduler import one_torch_thread

    with ExitStack() as stack, one_torch_thread():
        sides = [open_side(named, stack, base=base, offline=offline, progress=sink) for named in (one, two)]
        tensors = compare_tensors(*sides, weights=weights, progress=sink)
        return ModelsDiff(sides[0], sides[1], weights, tensors, compare_files(sides[0].files, sides[1].files))


def _which_one(artifact: Named, other: Named) -> UsageError:
    from mfs_decompose.artifact.reader import Family

    assert artifact.artifact is not None
    with Family.open(artifact.artifact) as family:
        ids = ["base", *family.variant_ids]
    return UsageError(
        f"expected two models or two artifacts, found a whole artifact, {artifact.text}, and one model, {other.text}",
        hint=f"say which one of it: {', '.join(f'{artifact.text}::{id}' for id in ids[:8])}",
    )


def _side(side: Side) -> dict[str, Any]:
    dtypes: dict[str, int] = {}
    for spec in side.specs.values():
        dtypes[spec.dtype] = dtypes.get(spec.dtype, 0) + 1
    return {
        "ref": side.ref,
        "kind": side.kind,
        "tensors": len(side.specs),
        "bytes": side.nbytes,
        "dtypes": dict(sorted(dtypes.items())),
        "left_out": list(side.left_out),
    }


def _tensor(one: TensorDiff) -> dict[str, Any]:
    return {
        "tensor": one.name,
        "verdict": one.verdict,
        "dtype_a": one.a.dtype,
        "dtype_b": one.b.dtype,
        "shape_a": list(one.a.shape),
        "shape_b": list(one.b.shape),
        "compared": one.compared,
        "changed": one.changed,
        "max_abs": one.max_abs,
        "rel": one.rel,
        "cosine": one.cosine,
        "nonfinite": one.nonfinite,
    }
