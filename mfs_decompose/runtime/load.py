"""Load an artifact to be run: the base once, every variant as its deltas, in one transformers model.

family = load_family("art")
with family.use("math") as model, torch.inference_mode():
    logits = model(input_ids=ids).logits
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mfs_decompose.artifact.reader import Family
from mfs_decompose.errors import UsageError
from mfs_decompose.runtime.batch_plan import BASE, PlanSlot
from mfs_decompose.runtime.changes import Changes, Kind, storages_of
from mfs_decompose.runtime.load_base import DTYPES, build_model, check_device, spread_layers
from mfs_decompose.runtime.load_checkpoints import Described, describe, headers_of_base, headers_of_variant
from mfs_decompose.runtime.load_configs import refuse_length_dependent_rope, refuse_other_maths
from mfs_decompose.runtime.load_deltas import Places, Router
from mfs_decompose.runtime.load_swap import attach, detach, swap_modules, swap_rotary
from mfs_decompose.runtime.loaded import LoadedFamily, LoadedVariant
from mfs_decompose.runtime.ops.dispatch import choose_ops
from mfs_decompose.runtime.resident import SharedForms
from mfs_decompose.runtime.tiers import TierLimits, Tiers
from mfs_decompose.source.architecture import language_model_class, read_transformers_config
from mfs_decompose.source.side_files import GENERATION_CONFIG
from mfs_decompose.source.stop_ids import find_stop_ids
from mfs_decompose.source.tokenizer_facts import read_tokenizer

__all__ = ["LoadedFamily", "LoadedVariant", "load_family"]


def load_family(
    artifact: str | Path,
    *,
    variants: Sequence[str] | None = None,
    base: str | Path | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    ops: str = "auto",
    limits: TierLimits | None = None,
) -> LoadedFamily:
    """Load a family to be run.

    Every variant is read once, so that what cannot be served is refused now, even where not all fit into `limits`.

    Args:
        variants: those to load, all by default; slots are numbered in this order from 0.
        base: where the base is, for an artifact that refers to it.
        device: cpu, cuda, cuda:N, or auto, which spreads the layers over all GPUs.
        dtype: of the base's weights and of the activations; deltas are added in fp32.
        ops: auto, cpu or reference.
        limits: memory for deltas; without, all variants are on the device.

    Raises:
        UsageError: unknown variant, device, dtype or ops, or limits without room for a variant.
        SourceIncompatible: naming what cannot be served.
        ArtifactInvalid: the artifact is damaged.
        ResourceShortage: out of memory.
    """
    if dtype not in DTYPES:
        raise UsageError(f"expected a dtype among {', '.join(DTYPES)}, found {dtype!r}")
    spread = device == "auto" and torch.cuda.device_count() > 1
    first = "cuda" if device == "auto" and torch.cuda.is_available() else "cpu" if device == "auto" else device
    place = check_device(first)
    chosen_ops = choose_ops(ops, place.type)
    with Family.open(artifact, base=base) as family:
        ids = list(family.variant_ids if variants is None else dict.fromkeys(variants))
        shared, described, configs, model_class = _describe_all(family, ids)
        model = build_model(family, shared, configs["base"], model_class, dtype, "cpu" if spread else str(place))
        if spread:
            spread_layers(model)
        reader = _Reader(family, shared, described, Places.of(model), SharedForms(family))
        limits = limits or TierLimits()
        first_pass = _read_all(reader, ids, limits)
        slot = PlanSlot()
        rows = {BASE: _vocabulary(model)}
        for at, one in enumerate(described.values()):
            rows[at] = _vocabulary_of(model, one, rows[BASE])
        modules = swap_modules(model, first_pass.kinds, first_pass.rows, slot, chosen_ops)
        swap_rotary(model, {at: (id, configs[id]) for at, id in enumerate(ids)}, slot)
        if len(set(rows.values())) > 1:
            model.register_forward_hook(_mask_foreign_tokens(slot, rows))
        loaded = {"base": _loaded(family, shared, BASE, rows[BASE], {})}
        for at, (id, described_one) in enumerate(described.items()):
            loaded[id] = _loaded(family, described_one, at, rows[at], first_pass.accounts[id])
        tiers = _make_tiers(reader, modules, slot, {id: at for at, id in enumerate(ids)}, first_pass.sizes, limits)
        tiers.fill(first_pass.kept)
        return LoadedFamily(model, slot, loaded, tiers, chosen_ops.name, family.artifact_digest)


def _describe_all(family: Family, ids: Sequence[str]) -> tuple[Described, dict[str, Described], dict[str, Any], Any]:
    """The base, the variants, the configs of all by id, and the class of the model."""
    headers = headers_of_base(family)
    config = read_transformers_config(headers.checkpoint)
    model_class = language_model_class(headers.checkpoint, config)
    shared = describe(headers, model_class)
    refuse_length_dependent_rope("base", config)
    described, configs = {}, {"base": config}
    for id in ids:
        headers = headers_of_variant(family, id)
        own = read_transformers_config(headers.checkpoint)
        refuse_length_dependent_rope(id, own)
        refuse_other_maths(id, config, own)
        described[id], configs[id] = describe(headers, model_class), own
    return shared, described, configs, model_class


@dataclass(frozen=True)
class _Reader:
    """Reads variants of the artifact, again and again."""

    family: Family
    base: Described
    described: Mapping[str, Described]
    places: Places
    shared: SharedForms

    def read(self, id: str) -> tuple[Changes, Mapping[str, str]]:
        """What a variant changes, in the CPU's memory, and the accounts of its tensors."""
        router = Router(self.family, self.places, self.base, self.described[id], self.shared)
        return router.lead(), router.accounts


@dataclass(frozen=True)
class _FirstPass:
    """What reading all variants once has shown: kinds of changed modules and most rows of their matrices, by path;
    bytes and accounts by variant; and those that had room."""

    kinds: dict[str, Kind]
    rows: dict[str, int]
    sizes: dict[str, int]
    accounts: dict[str, Mapping[str, str]]
    kept: dict[str, Changes]


def _read_all(reader: _Reader, ids: Sequence[str], limits: TierLimits) -> _FirstPass:
    found = _FirstPass({}, {}, {}, {}, {})
    room = None if limits.device is None or limits.host is None else limits.device + limits.host
    for id in ids:
        changes, found.accounts[id] = reader.read(id)
        common = reader.shared.storages
        found.sizes[id] = sum(size for place, size in storages_of(changes).items() if place not in common)
        for path, change in changes.items():
            found.kinds[path] = change.kind
            if change.matrix is not None:
                found.rows[path] = max(change.matrix.rows, found.rows.get(path, 0))
        if room is None or id in limits.pinned or sum(found.sizes[kept] for kept in [*found.kept, id]) <= room:
            found.kept[id] = changes
    return found


def _make_tiers(
    reader: _Reader,
    modules: Mapping[str, Any],
    slot: PlanSlot,
    slots: Mapping[str, int],
    sizes: Mapping[str, int],
    limits: TierLimits,
) -> Tiers[Changes]:
    resident: set[int] = set()
    slot.resident = resident

    def put(id: str, changes: Changes) -> Changes:
        attached = attach(modules, slots[id], changes)
        resident.add(slots[id])
        return attached

    def take(id: str, changes: Changes) -> Changes:
        resident.discard(slots[id])
        detach(modules, slots[id], changes)
        return {path: change.to(torch.device("cpu")) for path, change in changes.items()}

    return Tiers(sizes, lambda id: reader.read(id)[0], put, take, slot.alone, limits)


def _loaded(family: Family, one: Described, slot: int, rows: int, accounts: Mapping[str, str]) -> LoadedVariant:
    digest = hashlib.sha256(f"{family.artifact_digest}\n{one.id}".encode()).digest()
    stops = find_stop_ids(one.files, read_tokenizer(one.files))
    generation = one.files.parse(GENERATION_CONFIG).value or {}
    return LoadedVariant(one.id, slot, digest, rows, stops.ids, generation, one.files, accounts)


def _vocabulary(model: Any) -> int:
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    return min(int(table.weight.shape[0]) for table in tables if table is not None)


def _vocabulary_of(model: Any, one: Described, base: int) -> int:
    names = {id(module): path for path, module in model.named_modules()}
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    paths = [names[id(table)] for table in tables if table is not None]
    found = [one.map.parameters[f"{path}.weight"].shape[0] for path in paths if f"{path}.weight" in one.map.parameters]
    return min(found, default=base)


def _mask_foreign_tokens(slot: PlanSlot, rows: Mapping[int, int]) -> Any:
    """A hook that takes the tokens of other variants out of the logits; after any capping of them."""

    def hook(model: Any, inputs: Any, output: Any) -> None:
        logits = output.logits
        flat = logits.view(-1, logits.shape[-1])
        for variant, start, stop in slot.logits_plan.over(flat.shape[0]):
            flat[start:stop, rows[variant] :] = -torch.inf

    return hook
