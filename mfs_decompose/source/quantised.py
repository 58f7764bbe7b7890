"""Which tensors of a checkpoint are codes of quantised weights, and which are the scales of those; from headers alone.

Codes are no numbers that could be subtracted, and a scale means nothing without its codes: the two are kept together,
bit by bit. The names are those that the writers use: torchao, compressed-tensors and DeepSeek for FP8 and INT8, GPTQ
and AWQ, bitsandbytes, and the MXFP4 of gpt-oss.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mfs_decompose.errors import SourceIncompatible
from mfs_decompose.source.align_notes import count
from mfs_decompose.source.checkpoint import Checkpoint
from mfs_decompose.source.comparable import comparable
from mfs_decompose.source.header import TensorSpec
from mfs_decompose.source.naming import first_few
from mfs_decompose.units import format_fraction

_FP8 = frozenset({"F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ"})
_PACKED = {"qweight": "GPTQ or AWQ", "weight_packed": "compressed-tensors"}
_BESIDE = frozenset(
    {
        *("weight_scale", "weight_scale_inv", "weight_scale_2", "weight_zero_point", "weight_global_scale"),
        *("weight_shape", "weight_g_idx", "input_scale", "input_zero_point", "input_global_scale", "output_scale"),
        *("scale", "scale_inv", "scales", "qzeros", "g_idx", "SCB", "weight_format"),
    }
)
_BESIDE_A_PARAMETER = ("_scale_inv", "_scale", "_scales")
_MOST = 0.5  # of a variant's bytes, as in align: below it nothing is gained from the base


@dataclass(frozen=True, slots=True)
class Quantised:
    """The quantised tensors of a checkpoint by name, what belongs to them, and how people call it; each sorted."""

    codes: tuple[str, ...]
    beside: tuple[str, ...]
    kinds: tuple[str, ...]

    @property
    def exact(self) -> frozenset[str]:
        """All that must come back bit by bit."""
        return frozenset((*self.codes, *self.beside))


def find_quantised(tensors: Mapping[str, TensorSpec]) -> Quantised:
    """Recognise quantised weights by the names and types of a checkpoint's tensors."""
    kinds = {name: kind for name, spec in tensors.items() if (kind := _kind(name, spec, tensors)) is not None}
    modules = {_stem(name) for name in kinds}
    beside = [name for name in tensors if name not in kinds and _belongs(name, kinds, modules)]
    return Quantised(tuple(sorted(kinds)), tuple(sorted(beside)), tuple(sorted(set(kinds.values()))))


def describe_quantised(base: Checkpoint | None, variants: Sequence[Checkpoint]) -> Iterator[str]:
    """One sentence for each source that holds quantised tensors, or whose config says so where none are.

    `base` None stands for a mean base.

    Raises:
        SourceIncompatible: more than half of a variant's bytes are codes, or take the place of codes, that have no
            counterpart in the base: one of the two is quantised, or both in other ways; or codes would be averaged.
    """
    of_base = Quantised((), (), ()) if base is None else find_quantised(base.tensors)
    if base is not None:
        yield from _sentences("base", base, of_base)
    for variant in sorted(variants, key=lambda one: one.id):
        if variant.adapter is not None:
            continue
        own = find_quantised(variant.tensors)
        if base is not None:
            _require_counterparts(base, of_base, variant, own)
        elif own.codes:
            raise SourceIncompatible(
                f"variant {variant.id!r} is quantised ({', '.join(own.kinds)}), and codes have no mean: "
                f"{count(own.codes)}, among them {first_few(own.codes)}",
                hint="Give the base they were made from with --base.",
            )
        yield from _sentences(variant.id, variant, own)


def _kind(name: str, spec: TensorSpec, tensors: Mapping[str, TensorSpec]) -> str | None:
    """What the codes of a tensor are called; None for a tensor of any other sort."""
    module, _, last = name.rpartition(".")
    if spec.dtype in _FP8:
        return "FP8"
    if last in _PACKED and spec.dtype[0] in "IU":
        return _PACKED[last]
    if spec.dtype == "U8" and (f"{name}.absmax" in tensors or f"{name}.quant_map" in tensors):
        return "bitsandbytes 4-bit"
    if spec.dtype == "I8" and f"{module}.SCB" in tensors:
        return "bitsandbytes 8-bit"
    if spec.dtype == "I8" and f"{module}.weight_scale" in tensors:
        return "INT8"
    if spec.dtype == "U8" and name.endswith("_blocks") and f"{name.removesuffix('_blocks')}_scales" in tensors:
        return "MXFP4"
    return None


def _belongs(name: str, codes: Mapping[str, str], modules: set[str]) -> bool:
    module, _, last = name.rpartition(".")
    if last in _BESIDE and module in modules:
        return True
    head, inside, _ = name.rpartition(".weight.")  # bitsandbytes: weight.absmax, weight.quant_state.bitsandbytes__nf4
    if inside and f"{head}.weight" in codes:
        return True
    return any(name.endswith(end) and name.removesuffix(end) in modules for end in _BESIDE_A_PARAMETER)


def _sentences(who: str, checkpoint: Checkpoint, found: Quantised) -> Iterator[str]:
    settings = checkpoint.config.get("quantization_config")
    method = settings.get("quant_method") if isinstance(settings, Mapping) else None
    said = [f"config.json: {first_few([str(method)])}"] if method else []
    if found.codes:
        yield (
            f"{who}: {count(found.codes)} of quantised weights ({'; '.join([*found.kinds, *said])}) and "
            f"{len(found.beside)} with their scales are stored exactly and not compared: {first_few(found.codes)}"
        )
    elif isinstance(settings, Mapping):
        shown = f" ({said[0]})" if said else ""
        yield f"{who}: config.json speaks of quantised weights{shown}, and no tensor is: they are stored as they stand"


def _require_counterparts(base: Checkpoint, of_base: Quantised, variant: Checkpoint, own: Quantised) -> None:
    """Refuse what align would take for another architecture: one of the two is quantised, or both in other ways."""
    of_codes, of_all = {_stem(name) for name in of_base.codes}, {_stem(name) for name in base.tensors}
    codes = set(own.codes)
    alone = [
        name
        for name, spec in variant.tensors.items()
        if (_stem(name) in of_codes or (name in codes and _stem(name) in of_all))
        and not (name in base.tensors and comparable(base.tensors[name], spec))
    ]
    beside = [name for name in own.beside if name not in base.tensors] if alone else []
    share = sum(variant.tensors[name].nbytes for name in (*alone, *beside)) / max(variant.tensor_bytes, 1)
    if share <= _MOST:
        return
    difference, hint = _difference(repr(variant.id), own, of_base)
    raise SourceIncompatible(
        f"{difference}: {count([*alone, *beside])}, {format_fraction(share)} of its bytes, cannot be compared, "
        f"among them {first_few(alone)}",
        hint=hint,
    )


def _difference(variant: str, own: Quantised, of_base: Quantised) -> tuple[str, str]:
    """How a variant and its base differ, and what to do about it."""
    if not own.codes:
        return (
            f"the base is quantised ({', '.join(of_base.kinds)}) and variant {variant} is not",
            "Give the base as it was before it was quantised.",
        )
    if not of_base.codes:
        return (
            f"variant {variant} is quantised ({', '.join(own.kinds)}) and the base is not",
            "Give the fine-tune as it was before it was quantised, or a base quantised in the same way.",
        )
    return (
        f"variant {variant} is quantised ({', '.join(own.kinds)}) in another way than the base "
        f"({', '.join(of_base.kinds)})",
        "Give both as they were before they were quantised, or both quantised in the same way.",
    )


def _stem(name: str) -> str:
    """What a weight, its codes and its scales have in common in their names."""
    module, _, last = name.rpartition(".")
    return module if last == "weight" or last in _PACKED else name.removesuffix("_blocks")
