"""Each part of an adapter attached to the tensor of the base that it changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

from mfs_decompose.errors import SourceIncompatible
from mfs_decompose.source.adapter_config import AdapterConfig
from mfs_decompose.source.adapter_draft import Draft, factor_entries
from mfs_decompose.source.adapter_fit import Fit, fit_factors
from mfs_decompose.source.adapter_keys import AdapterKeys, Factors, Way
from mfs_decompose.source.adapter_names import Location, Names
from mfs_decompose.source.dtypes import is_float
from mfs_decompose.source.header import TensorSpec
from mfs_decompose.source.naming import first_few
from mfs_decompose.source.quantised import find_quantised
from mfs_decompose.source.tying import vocabulary_role

_RIGHT_BASE = "Give the base that the adapter was trained on with --base."
_UNQUANTISED = "The base is quantised, and nothing can be added to codes: give the same model in bf16 or fp16."
_FLOATS = "Save the adapter again in bf16, fp16 or fp32."


@dataclass
class Attacher:
    """Attaches the parts of one adapter; `new` collects tensors that the base lacks, `strange` what matches nothing."""

    keys: AdapterKeys
    config: AdapterConfig
    names: Names
    draft: Draft
    where: str

    def __post_init__(self) -> None:
        self.new: list[str] = []
        self.strange: list[str] = []

    def attach(self) -> None:
        """All parts; replaced tensors first, since factors then have to fit those.

        Raises:
            SourceIncompatible: a part is incomplete, contradicts the config, or does not fit.
        """
        for name, (spec, way) in self.keys.whole.items():
            self._attach_whole(name, spec, way)
        for module, spec in self.keys.tokens.items():
            self._attach_tokens(module, spec)
        for factors in self.keys.factors.values():
            self._require_complete(factors)
        wrapped = self._wrapped_parameters()
        for place, factors in self.keys.factors.items():
            if place in wrapped:
                self._attach_factors(factors, wrapped[place], wrapped[place])
            elif factors.nesting:
                self.strange.append(factors.label)
            else:
                self._attach_factors(factors, f"{factors.module}.weight", factors.module)

    def parameters(self) -> list[str]:
        """Names of all parameters that are changed, as far as they are known before the base is looked at."""
        plain = [f"{module}.weight" for module, nesting in self.keys.factors if not nesting]
        return sorted({*plain, *self.keys.whole, *(f"{module}.weight" for module in self.keys.tokens)})

    def _attach_whole(self, name: str, spec: TensorSpec, way: Way) -> None:
        module = name.rpartition(".")[0]
        saved = way == "saved" or (way == "plain" and self.config.saves(module))
        location = self.names.locate(name)
        if location is None:
            if not saved:
                self.strange.append(name)
                return
            self.new.append(name)
            self.draft.change(name, None).replace = spec
            return
        start = location.base
        if location.whole is None or start is None:
            raise self._misfit(spec.name, f"it replaces {name}, which the base keeps in several tensors")
        self._require_floats(spec, start)
        grows = len(start.shape) >= 2 and spec.shape[1:] == start.shape[1:] and vocabulary_role(name) is not None
        if spec.shape != start.shape and not grows:
            raise self._misfit(spec.name, f"it is {list(spec.shape)} where the base has {list(start.shape)}")
        change = self.draft.change(location.whole, start)
        if change.replace is not None:
            raise self._misfit(spec.name, f"{change.replace.name} replaces the same tensor")
        change.replace, change.direct = spec, not saved

    def _attach_tokens(self, module: str, spec: TensorSpec) -> None:
        location = self.names.locate(f"{module}.weight")
        if location is None or location.whole is None or location.base is None:
            self.strange.append(module)
            return
        rows = self.config.token_rows(module, is_input=vocabulary_role(f"{module}.weight") == "embedding")
        if rows is None:
            raise self._misfit(spec.name, "adapter_config.json has no trainable_token_indices for it")
        shape = self.draft.shape(location.whole, location)
        if spec.shape != (len(rows), *shape[1:]) or len(shape) != 2:
            found = f"it is {list(spec.shape)} for {len(rows)} tokens where the base has {list(shape)}"
            raise self._misfit(spec.name, found)
        grown = max(rows, default=0) + 1
        whole = self.draft.changes.get(location.whole)
        fixed = whole is not None and whole.replace is not None  # then the resized embeddings are there already
        if grown > shape[0] and (fixed or not set(range(shape[0], grown)) <= set(rows)):
            raise SourceIncompatible(
                f"the adapter in {self.where} trains token {grown - 1}, and the base has {shape[0]} tokens and no "
                "values for those between",
                hint=f"Give the base with its embeddings resized to at least {grown} tokens, as it was trained on.",
            )
        self._require_floats(spec, location.base)
        change = self.draft.change(location.whole, location.base)
        change.tokens = (spec, rows)

    def _require_complete(self, factors: Factors) -> None:
        label = factors.label
        if factors.a is None or factors.b is None:
            there = "lora_B" if factors.b is not None else "lora_A" if factors.a is not None else "neither"
            raise SourceIncompatible(
                f"expected lora_A and lora_B for {label[:200]} in {self.where}, found {there} only",
                hint="The adapter is incomplete: fetch or save it again.",
            )
        for spec, promised, field in (
            (factors.magnitude, self.config.use_dora, "use_dora"),
            (factors.bias, self.config.lora_bias and not factors.is_embedding, "lora_bias"),
        ):
            if (spec is not None) != promised:
                what = "no such tensor" if promised else f"{spec.name[:200]}" if spec is not None else ""
                raise SourceIncompatible(
                    f"adapter_config.json of {self.where} has {field} {str(promised).lower()}, but for "
                    f"{label[:200]} the file has {what}",
                    hint="The two files are of different adapters, or one is incomplete: fetch or save it again.",
                )

    def _wrapped_parameters(self) -> dict[tuple[str, int], str]:
        """The parameter of each pair of factors that wraps one by name (target_parameters)."""
        found: dict[tuple[str, int], str] = {}
        depths: dict[str, list[int]] = {}
        for module, nesting in self.keys.factors:
            depths.setdefault(module, []).append(nesting)
        leaves = [target.rpartition(".") for target in self.config.target_parameters]
        for module, nested in depths.items():
            names = sorted({leaf for path, _, leaf in leaves if not path or f".{module}".endswith(f".{path}")})
            candidates = [name for leaf in names if self.names.locate(name := f"{module}.{leaf}") is not None]
            if not candidates:
                continue
            if sorted(nested) != list(range(len(candidates))):
                raise self._misfit(f"factors of {module}", f"there are {len(nested)} pairs for {first_few(candidates)}")
            found |= {(module, depth): name for depth, name in self._assign(module, candidates).items()}
        return found

    def _assign(self, module: str, candidates: list[str]) -> dict[int, str]:
        """Depth -> parameter. PEFT wraps in the order of definition: the first one is the innermost."""
        depths = range(len(candidates) - 1, -1, -1)
        fitting = [
            names
            for names in permutations(candidates)
            if all(self._fits((module, depth), name) for depth, name in zip(depths, names, strict=True))
        ]
        if len(fitting) > 1:
            fitting = [names for names in fitting if list(names) == self.names.order(candidates)]
        if len(fitting) != 1:
            sizes = [f"{name} {list(found.shape)}" for name in candidates if (found := self.names.locate(name))]
            raise self._misfit(f"factors of {module}", f"they do not fit {', '.join(sizes)} in exactly one way")
        return dict(zip(depths, fitting[0], strict=True))

    def _fits(self, key: tuple[str, int], parameter: str) -> bool:
        location = self.names.locate(parameter)
        return location is not None and isinstance(self._fit(self.keys.factors[key], parameter, location), Fit)

    def _fit(self, factors: Factors, key: str, location: Location) -> Fit | str:
        """`key` is what PEFT looks patterns up by: the module's name, or that of a parameter targeted by itself."""
        shape = self.draft.shape(location.whole or "", location)
        model_type = str(self.names.base.config.get("model_type", ""))
        flag, names = self.config.fan_in_fan_out, self.names
        return fit_factors(
            factors, shape, self.config.rank(key), model_type, flag, lambda: names.module_class(factors.module)
        )

    def _attach_factors(self, factors: Factors, parameter: str, key: str) -> None:
        assert factors.a is not None
        assert factors.b is not None
        location = self.names.locate(parameter)
        if location is None:
            self.strange.append(factors.label)
            return
        fit = self._fit(factors, key, location)
        if isinstance(fit, str):
            raise self._misfit(factors.label, fit, vocabulary=vocabulary_role(parameter) is not None)
        scale = self.config.scale(key)
        entries = factor_entries(factors, scale, fit.orientation, fit.experts, location)
        if entries is None:
            raise self._misfit(factors.label, "the base keeps it in an order that this version cannot follow")
        for piece, entry in entries:
            start = location.base or self.names.base.tensors[piece.tensor].spec
            for spec in (factors.a, factors.b):
                self._require_floats(spec, start)
            change = self.draft.change(piece.tensor, start)
            if change.tokens is not None:
                raise self._misfit(factors.label, "trainable_token_indices replaces rows of the same tensor")
            change.factors.append(entry)
        if factors.magnitude is not None:
            self._attach_magnitude(factors, factors.magnitude, location, fit)
        if factors.bias is not None:
            self._attach_bias(factors, factors.bias, scale)

    def _attach_magnitude(self, factors: Factors, spec: TensorSpec, location: Location, fit: Fit) -> None:
        if location.whole is None or fit.experts is not None:
            raise self._misfit(factors.label, "use_dora on a tensor that the base keeps in several or as experts")
        if spec.numel != fit.outputs:
            raise self._misfit(spec.name, f"it has {spec.numel} values for {fit.outputs} outputs")
        self._require_floats(spec, spec)
        self.draft.change(location.whole, location.base).magnitude = spec

    def _attach_bias(self, factors: Factors, spec: TensorSpec, scale: float) -> None:
        location = self.names.locate(f"{factors.module}.bias")
        if location is None or location.whole is None or location.base is None:
            raise SourceIncompatible(
                f"the adapter in {self.where} adds a bias (lora_bias) to {factors.module[:200]}, which has none in "
                "the base, and its config cannot say that one layer has one",
                hint="Train without lora_bias: PEFT cannot merge such an adapter either.",
            )
        if spec.shape != self.draft.shape(location.whole, location):
            raise self._misfit(spec.name, f"it is {list(spec.shape)} where the base has {list(location.shape)}")
        self._require_floats(spec, location.base)
        self.draft.change(location.whole, location.base).add.append({"tensor": spec.name, "scale": scale})

    def _require_floats(self, spec: TensorSpec, start: TensorSpec) -> None:
        if not is_float(spec.dtype):
            raise self._misfit(spec.name, f"its values are {spec.dtype}, which are no weights", hint=_FLOATS)
        if not is_float(start.dtype):
            raise self._misfit(spec.name, f"it changes {start.name}, which the base has as {start.dtype}")

    def _misfit(self, what: str, why: str, *, vocabulary: bool = False, hint: str | None = None) -> SourceIncompatible:
        hint = hint or _base_hint(self.names, [what])
        if vocabulary:
            hint += (
                " If tokens were added for the training, resize the base's embeddings first (resize_token_embeddings)."
            )
        return SourceIncompatible(f"the adapter in {self.where} does not fit: {what[:200]}: {why}", hint=hint)


def require_matches(found: Attacher, total: Sequence[str]) -> None:
    """Refuse an adapter with parts that match nothing in the base.

    Raises:
        SourceIncompatible: naming some, and how many match.
    """
    if not found.strange:
        return
    matched = len(total) - len(found.strange)
    because = f" ({found.names.trouble})" if found.names.trouble else ""
    raise SourceIncompatible(
        f"{matched or 'none'} of {len(total)} modules of the adapter in {found.where} are in the base; "
        f"not there: {first_few(sorted(found.strange))}{because}",
        hint=_base_hint(found.names, found.strange),
    )


def _base_hint(names: Names, parts: Sequence[str]) -> str:
    """What to do about parts of an adapter that do not go with the base."""
    coded = {code.rpartition(".")[0] for code in find_quantised(names.base.tensors).codes}
    return _UNQUANTISED if any(module in part for part in parts for module in coded) else _RIGHT_BASE
