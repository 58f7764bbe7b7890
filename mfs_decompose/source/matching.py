"""Go through a load with transformers' own tables: names by its renaming, operations on tensors without data.

This is the loop of `transformers.core_model_loading.convert_and_load_state_dict_in_model` (5.24) without the reading;
tests hold its result against what a real load gives, bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from mfs_decompose.source.architecture import module_classes
from mfs_decompose.source.checkpoint import Checkpoint
from mfs_decompose.source.quiet import quiet_transformers
from mfs_decompose.source.tensor_map import Failure, Mismatch, Parameter, TensorMap


@dataclass
class _Join:
    """The checkpoint tensors that go into one parameter, and the transform of transformers that joins them."""

    transform: Any
    tensors: dict[str, Any] = field(default_factory=dict)  # name -> tensor on the meta device


@dataclass
class _Outcome:
    """What became of all joins."""

    made: dict[str, Parameter] = field(default_factory=dict)
    mismatched: list[Mismatch] = field(default_factory=list)
    failed: list[Failure] = field(default_factory=list)

    @property
    def accounted(self) -> set[str]:
        """Checkpoint tensors that are in a parameter or under a complaint."""
        holders: tuple[Iterable[Any], ...] = (self.made.values(), self.mismatched, self.failed)
        return {name for holder in holders for one in holder for name in one.tensors}


def match_tensors(checkpoint: Checkpoint, model: Any) -> TensorMap:
    """What of the checkpoint would become what of `model`, which has its parameters on the meta device."""
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items() if hasattr(value, "shape")}
    with quiet_transformers():
        joins, strays = _plan_joins(checkpoint, model)
        outcome = _Outcome()
        for target, join in joins.items():
            _run_join(target, join, model, expected, outcome)
        complained = {one.parameter for one in outcome.mismatched} | {one.parameter for one in outcome.failed}
        missing = set(expected) - set(outcome.made) - complained
        aliases = _tie(model, set(outcome.made) | complained, missing)
        kept = SimpleNamespace(missing_keys=set(missing), unexpected_keys=set(strays.values()))
        model._adjust_missing_and_unexpected_keys(kept)
    accounted = outcome.accounted
    sources = {name: outcome.made.get(aliases.get(name, name)) for name in expected}
    return TensorMap(
        architecture=type(model).__name__,
        parameters={
            name: replace(one, name=name) if one is not None else Parameter(name, expected[name])
            for name, one in sources.items()
        },
        aliases=aliases,
        modules=module_classes(model),
        unused=tuple(name for name, renamed in strays.items() if renamed in kept.unexpected_keys),
        ignored=tuple(name for name, renamed in strays.items() if renamed not in kept.unexpected_keys),
        shadowed={name: target for target, join in joins.items() for name in join.tensors if name not in accounted},
        unfilled=tuple(sorted(kept.missing_keys)),
        initialised=tuple(sorted(missing - kept.missing_keys)),
        mismatched=tuple(outcome.mismatched),
        failed=tuple(outcome.failed),
    )


def _plan_joins(checkpoint: Checkpoint, model: Any) -> tuple[dict[str, _Join], dict[str, str]]:
    """Checkpoint tensors by the parameter they go into, and those that go nowhere, each with its new name."""
    import torch
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    transforms = get_model_conversion_mapping(model)
    renamings: list[Any] = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters: list[Any] = [one for one in transforms if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    prefix, expected = model.base_model_prefix, model.state_dict()
    joins: dict[str, _Join] = {}
    strays: dict[str, str] = {}
    for name in sorted(checkpoint.tensors, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, expected)
        if renamed not in expected and name in expected:
            renamed, pattern = rename_source_key(name, [], [], prefix, expected)
        if renamed not in expected:
            strays[name] = renamed
            continue
        if renamed not in joins:
            joins[renamed] = _Join(WeightRenaming(name, renamed) if pattern is None else deepcopy(by_pattern[pattern]))
        # One dtype for all, as in a load, which casts before it joins.
        tensor = torch.empty(checkpoint.tensors[name].shape, dtype=torch.float32, device="meta")
        joins[renamed].tensors[name] = tensor
        joins[renamed].transform.add_tensor(renamed, name, pattern or name, tensor)
    return joins, strays


def _run_join(target: str, join: _Join, model: Any, expected: dict[str, tuple[int, ...]], outcome: _Outcome) -> None:
    from mfs_decompose.source.piece_trace import PieceTrace

    names = tuple(join.tensors)
    trace = PieceTrace()
    for name, tensor in join.tensors.items():
        trace.watch(tensor, name)
    try:
        with trace:
            results = join.transform.convert(target, model=model, config=model.config)
    except Exception as error:  # an operation fails in whatever way its tensors' shapes make it fail
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        outcome.failed.append(Failure(target, reason, names))
        return
    for name, result in results.items():
        value = result[0] if isinstance(result, list) else result
        if name not in expected:
            outcome.failed.append(Failure(name, "the architecture has no such parameter", names))
            continue
        shape = tuple(value.shape)
        if shape != expected[name]:
            outcome.mismatched.append(Mismatch(name, shape, expected[name], names))
            continue
        pieces = trace.pieces_of(value)
        tiled = pieces is not None and sum(piece.numel for piece in pieces) == value.numel()
        outcome.made[name] = Parameter(name, shape, pieces or ()) if tiled else Parameter(name, shape, (), names)


def _tie(model: Any, filled: set[str], missing: set[str]) -> dict[str, str]:
    """Tie the model as a load does; what gets a value that way goes from `missing` into the result, with its source."""
    before = set(missing)
    model.tie_weights(missing_keys=missing, recompute_mapping=False)
    owners = {id(model.get_parameter_or_buffer(name)): name for name in sorted(filled)}
    return {name: owners[id(model.get_parameter_or_buffer(name))] for name in sorted(before - missing)}
