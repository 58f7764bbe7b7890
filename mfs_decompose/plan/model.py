"""The plan: which tensors are worked on together, by which codec, and what that may cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from mfs_decompose.codec.base import matrix_shape
from mfs_decompose.codec.direct_sizes import direct_bytes
from mfs_decompose.codec.sizes import max_steps, step_bytes
from mfs_decompose.codec.tree import Json
from mfs_decompose.recipe.schema import Recipe
from mfs_decompose.source.align import GroupKind
from mfs_decompose.source.header import TensorSpec

BaseMode = Literal["known", "mean", "refined", "shared"]
BaseStore = Literal["copy", "reference", "hardlink"]

UnitKind = Literal["batch", "blocks", "stack", "exact"]
"""`batch`: equal matrices, factorised together. `blocks`: one matrix, read in row blocks. `stack`: one tensor
[E, O, I], read in groups of slices that are factorised together. `exact`: the rest."""

FITTED = frozenset({"lowrank", "sparse", "banded"})
"""Codecs that pass 1 fits, and allocation cuts to size."""

DIRECT = frozenset({"sign", "ternary", "kbit", "deadzone", "rowsparse", "significant"})
"""Codecs that pass 2 writes straight from the delta."""

Options = tuple[tuple[str, Json], ...]


@dataclass(frozen=True, slots=True)
class Item:
    """One tensor of one variant, and how it will be stored.

    `matrix` is what a lossy codec sees of the `common_rows` rows that have a counterpart in the base; rows beyond them
    are stored raw. `steps` is the size fitted in pass 1: fixed where `fixed`, else the most that allocation may take.
    Where `stacked`, the common rows are matrices themselves: `matrix` and `steps` are those of each.
    """

    variant: str
    kind: GroupKind
    spec: TensorSpec
    base: TensorSpec | None
    common_rows: int
    codec: str
    params: Mapping[str, str]
    matrix: tuple[int, int] | None
    steps: int
    fixed: bool
    merged: Mapping[str, object] | None = None
    """What an adapter does to the tensor: parameters of the codec `adapter`."""
    stacked: bool = False
    options: Options = ()
    """Parameters of a direct codec."""
    residual: tuple[str, Options] | None = None
    """A direct codec for what the fit leaves."""
    auto: bool = False
    """Allocation chooses how it is stored; `codec` is what pass 1 fits."""
    keep_exact: bool = False
    """Store what a lossy codec gets wrong as well."""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def key(self) -> tuple[str, str]:
        """(variant, tensor): what names an item everywhere."""
        return (self.variant, self.spec.name)

    @property
    def fitted(self) -> bool:
        return self.codec in FITTED

    @property
    def direct(self) -> bool:
        return self.codec in DIRECT

    @property
    def beside_bytes(self) -> int:
        """Bytes that a fitted item has whatever allocation decides: new rows, and a residual."""
        return self.tail_bytes + (0 if self.residual is None else self._direct_bytes(*self.residual) or 0)

    @property
    def most_bytes(self) -> int:
        """Bytes of an item that is not fitted, at most."""
        sized = self._direct_bytes(self.codec, self.options) if self.direct else None
        return self.spec.nbytes if sized is None else sized + self.tail_bytes

    def _direct_bytes(self, codec: str, options: Options) -> int | None:
        shape = matrix_shape(self.common.shape)
        assert shape is not None, f"{codec} of {self.name}, which is no matrix"
        return direct_bytes(codec, shape, dict(options))

    @property
    def matrices(self) -> int:
        """How many matrices a lossy codec sees."""
        if self.matrix is None:
            return 0
        return self.common_rows if self.stacked else 1

    @property
    def step_bytes(self) -> int:
        """Bytes of one step of one matrix; 0 where there is none."""
        return 0 if self.matrix is None else step_bytes(self.codec, self.matrix, self.params)

    @property
    def worthwhile_steps(self) -> int:
        """Steps of one matrix below the bytes of the weights themselves."""
        assert self.matrix is not None
        affordable = self.common.nbytes // self.matrices // self.step_bytes
        return max(1, min(max_steps(self.codec, self.matrix), affordable))

    @property
    def common(self) -> TensorSpec:
        """The rows that have a counterpart in the base."""
        if not self.spec.shape:
            return self.spec if self.common_rows else TensorSpec(self.name, self.spec.dtype, (0,))
        return TensorSpec(self.name, self.spec.dtype, (self.common_rows, *self.spec.shape[1:]))

    @property
    def tail_bytes(self) -> int:
        """Bytes of the rows beyond the base's, stored raw."""
        return self.spec.nbytes - self.common.nbytes

    @property
    def comparable_bits(self) -> bool:
        """Whether the common rows have the same dtype and row shape in the base, so that they may be identical."""
        if self.base is None or (self.common_rows == 0 and self.spec.rows):
            return False
        return (self.base.dtype, self.base.shape[1:]) == (self.spec.dtype, self.spec.shape[1:])


@dataclass(frozen=True, slots=True)
class Unit:
    """Items that are worked on together: the piece of work that is journalled, and lost at most by a kill.

    `read_bytes` and `peak_bytes` are of pass 1, the larger of the two passes.
    """

    number: int
    kind: UnitKind
    items: tuple[Item, ...]
    read_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class VariantPlan:
    """One variant: its own size, its cap (None without a budget), and what must be stored exactly whatever happens.

    An adapter is kept as it is: that is all it needs.
    """

    id: str
    checkpoint_bytes: int
    cap: int | None
    unavoidable_bytes: int
    adapter: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is decided before a weight is read."""

    recipe: Recipe
    base_mode: BaseMode
    base_store: BaseStore
    base_tensors: Mapping[str, TensorSpec]
    variants: tuple[VariantPlan, ...]
    units: tuple[Unit, ...]
    missing: Mapping[str, tuple[str, ...]]
    groups: int
    total_cap: int | None = None
    """Bytes that all variants may take together, adapters apart: then none has a cap of its own."""
    base_auto: bool = False
    """Whether the weights decide between this mode and the plain one, see plan/weigh.py."""

    def items(self) -> tuple[Item, ...]:
        """All items in the order of the units."""
        return tuple(item for unit in self.units for item in unit.items)
