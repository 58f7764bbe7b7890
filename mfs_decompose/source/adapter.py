"""What an adapter makes of its base, tensor by tensor, from headers alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mfs_decompose.errors import SourceIncompatible
from mfs_decompose.source.adapter_attach import Attacher, require_matches
from mfs_decompose.source.adapter_config import parse_adapter_config
from mfs_decompose.source.adapter_draft import Change, Draft, Json
from mfs_decompose.source.adapter_keys import sort_keys
from mfs_decompose.source.adapter_names import LoadMap, Names
from mfs_decompose.source.adapter_notes import describe, warn
from mfs_decompose.source.adapter_tokens import describe_unknown_tokens
from mfs_decompose.source.adapter_tying import config_changes, find_ends, settle_tying
from mfs_decompose.source.align import GroupKind
from mfs_decompose.source.checkpoint import Checkpoint
from mfs_decompose.source.header import TensorSpec
from mfs_decompose.source.naming import first_few


@dataclass(frozen=True, slots=True)
class MergedTensor:
    """A tensor of the checkpoint that an adapter and its base make.

    `base` is the tensor of the base that it starts from, for a head that was tied the embeddings; `common_rows` and
    `kind` are those of an alignment with the base. `params` are the codec's, see codec/adapter.py; None where the
    tensor has the bits of `base`.
    """

    spec: TensorSpec
    base: TensorSpec | None
    common_rows: int
    kind: GroupKind
    params: Mapping[str, Json] | None


@dataclass(frozen=True, slots=True)
class Merge:
    """All tensors of the merged checkpoint by name, sorted.

    `notes` and `warnings` are for the user. `config_changes` go into the base's config.json; objects inside it are
    merged with the config's own.
    """

    tensors: Mapping[str, MergedTensor]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    config_changes: Mapping[str, object]


def resolve_adapter(adapter: Checkpoint, base: Checkpoint, load_map: LoadMap | None = None) -> Merge:
    """The checkpoint that `adapter` makes of `base`, as PEFT computes the two unmerged.

    `load_map` gives the base's tensor map; it is asked only where names do not match as they stand. By default it is
    made with transformers, from the headers.

    Raises:
        SourceIncompatible: the adapter is of another method, incomplete, or does not fit the base in every part.
    """
    assert adapter.adapter is not None, "an adapter"
    where = adapter.pinned
    if base.adapter is not None:
        raise SourceIncompatible(
            f"expected a whole checkpoint as the base, found an adapter: {base.pinned}",
            hint="Give the base that both adapters were trained on.",
        )
    config = parse_adapter_config(adapter.adapter, where)
    _refuse_empty(adapter, where)
    draft = Draft({name: info.spec for name, info in base.tensors.items()})
    attached = Attacher(
        sort_keys(adapter.tensors, where), config, Names(base, load_map or _transformers_map(base)), draft, where
    )
    needed = attached.parameters()
    attached.names.learn(needed)
    attached.attach()
    require_matches(attached, [*needed, *(label for label in attached.strange if f"{label}.weight" not in needed)])
    ends = find_ends(base, draft, where)
    apart = ends is not None and settle_tying(draft, ends, base, keep_tied=config.ensure_weight_tying, where=where)
    tensors = {name: _merged(name, draft, base) for name in sorted({*base.tensors, *draft.changes})}
    shapes = {name: tensor.spec.shape for name, tensor in tensors.items()}
    changes = config_changes(base, ends, shapes, apart=apart, where=where)
    changed = [name for name, tensor in tensors.items() if tensor.params is not None]
    notes = describe(attached, adapter, base, changed, apart=apart)
    rows = shapes[ends.embedding][0] if ends is not None else None
    return Merge(
        tensors, notes, (*warn(attached, adapter, base), *describe_unknown_tokens(adapter, base, rows)), changes
    )


def _transformers_map(base: Checkpoint) -> LoadMap:
    def load() -> object:
        from mfs_decompose.source.tensor_map import load_tensor_map

        return load_tensor_map(base)

    return load  # type: ignore[return-value]


def _refuse_empty(adapter: Checkpoint, where: str) -> None:
    empty = [name for name, info in adapter.tensors.items() if info.numel == 0]
    if empty:
        raise SourceIncompatible(
            f"{len(empty)} of {len(adapter.tensors)} tensors of the adapter in {where} are empty: {first_few(empty)}",
            hint="DeepSpeed ZeRO-3 or FSDP saved it without gathering the shards: save it again from the trainer's "
            "checkpoint, inside deepspeed.zero.GatheredParameters or summon_full_params.",
        )


def _merged(name: str, draft: Draft, base: Checkpoint) -> MergedTensor:
    own = base.tensors.get(name)
    change = draft.changes.get(name, Change())
    start = draft.starts.get(name, own.spec if own is not None else None)
    params = None if change.is_empty else change.params()
    shape = _shape(change, start)
    if start is None:
        assert change.replace is not None
        return MergedTensor(TensorSpec(name, change.replace.dtype, shape), None, 0, "only_in_variant", params)
    spec = TensorSpec(name, start.dtype, shape)
    kind: GroupKind = "tied" if own is None else "same" if shape == start.shape else "resized"
    return MergedTensor(spec, start, min(spec.rows, start.rows), kind, params)


def _shape(change: Change, start: TensorSpec | None) -> tuple[int, ...]:
    shape = change.replace.shape if change.replace is not None else start.shape if start is not None else ()
    if change.tokens is not None:
        shape = (max(shape[0], max(change.tokens[1], default=-1) + 1), *shape[1:])
    return shape
