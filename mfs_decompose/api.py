"""The Python API: what the commands do, as functions.

from mfs_decompose import Family, decompose, evaluate, restore

decompose("./base", {"math": "./math", "code": "./code"}, "art", budget="5%")
restore("art", "math", "./math-restored")
drift = evaluate("art", ["humaneval.jsonl:prompt+canonical_solution"], variants=["code"])
with Family.open("art") as family:
    print(family.variant("code").footprint)
served = Family.load("art")
print([answer.text for answer in served.generate([("math", "2 + 2 ="), ("code", "def add(a, b):")])])
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mfs_decompose.artifact.reader import Family as StoredFamily
from mfs_decompose.events import NullSink, ProgressSink

if TYPE_CHECKING:
    from mfs_decompose.fidelity.document import EvalDocument
    from mfs_decompose.fidelity.settings import EvalSettings
    from mfs_decompose.pipeline.gauge import Gauges
    from mfs_decompose.pipeline.request import DecomposeReport
    from mfs_decompose.pipeline.restore import Restored
    from mfs_decompose.runtime.scheduler import Limits
    from mfs_decompose.runtime.served import ServedFamily
    from mfs_decompose.runtime.tiers import TierLimits

__all__ = ["Family", "decompose", "evaluate", "restore"]

PathLike = str | os.PathLike[str]


class Family(StoredFamily):
    """An artifact: `open` reads what it holds, `load` runs it."""

    @classmethod
    def load(
        cls,
        artifact: PathLike,
        *,
        variants: Sequence[str] | None = None,
        base: PathLike | None = None,
        device: str = "cpu",
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        tiers: TierLimits | None = None,
        limits: Limits | None = None,
        kv_tokens: int = 16384,
    ) -> ServedFamily:
        """Load the base once and every variant as its delta, to answer for all of them in one batch.

        Args:
            artifact: folder of the artifact.
            variants: ids, all by default.
            base: folder of the base, for an artifact that refers to it.
            device: cpu, cuda, cuda:N, or auto, which spreads the layers over all GPUs.
            dtype: of the base's weights and the activations; deltas are added in fp32.
            tiers: memory for deltas on the device and beside it; without, all are on the device.
            limits: of one step of the engine.
            kv_tokens: room for keys and values, in tokens.

        Raises:
            SourceIncompatible: naming what cannot be served.
            MfsError: as `decompose`.
        """
        from mfs_decompose.runtime.load import load_family
        from mfs_decompose.runtime.served import ServedFamily

        loaded = load_family(
            os.fspath(artifact),
            variants=variants,
            base=None if base is None else os.fspath(base),
            device=device,
            dtype=dtype,
            limits=tiers,
        )
        return ServedFamily(loaded, limits=limits, kv_tokens=kv_tokens)


def decompose(
    base: PathLike | None,
    variants: Mapping[str, PathLike],
    out: PathLike,
    *,
    budget: str | float | None = None,
    rank: int | None = None,
    density: str | float | None = None,
    target: str | Mapping[str, float] | None = None,
    text: Sequence[str] = (),
    max_tokens: int | None = None,
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
        target: an objective as well: `"kl=1e-3"` or `"ppl=0.001"`, the drift to stay under at the smallest size.
        text: `FILE[:FIELD+FIELD]`, as `mfs eval --text`: what a target is measured on.
        max_tokens: of each text; 4096 by default.
        codec: lowrank, sparse, sign, ternary, kbit, deadzone, rowsparse, lossless, lora-exact or raw.
        recipe: the name of a shipped recipe, or a file.
        overrides: further keys of the recipe, dotted.

    Raises:
        MfsError: one sentence and a hint; see `mfs_decompose.errors` for the kinds.
    """
    from mfs_decompose.pipeline.decompose import decompose as run
    from mfs_decompose.pipeline.request import DecomposeRequest
    from mfs_decompose.pipeline.workspace import scratch_folder
    from mfs_decompose.recipe.load import load_recipe

    given = {
        "objective.budget": budget,
        "objective.rank": rank,
        "objective.density": density,
        "objective.target": target,
        "deltas.default.codec": codec,
    }
    changes = dict(overrides or {}) | {key: value for key, value in given.items() if value is not None}
    gauges: Gauges | None = None
    if text:
        from mfs_decompose.fidelity.gauge import TARGET_TOKENS, make_gauges
        from mfs_decompose.fidelity.settings import EvalSettings
        from mfs_decompose.fidelity.text import read_corpus
        from mfs_decompose.pipeline.device import choose_device

        settings = EvalSettings(max_tokens=max_tokens or TARGET_TOKENS)
        corpora = [read_corpus(one) for one in text]
        gauges = make_gauges(corpora, settings, choose_device(device), scratch_folder(Path(out)))
    request = DecomposeRequest(
        variants={id: os.fspath(folder) for id, folder in variants.items()},
        out=Path(out),
        recipe=load_recipe(recipe, changes),
        gauges=gauges,
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
    through: Sequence[Literal["served", "restored"]] = ("served",),
    settings: EvalSettings | None = None,
    originals: Mapping[str, PathLike] | None = None,
    base: PathLike | None = None,
    device: str = "auto",
    engine: Literal["auto", "runtime", "restore"] = "auto",
    progress: ProgressSink | None = None,
) -> EvalDocument:
    """Measure the drift of an artifact's variants against their own originals.

    Args:
        artifact: folder of the artifact.
        text: `FILE[:FIELD+FIELD]`, as `mfs eval --text`.
        variants: ids, all by default.
        originals: folders of the variants' own checkpoints, where they are no longer where the artifact was made.
        engine: what answers as served: the runtime, or an fp32 restore in transformers; auto restores what the runtime
            refuses.

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
            engine=engine,
        )
        results, digest = measure_artifact(request, progress or NullSink())
    return EvalDocument(tuple(results), describe_settings(how, results, chosen), digest)
