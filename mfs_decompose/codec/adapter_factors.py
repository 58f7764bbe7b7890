"""The product of an adapter's two factors, laid into the tensor that it changes."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from mfs_decompose.codec.adapter_params import FactorParams, Span
from mfs_decompose.errors import ArtifactInvalid
from mfs_decompose.linalg.exact_product import exact_product


class OpenedFactors:
    """Two factors held in memory; products are made for the rows that are asked for."""

    def __init__(
        self, params: FactorParams, fetch: Callable[[str], torch.Tensor], tensor: str, shape: tuple[int, ...]
    ) -> None:
        """Open the factors of a tensor of `shape`.

        Raises:
            ArtifactInvalid: they do not fit each other, or the tensor.
        """
        self._tensor = tensor
        self._scale = params.scale
        self.transposed = params.transposed
        self.covers_all = params.at is None and params.experts is None
        a, b = (self._factor(fetch, name) for name in (params.a, params.b))
        if a.dim() > 2:  # a convolution, flattened as PEFT does
            self.is_flat, shape = True, (shape[0] if shape else 0, math.prod(shape[1:]))
            whole = b.dim() > 1 and a.numel() > 0 and b.numel() > 0
            if not whole or params.at is not None or params.experts is not None or params.transposed:
                raise self._misfit(a, b, shape)
            a, b = a.reshape(a.shape[0], -1), b.reshape(b.shape[0], -1)
        else:
            self.is_flat = False
        experts = params.experts or 1
        sound = a.dim() == b.dim() == 2 and a.shape[0] == b.shape[1] and a.shape[0] % experts == 0 and a.numel()
        if not sound or len(shape) not in (2, 3) or not b.numel():
            raise self._misfit(a, b, shape)
        rank = a.shape[0] // experts
        self.outputs, inputs = b.shape[0], a.shape[1]
        self._a_ERI = a.reshape(experts, rank, inputs)
        self._b_EOR = b.reshape(self.outputs, rank, experts).permute(2, 0, 1)
        self._of: Span = params.of or (0, experts)
        self._out: Span = params.out or (0, self.outputs)
        self._into: Span = params.into or (0, inputs)
        self._at = params.at or tuple((0, size) for size in shape)
        self._check(a, b, shape)

    def add_to(self, values: torch.Tensor, start: int, stop: int) -> None:
        """Add what lies in rows start..stop of the tensor to `values`, fp64 [stop - start, ...], in place."""
        low, high = max(start, self._at[0][0]), min(stop, self._at[0][1])
        if low >= high:
            return
        if len(self._at) == 2:
            # A convolution's rows are flattened; the view shares the memory of a contiguous tensor.
            target = values.reshape(stop - start, -1) if self.is_flat else values
            first = low - self._at[0][0]
            block = self._product(self._of[0], (first, first + high - low))
            target[low - start : high - start, slice(*self._at[1])] += block
            return
        rows, columns = self._at[1:]
        for place in range(low, high):
            block = self._product(self._of[0] + place - self._at[0][0], (0, rows[1] - rows[0]))
            values[place - start, slice(*rows), slice(*columns)] += block

    def _product(self, expert: int, rows: Span) -> torch.Tensor:
        """Rows of the box in the tensor's orientation, counted from the box's first one."""
        a, b = self._a_ERI[expert], self._b_EOR[expert]
        out, into = self._out, self._into
        if self.transposed:
            into = (into[0] + rows[0], into[0] + rows[1])
        else:
            out = (out[0] + rows[0], out[0] + rows[1])
        product = exact_product(b[slice(*out)], a[:, slice(*into)]) * self._scale
        return product.mT if self.transposed else product

    def _factor(self, fetch: Callable[[str], torch.Tensor], name: str) -> torch.Tensor:
        values = fetch(name)
        if not values.is_floating_point() or values.itemsize == 1 or not bool(torch.isfinite(values).all()):
            raise ArtifactInvalid(f"codec 'adapter' of {self._tensor!r}: its factor {name!r} holds no finite weights")
        return values

    def _check(self, a: torch.Tensor, b: torch.Tensor, shape: tuple[int, ...]) -> None:
        lengths = [stop - start for start, stop in self._at]
        sides = [self._out[1] - self._out[0], self._into[1] - self._into[0]]
        wanted = sides[::-1] if self.transposed else sides
        count = self._of[1] - self._of[0]
        sound = (
            len(self._at) == len(shape)
            and all(stop <= size for (_, stop), size in zip(self._at, shape, strict=True))
            and self._out[1] <= self.outputs
            and self._into[1] <= a.shape[1]
            and self._of[1] <= self._a_ERI.shape[0]
            and lengths[-2:] == wanted
            and (lengths[0] == count if len(shape) == 3 else count == 1)
        )
        if not sound:
            raise self._misfit(a, b, shape)

    def _misfit(self, a: torch.Tensor, b: torch.Tensor, shape: tuple[int, ...]) -> ArtifactInvalid:
        return ArtifactInvalid(
            f"codec 'adapter' of {self._tensor!r}: factors {list(a.shape)} and {list(b.shape)} do not fit {list(shape)}"
        )
