"""What a delta is while it is served: the forms it may have in memory, each counted to the byte.

A form is a matrix [O, I] in the orientation of the checkpoint tensor that it belongs to. All but `Rows` with `own` are
added to the base's matrix; those take the place of its rows. No form holds a weight that was rounded on the way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from mfs_decompose.linalg.shapes import GROUP

TRITS = 5
"""Values of -1, 0 and 1 in a byte, for which `Packed.bits` is 0."""


@dataclass(frozen=True, eq=False, slots=True)
class Factor:
    """R directions of length N: `scales * codes`, or `scales * (codes + 1/2)` where `half`.

    codes [R, N] are int8, int16, bf16, fp16 or fp32; scales fp32 [R, ceil((first + N) / 64)], one for 64 values of
    which the first lies `first` values before the factor, or [R, 1], or None for ones. Directions after those of int8
    codes may lie in `nibbles`, int8 [P, N]: first those of the low halves, then those of the high ones.
    """

    codes: torch.Tensor
    scales: torch.Tensor | None = None
    half: bool = False
    first: int = 0
    nibbles: torch.Tensor | None = None

    @property
    def rank(self) -> int:
        return self.codes.shape[0] + (0 if self.nibbles is None else 2 * self.nibbles.shape[0])

    @property
    def by_direction(self) -> bool:
        """Whether every value of a direction has the same scale."""
        return self.scales is None or self.scales.shape[1] == 1

    @property
    def name(self) -> str:
        whole = str(self.codes.dtype).removeprefix("torch.")
        return whole if self.nibbles is None else f"int4/{whole}" if self.codes.shape[0] else "int4"

    def columns(self, start: int, stop: int) -> Factor:
        """Values start..stop of every direction; memory is shared."""
        codes, first = self.codes[:, start:stop], self.first + start
        nibbles = None if self.nibbles is None else self.nibbles[:, start:stop]
        if self.scales is None or self.by_direction:
            return replace(self, codes=codes, first=first, nibbles=nibbles)
        scales = self.scales[:, first // GROUP : -(-(first + codes.shape[1]) // GROUP)]
        return replace(self, codes=codes, scales=scales, first=first % GROUP, nibbles=nibbles)

    def whole_codes(self) -> torch.Tensor:
        """Codes of all directions [R, N], nibbles as int8; the codes themselves where no direction lies in nibbles."""
        if self.nibbles is None:
            return self.codes
        return torch.cat((self.codes, (self.nibbles << 4) >> 4, self.nibbles >> 4))

    def values(self) -> torch.Tensor:
        """fp32 [R, N]; the codes themselves where they are that already."""
        codes, scales = self.whole_codes(), self.scales
        if scales is None:
            return codes.to(torch.float32)
        if scales.shape[1] == 1:
            return _scaled(codes.to(torch.float32, copy=True), scales, self.half)
        if self.first or codes.shape[1] % GROUP:
            wide = scales.repeat_interleave(GROUP, dim=1)[:, self.first : self.first + codes.shape[1]]
            return _scaled(codes.to(torch.float32, copy=True), wide, self.half)
        values = codes.to(torch.float32, copy=True)
        _scaled(values.view(codes.shape[0], -1, GROUP), scales.unsqueeze(2), self.half)
        return values

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return _present(self.codes, self.scales, self.nibbles)

    def to(self, device: str | torch.device) -> Factor:
        """The same in another device's memory."""
        scales, nibbles = (None if one is None else one.to(device) for one in (self.scales, self.nibbles))
        return replace(self, codes=self.codes.to(device), scales=scales, nibbles=nibbles)


@dataclass(frozen=True, eq=False, slots=True)
class LowRank:
    """`left^T right`, left [R, O] and right [R, I]."""

    left: Factor
    right: Factor

    @property
    def name(self) -> str:
        return f"low rank {'/'.join(sorted({self.left.name, self.right.name}))}"

    @property
    def transposed(self) -> LowRank:
        """The factors of the transpose; memory is shared."""
        return LowRank(self.right, self.left)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(tensor for side in (self.left, self.right) for tensor in side.tensors())


@dataclass(frozen=True, eq=False, slots=True)
class Ell:
    """As many entries in every row: columns uint16 or int32 [O, S], codes bf16, fp32 or int8 [O, S].

    int8 codes have bf16 scales [ceil(O / 64), S].
    """

    columns: torch.Tensor
    codes: torch.Tensor
    scales: torch.Tensor | None
    width: int

    name = "sparse rows"

    def values(self) -> torch.Tensor:
        """fp32 [O, S]."""
        values = self.codes.to(torch.float32)
        if self.scales is None:
            return values
        return values * self.scales.to(torch.float32).repeat_interleave(GROUP, dim=0)[: values.shape[0]]

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return _present(self.columns, self.codes, self.scales)


@dataclass(frozen=True, eq=False, slots=True)
class Packed:
    """Codes of `bits` bits, uint8 [O, W], that name values of `levels` (fp32), times scales.

    `bits` 0 packs TRITS codes of three levels in a byte. Scales are bf16 [1], [O] or [O, ceil(I / 64)].
    """

    codes: torch.Tensor
    bits: int
    levels: torch.Tensor
    scales: torch.Tensor
    width: int

    @property
    def name(self) -> str:
        return f"packed {self.bits or 1.6:g} bit"

    def rows(self, start: int, stop: int) -> Packed:
        """Rows start..stop; memory is shared."""
        scales = self.scales if self.scales.shape[0] == 1 != self.codes.shape[0] else self.scales[start:stop]
        return replace(self, codes=self.codes[start:stop], scales=scales)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.codes, self.levels, self.scales)


@dataclass(frozen=True, eq=False, slots=True)
class Rows:
    """Whole rows: [N, I] of them at `index` (rising, int32), or all where that is None.

    values are of any float type, or int8 with bf16 scales [N]. `own` rows are weights, and replace the base's.
    """

    index: torch.Tensor | None
    codes: torch.Tensor
    scales: torch.Tensor | None
    own: bool

    @property
    def name(self) -> str:
        what = "own rows" if self.own else "delta rows"
        return f"{what} {str(self.codes.dtype).removeprefix('torch.')}"

    def values(self) -> torch.Tensor:
        """fp32 [N, I]."""
        values = self.codes.to(torch.float32)
        return values if self.scales is None else values * self.scales.to(torch.float32).unsqueeze(1)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return _present(self.index, self.codes, self.scales)


@dataclass(frozen=True, eq=False, slots=True)
class Csr:
    """Single entries: those of row r lie at offsets[r] to offsets[r + 1] (int32 [O + 1]), columns uint16 or int32 [N].

    codes [N] are fp32 values, or uint8 names of `levels` (fp32).
    """

    offsets: torch.Tensor
    columns: torch.Tensor
    codes: torch.Tensor
    levels: torch.Tensor | None
    width: int

    name = "sparse entries"

    def values(self) -> torch.Tensor:
        """fp32 [N]."""
        # index_select: as an index a tensor takes three times as long here.
        return self.codes if self.levels is None else self.levels.index_select(0, self.codes.to(torch.int32))

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return _present(self.offsets, self.columns, self.codes, self.levels)


Form = LowRank | Ell | Csr | Packed | Rows


@dataclass(frozen=True, eq=False, slots=True)
class Placed:
    """A form in a tensor: rows start..stop of its matrix, or of matrix `slice` of a stack [E, O, I]."""

    form: Form
    start: int
    stop: int
    slice: int | None = None

    def to(self, device: str | torch.device) -> Placed:
        """The same in another device's memory."""
        return replace(self, form=move(self.form, device))


def move(form: Form, device: str | torch.device) -> Form:
    """A form in another device's memory; itself where it is there."""
    if isinstance(form, LowRank):
        return LowRank(form.left.to(device), form.right.to(device))
    if isinstance(form, Csr):
        levels = None if form.levels is None else form.levels.to(device)
        offsets, columns, codes = (part.to(device) for part in (form.offsets, form.columns, form.codes))
        return Csr(offsets, columns, codes, levels, form.width)
    scales = None if form.scales is None else form.scales.to(device)
    if isinstance(form, Ell):
        return replace(form, columns=form.columns.to(device), codes=form.codes.to(device), scales=scales)
    if isinstance(form, Packed):
        assert scales is not None
        return replace(form, codes=form.codes.to(device), levels=form.levels.to(device), scales=scales)
    index = None if form.index is None else form.index.to(device)
    return replace(form, index=index, codes=form.codes.to(device), scales=scales)


def cut_rows(form: Form, start: int, stop: int) -> Form:
    """Rows start..stop of a form as a form of their own."""
    if isinstance(form, LowRank):
        return LowRank(form.left.columns(start, stop), form.right)
    if isinstance(form, Ell):
        return replace(form, columns=form.columns[start:stop], codes=form.values()[start:stop], scales=None)
    if isinstance(form, Packed):
        return form.rows(start, stop)
    if isinstance(form, Csr):
        offsets = form.offsets[start : stop + 1]
        inside = slice(int(offsets[0]), int(offsets[-1]))
        return Csr(offsets - offsets[0], form.columns[inside], form.codes[inside], form.levels, form.width)
    if form.index is None:
        scales = None if form.scales is None else form.scales[start:stop]
        return replace(form, codes=form.codes[start:stop], scales=scales)
    first, last = torch.searchsorted(form.index, torch.tensor([start, stop], dtype=torch.int32)).tolist()
    scales = None if form.scales is None else form.scales[first:last]
    return Rows(form.index[first:last] - start, form.codes[first:last], scales, form.own)


def _scaled(values: torch.Tensor, scales: torch.Tensor, half: bool) -> torch.Tensor:
    # Two passes: torch's fused addcmul over groups of 64 takes three times as long on a CPU.
    return (values.add_(0.5) if half else values).mul_(scales)


def _present(*tensors: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    return tuple(tensor for tensor in tensors if tensor is not None)
