"""An adapter kept as it was given: its tensors, and what is computed from them and the base.

A merged value is the base's, or what replaces it, plus `scale * B @ A`, all in fp64. The product is exact_product, and
everything else is element by element, so merged values are the same on every machine. DoRA (Liu et al. 2024,
arXiv:2402.09353) scales each output to its magnitude over its norm, which is exact_norm's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache

import torch

from mfs_decompose.codec.adapter_factors import OpenedFactors
from mfs_decompose.codec.adapter_params import AdapterParams, read_adapter_params
from mfs_decompose.codec.base import DECODE_ELEMENTS, Rows, block_rows
from mfs_decompose.errors import ArtifactInvalid, SourceIncompatible
from mfs_decompose.linalg.exact_norm import exact_column_norms, exact_row_norms
from mfs_decompose.source.header import TensorSpec

_MOST_TIMES = 16

FetchTensor = Callable[[str], torch.Tensor]
"""Reads one of the adapter's own tensors by its name, whole and in its own dtype."""


def check_adapter_values(name: str, values: torch.Tensor) -> None:
    """Refuse a tensor of an adapter that is not finite.

    Raises:
        SourceIncompatible: saying how many values are NaN and how many infinite.
    """
    if not values.is_floating_point() or bool(torch.isfinite(values).all()):
        return
    nans, infinities = int(values.isnan().sum()), int(values.isinf().sum())
    raise SourceIncompatible(
        f"the adapter's tensor {name!r} is broken: {nans} of its {values.numel()} values are NaN and {infinities} "
        "infinite",
        hint="Its training diverged, or it was damaged: give an earlier checkpoint of it.",
    )


class MergedRows:
    """Reads a merged tensor by rows of its first dimension."""

    def __init__(self, params: AdapterParams, fetch: FetchTensor, spec: TensorSpec, base: TensorSpec | None) -> None:
        self.spec = spec
        self._base = base
        self._check_work(params)
        fetch = cache(fetch)  # a hostile list may name one tensor a thousand times
        self._replace = self._fetch(fetch, params.replace)
        self._factors = [OpenedFactors(entry, fetch, spec.name, spec.shape) for entry in params.factors]
        self._add = [(self._fetch(fetch, name), scale) for name, scale in params.add]
        self._magnitude = self._fetch(fetch, params.magnitude)
        self._tokens = self._fetch(fetch, params.tokens[0]) if params.tokens else None
        self._token_rows = params.tokens[1] if params.tokens else ()
        self._scales: torch.Tensor | None = None
        self._check()

    def rows(self, start: int, stop: int, base: Rows | None) -> torch.Tensor:
        """Rows start..stop of the merge: fp64 [stop - start, ...], a 0-d tensor as 0-d.

        `base` reads rows of the tensor that it starts from; where columns have norms, more of them than were asked for.
        """
        assert 0 <= start <= stop <= self.spec.rows, f"rows {start}..{stop} of {self.spec.rows}"
        values = self._sum(start, stop, base)
        if self._magnitude is not None:
            values = self._scaled(values, start, stop, base)
        if self._tokens is not None:
            rows = torch.tensor(self._token_rows, dtype=torch.int64)
            here = ((rows >= start) & (rows < stop)).nonzero().flatten()
            values[rows[here] - start] = self._tokens[here].to(torch.float64)
        return values

    def _sum(self, start: int, stop: int, base: Rows | None) -> torch.Tensor:
        values = self._starting(start, stop, base)
        for factors in self._factors:
            factors.add_to(values, start, stop)
        for vector, scale in self._add:
            assert vector is not None
            values += vector[start:stop].to(torch.float64) * scale
        return values

    def _starting(self, start: int, stop: int, base: Rows | None) -> torch.Tensor:
        shape = (stop - start, *self.spec.shape[1:]) if self.spec.shape else ()
        if self._replace is not None:
            own = self._replace[start:stop] if self.spec.shape else self._replace
            return own.to(torch.float64, copy=True)
        assert self._base is not None
        if base is None:
            raise ArtifactInvalid(f"the adapter's change of {self.spec.name!r} has no base tensor to be added to")
        values = torch.zeros(shape, dtype=torch.float64)
        known = min(stop, self._base.rows) - start  # rows beyond are new tokens, which are filled in later
        if known > 0:
            values[:known] = base(start, start + known).to(torch.float64)
        return values

    def _scaled(self, values: torch.Tensor, start: int, stop: int, base: Rows | None) -> torch.Tensor:
        """Values times magnitude over norm; an output that is all zeros has no direction and stays."""
        assert self._magnitude is not None
        magnitude = self._magnitude.reshape(-1).to(torch.float64)
        if not self._factors[0].transposed:
            flat = values.reshape(stop - start, -1)
            return (flat * _ratio(magnitude[start:stop], exact_row_norms(flat))[:, None]).reshape(values.shape)
        if self._scales is None:
            self._scales = _ratio(magnitude, exact_column_norms(lambda: self._blocks(base), self.spec.rows))
        return values * self._scales[None, :]

    def _blocks(self, base: Rows | None) -> Iterator[torch.Tensor]:
        step = block_rows(self.spec, DECODE_ELEMENTS)
        for start in range(0, self.spec.rows, step):
            yield self._sum(start, min(start + step, self.spec.rows), base)

    def _fetch(self, fetch: FetchTensor, name: str | None) -> torch.Tensor | None:
        if name is None:
            return None
        values = fetch(name)
        if not values.is_floating_point() or values.itemsize == 1:
            raise self._invalid(f"{name!r} is {values.dtype}, which are no weights")
        return values

    def _check_work(self, params: AdapterParams) -> None:
        """What is added once costs what the tensor has; a hostile list adds it again and again."""
        elements = sum(factor.elements(self.spec.shape) for factor in params.factors)
        if elements > _MOST_TIMES * self.spec.numel or len(params.add) > _MOST_TIMES:
            raise self._invalid(f"more is added to it than {_MOST_TIMES} times all of it")

    def _check(self) -> None:
        spec, base = self.spec, self._base
        if self._replace is not None and tuple(self._replace.shape) != spec.shape:
            raise self._invalid(f"it is {list(spec.shape)} and replaced by {list(self._replace.shape)}")
        if self._replace is None:
            self._check_base(base)
        if any(len(spec.shape) != 1 or vector is None or tuple(vector.shape) != spec.shape for vector, _ in self._add):
            raise self._invalid("a vector of another length is added")
        self._check_magnitude()
        if self._tokens is not None:
            sound = len(spec.shape) == 2 and tuple(self._tokens.shape) == (len(self._token_rows), spec.shape[1])
            if not sound or max(self._token_rows, default=0) >= spec.rows or self._factors:
                raise self._invalid("rows are replaced that it does not have")

    def _check_base(self, base: TensorSpec | None) -> None:
        if base is None:
            raise self._invalid("it starts from nothing")
        if base.shape == self.spec.shape:
            return
        new = range(base.rows, self.spec.rows)
        grown = len(self.spec.shape) == 2 and base.shape[1:] == self.spec.shape[1:] and len(new) > 0
        # Count first: a hostile number of rows must not become a set of them.
        if not grown or len(new) > len(self._token_rows) or not set(new) <= set(self._token_rows) or self._factors:
            raise self._invalid(f"it is {list(self.spec.shape)} and its base {list(base.shape)}")

    def _check_magnitude(self) -> None:
        if self._magnitude is None:
            return
        alone = len(self._factors) == 1 and self._factors[0].covers_all
        # Norms are those of the rows of a matrix or a flattened convolution, or of the columns of a matrix.
        fits = alone and (len(self.spec.shape) == 2 or self._factors[0].is_flat)
        outputs = self._factors[0].outputs if fits else -1
        if self._magnitude.numel() != outputs:
            raise self._invalid(f"{self._magnitude.numel()} magnitudes do not fit its outputs")

    def _invalid(self, why: str) -> ArtifactInvalid:
        return ArtifactInvalid(f"codec 'adapter' of {self.spec.name!r}: {why}")


def open_adapter_tensor(
    params: Mapping[str, object], fetch: FetchTensor, spec: TensorSpec, base: TensorSpec | None
) -> MergedRows:
    """Open one tensor of a merge; `base` is what it starts from, None where the base has nothing in its place.

    Raises:
        ArtifactInvalid: the parameters make no sense, or do not fit the adapter's tensors.
    """
    return MergedRows(read_adapter_params(params, spec.name), fetch, spec, base)


def _ratio(magnitude: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
    return torch.where(norms > 0, magnitude / norms.clamp(min=torch.finfo(torch.float64).tiny), 0.0)
