"""What compiled kernels are made with.

A kernel is a C function of one table of 64-bit words: addresses, sizes, and who belongs to whom. Its file says which
word is which, and Numba compiles it anew where that file changes: what it and its callers must agree on stands there.
"""

from __future__ import annotations

import ctypes
import hashlib
import inspect
import sys
from collections.abc import Callable
from functools import cache
from pickle import UnpicklingError
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from mfs_decompose.linalg import shapes
from mfs_decompose.runtime.ops.team import torch_team

FLAGS: dict[str, Any] = {"fastmath": {"reassoc", "contract", "nsz"}, "error_model": "numpy"}
"""Sums may be taken in another order, the same one each time; what is not finite stays so."""


class Kernel(NamedTuple):
    """Its address, for a team of threads, and itself, for one."""

    address: int
    alone: Callable[[int], None]

    def run(self, table: np.ndarray, threads: int) -> None:
        """Call it on several threads, or on this one: on no more than torch has now, a forked process may have one."""
        run, threads = torch_team().run, min(threads, torch.get_num_threads())
        if threads == 1 or run is None:
            self.alone(table.ctypes.data)
        else:
            run(self.address, table.ctypes.data, threads, 0)


def compile_kernel(function: Any) -> Kernel:
    """Compile a function of an address, which takes seconds; kept on disk where there is a place for it."""
    signature = types.void(types.voidptr)
    try:
        function.__qualname__ = f"{function.__name__}_{_used_by_kernels()}"
        address = cfunc(signature, cache=True, **FLAGS)(function).address
    except (RuntimeError, OSError, EOFError, UnpicklingError):  # no place, a full or a forbidden one, or a file cut off
        address = cfunc(signature, **FLAGS)(function).address
    return Kernel(address, ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address))


@cache
def _used_by_kernels() -> str:
    """Part of the name a kernel is kept under: Numba looks at its file alone, not at what it has from elsewhere."""
    sources = "".join(inspect.getsource(module) for module in (sys.modules[__name__], shapes))
    return hashlib.sha256(sources.encode()).hexdigest()[:16]


@intrinsic
def pointer(typing: Any, address: Any) -> Any:
    """An integer as the address that it is."""

    def build(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.inttoptr(given[0], context.get_value_type(types.voidptr))

    return types.voidptr(address), build


@intrinsic
def ask(typing: Any, address: Any, otherwise: Any) -> Any:
    """What the C function `int f()` at an address gives; `otherwise` where the address is 0."""

    def build(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        word = ir.IntType(64)
        found = cgutils.alloca_once_value(builder, context.cast(builder, given[1], signature.args[1], types.int64))
        with builder.if_then(builder.icmp_unsigned("!=", given[0], ir.Constant(given[0].type, 0))):
            kind = ir.FunctionType(ir.IntType(32), [])
            answer = builder.call(builder.inttoptr(given[0], kind.as_pointer()), [])
            builder.store(builder.sext(answer, word), found)
        return builder.load(found)

    return types.int64(address, otherwise), build


@intrinsic
def fetch(typing: Any, address: Any) -> Any:
    """Begin to bring what lies at an address into the caches."""

    def build(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        place, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        call = builder.module.declare_intrinsic(
            "llvm.prefetch", [place], ir.FunctionType(ir.VoidType(), [place, number, number, number])
        )
        read, all_levels, data = (ir.Constant(number, value) for value in (0, 3, 1))
        builder.call(call, [builder.inttoptr(given[0], place), read, all_levels, data])
        return context.get_dummy_value()

    return types.void(address), build


def widen(code: Any) -> Any:
    """A code as fp32; uint16 is bf16."""


@overload(widen, inline="always")
def _widen_of(code: Any) -> Any:
    def bf16(code: Any) -> Any:
        return np.uint32(np.uint32(code) << np.uint32(16)).view(np.float32)

    def number(code: Any) -> Any:
        return np.float32(code)

    return bf16 if code == types.uint16 else number


@njit(**FLAGS)
def low_half(byte: Any) -> Any:
    """The lower half of an int8, -8 to 7, as fp32."""
    return np.float32(np.int8(byte << 4) >> 4)


@njit(**FLAGS)
def high_half(byte: Any) -> Any:
    """The upper half of an int8, -8 to 7, as fp32."""
    return np.float32(byte >> 4)
