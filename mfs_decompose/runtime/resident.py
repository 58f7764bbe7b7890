"""A tensor of a variant as it is served: the forms of its delta, and where in it each lies.

Served is the base's tensor plus the delta, in fp32. What corrects restored bits alone is left out. Tensors that give
their own bits back become their own rows, in their own dtype, where they differ from the base's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mfs_decompose.artifact.values import StoredTensor, open_tensor
from mfs_decompose.codec.base import Fetch, matrix_shape
from mfs_decompose.codec.registry import LOSSY
from mfs_decompose.codec.tree import CodecNode
from mfs_decompose.runtime.nibbles import pack_nibbles
from mfs_decompose.runtime.resident_adapter import adapter_forms
from mfs_decompose.runtime.resident_forms import Form, Placed, Rows, cut_rows
from mfs_decompose.runtime.resident_read import dense_form, read_forms, read_stack
from mfs_decompose.source.dtypes import torch_dtype

if TYPE_CHECKING:
    from mfs_decompose.artifact.reader import Family


@dataclass(frozen=True, eq=False)
class Resident:
    """A stored matrix [O, I], or stack [E, O, I], of a variant in memory.

    `base` is the tensor of the base that the forms are added to, None where they are all there is.
    """

    tensor: str
    shape: tuple[int, ...]
    base: str | None
    placed: tuple[Placed, ...]

    @property
    def replaces(self) -> bool:
        """Whether own rows take the place of some of the base's."""
        return any(isinstance(one.form, Rows) and one.form.own for one in self.placed)


def resolve_alias(family: Family, variant: str, tensor: str) -> str:
    """The tensor that holds the bytes: what an alias names, else the tensor itself."""
    node = family.tree(variant, tensor)
    return str(node.params["of"]) if node.codec == "alias" else tensor


class SharedForms:
    """The forms of a family's shared delta: read once, held once, whoever uses them."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self._found: dict[str, list[Form]] = {}

    @property
    def storages(self) -> dict[int, int]:
        """Address -> bytes of the memory of all that was read."""
        tensors = [tensor for forms in self._found.values() for form in forms for tensor in form.tensors()]
        storages = [tensor.untyped_storage() for tensor in tensors]
        return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}

    @property
    def nbytes(self) -> int:
        """Bytes of all that was read."""
        return sum(self.storages.values())

    def of(self, base_name: str, rows: int) -> list[Form]:
        """The first `rows` rows of the matrix of a base tensor, of which the family has such a delta.

        Raises:
            ArtifactInvalid: it is damaged.
        """
        from mfs_decompose.artifact.shared_delta import SharedReader, read_shared_tree

        record, tensors = self._family.manifest.shared, self._family.manifest.base.tensors
        assert record is not None, "it was opened before"
        shape = matrix_shape(tensors[base_name].shape)
        assert shape is not None, "it was opened before"
        if base_name not in self._found:
            reader = SharedReader(self._family.path, record, {name: one.shape for name, one in tensors.items()})
            data, node = reader.read(base_name), read_shared_tree(base_name, record.tensors[base_name])
            forms = read_forms(node, lambda offset, count: data[offset : offset + count], shape)
            self._found[base_name] = [pack_nibbles(form) for form in forms]
        found = self._found[base_name]
        return found if rows == shape[0] else [cut_rows(form, 0, rows) for form in found]


def make_resident(family: Family, variant: str, tensor: str, shared: SharedForms) -> Resident:
    """Read a tensor of two or three dimensions of a variant into its resident forms; of an alias, what it names.

    Args:
        shared: one for all variants of the family.

    Raises:
        ArtifactInvalid: it is damaged.
    """
    stored = open_tensor(family, variant, tensor)  # checks the tree
    name = resolve_alias(family, variant, tensor)
    record = family.variant(variant).tensors[name]
    node = family.tree(variant, name)
    assert len(record.shape) in (2, 3), f"{name} is no matrix"

    def fetch(offset: int, count: int) -> bytes:
        return family.blob_range(variant, name, offset, count)

    if node.codec == "adapter":
        placed = adapter_forms(family, variant, name, stored)
    else:
        placed = []
        for child, start, stop in _segments(node, record.shape[0]):
            placed += _segment_forms(
                family, stored, child, fetch, record.shape, (start, stop), record.base_name, shared
            )
    base = record.base_name
    return Resident(name, record.shape, base, tuple(placed))


def served_whole(family: Family, variant: str, tensor: str) -> torch.Tensor:
    """All of a tensor as it is served, fp32; what is not floats as it is."""
    stored = open_tensor(family, variant, tensor)
    blocks = [stored.served(start, stop) for start, stop in stored.blocks()]
    return (torch.cat(blocks) if blocks else stored.served(0, stored.spec.rows)).reshape(stored.spec.shape)


def own_resident(family: Family, variant: str, tensor: str) -> Resident:
    """A tensor as its own rows, all of them: where the base has something else in its place."""
    served = served_whole(family, variant, tensor)
    narrow = served.to(torch_dtype(family.variant(variant).tensors[tensor].dtype))
    whole = narrow if torch.equal(narrow.to(served.dtype), served) else served
    slices = [(None, whole)] if whole.dim() == 2 else list(enumerate(whole))
    placed = tuple(Placed(Rows(None, part, None, True), 0, part.shape[0], at) for at, part in slices)
    return Resident(resolve_alias(family, variant, tensor), tuple(whole.shape), None, placed)


def _segments(node: CodecNode, rows: int) -> list[tuple[CodecNode, int, int]]:
    if node.codec != "rows":
        return [(node, 0, rows)]
    splits = node.params["splits"]
    assert isinstance(splits, list), "it was opened before"
    edges = [edge for edge in splits if isinstance(edge, int)]
    return list(zip(node.children, edges, edges[1:], strict=False))


def _segment_forms(
    family: Family,
    stored: StoredTensor,
    node: CodecNode,
    fetch: Fetch,
    shape: tuple[int, ...],
    rows: tuple[int, int],
    base: str | None,
    shared: SharedForms,
) -> list[Placed]:
    """The forms of rows start..stop of the first dimension."""
    start, stop = rows
    if node.codec == "corrected":
        node = node.children[0]
    if node.codec == "identical" or start == stop:
        return []
    if node.codec not in LOSSY:
        return _own_forms(family, stored, rows, base)
    if "slices" in node.params:
        forms = read_stack(node, fetch, stop - start, (shape[1], shape[2]))
        return [Placed(form, 0, shape[1], slice) for slice, form in enumerate(forms, start=start) if form is not None]
    matrix = matrix_shape((stop - start, *shape[1:]))
    assert matrix is not None, "it was opened before"
    read = read_forms(node, fetch, matrix, None if base is None else lambda: shared.of(base, matrix[0]))
    found = [pack_nibbles(form) for form in read]
    if len(shape) == 2:
        return [Placed(form, start, stop) for form in found]
    return [
        Placed(cut_rows(form, at * shape[1], (at + 1) * shape[1]), 0, shape[1], start + at)
        for at in range(stop - start)
        for form in found
    ]


def _own_forms(family: Family, stored: StoredTensor, rows: tuple[int, int], base: str | None) -> list[Placed]:
    """Exact rows: those that differ from the base's rows, in their own dtype."""
    start, stop = rows
    known = family.manifest.base.tensors[base].shape if base is not None else ()
    shape = stored.spec.shape
    comparable = base is not None and known[1:] == shape[1:]
    found: list[Placed] = []
    step = max(1, (1 << 22) // max(stored.spec.numel // max(shape[0], 1), 1))
    if len(shape) == 3:
        step = 1
    indices, values = [], []
    for low in range(start, stop, step):
        high = min(low + step, stop)
        own = stored.restored(low, high)
        changed = torch.ones(high - low, dtype=torch.bool)
        if comparable and base is not None and low < known[0]:
            there = min(high, known[0]) - low
            theirs = family.base_rows(base, low, low + there)
            # As numbers: what is served is fp32, whatever the dtypes of the two.
            changed[:there] = (own[:there].float() != theirs.float()).flatten(1).any(dim=1)
        if len(shape) == 3:
            if bool(changed.any()):
                found.append(Placed(Rows(None, own[0].clone(), None, True), 0, shape[1], low))
            continue
        indices.append(changed.nonzero().flatten() + (low - start))
        values.append(own[changed])
    if len(shape) == 3:
        return found
    index = torch.cat(indices)
    if not index.numel():
        return []
    if comparable and base is not None and stop <= known[0]:
        entries = _entries(torch.cat(values), family.base_rows(base, start, stop)[index], index, stop - start)
        if entries is not None:
            return [Placed(entries, start, stop)]
    whole = index.numel() == stop - start
    form: Form = Rows(None if whole else index.to(torch.int32), torch.cat(values), None, True)
    return [Placed(form, start, stop)]


def _entries(own: torch.Tensor, base: torch.Tensor, index: torch.Tensor, rows: int) -> Form | None:
    """Rows that differ in few places as those differences; None where own rows take less memory."""
    difference = own.to(torch.float64) - base.to(torch.float64)
    if 6 * int(difference.ne(0).sum()) >= own.nbytes or not bool(torch.isfinite(difference).all()):
        return None
    whole = torch.zeros(rows, own.shape[1], dtype=torch.float64)
    whole[index] = difference
    form = dense_form(lambda start, stop: whole[start:stop], (rows, own.shape[1]))
    return form if form is not None and sum(part.nbytes for part in form.tensors()) < own.nbytes else None


def dense_difference(own: torch.Tensor, base: torch.Tensor) -> Form | None:
    """`own - base` of two matrices as a form; None where they are equal."""

    def rows(start: int, stop: int) -> torch.Tensor:
        return own[start:stop].to(torch.float64) - base[start:stop].to(torch.float64)

    return dense_form(rows, (own.shape[0], own.shape[1]))
