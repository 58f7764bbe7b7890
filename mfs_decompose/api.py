"""The Python API: what the commands do, as functions.

from mfs_decompose import Family, decompose, evaluate, restore

decompose("./base", {"math": "./math", "code": "./code"}, "art", budget="5%")
restore("art", "math", "./math-restored")
drift = evaluate("art", ["humaneval.jsonl:prompt+canonical_solution"], variants=["code"])
with Family.open("art") as family:
    print(family.variant("code").footprint)
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mfs_decompose.artifact.reader import Family
from mfs_decompose.events import NullSink, ProgressSink

if TYPE_CHECKING:
    from mfs_decompose.fidelity.document import EvalDocument
    from mfs_decompose.fidelity.settings import EvalSettings
    from mfs_decompose.pipeline.request import DecomposeReport
    from mfs_decompose.pipeline.restore import Restored

__all__ = ["Family", "decompose", "evaluate", "restore"]

PathLike = str | os.PathLike[str]


def decompose(
    base: PathLike | None,
    variants: Mapping[str, PathLike],
    out: PathLike,
    *,
    budget: str | float | None = None,
    rank: int | None = None,
    density: str | float | None = None,
    codec: str | None = None,
    recipe: PathLike | None = None,
    overrides: Mapping[str, object] | None = None,
    device: str = "auto",
    threads: int | None = None,
    resume: bool = True,
    overwrite: bool = False,
    progress: ProgressSink | None = None,
) -> DecomposeReport:
    """Decompose a base and its fine-tunes into the artifact `out`.

    Args:
        base: folder of the base; None averages the variants.
        variants: folder of each fine-tune, by id.
        out: folder of the artifact. If it is there already and this would write it again, nothing is written.
        budget, rank, density: at most one objective: a cap for each variant (`"5%"`, `0.05`, `"80MB"`), one rank, or
            a share of each row.
        codec: lowrank, sparse, sign, ternary, kbit, deadzone, rowsparse, lossless, lora-exact or raw.
        recipe: the name of a shipped recipe, or a file.
        overrides: further keys of the recipe, dotted.

    Raises:
        MfsError: one sentence and a hint; see `mfs_decompose.errors` for the kinds.
    """
    from mfs_decompose.pipeline.decompose import decompose as run
    from mfs_decompose.pipeline.request import DecomposeRequest
    from mfs_decompose.recipe.load import load_recipe

    given = {
        "objective.budget": budget,
        "objective.rank": rank,
        "objective.density": density,
        "deltas.default.codec": codec,
    }
    changes = dict(overrides or {}) | {key: value for key, value in given.items() if value is not None}
    request = DecomposeRequest(
        variants={id: os.fspath(folder) for id, folder in variants.items()},
        out=Path(out),
        recipe=load_recipe(recipe, changes),
        base=None if base is None else os.fspath(base),
        device=device,
        threads=threads,
        resume=resume,
        overwrite=overwrite,
    )
    return run(request, progress)


def restore(
    artifact: PathLike,
    variant: str,
    out: PathLike,
    *,
    dtype: Literal["original", "float32"] = "original",
    rounding: Literal["stochastic", "nearest"] = "stochastic",
    layout: Literal["original", "single"] = "original",
    exact: bool = False,
    form: Literal["checkpoint", "adapter"] = "checkpoint",
    base: PathLike | None = None,
    progress: ProgressSink | None = None,
) -> Restored:
    """Write one variant, or `base`, back as a checkpoint folder.

    Args:
        artifact: folder of the artifact.
        variant: its id.
        out: folder to write; absent or empty.
        dtype: that of the original, or float32 for what is served.
        form: of an adapter, the checkpoint it makes of the base, or the adapter as it was given.
        base: folder of the base, for an artifact that refers to it.

    Raises:
        MfsError: as `decompose`.
    """
    from mfs_decompose.pipeline.restore import RestoreOptions
    from mfs_decompose.pipeline.restore import restore as run

    options = RestoreOptions(dtype=dtype, rounding=rounding, layout=layout, exact=exact, form=form)
    place = None if base is None else os.fspath(base)
    return run(Path(artifact), [variant], Path(out), options, base=place, progress=progress)[0]


def evaluate(
    artifact: PathLike,
    text: Sequence[str],
    *,
    variants: Sequence[str] | None = None,
    through: Sequence[Literal["served", "restored"]] = ("served", "restored"),
    settings: EvalSettings | None = None,
    originals: Mapping[str, PathLike] | None = None,
    base: PathLike | None = None,
    device: str = "auto",
    progress: ProgressSink | None = None,
) -> EvalDocument:
    """Measure the drift of an artifact's variants against their own originals.

    Args:
        artifact: folder of the artifact.
        text: `FILE[:FIELD+FIELD]`, as `mfs eval --text`.
        variants: ids, all by default.
        originals: folders of the variants' own checkpoints, where they are no longer where the artifact was made.

    Raises:
        MfsError: as `decompose`.
    """
    from mfs_decompose.fidelity.artifact_drift import DriftRequest, measure_artifact
    from mfs_decompose.fidelity.document import EvalDocument, describe_settings
    from mfs_decompose.fidelity.settings import EvalSettings
    from mfs_decompose.fidelity.text import read_corpus
    from mfs_decompose.pipeline.device import choose_device

    chosen, how = choose_device(device), settings or EvalSettings()
    with tempfile.TemporaryDirectory(prefix="mfs-eval-") as scratch:
        request = DriftRequest(
            artifact=Path(artifact),
            corpora=[read_corpus(one) for one in text],
            settings=how,
            through=tuple(through),
            scratch=Path(scratch),
            variants=variants,
            originals={id: os.fspath(folder) for id, folder in (originals or {}).items()},
            base=None if base is None else os.fspath(base),
            device=chosen,
        )
        results, digest = measure_artifact(request, progress or NullSink())
    return EvalDocument(tuple(results), describe_settings(how, results, chosen), digest)
