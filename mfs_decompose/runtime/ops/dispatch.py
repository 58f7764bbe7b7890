"""Which ops serve a device: one place that a file of kernels joins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from mfs_decompose.errors import UsageError
from mfs_decompose.runtime.ops.cpu import CpuOps
from mfs_decompose.runtime.ops.program import Part, Program, Taken
from mfs_decompose.runtime.ops.reference import ReferenceOps

if TYPE_CHECKING:
    import torch

    from mfs_decompose.runtime.resident_forms import Form


class Ops(Protocol):
    """What a form does to the rows of its group, in place. x and y are fp32; y may be a slice of a wider tensor."""

    name: str
    together: bool
    """Whether a few rows of several variants are answered together where they can be."""

    def add(self, form: Form, x_TI: torch.Tensor, y_TO: torch.Tensor) -> None:
        """`y += x M^T` of the form's matrix M [O, I]; own rows replace their columns of y by `x M^T`."""

    def add_transposed(self, form: Form, x_TO: torch.Tensor, y_TI: torch.Tensor) -> None:
        """`y += x M`; not of own rows."""

    def look_up(self, form: Form, ids_N: torch.Tensor, rows: int, values_NI: torch.Tensor) -> None:
        """Add rows `ids` of M, which has `rows`, to the base's rows in `values`, or replace them by own rows."""

    def takes(self, form: Form) -> bool:
        """Whether a program may have a form."""

    def program(self, parts: Sequence[Part]) -> Program:
        """What adds the deltas of a few rows of several variants in one call."""


__all__ = ["Ops", "Part", "Program", "Taken", "choose_ops"]

_BY_NAME: dict[str, Callable[[], Ops]] = {"reference": ReferenceOps, "cpu": CpuOps}
_BY_DEVICE = {"cpu": "cpu", "cuda": "cpu"}  # plain torch runs anywhere


def choose_ops(name: str, device: str) -> Ops:
    """The ops called `name`, or for `auto` the fastest that serve a device type.

    Raises:
        UsageError: there are no such ops, or none for the device.
    """
    chosen = _BY_DEVICE.get(device) if name == "auto" else name
    if chosen not in _BY_NAME:
        asked = f"ops {name!r}" + (f" for {device}" if name == "auto" else "")
        raise UsageError(
            f"expected ops for the runtime, found {asked}", hint=f"choose among {', '.join(_BY_NAME)}, or auto"
        )
    return _BY_NAME[chosen]()
