"""In which precision factors and single entries are held: as stored, or widened once to what a product takes.

Widened, nothing is converted in a step, and factors of several variants can lie side by side (`runtime.stacks`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from mfs_decompose.runtime.changes import Changes
from mfs_decompose.runtime.resident_forms import Csr, Form, LowRank, widen

Precision = Literal["auto", "int8", "fp32"]
"""`int8` is what is stored, `fp32` widened, `auto` widened for each variant that stays small."""

WIDE_SHARE = 16
"""A variant stays small while it takes at most this part of the base in fp32: four of them and the base then take less
than a third of four models."""


def is_wide(precision: Precision, nbytes: int, base: int) -> bool:
    """Whether a variant is widened that then takes so many bytes, beside a base of `base` bytes in fp32."""
    return WIDE_SHARE * nbytes <= base if precision == "auto" else precision == "fp32"


def widen_small(changes: Changes, shared: Mapping[int, int], precision: Precision, base: int) -> Changes:
    """The changes of a variant, widened where it is (`is_wide`).

    Args:
        shared: addresses of what is not its own alone, which stays.
        base: bytes of the base in fp32.
    """
    forms = {id(one.form): one.form for change in changes.values() for one in change.placed()}
    own = {
        at: form
        for at, form in forms.items()
        if not any(tensor.untyped_storage().data_ptr() in shared for tensor in form.tensors())
    }
    whole = {id(tensor): tensor.nbytes for change in changes.values() for tensor in change.tensors()}
    if not is_wide(precision, sum(map(widened_bytes, own.values())) + sum(whole.values()), base):
        return changes
    # By form: what two parameters share, such as an embedding and its head, stays one.
    wide = {at: widen(form) for at, form in own.items()}
    return {path: change.map(lambda form: wide.get(id(form), form)) for path, change in changes.items()}


def widened_bytes(form: Form) -> int:
    """What `widen` makes of a form takes."""
    if isinstance(form, LowRank):
        return 4 * form.left.rank * (form.left.codes.shape[1] + form.right.codes.shape[1])
    if isinstance(form, Csr):
        return form.offsets.nbytes + 8 * form.codes.numel()
    return sum(tensor.nbytes for tensor in form.tensors())
